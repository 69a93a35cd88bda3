"""Decide if the training order of a shorter run is the beginning of the order of a longer run.

The orders are not generated; megatron-core's arithmetic for their lengths suffices. The module does
not import torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from pretrain.config import RunConfig
from pretrain.data.facts import DataFacts

# Additional share of a blended source's samples: GPTDatasetConfig.mid_level_dataset_surplus.
_SURPLUS = 0.005
# A last pass with less than this share of a pass's samples is shuffled separately (GPTDataset).
_APART = 0.80


def passes_drawn(config: RunConfig, facts: DataFacts, samples: int) -> list[tuple[int, bool]]:
    """Return the passes over each training source in an order of ``samples`` samples.

    Each element is (number of passes over the documents, True if the last pass is shuffled
    separately). If the results for two lengths are equal, the shorter order is the beginning of the
    longer one.
    """
    length, sources = config.data.seq_length, config.data.train
    weights = np.array([source.weight for source in sources], dtype=np.float64)
    found = []
    for weight, source in zip(
        (weights / weights.sum()).tolist(),
        [one for one in facts.sources if one.split == "train"],
        strict=True,
    ):
        share = (
            math.ceil(math.ceil(samples * weight) * (1 + _SURPLUS)) if len(sources) > 1 else samples
        )
        # The label of the last token needs one more token.
        passes = max(1, -(-(share * length + 1) // source.tokens))
        before = ((passes - 1) * source.tokens - 1) // length
        found.append(
            (passes, passes > 1 and share - before < int(_APART * ((source.tokens - 1) // length)))
        )
    return found


def longest_order(config: RunConfig, facts: DataFacts, drawn: int, wanted: int) -> int:
    """Return the largest number of samples up to ``wanted`` to which an order can be extended.

    drawn: samples of the present order, which must be the beginning of the extended order. Return
    ``drawn`` if ``wanted`` is smaller.
    """
    # With best-fit packing, each pass has a separate order, so a longer order always begins with a
    # shorter one.
    if wanted <= drawn or config.data.packing == "best_fit":
        return max(drawn, wanted)
    if config.stages:  # an order contains only the documents of its stage, so it has a fixed length
        return drawn
    before = passes_drawn(config, facts, drawn)
    return drawn + bisect_left(
        range(drawn + 1, wanted + 1),
        True,
        key=lambda samples: passes_drawn(config, facts, samples) != before,
    )
