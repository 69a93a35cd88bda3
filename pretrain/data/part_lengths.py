"""Lengths of the parts of documents in the training sequences.

A part is the section of a document that is in one sequence. The lengths follow from the documents'
lengths in .idx files. The module does not import torch.

Megatron joins the documents of a source in random order and cuts every ``seq_length`` tokens, so a
document begins at any position in a sequence that is a multiple of the greatest common divisor of
all lengths and ``seq_length``. For a document of d tokens and sequences of s, in units of that
divisor, the expected number of parts is 2 / s for every length below m = min(d, s), and
(|d - s| + 1) / s for length m. With best-fit packing, the parts are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pretrain.config import RunConfig
from pretrain.data.facts import DataFacts
from pretrain.data.packing import best_fit, cuts, document_lengths

# Of more documents than this only so many lengths are read, in runs of neighbours.
_DOCUMENTS, _RUN = 1 << 23, 1 << 12
# Of more lengths than this the cost is evaluated only for so many.
_LENGTHS = 1 << 13


@dataclass(frozen=True, eq=False)
class PartLengths:
    """Distribution of the lengths of the parts of documents in the training sequences.

    shares [seq_length + 1]: share of all tokens that are in parts of each length. mean: tokens per
    document. read: number of documents, out of ``documents``, whose lengths were read.
    """

    shares: npt.NDArray[np.float64]
    mean: float
    read: int
    documents: int

    def mean_over(self, cost: Callable[[int], dict[str, float]]) -> dict[str, float]:
        """Return name -> mean of a cost over all tokens.

        ``cost`` returns name -> cost of one token in a part of the given length. If many lengths
        occur, it is evaluated for some lengths and interpolated between them. This is exact if the
        cost is linear in the length.
        """
        held = np.flatnonzero(self.shares)
        requested = held
        if held.size > _LENGTHS:
            requested = held[np.unique(np.geomspace(1, held.size, _LENGTHS).astype(np.int64)) - 1]
        cost_of = [cost(length) for length in requested.tolist()]
        means = {}
        for name in cost_of[0]:
            values = np.interp(held, requested, [costs[name] for costs in cost_of])
            means[name] = float(self.shares[held] @ values)
        return means


def part_lengths_of(config: RunConfig, facts: DataFacts) -> PartLengths:
    """Return the lengths of the parts of documents for the training blend.

    Each sequence of an .idx file counts as a document with an end-of-document token at its end, as
    data_prep writes them.

    Raises:
        OSError: an .idx file cannot be read.
    """
    length = config.data.seq_length
    counted = packed_shares if config.data.packing == "best_fit" else shares_of
    read = [
        _some(document_lengths(source.local)) for source in facts.sources if source.split == "train"
    ]
    weights = [source.weight for source in config.data.train]
    shares = np.average([counted(lengths, length) for lengths, _ in read], axis=0, weights=weights)
    # Blending averages documents per token.
    mean = 1 / np.average([1 / lengths.mean() for lengths, _ in read], weights=weights)
    return PartLengths(
        shares,
        float(mean),
        sum(lengths.size for lengths, _ in read),
        sum(total for _, total in read),
    )


def shares_of(lengths: npt.NDArray[np.int32], seq_length: int) -> npt.NDArray[np.float64]:
    """Return the share of tokens in parts of each length, [seq_length + 1].

    lengths [n]: numbers of tokens of the documents.
    """
    unit = int(np.gcd.reduce(lengths, initial=seq_length))
    sizes, most = lengths // unit, seq_length // unit
    documents = np.bincount(np.minimum(sizes, most), minlength=most + 1)
    place = np.arange(most + 1)
    longer = documents.sum() - documents.cumsum()
    parts = 2 * longer + documents * (most - place + 1)
    parts[most] = (np.maximum(sizes, most - 1) - (most - 1)).sum(dtype=np.int64)
    shares = np.zeros(seq_length + 1)
    shares[::unit] = parts * place / (parts @ place)
    return shares


def packed_shares(lengths: npt.NDArray[np.int32], seq_length: int) -> npt.NDArray[np.float64]:
    """Return the share of tokens in parts of each length for best-fit packing, [seq_length + 1].

    Padding counts as a part. The last token of a full sequence, which is only a label, counts as
    part of its document.
    """
    before = cuts(lengths, seq_length)
    parts = np.bincount(lengths - before * seq_length, minlength=seq_length + 2)
    _, _, spaces = best_fit(parts.tolist(), seq_length + 1)
    parts[seq_length] += parts[-1] + before.sum()
    for space, sequences in spaces.items():
        parts[space - 1] += sequences
    tokens = parts[:-1] * np.arange(seq_length + 1)
    return tokens / tokens.sum()


def _some(held: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], int]:
    """Return (lengths of a sample of documents, number of all documents).

    A small source is returned completely. The sample of a large source consists of runs of
    documents spread over the file.
    """
    if len(held) <= _DOCUMENTS:
        return held, len(held)
    begins = np.linspace(0, len(held) - _RUN, _DOCUMENTS // _RUN).astype(np.int64)
    return np.concatenate([held[begin : begin + _RUN] for begin in begins]), len(held)
