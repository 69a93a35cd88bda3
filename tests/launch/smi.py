"""Scripts that replace a node's tools on PATH: an nvidia-smi and a dmesg with the output of the
real ones, field by field.

The formats are those of H100 nodes with drivers 535 to 570, and of the older names that drivers up
to 530 use for the reasons of slow clocks.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.node import hardware as gpus
from tests.launch.hostile import program

BUSES = ("18", "2A", "3A", "5D", "9A", "AB", "BA", "DB")
SCRIPT = """\
#!/bin/bash
here={folder}
[ -d "$here/$SLURMD_NODENAME" ] && [ -n "$SLURMD_NODENAME" ] && here="$here/$SLURMD_NODENAME" || here="$here/any"
query="$here/${{1//[^a-zA-Z0-9]/_}}"
[ -e "$query" ] || {{ printf 'Field "%s" is not a valid field to query.\\n\\n' "$1"; exit 2; }}
code=$(cat "$query")
[ "$code" = hang ] && sleep 600
echo >> "$query.asked"
number=$(wc -l < "$query.asked")
[ -e "$query.$number" ] || number=1
cat "$query.$number"
exit "$code"
"""  # noqa: E501


@dataclass
class Node:
    """A node with eight H100 as reported by nvidia-smi; ``changed`` holds simulated faults."""

    count: int = 8
    changed: dict[tuple[int, str], str] = field(default_factory=dict)  # (GPU, field) -> value
    # A driver that has clocks_throttle_reasons, but no recovery action and no fabric.
    older: bool = False

    def value(self, gpu: int, name: str) -> str:
        """Return a field of a GPU in the format of --format=csv,noheader,nounits."""
        healthy = {
            "index": str(gpu),
            "uuid": f"GPU-{gpu:08x}-4c1d-5f0a-9f3e-{gpu:012x}",
            "name": "NVIDIA H100 80GB HBM3",
            "pci.bus_id": f"00000000:{BUSES[gpu]}:00.0",
            "driver_version": "470.82.01" if self.older else "550.90.07",
            "memory.total": "81559",
            "memory.used": "4",
            "ecc.errors.uncorrected.volatile.total": "0",
            "temperature.gpu": str(28 + gpu),
            "remapped_rows.pending": "No",
            "remapped_rows.failure": "No",
            "gpu_recovery_action": "None",
            "fabric.state": "Completed",
        }
        name = "uuid" if name == "gpu_uuid" else name
        return self.changed.get((gpu, name), healthy.get(name, "Not Active"))

    def answers(self) -> dict[str, list[object]]:
        """Return query -> exit code and output."""
        prefix = "clocks_throttle_reasons" if self.older else "clocks_event_reasons"
        queries = {
            "gpu": [gpus.CORE, ["uuid", *(f"{prefix}.{reason}" for reason in gpus.THROTTLING)]],
            "remapped-rows": [gpus.ROWS],
        }
        if not self.older:
            queries["gpu"] += [["uuid", "gpu_recovery_action"], ["uuid", "fabric.state"]]
        report: dict[str, list[object]] = {f"--query-compute-apps={','.join(gpus.USERS)}": [0, ""]}
        for what, lists in queries.items():
            for fields in lists:
                rows = [
                    ", ".join(self.value(gpu, name) for name in fields) for gpu in range(self.count)
                ]
                report[f"--query-{what}={','.join(fields)}"] = [
                    0,
                    "".join(f"{row}\n" for row in rows),
                ]
        return report


CORE = f"--query-gpu={','.join(gpus.CORE)}"
USERS = f"--query-compute-apps={','.join(gpus.USERS)}"


def install(
    folder: Path, answers: Mapping[str, Sequence[object]], node: str = "any"
) -> dict[str, str]:
    """Write the script and its responses (on the node with this name); return the environment that
    finds it.

    answers: query -> exit code, or "hang", and its output; a second output is used for the second
    call, the first one for all other calls.
    """
    (folder / node).mkdir(parents=True, exist_ok=True)
    for query, (code, *texts) in answers.items():
        name = re.sub("[^a-zA-Z0-9]", "_", query)
        (folder / node / name).write_text(str(code), encoding="utf-8")
        for number, text in enumerate(texts, 1):
            (folder / node / f"{name}.{number}").write_text(str(text), encoding="utf-8")
    program(folder / "nvidia-smi", SCRIPT.format(folder=shlex.quote(str(folder))))
    if not (folder / "dmesg").exists():
        program(
            folder / "dmesg",
            "#!/bin/sh\necho 'dmesg: read kernel buffer failed: Operation not permitted' >&2;"
            " exit 1\n",
        )
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
