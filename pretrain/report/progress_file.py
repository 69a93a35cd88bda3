"""Write and read the state of the run in ``progress.json`` in the run directory.

External monitoring programs read the file. The module does not import torch.
"""

from __future__ import annotations

import json
import os
import platform as host
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common import secrets
from fem_common.files import write_atomically
from fem_common.text import one_line
from pretrain.schedule import Schedule

NAME = "progress.json"
FORMAT = 1
STATES = ("starting", "running", "complete", "stopped", "failed")
_LONGEST_MESSAGE = 1000


@dataclass
class ProgressFile:
    """Writer of ``progress.json``.

    The file is replaced atomically at every change of state and at every checkpoint. Rank 0 writes
    it. If rank 0 is killed or crashes in a library, the file keeps its last state.

    Keys: format, state, step, steps, consumed_tokens, total_tokens, checkpoint (the newest complete
    one, relative to the run directory), signal (the signal that stopped the run), message (one
    line), time (Unix seconds), pid, host, world_size. ``step`` is the last finished step at the
    time of writing; metrics.jsonl has newer steps between checkpoints.
    """

    folder: Path | None  # the run directory; None on ranks that do not write
    schedule: Schedule
    world_size: int
    written: tuple[str | None, Path | None] = (None, None)  # state and checkpoint in the file
    step: int = 0
    consumed_samples: int = 0
    checkpoint: Path | None = None

    def at(self, step: int, consumed_samples: int, checkpoint: Path | None) -> None:
        """Set the finished step and the newest complete checkpoint for the next write."""
        self.step = step
        self.consumed_samples = consumed_samples
        self.checkpoint = checkpoint

    def write(self, state: str, *, signal: str | None = None, message: str | None = None) -> None:
        """Write the file with this state.

        A message of several lines becomes one line, and secret values from the environment are
        replaced by ***.

        Raises:
            OSError: the run directory is not writable.
        """
        assert state in STATES
        self.written = state, self.checkpoint
        if self.folder is None:
            return
        if message is not None:
            message = secrets.hide(one_line(message), secrets.values(os.environ))[:_LONGEST_MESSAGE]
        content = {
            "format": FORMAT,
            "state": state,
            "step": self.step,
            "steps": self.schedule.last_step,
            "consumed_tokens": self.consumed_samples * self.schedule.sample_tokens,
            "total_tokens": self.schedule.total_tokens,
            "checkpoint": str(self.checkpoint.relative_to(self.folder))
            if self.checkpoint
            else None,
            "signal": signal,
            "message": message,
            "time": time.time(),
            "pid": os.getpid(),
            "host": host.node(),
            "world_size": self.world_size,
        }
        text = (json.dumps(content, indent=1) + "\n").encode()
        try:
            write_atomically(self.folder / NAME, text)
        except OSError:
            if state != "failed":
                raise
            # On a full file system the old file can still be overwritten; spaces keep its length.
            with (self.folder / NAME).open("r+b") as file:
                file.write(text.ljust((self.folder / NAME).stat().st_size))
                file.flush()
                os.fsync(file.fileno())


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Return the content of ``progress.json`` in a run directory.

    Return None if the file is missing or invalid.
    """
    try:
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if (
        not isinstance(content, dict)
        or content.get("format") != FORMAT
        or content.get("state") not in STATES
    ):
        return None
    numbers = content.get("step"), content.get("consumed_tokens", 0)
    return content if all(type(number) is int and number >= 0 for number in numbers) else None
