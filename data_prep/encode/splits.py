"""Assignment of documents to the splits train, valid and test by the documents' ids alone.

It does not depend on files or texts.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_prep.aliases import Uint8Array, Uint64Array
from fem_common.errors import UserError

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True, slots=True)
class Split:
    """Percentages of the documents in the valid and test splits.

    A document's split depends on its id alone. Let h be the 8-byte blake2b hash of the id, read
    big-endian. If h is below test's share of 2^64, the document is in test. If h is below the sum
    of test's and valid's shares, it is in valid. Otherwise it is in train.
    """

    valid_percent: float
    test_percent: float

    def __post_init__(self) -> None:
        for name, percent in (
            ("--valid-percent", self.valid_percent),
            ("--test-percent", self.test_percent),
        ):
            if not math.isfinite(percent) or not 0 <= percent < 100:
                raise UserError(f"{name} is {percent}; it must be at least 0 and below 100")
        if self.valid_percent + self.test_percent >= 100:
            shares = f"--valid-percent {self.valid_percent} and --test-percent {self.test_percent}"
            raise UserError(f"{shares} leave nothing to train on; their sum must be below 100")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the splits that are written: train, and the splits with a percentage above 0."""
        return (
            ("train",) + ("valid",) * (self.valid_percent > 0) + ("test",) * (self.test_percent > 0)
        )

    def of(self, document_id: bytes) -> str:
        """Return the name of the split to which a document belongs."""
        share = 100 * hash64(document_id) / 2**64
        if share < self.test_percent:
            return "test"
        return "valid" if share < self.test_percent + self.valid_percent else "train"

    def of_hashes(self, hashes: Uint64Array) -> Uint8Array:
        """Return the split of each document as an index into SPLITS, uint8 [n].

        hashes: uint64 [n], `hash64` of the documents' ids. The result is the same as that of `of`.
        """
        starts = [
            _first_hash(self.test_percent),
            _first_hash(self.test_percent + self.valid_percent),
        ]
        order = np.array(
            [SPLITS.index("test"), SPLITS.index("valid"), SPLITS.index("train")], np.uint8
        )
        return order[np.searchsorted(np.array(starts, np.uint64), hashes, side="right")]


def _first_hash(percent: float) -> int:
    """Return the lowest hash whose share of 2^64 is at least ``percent``, which is below 100.

    The arithmetic is that of ``Split.of``, so that both round in the same way.
    """
    low, high = 0, 2**64 - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if 100 * middle / 2**64 >= percent else (middle + 1, high)
    return low


def hash64(document_id: bytes, purpose: bytes = b"") -> int:
    """Return a 64-bit hash of a document's id, the same on every machine.

    Each ``purpose`` gives an independent hash.
    """
    return int.from_bytes(
        hashlib.blake2b(document_id, digest_size=8, person=purpose).digest(), "big"
    )


def hash_ids(ids: pa.LargeBinaryArray, purpose: bytes = b"") -> Uint64Array:
    """Return ``hash64`` of each id, uint64 [n]. The ids must not contain nulls."""
    _, offset_buffer, data = ids.buffers()
    offsets = (
        np.frombuffer(offset_buffer, np.int64)[ids.offset : ids.offset + len(ids) + 1].tolist()
        if len(ids)
        else [0]
    )
    view, blake2b = memoryview(data if data is not None else b""), hashlib.blake2b
    digests = [
        blake2b(view[start:stop], digest_size=8, person=purpose).digest()
        for start, stop in zip(offsets[:-1], offsets[1:], strict=True)
    ]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)


def fitting(split: Split, hashes: Uint64Array) -> Split | None:
    """Return percentages with which no requested split is empty, or None if none exist.

    The documents are given by the ``hashes`` [n] of their ids. Each percentage is that of ``split``
    or the next larger one that suffices; test is chosen before valid. A percentage of 0 stays 0.
    """

    def filled(split: Split) -> set[str]:
        return {SPLITS[number] for number in np.unique(split.of_hashes(hashes))}

    shares = [factor * 10.0**exponent for exponent in (-3, -2, -1) for factor in range(1, 10)] + [
        float(share) for share in range(1, 100)
    ]

    def tried(percent: float) -> list[float]:
        larger = [share for share in shares if share > percent]
        return [percent, *larger] if percent else [percent]

    test = next(
        (
            share
            for share in tried(split.test_percent)
            if not share or "test" in filled(Split(0.0, share))
        ),
        None,
    )
    if test is None:
        return None
    for valid in tried(split.valid_percent):
        if valid + test < 100 and filled(wanted := Split(valid, test)) >= set(wanted.names):
            return wanted
    return None
