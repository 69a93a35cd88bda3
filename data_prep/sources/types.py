"""data_prep: what the readers take and give. Knows no file format."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.drops import Drop

BATCH_BYTES = 4 << 20  # in a batch, where no single row is larger
ROW_BYTES = 100  # that a row counts for beside its text: rows of empty texts fill a batch too


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read; ``extra`` are those that filters and the mask need beside text and id.

    ``a.b`` is the field b of the column a, unless there is a column of that very name.
    """

    text: str = "text"
    id: str = "id"
    extra: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name once: text, id, then the others."""
        return tuple(dict.fromkeys((self.text, self.id, *self.extra)))


@dataclass(frozen=True)
class SourceFile:
    """One input file.

    ``path``: local path, or ``hf://…@COMMIT/…``; ``kind``: parquet, jsonl, jsonl.gz or jsonl.zst; ``bytes``: its size; ``rows``: from a
    parquet footer, None where only reading tells; ``text_bytes``: about how much text it holds; ``fingerprint``: identity of its content
    that takes milliseconds: size and footer of parquet, size and blocks spread over JSONL, size and the Hub's hash of a remote file.
    """

    path: str
    kind: str
    bytes: int
    rows: int | None
    text_bytes: int
    fingerprint: str


@dataclass(frozen=True)
class Span:
    """Part of a file: row groups [start, stop) of parquet; lines of plain JSONL that start at bytes [start, stop); [0, 1), all, if packed.

    ``rows``: None where only reading tells; ``text_bytes``: about how much text it holds.
    """

    start: int
    stop: int
    rows: int | None
    text_bytes: int


@dataclass(frozen=True)
class Rows:
    """Consecutive readable rows [n]. ``places`` int64 [n] as in BadRow; ``batch`` has a column for each of Columns.all.

    Text and id are large_binary with null where the row has none, an integer id as its decimal digits; text need not be UTF-8. The others
    are as stored, of JSON: float64, bool or large_string, null where a line lacks them.
    """

    places: npt.NDArray[np.int64]
    batch: pa.RecordBatch


@dataclass(frozen=True)
class Unreadable:
    """``rows`` rows from ``place`` on that could not be read; reason is UNREADABLE or MALFORMED."""

    place: int
    rows: int
    reason: Drop
    message: str
