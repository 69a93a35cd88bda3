"""One rank's answer for all ranks of the process group: folders may look different to others on a shared file system, and reading costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pretrain.loader import ConfigError

Answer = TypeVar("Answer")


def from_rank_0(compute: Callable[[], Answer]) -> Answer:
    """What ``compute`` gives on rank 0, on all ranks; collective.

    Raises:
        ConfigError: on all ranks, where it was raised on rank 0, or a file there could not be read or written.
    """
    told: list[tuple[Answer | None, str | None]] = [(None, None)]
    if torch.distributed.get_rank() == 0:
        try:
            told = [(compute(), None)]
        except ConfigError as error:
            told = [(None, str(error))]
        except OSError as error:
            told = [(None, f"{error.filename}: {error.strerror}" if error.filename else str(error))]
    torch.distributed.broadcast_object_list(told, src=0)
    answer, wrong = told[0]
    if wrong is not None:
        raise ConfigError(wrong)
    return answer  # type: ignore[return-value]
