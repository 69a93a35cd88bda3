"""Types for the input and output of the readers of parquet, Arrow, JSONL and .txt files.

They do not depend on the file format.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import pyarrow as pa

from data_prep.aliases import Int64Array
from fem_common.cli import is_want_of_memory
from fem_common.config import plain
from fem_common.errors import UserError
from fem_common.text import first_few, nearest, one_line

ID = "id"  # only an id column with this name may be missing
MESSAGES, PAIR = "messages", ("prompt", "completion")  # columns of conversations
BATCH_BYTES = 4 << 20  # maximum size of a batch, unless a single row is larger
ROW_BYTES = 100  # added to the size of each row, so that empty texts fill a batch too


@dataclass(frozen=True)
class Columns:
    """Names of the columns to read.

    ``extra`` are the columns that filters and the mask require in addition to text and id. ``a.b``
    is the field b of the column a, unless a column has the name ``a.b`` itself.

    If ``messages``, the text column contains lists of messages, which the readers return as JSON.
    A file without the column ``messages`` may have ``PAIR`` instead: the text is then the JSON
    object of these two columns.
    """

    text: str = "text"
    id: str = ID
    extra: tuple[str, ...] = ()
    messages: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """All names without duplicates: text, id, then the extra columns."""
        return tuple(dict.fromkeys((self.text, self.id, *self.extra)))


@dataclass(frozen=True)
class SourceFile:
    """One input file, or the .txt files of one input.

    - ``path``: local path, or ``hf://…@COMMIT/…``.
    - ``kind``: parquet, arrow, jsonl, jsonl.gz, jsonl.zst; for .txt files txt (a document is a
      file) or paragraphs.
    - ``bytes``: the file's size.
    - ``rows``: of a parquet or Arrow file; None if the rows must be read to be counted.
    - ``text_bytes``: approximate bytes of text.
    - ``fingerprint``: identity of the content, computed in milliseconds: size and footer of
      parquet, size and sampled blocks of other files, size and the Hub's hash of a remote file.
    - ``id_prefix``: the file's name if its rows have no ids; their ids are then ``NAME:PLACE``.
    - ``parts``: name below ``path`` and size of each .txt file.
    """

    path: str
    kind: str
    bytes: int
    rows: int | None
    text_bytes: int
    fingerprint: str
    id_prefix: str | None = field(default=None, kw_only=True)
    parts: tuple[tuple[str, int], ...] = field(default=(), kw_only=True)

    @property
    def content(self) -> tuple[str, ...]:
        """Properties of the file that determine its rows: fingerprint, and names used in ids."""
        return (
            self.fingerprint,
            *filter(None, (self.id_prefix,)),
            *(name for name, _ in self.parts),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the file as a dictionary for JSON.

        ``id_prefix`` and ``parts`` are omitted if they are empty.
        """
        return {
            name: item
            for name, item in plain(self).items()
            if item or name not in ("id_prefix", "parts")
        }


@dataclass(frozen=True)
class Span:
    """Part of a file, given by a range [start, stop).

    The unit of the range depends on the kind of file:

    - parquet: numbers of row groups.
    - arrow: numbers of record batches.
    - plain JSONL: bytes; the part consists of the lines that start in the range.
    - compressed JSONL: always [0, 1), the entire file.
    - .txt files: places (see txt); the part consists of the documents that start in the range.

    ``rows`` is the number of rows, or None if the rows must be read to be counted. ``text_bytes``
    is the approximate size of the text.
    """

    start: int
    stop: int
    rows: int | None
    text_bytes: int


@dataclass(frozen=True)
class Rows:
    """Batch of n consecutive readable rows.

    places: int64 [n], row number or byte offset of each row, as in BadRow.
    batch: one column for each name of Columns.all.

    Text and id are large_binary, null if the row has none. An integer id is its decimal digits.
    Text may be invalid UTF-8. Other columns have their stored type; those of JSON are float64, bool
    or large_string, null if a line lacks them.
    """

    places: Int64Array
    batch: pa.RecordBatch


@dataclass(frozen=True)
class Unreadable:
    """Consecutive rows that could not be read.

    place: place of the first row, as in BadRow.
    rows: number of rows.
    reason: UNREADABLE, CUT_OFF or MALFORMED.
    """

    place: int
    rows: int
    reason: Drop
    message: str


def is_text(kind: pa.DataType) -> bool:
    """Return True if a column of this type contains text, or bytes that may be text."""
    types = pa.types
    tests = (
        types.is_string,
        types.is_large_string,
        types.is_string_view,
        types.is_binary,
        types.is_large_binary,
        types.is_binary_view,
    )
    return any(test(kind) for test in tests)


NAMED = 20


def missing_column(
    path: str, name: str, columns: Columns, names: Sequence[str], where: str
) -> UserError:
    """Return the error to raise for a column that is not among ``names``.

    Its message suggests the nearest name or the option to use. ``where`` is the part of the file
    that was searched, for example " in its first line".
    """
    near = nearest(name, names)
    listed = first_few(names, NAMED)
    hints = [f"did you mean {near!r}?"] if near else []
    if name == columns.text:
        pair = f", or have {' and '.join(PAIR)}" if columns.messages and name == MESSAGES else ""
        hints = hints or [f"name it with --text-column{pair}"]
    elif name == columns.id:
        hints += [
            f"name it with --id-column, or --id-column {columns.text} to split by the text itself"
        ]
    else:
        hints = hints or ["a filter or the mask requires it"]
    return UserError(f"{path} has no column {name!r}{where} (it has: {listed}); {' '.join(hints)}")


class Drop(StrEnum):
    """Reason why a row was not written as a document.

    The first members are faults of the row; the last ones are filters of the settings.
    """

    NULL_TEXT = "null_text"
    EMPTY_TEXT = "empty_text"
    INVALID_UTF8 = "invalid_utf8"  # lone surrogates too
    NULL_ID = "null_id"
    NO_TOKENS = "no_tokens"
    CONTAINS_EOD = "contains_eod"  # EOD before the end: of plain text, or written by a template
    NOT_MESSAGES = "not_messages"  # no list of messages with role and content
    TEMPLATE_FAILED = "template_failed"  # the chat template refuses the messages, or rewrites them
    NOTHING_COUNTS = "nothing_counts"  # no token of an assistant's message
    UNREADABLE = "unreadable"  # the rest of a damaged row group
    # The rest of a truncated or damaged stream: one drop for an unknown number of rows.
    CUT_OFF = "cut_off"
    MALFORMED = "malformed"  # a line that is not a JSON object with these columns
    ABOVE_MAX_BYTES = "above_max_bytes"
    BELOW_MIN_BYTES = "below_min_bytes"
    BELOW_MIN_SCORE = "below_min_score"
    OTHER_LANGUAGE = "other_language"
    MASKED = "masked"

    @property
    def requested(self) -> bool:
        """True if the reason is a filter that the user requested.

        Filtered rows do not count against ``--max-bad``, unlike faulty rows.
        """
        return self in FILTERED


FILTERED = (
    Drop.ABOVE_MAX_BYTES,
    Drop.BELOW_MIN_BYTES,
    Drop.BELOW_MIN_SCORE,
    Drop.OTHER_LANGUAGE,
    Drop.MASKED,
)


def by_reason(dropped: Mapping[Any, int]) -> dict[str, int]:
    """Return the numbers of dropped rows above 0, in the order of the reasons."""
    return {str(reason): dropped[reason] for reason in Drop if dropped.get(reason)}


def listed(dropped: Mapping[str, int]) -> str:
    """Format numbers of dropped rows: ``4 null_text, 1,200 masked``."""
    return ", ".join(f"{number:,} {reason}" for reason, number in dropped.items())


@dataclass(frozen=True)
class BadRow:
    """Row that was dropped because of a fault.

    ``place`` is the row number in a parquet or Arrow file, the byte offset of the line in
    uncompressed JSONL, or the place in .txt files (see txt).
    """

    place: int
    reason: Drop
    message: str = ""


@dataclass
class Tally:
    """Counts of rows read, documents written and rows dropped.

    ``tokens`` (including EOD) and ``text_bytes`` (UTF-8) are those of the written documents.
    ``dropped`` has the number of rows for each reason. After a unit is done,
    ``rows == documents + dropped.total()``.
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)

    @property
    def bad(self) -> int:
        """Number of rows dropped because of a fault."""
        return sum(number for reason, number in self.dropped.items() if not reason.requested)

    def __iadd__(self, other: Tally) -> Tally:
        self.rows += other.rows
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.dropped += other.dropped
        return self


def messages_json(value: Any) -> str:
    """Return the messages of a row as JSON text."""
    return json.dumps(value, ensure_ascii=False, default=str)


def raise_if_memory(error: Exception) -> None:
    """Raise MemoryError if ``error``, raised by a library, means that memory is exhausted.

    Without this, lack of memory would be mistaken for damaged rows.
    """
    if is_want_of_memory(error):
        raise MemoryError(one_line(error)) from None
