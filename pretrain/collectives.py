"""Run a computation on one rank and share its result with all ranks of the process group.

Ranks can see different versions of a file on a shared file system, and reading is expensive, so
rank 0 reads for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from fem_common.errors import CommandError, from_os_error
from fem_megatron.megatron import platform

Answer = TypeVar("Answer")


def from_rank_0(compute: Callable[[], Answer]) -> Answer:
    """Call ``compute`` on rank 0 and return its result on all ranks.

    All ranks must call this function together.

    Raises:
        CommandError: on all ranks, if ``compute`` raised it on rank 0.
        ConfigError: on all ranks, if a path is wrong on rank 0.
        StorageError: on all ranks, if a file system failed on rank 0.
    """
    sent: list[tuple[Answer | None, CommandError | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        try:
            sent = [(compute(), None)]
        except CommandError as error:
            sent = [(None, error)]
        except OSError as error:
            sent = [(None, from_os_error(error))]
    torch.distributed.broadcast_object_list(sent, src=0)
    answer, wrong = sent[0]
    if wrong is not None:
        raise wrong
    return answer  # type: ignore[return-value]


def sum_over_ranks(values: Iterable[float]) -> list[float]:
    """Return the sum of each value over all ranks; all ranks must call it together."""
    total = torch.tensor([*values], dtype=torch.float64, device=platform.device())
    torch.distributed.all_reduce(total)
    return list(total.tolist())
