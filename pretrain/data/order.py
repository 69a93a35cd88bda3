"""Compare the training orders of a longer and a shorter run without drawing them.

Uses megatron-core's arithmetic. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np

from pretrain.config import RunConfig
from pretrain.data.facts import DataFacts

# Additional share of a blended source's samples: GPTDatasetConfig.mid_level_dataset_surplus.
_SURPLUS = 0.005
# Share of a pass: a last pass with fewer samples is shuffled separately (GPTDataset).
_APART = 0.80


def passes_drawn(config: RunConfig, facts: DataFacts, samples: int) -> list[tuple[int, bool]]:
    """Return (passes, True if the last is shuffled separately) for each training source.

    The passes are those that an order of ``samples`` samples shuffles. These numbers decide the
    order: two lengths with the same passes have the same order.
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
        # The last label takes one more token.
        passes = max(1, -(-(share * length + 1) // source.tokens))
        before = ((passes - 1) * source.tokens - 1) // length
        found.append(
            (passes, passes > 1 and share - before < int(_APART * ((source.tokens - 1) // length)))
        )
    return found


def longest_order(config: RunConfig, facts: DataFacts, drawn: int, wanted: int) -> int:
    """Return the most samples whose order begins with the one drawn for ``drawn`` samples.

    The result is from ``drawn`` to ``wanted``.
    """
    # Each pass of best-fit packing has a separate order.
    if wanted <= drawn or config.data.packing == "best_fit":
        return max(drawn, wanted)
    if config.stages:  # the documents of an order end with its stage
        return drawn
    before = passes_drawn(config, facts, drawn)
    return drawn + bisect_left(
        range(drawn + 1, wanted + 1),
        True,
        key=lambda samples: passes_drawn(config, facts, samples) != before,
    )
