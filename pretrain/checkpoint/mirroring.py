"""The run's mirror: ``tools.checkpoint mirror`` beside the training, which knows it by its command line and by RUN_DIR/mirror.json.

It is a process beside rank 0.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, StorageError
from fem_common.exits import Exit
from fem_common.files import sync_folder, write_whole
from pretrain import beside
from pretrain.checkpoint.folder import MIRROR_STATE, Say, newest_first, set_aside
from pretrain.config import CheckpointConfig
from pretrain.run_directory import RUN_ID

FETCHED = (
    ".fetched"  # in a run directory: what comes from a mirror, until it is known to be of this run
)

_FETCH_PATIENCE = 60.0  # seconds that a store has to answer at the start
_LOOK = 0.1  # seconds between two looks at whether it has ended
_GRACE = 30.0  # seconds that a run which a signal stopped waits for its last checkpoint to be sent


class Mirroring:
    """On rank 0 alone."""

    def __init__(self, settings: CheckpointConfig, url: str, run_dir: Path, say: Say) -> None:
        self.settings, self.run_dir, self.url, self.say = settings, run_dir, url, say
        self.process: subprocess.Popen[bytes] | None = None
        self.began = 0

    def fetch(self, damaged: Collection[str] = ()) -> None:
        """Bring the newest good checkpoint into the run directory, where it is newer than all good ones there but the ``damaged``.

        Where the mirror is not known to be this run's, it stays in FETCHED.

        Raises:
            ConfigError: the mirror is no place, or another run's. StorageError: it cannot be read, or all there is damaged, and there is no
                other checkpoint.
        """
        named = [word for name in damaged for word in ("--damaged", name)]
        command = self._command("fetch", "--aside", "--patience", str(_FETCH_PATIENCE), *named)
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=beside.environ()
        )
        for line in done.stdout.splitlines():
            self.say(line)
        beside.check(done, "tools.checkpoint", "checkpoint.mirror: ")

    def start(self, step: int) -> None:
        """Send what is newer from here on; ``step``: where the attempt begins."""
        self.began = step
        keep, interval = self.settings.mirror_keep_last, self.settings.mirror_interval
        options = [
            "--follow",
            "--interval",
            str(interval),
            *([] if keep is None else ["--keep-last", str(keep)]),
        ]
        # A session of its own: Ctrl-C at the training's terminal is not for it.
        self.process = subprocess.Popen(
            self._command("mirror", *options),
            stdin=subprocess.PIPE,
            env=beside.environ(),
            start_new_session=True,
        )

    def check(self, step: int) -> None:
        """Raise an error where the mirror does not take this run's checkpoints.

        Raises:
            ConfigError: the sender has found that the place is another run's. StorageError: the mirror is more than
                ``checkpoint.max_unsaved_steps`` behind.
        """
        self._check_sender()
        limit, said = self.settings.max_unsaved_steps, self._state()
        newest = self.began if said.get("newest") is None else int(said["newest"])
        if limit is not None and step - newest > limit:
            why = said.get("fault") or "it is too slow"
            raise StorageError(
                f"checkpoint.mirror = {self.url} is {step - newest} steps behind (checkpoint.max_unsaved_steps = {limit}): {why}; "
                "the same command continues"
            )

    def close(self, stopped: Callable[[], bool]) -> None:
        """The run ends: what is not sent yet is now, for as long as that is tried; for a short time once a signal has stopped the run."""
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
            self.say(f"the mirror {self.url} lacks the last checkpoint, which is in {self.run_dir}")

    def end(self) -> None:
        """Whatever it still does: the next attempt does it again."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _check_sender(self) -> None:
        """Raises ConfigError: the sender has ended before its time, because the place is not this run's."""
        if self.process is not None and self.process.poll() == Exit.WRONG_INPUT:
            raise ConfigError(
                f"checkpoint.mirror = {self.url} cannot be used by this run, as its sender says above; name another place"
            )

    def _command(self, verb: str, *options: str) -> list[str]:
        return beside.command("tools.checkpoint", verb, self.run_dir, self.url, *options)

    def _state(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            said = json.loads((self.run_dir / MIRROR_STATE).read_text())
            return said if isinstance(said, dict) else {}
        return {}


def take_in(run_dir: Path) -> None:
    """Move what is in FETCHED to its place in the run directory: a checkpoint, the run's id, and the records that are missing there."""
    fetched, folder = run_dir / FETCHED, run_dir / "checkpoints"
    for step in newest_first(fetched):
        folder.mkdir(exist_ok=True)
        if (folder / step.name).exists():  # damaged: else it would be newest there
            set_aside(folder / step.name)
        step.rename(folder / step.name)
        sync_folder(folder)
        write_whole(folder / "latest", step.name + "\n")
    for file in fetched.iterdir():
        if file.name == RUN_ID or not (run_dir / file.name).exists():
            os.replace(file, run_dir / file.name)
    shutil.rmtree(fetched)
