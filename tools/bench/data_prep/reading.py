"""Measure the speed of reading random samples from a .bin/.idx pair.

Usage: ``python -m tools.bench.data_prep.reading PREFIX EOD_ID VOCAB_SIZE RESULT.json``.

Two rates are measured. "reads": SAMPLE tokens at a random position are read with Megatron's
IndexedDataset.get from the mapped .bin, as in GPTDataset, and converted to int64, so that every
byte is read. "items": complete samples of GPTDataset, with tensors, labels and positions. The pair
is small and in memory, so the rates measure the code, not a disk.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SAMPLE = 4096  # tokens of a sample
# Reads per pass, samples of GPTDataset per pass, and passes.
READS, ITEMS, PASSES = 20_000, 2_000, 3


@dataclass(frozen=True)
class Tokens:
    """Tokenizer interface that GPTDataset requires."""

    vocab_size: int
    eod: int
    pad: int = -1
    unique_identifiers: tuple[str, ...] = ()


def rates(read: Callable[[int], object], count: int) -> list[float]:
    """Return the calls of ``read`` per CPU second, one number for each of PASSES passes.

    A pass consists of ``count`` calls. One warm-up pass before them is not counted.
    """
    found = []
    for number in range(PASSES + 1):
        began = time.process_time()
        for call in range(count):
            read(call)
        if number:
            found.append(count / (time.process_time() - began))
    return found


def main(prefix: str, eod: int, vocab_size: int, result: Path) -> int:
    """Measure both rates, write them to ``result`` as JSON, and return 0."""
    from fem_megatron.megatron import platform

    platform.import_megatron()
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    pair = IndexedDataset(prefix, mmap=True)
    ends = np.cumsum(pair.sequence_lengths, dtype=np.int64)
    rng = np.random.default_rng(3)
    places = rng.integers(0, ends[-1] - SAMPLE, READS)
    documents = np.searchsorted(ends, places, side="right")
    offsets = places - (ends - pair.sequence_lengths)[documents]

    def read(call: int) -> object:
        return pair.get(documents[call], offsets[call], SAMPLE).astype(np.int64)

    settings = GPTDatasetConfig(
        random_seed=3,
        sequence_length=SAMPLE,
        blend=([prefix], None),
        split="1,0,0",
        tokenizer=Tokens(vocab_size, eod),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = GPTDataset(
        pair, prefix, np.arange(len(pair), dtype=np.int32), None, Split.train, settings
    )
    order = rng.integers(0, len(samples), ITEMS)
    found = {
        "reads": rates(read, READS),
        "items": rates(lambda call: samples[int(order[call])], ITEMS),
        "tokens": int(ends[-1]),
    }
    result.write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
