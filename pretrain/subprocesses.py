"""Start and check helper processes of a rank, which run the clients of object stores.

Store clients use threads and much memory and wait for the network, so they must not run in a rank,
which forks checkpoint writers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from fem_common.errors import ConfigError, StorageError
from fem_common.exits import Exit

ROOT = Path(__file__).resolve().parents[1]


def command(module: str, *words: object) -> list[str]:
    """Return the command ``python -m MODULE WORDS...``."""
    return [sys.executable, "-m", module, *map(str, words)]


def environ(inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return environment variables with the repository root in PYTHONPATH.

    The child process can then import the packages of a checkout.
    """
    paths = os.pathsep.join(filter(None, (str(ROOT), inherited.get("PYTHONPATH"))))
    return {**inherited, "PYTHONPATH": paths}


def check(done: subprocess.CompletedProcess[str], program: str, before: str = "") -> None:
    """Raise ConfigError or StorageError if the process failed.

    The message is ``before`` followed by the last line that the process wrote to stderr.
    """
    if done.returncode:
        kind = ConfigError if done.returncode == Exit.WRONG_INPUT else StorageError
        raise kind(before + last_line(done, program))


def last_line(done: subprocess.CompletedProcess[str], program: str) -> str:
    """Return the error in the last line that the process wrote to stderr, or its exit code."""
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1].removeprefix(f"{program}: error: ")
