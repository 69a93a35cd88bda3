"""data_prep: why a row was not written, and counts of rows. Knows no file and no text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Drop(StrEnum):
    """Why a row was not written: first what is wrong with it, then what the settings asked to leave out."""

    NULL_TEXT = "null_text"
    EMPTY_TEXT = "empty_text"
    INVALID_UTF8 = "invalid_utf8"  # lone surrogates too
    NULL_ID = "null_id"
    NO_TOKENS = "no_tokens"
    CONTAINS_EOD = "contains_eod"  # a tokenizer that makes EOD from plain text
    UNREADABLE = "unreadable"  # the rest of a damaged row group
    CUT_OFF = "cut_off"  # the rest of a truncated or damaged stream: one for all its rows, whose number nothing tells
    MALFORMED = "malformed"  # a line that is no JSON object with these columns
    ABOVE_MAX_BYTES = "above_max_bytes"
    BELOW_MIN_BYTES = "below_min_bytes"
    BELOW_MIN_SCORE = "below_min_score"
    OTHER_LANGUAGE = "other_language"
    MASKED = "masked"

    @property
    def asked_for(self) -> bool:
        """Whether a filter left the row out, rather than a fault of the row: these do not count against ``--max-bad``."""
        return self in FILTERED


FILTERED = (Drop.ABOVE_MAX_BYTES, Drop.BELOW_MIN_BYTES, Drop.BELOW_MIN_SCORE, Drop.OTHER_LANGUAGE, Drop.MASKED)


@dataclass(frozen=True)
class BadRow:
    """A bad row: ``place`` is its row number in a parquet file, or the byte its line starts at in (uncompressed) JSONL."""

    place: int
    reason: Drop
    message: str = ""


@dataclass
class Tally:
    """Rows read, documents and tokens (EOD included) written, UTF-8 bytes of the documents written, rows dropped by reason.

    ``rows == documents + dropped.total()`` once a unit is done.
    """

    rows: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)

    @property
    def bad(self) -> int:
        """Rows dropped for a fault of theirs."""
        return sum(number for reason, number in self.dropped.items() if not reason.asked_for)

    def __iadd__(self, other: Tally) -> Tally:
        self.rows += other.rows
        self.documents += other.documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.dropped += other.dropped
        return self
