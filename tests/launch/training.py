"""A real training run of the demo model in seconds, with gloo ranks, and access to its files."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launch.job import read_json
from tests.launch.supervised import Attempts, start
from tests.pretrain.conftest import DEMO, SMALL

STEPS = 60
LONGER = [
    *(word for word in SMALL if "train.steps" not in word and "eval_interval" not in word),
    "checkpoint.interval=15",
    "train.eval_interval=30",
    "log.interval=30",
]


class Training(Attempts):
    """A run in a separate directory, with a working directory that is not a checkout."""

    def __init__(self, folder: Path, data: Path, steps: int = STEPS) -> None:
        folder.mkdir()
        self.folder, self.directory = folder, folder / "run"
        paths = [
            f"run_dir={self.directory}",
            f"data.train.0.prefix={data / 'train'}",
            f"data.valid.0.prefix={data / 'valid'}",
        ]
        self.words = [DEMO, *paths, "data.test=[]", *LONGER, f"train.steps={steps}"]

    def local(self, *options: str, processes: int = 2) -> subprocess.Popen[str]:
        """Start or continue it on this machine."""
        words = ["--processes", str(processes), "--set", "restarts.back_off_seconds=0.1", *options]
        return launch(self.folder, "local", *self.words, *words)

    @property
    def losses(self) -> dict[int, tuple[float, float]]:
        """Return step -> loss and gradient norm; the last line of a step counts."""
        text = (self.directory / "metrics.jsonl").read_text()
        lines = [
            json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("}\n")
        ]
        return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}

    def is_at(self, step: int, attempt: int) -> bool:
        """Return True if this attempt is training and past this step."""
        folder = self.directory / "attempts" / f"{attempt:04}"
        try:
            since = read_json(folder / "attempt.json")["started"]
            metrics = self.directory / "metrics.jsonl"
            return metrics.stat().st_mtime > since and max(self.losses, default=0) > step
        except (OSError, TypeError):
            return False

    def child(self, rank: int, attempt: int) -> int:
        """Return the process id of a rank's program."""
        return int(
            read_json(
                self.directory / "attempts" / f"{attempt:04}" / "ranks" / f"rank_{rank:05}.json"
            )["child"]
        )


def launch(
    folder: Path, *words: str | Path, env: Mapping[str, str] = os.environ
) -> subprocess.Popen[str]:
    """Start ``python -m launch WORDS`` in a folder."""
    return start("launch", *map(str, words), cwd=folder, env={**env, "PWD": str(folder)})


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for the end and return the output."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output
