"""The verb ``verify``: every checkpoint's files read whole and compared with their sizes, hashes and checksums; no model is built."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from fem_common.errors import ConfigError, files_told
from pretrain.checkpoint.reader import MANIFEST, damage, damaged_tensors, newest_first

WORD_SECONDS = 10.0  # between lines that say how far it is


def verify(checkpoint: Path) -> bool:
    """Whether a step's folder, or every one of a run directory, is undamaged; says so on stdout, each fault in a line.

    Raises:
        ConfigError: there is no checkpoint. StorageError: a file system failed.
    """
    with files_told():
        inner = checkpoint / "checkpoints"
        steps = [checkpoint] if (checkpoint / MANIFEST).exists() else newest_first(inner if inner.is_dir() else checkpoint)
        if not steps:
            raise ConfigError(f"{checkpoint}: no checkpoint there; expected a folder step_NNNNNNNN or a run directory that has some")
        return [_verified(step) for step in steps].count(False) == 0


def _verified(step: Path) -> bool:
    files = [path for path in step.iterdir() if path.is_file()]
    total, read, told = sum(path.stat().st_size for path in files), 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal read, told
        read += count
        if time.monotonic() - told > WORD_SECONDS:
            told = time.monotonic()
            print(f"{step}: {read / 2**30:.1f} of {total / 2**30:.1f} GiB", file=sys.stderr, flush=True)

    wrong = damage(step)
    faults = [wrong] if wrong else list(damaged_tensors(step, advance))
    for fault in faults:
        print(f"{step}: damaged: {fault}")
    if not faults:
        print(f"{step}: undamaged, {len(files)} files of {total / 2**20:,.1f} MiB", flush=True)
    return not faults
