"""Trace single steps with torch's profiler.

A rank traces the configured steps, and its next step after it received SIGUSR2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from fem_megatron.megatron import platform
from pretrain.config import ProfileConfig
from pretrain.signals import Received

FOLDER = "profile"


@dataclass
class Profiler:
    """Context manager around every step on every rank; it does not change the result of a step.

    A traced step writes profile/step_NNNNNNNN_rank_NNNNN.json.gz (chrome://tracing, Perfetto) into
    the run directory, with operators, shapes and allocations, but without stacks. With
    ``log.profile.memory`` on a GPU it then writes a .pickle with the same name
    (pytorch.org/memory_viz). Other ranks wait during that time.
    """

    settings: ProfileConfig
    run_dir: Path
    received: Received

    @contextmanager
    def __call__(self, step: int) -> Iterator[list[str]]:
        """Run the block as a step, and trace it if requested.

        The yielded list then receives one line per file, written or failed.
        """
        lines: list[str] = []
        requested, self.received.profile = self.received.profile, False
        rank = torch.distributed.get_rank()
        if not requested and (step not in self.settings.steps or rank not in self.settings.ranks):
            yield lines
            return
        name = self.run_dir / FOLDER / f"step_{step:08}_rank_{rank:05}"
        memory = self.settings.memory
        with (
            platform.memory_history()
            if memory and platform.has_cuda()
            else nullcontext() as snapshot
        ):
            with torch.profiler.profile(record_shapes=True, profile_memory=True) as trace:
                yield lines
            # The trace is written first, because a snapshot can take long and may be interrupted.
            export = trace.export_chrome_trace
            lines.append(
                _written("trace", name.with_suffix(".json.gz"), lambda path: export(str(path)))
            )
            if snapshot is not None:
                lines.append(_written("memory snapshot", name.with_suffix(".pickle"), snapshot))
            elif memory:
                lines.append("no memory snapshot: this rank computes on a CPU")
        lines[:] = [f"step {step}: {line}" for line in lines]


def _written(what: str, path: Path, write: Callable[[Path], object]) -> str:
    """Write a file and return a line with its path, or with the error if writing failed.

    An error does not end the run. A partially written file is removed.
    """
    try:
        path.parent.mkdir(exist_ok=True)
        write(path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        return f"no {what}: {error}"
    return f"{what}: {path}"
