"""Which documents a stage reads of a source: after those that earlier stages have read, until all are. No torch, no Megatron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def stage_documents(
    lengths: npt.NDArray[Any], needs: Sequence[int], seed: int
) -> npt.NDArray[np.int64]:
    """The documents of the last of some stages, of which each takes the next ones until they have as many tokens as it ``needs``.

    lengths: tokens of each document of the source. They are taken in the seed's order, every pass over them in one of its own: none comes
    again before all others have come.
    """
    at, epoch, taken = 0, 0, list[npt.NDArray[np.int64]]()

    def shuffled() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        order = np.random.RandomState([seed, epoch]).permutation(
            len(lengths)
        )  # numpy's frozen generator
        return order, lengths[order].cumsum(dtype=np.int64)

    order, ends = shuffled()
    for need in needs:
        taken = []
        while need > 0:
            if at == len(order):
                at, epoch = 0, epoch + 1
                order, ends = shuffled()
            before = int(ends[at - 1]) if at else 0
            stop = min(len(order), int(ends.searchsorted(before + need)) + 1)
            taken.append(order[at:stop])
            need -= int(ends[stop - 1]) - before
            at = stop
    return np.concatenate(taken) if taken else order[:0]
