"""Control of the process that copies checkpoints between a run and its mirror.

The process runs ``tools.checkpoint mirror`` next to rank 0. The training process controls it
through its command line and reads its state from RUN_DIR/mirror.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, StorageError
from fem_common.exits import Exit
from fem_common.files import sync_folder, write_atomically
from pretrain import subprocesses
from pretrain.checkpoint.folder import MIRROR_STATE, Log, newest_first, set_aside
from pretrain.config import CheckpointConfig
from pretrain.run_directory import RUN_ID

# In a run directory: files from a mirror that is not yet known to belong to this run.
FETCHED = ".fetched"

_FETCH_PATIENCE = 60.0  # seconds within which a store must answer at the start
_LOOK = 0.1  # seconds between two checks if the process has ended
# Seconds that a run waits for its last checkpoint to be sent after a signal has stopped it.
_GRACE = 30.0


@dataclass
class Mirroring:
    """Copies between the run directory and its mirror, made by separate processes.

    Only rank 0 creates an instance.
    """

    settings: CheckpointConfig
    url: str
    run_dir: Path
    log: Log
    process: subprocess.Popen[bytes] | None = None
    began: int = 0  # first step of this attempt

    def fetch(self, damaged: Collection[str] = ()) -> None:
        """Copy the mirror's newest good checkpoint if it is newer than all good local checkpoints.

        The local checkpoints named in ``damaged`` do not count as good. If the mirror is not known
        to belong to this run, the copy stays in the folder FETCHED of the run directory.

        Raises:
            ConfigError: the mirror is not a valid location, or belongs to another run.
            StorageError: the mirror cannot be read, or contains only damaged checkpoints while no
                local one is good.
        """
        named = [word for name in damaged for word in ("--damaged", name)]
        command = self._command("fetch", "--aside", "--patience", _FETCH_PATIENCE, *named)
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=subprocesses.environ(),
        )
        for line in done.stdout.splitlines():
            self.log(line)
        subprocesses.check(done, "tools.checkpoint", "checkpoint.mirror: ")

    def start(self, step: int) -> None:
        """Start the process that sends new checkpoints to the mirror.

        ``step`` is the first step of this attempt.
        """
        self.began = step
        options: list[object] = ["--follow", "--interval", self.settings.mirror_interval]
        if self.settings.mirror_keep_last is not None:
            options += ["--keep-last", self.settings.mirror_keep_last]
        # A separate process session: Ctrl-C at the training's terminal does not reach it.
        self.process = subprocess.Popen(
            self._command("mirror", *options),
            stdin=subprocess.PIPE,
            env=subprocesses.environ(),
            start_new_session=True,
        )

    def check(self, step: int) -> None:
        """Raise an error if the mirror does not accept this run's checkpoints.

        Raises:
            ConfigError: the sending process has found that the location belongs to another run.
            StorageError: the mirror is more than ``checkpoint.max_unsaved_steps`` behind ``step``.
        """
        self._check_sender()
        limit, state = self.settings.max_unsaved_steps, self._state()
        newest = self.began if state.get("newest") is None else int(state["newest"])
        if limit is not None and step - newest > limit:
            why = state.get("fault") or "it is too slow"
            raise StorageError(
                f"checkpoint.mirror = {self.url} is {step - newest} steps behind "
                f"(checkpoint.max_unsaved_steps = {limit}): {why}; the same command continues"
            )

    def close(self, stopped: Callable[[], bool]) -> None:
        """Wait until the sending process has sent the remaining checkpoints and ended.

        The wait is unlimited, but after ``stopped`` reports that a signal has stopped the run it
        lasts at most ``_GRACE`` seconds.
        """
        assert self.process is not None and self.process.stdin is not None
        self._check_sender()
        with suppress(OSError):
            self.process.stdin.close()
        end = None
        while self.process.poll() is None and (end is None or time.monotonic() < end):
            if end is None and stopped():
                end = time.monotonic() + _GRACE
            time.sleep(_LOOK)
        if self.process.poll() != 0:
            self.log(f"the mirror {self.url} lacks the last checkpoint, which is in {self.run_dir}")

    def end(self) -> None:
        """Kill the sending process. The next attempt sends again what is missing."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _check_sender(self) -> None:
        """Raise ConfigError if the sending process found that the mirror belongs to another run."""
        if self.process is not None and self.process.poll() == Exit.WRONG_INPUT:
            raise ConfigError(
                f"checkpoint.mirror = {self.url} cannot be used by this run (see its message "
                "above); set another location"
            )

    def _command(self, verb: str, *options: object) -> list[str]:
        return subprocesses.command("tools.checkpoint", verb, self.run_dir, self.url, *options)

    def _state(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            state = json.loads((self.run_dir / MIRROR_STATE).read_text())
            return state if isinstance(state, dict) else {}
        return {}


def take_in(run_dir: Path) -> None:
    """Move the contents of the folder FETCHED to their final places in the run directory.

    The contents are a checkpoint, the run's id, and records; records that the run directory already
    has are not replaced.
    """
    fetched, folder = run_dir / FETCHED, run_dir / "checkpoints"
    for step in newest_first(fetched):
        folder.mkdir(exist_ok=True)
        if (folder / step.name).exists():  # damaged, since otherwise it would be the newest
            set_aside(folder / step.name)
        step.rename(folder / step.name)
        sync_folder(folder)
        write_atomically(folder / "latest", step.name + "\n")
    for file in fetched.iterdir():
        if file.name == RUN_ID or not (run_dir / file.name).exists():
            os.replace(file, run_dir / file.name)
    shutil.rmtree(fetched)
