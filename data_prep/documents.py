"""data_prep: rows into documents: what is dropped and why, and which split a document belongs to."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from data_prep.errors import UserError
from data_prep.sources import Columns, ParquetFile, read_rows

BATCH_BYTES = 1_000_000


class Drop(StrEnum):
    """Why a row was not written."""

    NULL_TEXT = "null_text"
    EMPTY_TEXT = "empty_text"
    INVALID_UTF8 = "invalid_utf8"
    NULL_ID = "null_id"
    NO_TOKENS = "no_tokens"
    CONTAINS_EOD = "contains_eod"


@dataclass(frozen=True, slots=True)
class Document:
    """A document that can be encoded; ``size`` is its text's length in UTF-8 bytes."""

    id: bytes
    text: str
    size: int


@dataclass(frozen=True)
class Split:
    """Shares of the documents held out, in percent; a document's split depends on its id alone.

    h = blake2b(id), 8 bytes read big-endian: below test's share of 2^64 it is test, below test's and valid's it is valid, else train.
    """

    valid_percent: float
    test_percent: float

    def __post_init__(self) -> None:
        for name, percent in (("--valid-percent", self.valid_percent), ("--test-percent", self.test_percent)):
            if not math.isfinite(percent) or not 0 <= percent < 100:
                raise UserError(f"{name} is {percent}; it must be at least 0 and below 100")
        if self.valid_percent + self.test_percent >= 100:
            shares = f"--valid-percent {self.valid_percent} and --test-percent {self.test_percent}"
            raise UserError(f"{shares} leave nothing to train on; their sum must be below 100")

    @property
    def names(self) -> tuple[str, ...]:
        """The splits that are written: train, and those with a share."""
        return ("train",) + ("valid",) * (self.valid_percent > 0) + ("test",) * (self.test_percent > 0)

    def of(self, document_id: bytes) -> str:
        """The split of a document."""
        share = 100 * hash64(document_id) / 2**64
        if share < self.test_percent:
            return "test"
        return "valid" if share < self.test_percent + self.valid_percent else "train"


def hash64(document_id: bytes, purpose: bytes = b"") -> int:
    """A 64-bit hash of a document's id, the same on every machine; ``purpose`` makes independent ones."""
    return int.from_bytes(hashlib.blake2b(document_id, digest_size=8, person=purpose).digest(), "big")


def _document(text: bytes | None, document_id: bytes | None) -> Document | Drop:
    if text is None:
        return Drop.NULL_TEXT
    if not text:
        return Drop.EMPTY_TEXT
    if document_id is None:
        return Drop.NULL_ID
    try:
        return Document(document_id, text.decode("utf-8"), len(text))
    except UnicodeDecodeError:
        return Drop.INVALID_UTF8


def read_documents(files: list[ParquetFile], columns: Columns, dropped: Counter[Drop]) -> Iterator[list[Document]]:
    """Yield the files' documents in order, in batches of about 1 MB of text; rows that hold none are counted in ``dropped``."""
    batch: list[Document] = []
    size = 0
    for file in files:
        for texts, ids in read_rows(file, columns):
            for text, document_id in zip(texts, ids, strict=True):
                document = _document(text, document_id)
                if isinstance(document, Drop):
                    dropped[document] += 1
                    continue
                if batch and size + document.size > BATCH_BYTES:
                    yield batch
                    batch, size = [], 0
                batch.append(document)
                size += document.size
    if batch:
        yield batch
