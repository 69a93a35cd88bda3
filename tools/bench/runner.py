"""Code that all benchmarks share: timing of a call, description of the machine, tables and JSON.

Importing this module does not load torch.
"""

from __future__ import annotations

import json
import os
import platform as host
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.errors import ConfigError
from fem_common.files import write_atomically
from fem_common.text import did_you_mean

# Packages besides torch that benchmarks use if they are installed.
PACKAGES = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-linear-attention",
    "megatron-core",
    "transformer-engine",
    "matplotlib",
)

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "configs" / "model"
VOCABULARY = 32000  # vocabulary size of a model whose configuration leaves it to the data


def model_file(name: str) -> Path:
    """Return the YAML file of a model.

    name: in configs/model, or a path (with a slash, or ending in .yaml or .yml).

    Raises ConfigError if the file does not exist.
    """
    by_path = "/" in name or name.endswith((".yaml", ".yml"))
    file = Path(name).resolve() if by_path else MODELS / f"{name}.yaml"
    if not file.is_file():
        known = sorted(path.stem for path in MODELS.glob("*.yaml"))
        raise ConfigError(
            f"{'there is no file' if by_path else 'configs/model has no'} {name}; "
            f"{did_you_mean(file.stem, known)}"
        )
    return file


def facts() -> dict[str, Any]:
    """Return the date, the device and its memory, and the versions of the installed software.

    `sentence` writes the result as text.
    """
    import torch

    from fem_megatron.megatron import platform

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    device = f"CPU ({host.machine()}, {os.cpu_count()} cores)"
    if platform.has_cuda():
        device = platform.device_name()
    return {
        "date": date.today().isoformat(),
        "device": device,
        "memory_bytes": platform.device_memory_bytes(),
        "threads": torch.get_num_threads(),
        "python": host.python_version(),
        "torch": torch.__version__,
        "toolkit": platform.toolkit(),
        "packages": found,
    }


def sentence(machine: dict[str, Any]) -> str:
    """Return the result of `facts` as one line of text."""
    parts = [
        machine["date"],
        machine["device"],
        f"Python {machine['python']}",
        f"torch {machine['torch']}",
    ]
    parts.append(machine["toolkit"] or f"{machine['threads']} threads")
    parts += [
        f"{name} {number}" for name, number in machine["packages"].items() if name != "matplotlib"
    ]
    return ", ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, so that it is also readable in a console."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        text.append(f"| {' | '.join(cells)} |")
    rule = "|".join("-" * (width + 2) for width in widths)
    text.insert(1, f"|{rule}|")
    return "\n".join(text)


def command_line(program: str, description: str) -> Parser:
    """Return a parser with the option --json PATH, which all benchmarks have."""
    parser = Parser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write all numbers to this file"
    )
    return parser


def write_json(path: Path | None, content: Any) -> None:
    """Write ``content`` as JSON and create the parent folders; do not write if ``path`` is None.

    The file is valid JSON at any moment.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    # For example /dev/stdout, which must not be replaced by a file.
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
    else:
        write_atomically(path, text, synced=False)


@dataclass(frozen=True)
class Spread:
    """Figure measured in several rounds: median, minimum (``least``) and maximum (``most``)."""

    median: float
    least: float
    most: float
    rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return the spread of the given values, at least one."""
        return Spread(statistics.median(values), min(values), max(values), len(values))


SLOW = 1.0  # seconds; a call that takes longer is repeated less often


@dataclass(frozen=True)
class Timing:
    """Timing of a call, from two passes of repeated calls.

    seconds: median seconds of one call.
    spread: difference between the medians of the two passes, divided by ``seconds``.
    calls: number of timed calls.
    """

    seconds: float
    spread: float
    calls: int


def measure(call: Callable[[int], object], budget: float, most: int = 100) -> Timing:
    """Time ``call(0)``, ``call(1)``, ... and return the timing.

    The number lets the call rotate its inputs, so that no cache contains them.

    budget: approximate seconds of all timed calls, without the warm-up, in which kernels may be
        compiled. At least six calls are timed, or two if one call takes longer than SLOW.
    most: maximum number of calls in each of the two passes.

    On a GPU each call is timed by two events on the device, and all calls of a pass are enqueued
    without waiting.
    """
    from fem_megatron.megatron.platform import Moment, synchronize

    call(0)
    synchronize()
    began = Moment()
    call(1)
    once = began.seconds_until(Moment())
    if once < SLOW:
        for number in range(2):
            call(number)
    each = max(1 if once >= SLOW else 3, min(most, int(budget / 2 / max(once, 1e-9))))
    passes: list[list[float]] = []
    for _ in range(2):
        synchronize()
        moments = [Moment()]
        for number in range(each):
            call(number)
            moments.append(Moment())
        passes.append([before.seconds_until(after) for before, after in pairwise(moments)])
    middle = statistics.median(passes[0] + passes[1])
    first, second = map(statistics.median, passes)
    return Timing(middle, abs(first - second) / middle, 2 * each)
