"""Choose the documents of a source that a stage reads.

A stage reads documents that earlier stages have not read. When all have been read, they are read
again in another order. The module imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def stage_documents(
    lengths: npt.NDArray[Any], needs: Sequence[int], seed: int
) -> npt.NDArray[np.int64]:
    """Return the indices of the documents that the last stage in ``needs`` reads.

    Each stage takes the next documents until they contain the number of tokens that it needs.
    Documents are taken in random order, with a new order for every pass, so that no document
    repeats before all documents have been read.

    lengths: tokens of each document of the source. needs: tokens of each stage.
    """
    at = 0
    epoch = 0
    taken = list[npt.NDArray[np.int64]]()

    def shuffled() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        # RandomState is numpy's frozen generator.
        order = np.random.RandomState([seed, epoch]).permutation(len(lengths))
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
