"""A step traced by torch's profiler, on a GPU with its memory's history: of named steps and ranks, and of a rank that SIGUSR2 asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fem_megatron.megatron import platform
from pretrain.config import ProfileConfig
from pretrain.signals import Received

FOLDER = "profile"


class Profiler:
    """Put around every step, on every rank; what a step computes does not change.

    A traced step writes profile/step_NNNNNNNN_rank_NNNNN.json.gz (chrome://tracing, Perfetto), and on a GPU .pickle beside it
    (pytorch.org/memory_viz), into the run directory.
    """

    def __init__(self, settings: ProfileConfig, folder: Path, received: Received) -> None:
        self.settings, self.folder, self.received = settings, folder / FOLDER, received

    @contextmanager
    def __call__(self, step: int) -> Iterator[list[str]]:
        """When the step is done the list has what is to be told of its trace on this rank; it is empty where there is none."""
        told: list[str] = []
        asked, self.received.profile = self.received.profile, False
        rank = torch.distributed.get_rank()
        if not asked and (step not in self.settings.steps or rank not in self.settings.ranks):
            yield told
            return
        name = self.folder / f"step_{step:08}_rank_{rank:05}"
        with platform.memory_history(name.with_suffix(".pickle")), torch.profiler.profile(record_shapes=True, profile_memory=True) as trace:
            yield told
        try:
            self.folder.mkdir(exist_ok=True)
            trace.export_chrome_trace(str(name.with_suffix(".json.gz")))
            told.append(f"step {step}: traced: {name}.json.gz")
        except OSError as error:  # a trace is no reason to end a run
            told.append(f"step {step}: no trace: {error}")
