"""Measurement of commands in separate processes: CPU seconds, wall seconds and peak memory.

CPU seconds include all child processes; peak memory is that of the largest process.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fem_common.errors import Fault

ROOT = Path(__file__).resolve().parents[3]
LAUNCH = Path(__file__).with_name("launch.py")
TAIL = 15  # lines of a failed command's output that are shown
# One thread per process in every command: CPU seconds then measure work, not threads that wait for
# each other.
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "ARROW_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
}
SLURM = "SLURM_"


class BenchError(Fault):
    """Failure of a command, or a missing requirement.

    The first line is for the user; the command's output follows.
    """


@dataclass(frozen=True)
class Usage:
    """Cost of a command.

    wall: wall seconds.
    cpu: user and system seconds, with those of child processes.
    peak_bytes: peak resident bytes of the largest process.
    """

    wall: float
    cpu: float
    peak_bytes: int


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

    @property
    def share(self) -> float:
        """Range (maximum minus minimum) divided by the median."""
        return (self.most - self.least) / self.median if self.median else 0.0


def run(command: Sequence[str | Path], scratch: Path) -> Usage:
    """Run a command in the repository's root, with one thread per process, and return its cost.

    Raises BenchError with the end of the command's output if the command fails.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    result, log = scratch / "usage.json", scratch / "output.log"
    result.unlink(missing_ok=True)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(SLURM)
    } | ONE_THREAD
    words = [sys.executable, "-I", "-S", str(LAUNCH), str(result), *map(str, command)]
    with log.open("wb") as stream:
        code = subprocess.run(
            words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
        ).returncode
    if code or not result.exists():
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:])
        raise BenchError(f"exit code {code} of: {' '.join(map(str, command))}\n{last}")
    found = json.loads(result.read_text(encoding="utf-8"))
    return Usage(found["wall"], found["cpu"], found["peak_bytes"])


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


class Neighbours:
    """Meter of the average number of cores that other programs use.

    The measurement starts when the object is created.
    """

    def __init__(self) -> None:
        self.busy, self.own, self.began = _busy_seconds(), _own_seconds(), time.monotonic()

    def cores(self) -> float | None:
        """Return the cores that other programs used on average; None if the system has no /proc."""
        busy = _busy_seconds()
        if self.busy is None or busy is None:
            return None
        others = (busy - self.busy) - (_own_seconds() - self.own)
        return max(0.0, others) / (time.monotonic() - self.began)


def _own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _busy_seconds() -> float | None:
    """Return the CPU seconds of all programs since the machine started, or None without /proc."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split(maxsplit=9)
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq = map(int, words[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
