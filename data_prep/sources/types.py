"""data_prep: what the readers take and give. Knows no file format."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from data_prep.drops import Drop
from data_prep.records import a_list, an_object, count, listed, optional, record, text

ID = "id"  # the id column that a file may lack; one of another name must be there
BATCH_BYTES = 4 << 20  # in a batch, where no single row is larger
ROW_BYTES = 100  # that a row counts for beside its text: rows of empty texts fill a batch too


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are read; ``extra`` are those that filters and the mask need beside text and id.

    ``a.b`` is the field b of the column a, unless there is a column of that very name.
    """

    text: str = "text"
    id: str = ID
    extra: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name once: text, id, then the others."""
        return tuple(dict.fromkeys((self.text, self.id, *self.extra)))


@dataclass(frozen=True)
class SourceFile:
    """One input file, or the .txt files of one input.

    ``path``: local path, or ``hf://…@COMMIT/…``; ``kind``: parquet, jsonl, jsonl.gz, jsonl.zst, or of .txt files what is a document: txt (a
    file) or paragraphs; ``bytes``: its size; ``rows``: from a parquet footer, None where only reading tells; ``text_bytes``: about how much
    text it holds; ``fingerprint``: identity of its content that takes milliseconds: size and footer of parquet, size and blocks spread over
    other files, size and the Hub's hash of a remote file.
    ``id_prefix``: the file's name, where its rows have no id: their ids are this and their place, ``NAME:PLACE``.
    ``parts``: name below ``path`` and size of each .txt file.
    """

    path: str
    kind: str
    bytes: int
    rows: int | None
    text_bytes: int
    fingerprint: str
    id_prefix: str | None = None
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def content(self) -> tuple[str, ...]:
        """What of it decides the rows: its fingerprint, and names where they are in ids."""
        return (self.fingerprint, *filter(None, (self.id_prefix,)), *(name for name, _ in self.parts))

    def as_json(self) -> dict[str, Any]:
        """The file as JSON, without what it does not have."""
        value = asdict(self) | {"parts": [list(part) for part in self.parts]}
        return {name: item for name, item in value.items() if item or name not in ("id_prefix", "parts")}

    @staticmethod
    def from_json(value: Any) -> SourceFile:
        """The inverse of ``as_json``. Raises ValueError that says what is wrong with it."""
        file: SourceFile = record(
            SourceFile,
            {"id_prefix": None, "parts": []} | an_object(value),
            path=text,
            kind=text,
            bytes=count,
            rows=optional(count),
            text_bytes=count,
            fingerprint=text,
            id_prefix=optional(text),
            parts=listed(_part),
        )
        return file


def _part(value: Any) -> tuple[str, int]:
    if len(a_list(value)) != 2:
        raise ValueError("not a name and a size")
    return text(value[0]), count(value[1])


@dataclass(frozen=True)
class Span:
    """Part of a file: row groups [start, stop) of parquet; lines of plain JSONL that start at bytes [start, stop); [0, 1), all, if packed;
    documents of .txt files that start at places [start, stop).

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
