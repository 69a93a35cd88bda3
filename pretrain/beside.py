"""Processes beside a rank: what a store's client does (threads, much memory, waiting) has no place in a rank that forks writers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fem_common.errors import ConfigError, StorageError
from fem_common.exits import Exit

ROOT = Path(__file__).resolve().parents[1]


def command(module: str, *words: object) -> list[str]:
    """``python -m MODULE WORDS...``."""
    return [sys.executable, "-m", module, *map(str, words)]


def environ() -> dict[str, str]:
    """This process's, in which the house is found from a checkout too."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }


def check(done: subprocess.CompletedProcess[str], program: str, before: str = "") -> None:
    """Raises ConfigError, StorageError: the process has failed; what it said last on stderr, behind ``before``."""
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[
            -1
        ].removeprefix(f"{program}: error: ")
        raise (ConfigError if done.returncode == Exit.WRONG_INPUT else StorageError)(before + last)
