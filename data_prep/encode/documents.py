"""Selection of documents from rows, and assignment of the documents to splits.

Every dropped row has a reason. This module does not depend on files or tokenizers.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.aliases import BoolArray, Int64Array, Json, Uint8Array
from data_prep.encode.encoders import MAX_DOCUMENT_BYTES
from data_prep.encode.mask import load_mask
from data_prep.encode.splits import Split, hash_ids
from data_prep.options import check_least, values_of
from data_prep.sources import Columns, Rows
from data_prep.sources.rows import MESSAGES, BadRow, Drop, is_text
from fem_common.config import plain
from fem_common.errors import UserError

BAD_ROWS_LISTED = 100
COLUMN_HELP = {
    "text": "column of the text (default: text)",
    "id": (
        "column of the document id, which decides the split (default: id, or without one the "
        "document's file and place); name the text column to split by the text"
    ),
    "score": "column of the score (default: score)",
    "language": "column of the language (default: language)",
}
REASONS = tuple(Drop)


@dataclass(frozen=True)
class Settings:
    """Settings that decide which rows become documents and to which split each document belongs.

    ``mask`` is FILE.py:FUNCTION (see mask). ``mask_columns`` and ``mask_sha256`` are copies of the
    attributes of mask.Mask. If ``messages``, the text column contains conversations, and
    ``template_sha256`` is that of chat.Chat. Raises UserError for invalid values.
    """

    text_column: str = "text"
    id_column: str = "id"
    score_column: str = "score"
    language_column: str = "language"
    min_score: float | None = None
    languages: tuple[str, ...] = ()
    min_bytes: int = 0
    max_bytes: int = MAX_DOCUMENT_BYTES
    mask: str | None = None
    mask_sha256: str | None = None
    mask_columns: tuple[str, ...] = ()
    valid_percent: float = 2.0
    test_percent: float = 2.0
    messages: bool = field(default=False, kw_only=True)
    template_sha256: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("text_column", "id_column", "score_column", "language_column"):
            if not getattr(self, name):
                raise UserError(f"--{name.replace('_', '-')} is empty; name a column")
        if self.min_score is not None and not math.isfinite(self.min_score):
            raise UserError(f"--min-score is {self.min_score}; it must be a finite number")
        if not all(self.languages):
            raise UserError(
                "--language is empty; name a language as the column writes it, such as en"
            )
        check_least("min-bytes", self.min_bytes, 0)
        if self.max_bytes < max(1, self.min_bytes):
            least = f"--min-bytes, {self.min_bytes}" if self.min_bytes > 1 else "1"
            raise UserError(f"--max-bytes is {self.max_bytes}; it must be at least {least}")
        _ = self.split

    @property
    def columns(self) -> Columns:
        """Columns to read from the source: the text, the id, and those that the filters use."""
        extra = (
            [self.score_column] * (self.min_score is not None)
            + [self.language_column] * bool(self.languages)
            + list(self.mask_columns)
        )
        return Columns(
            self.text_column,
            self.id_column,
            tuple(
                name
                for name in dict.fromkeys(extra)
                if name not in (self.text_column, self.id_column)
            ),
            self.messages,
        )

    @property
    def split(self) -> Split:
        """Percentages of valid and test as a Split."""
        return Split(self.valid_percent, self.test_percent)

    def as_json(self) -> Json:
        """Return the settings as a dictionary for JSON.

        The fields of conversations are omitted for other data.
        """
        value: Json = plain(self)
        if not self.messages:
            del value["messages"], value["template_sha256"]
        return value

    def deciding(self) -> Json:
        """Return the part of ``as_json`` that determines the prepared data.

        A mask is represented by its function and its sha256, without the path of its file.
        """
        return self.as_json() | {"mask": self.mask and self.mask.rpartition(":")[2]}


def add_column_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name columns and filter rows, for every verb that reads text."""
    add = parser.add_argument
    for name, what in COLUMN_HELP.items():
        add(f"--{name}-column", default=name, metavar="NAME", help=what)
    paragraphs = "a document is a paragraph of a .txt file, up to a blank line (default: the file)"
    add("--paragraphs", action="store_true", help=paragraphs)
    score = "leave out rows with a score below X, or none"
    add("--min-score", type=float, metavar="X", help=score)
    language = "keep only this language; repeat for more"
    add("--language", action="append", default=[], dest="languages", metavar="CODE", help=language)
    least = "leave out texts below N bytes of UTF-8 (default: 0)"
    add("--min-bytes", type=int, default=0, metavar="N", help=least)
    most = (
        f"leave out texts above N bytes (default: {MAX_DOCUMENT_BYTES}); the longest may cost a "
        "worker 110 times its size in memory"
    )
    add("--max-bytes", type=int, default=MAX_DOCUMENT_BYTES, metavar="N", help=most)
    own = "a filter of your own, as for deduplication (see data_prep/encode/mask.py)"
    add("--mask", metavar="FILE.py:FUNCTION", help=own)


def add_messages_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of conversations, for the verbs that apply a chat template."""
    add = parser.add_argument
    messages = (
        "the rows are conversations: a column messages (list of role and content), or prompt and "
        "completion; they are written by the tokenizer's chat template, with a mask of the loss"
    )
    add("--messages", action="store_true", help=messages)
    template = "template of --messages; it replaces the tokenizer's, also in OUT/tokenizer"
    add("--chat-template", type=Path, metavar="FILE.jinja", help=template)


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of rows and conversations, and the percentages of the splits."""
    add_column_arguments(parser)
    add_messages_arguments(parser)
    for split in ("valid", "test"):
        parser.add_argument(
            f"--{split}-percent",
            type=float,
            default=2.0,
            metavar="P",
            help=f"share of the documents in {split}; 0: none (default: 2)",
        )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the command-line arguments define.

    The mask is loaded to find its columns and its hash. Raises UserError for an invalid option.
    """
    given = values_of(Settings, arguments)
    given["languages"] = tuple(dict.fromkeys(given["languages"]))
    if given.get("messages"):
        if given["text_column"] == Columns().text:
            given["text_column"] = MESSAGES
    elif getattr(arguments, "chat_template", None):
        raise UserError("--chat-template goes with --messages; give both")
    if given["mask"]:
        mask = load_mask(given["mask"])
        anywhere = f"{mask.file.absolute()}:{given['mask'].rpartition(':')[2]}"
        given |= {"mask": anywhere, "mask_sha256": mask.sha256, "mask_columns": mask.columns}
    return Settings(**given)


@dataclass(frozen=True)
class Documents:
    """Batch of n documents in the order of their rows.

    texts: large_string [n], valid UTF-8 without nulls.
    ids: large_binary [n] without nulls.
    splits: uint8 [n], indices into splits.SPLITS.
    places: int64 [n], row number or byte offset of each document in its file, as in BadRow.
    """

    texts: pa.LargeStringArray
    ids: pa.LargeBinaryArray
    splits: Uint8Array
    places: Int64Array

    @property
    def text_bytes(self) -> int:
        """Total length of the texts in bytes of UTF-8."""
        return int(pc.sum(pc.binary_length(self.texts)).as_py() or 0)


class Selection:
    """Filter that turns rows into documents or drops them with exactly one reason per row.

    Raises UserError for a mask that has changed since the plan was made or that cannot be loaded.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.split = settings, settings.split
        self.mask = load_mask(settings.mask) if settings.mask else None
        if self.mask and self.mask.sha256 != settings.mask_sha256:
            raise UserError(
                f"{self.mask.file} (--mask) or a file it names has changed since the plan "
                "was made; put it back or plan again"
            )

    def of(self, rows: Rows, path: str = "") -> tuple[Documents, Counter[Drop], list[BadRow]]:
        """Return the documents of ``rows``, the number of dropped rows by reason, and the bad rows.

        ``path`` is the file that contains the rows. At most the first 100 bad rows are returned. A
        dropped row counts under the first reason that applies, in this order: null_text,
        empty_text, invalid_utf8, null_id, above_max_bytes, below_min_bytes, below_min_score (or no
        score), other_language (or none), masked. Raises UserError for a column of the wrong type or
        a mask that fails.
        """
        settings, batch = self.settings, rows.batch
        raw, ids = batch.column(settings.text_column), batch.column(settings.id_column)
        texts, faults = _decoded(raw)
        sizes = pc.fill_null(pc.binary_length(raw), -1).to_numpy(zero_copy_only=False)
        verdict = np.zeros(len(sizes), np.uint8)  # 0: document; else 1 + index into REASONS

        def drop(reason: Drop, condition: BoolArray) -> None:
            verdict[(verdict == 0) & condition] = 1 + REASONS.index(reason)

        drop(Drop.NULL_TEXT, sizes < 0)
        drop(Drop.EMPTY_TEXT, sizes == 0)
        if faults:
            drop(Drop.INVALID_UTF8, np.isin(np.arange(len(sizes)), list(faults)))
        if ids.null_count:
            drop(Drop.NULL_ID, ids.is_null().to_numpy(zero_copy_only=False))
        drop(Drop.ABOVE_MAX_BYTES, sizes > settings.max_bytes)
        drop(Drop.BELOW_MIN_BYTES, sizes < settings.min_bytes)
        self._filter(batch, drop)
        if self.mask:
            self._mask(rows, texts, ids, path, verdict)
        return self._result(texts, ids, rows.places, verdict, faults)

    def _filter(self, batch: pa.RecordBatch, drop: Callable[[Drop, BoolArray], None]) -> None:
        settings = self.settings
        if settings.min_score is not None:
            scores = _numbers(batch.column(settings.score_column), settings.score_column)
            drop(Drop.BELOW_MIN_SCORE, ~_filled(pc.greater_equal(scores, settings.min_score)))
        if settings.languages:
            column = batch.column(settings.language_column)
            if pa.types.is_nested(column.type):
                raise UserError(
                    f"column {settings.language_column!r} is {column.type}, not text; name "
                    "it with --language-column"
                )
            languages = column if is_text(column.type) else column.cast(pa.large_string())
            wanted = pa.array([name.encode() for name in settings.languages], pa.large_binary())
            drop(
                Drop.OTHER_LANGUAGE,
                ~_filled(pc.is_in(languages.cast(pa.large_binary()), value_set=wanted)),
            )

    def _mask(
        self,
        rows: Rows,
        texts: pa.LargeStringArray,
        ids: pa.LargeBinaryArray,
        path: str,
        verdict: Uint8Array,
    ) -> None:
        """Apply the mask to the rows that no filter has dropped yet, and record its rejections.

        ``verdict`` [n] is 0 for a document and 1 + the index of the reason for a dropped row; it is
        modified in place.
        """
        assert self.mask
        settings, kept = self.settings, np.flatnonzero(verdict == 0)
        if not len(kept):
            return
        columns = {name: rows.batch.column(name) for name in self.mask.columns}
        columns |= {settings.id_column: ids, settings.text_column: texts}
        full = len(kept) == len(verdict)
        columns = {
            name: column if full else column.take(pa.array(kept))
            for name, column in columns.items()
        }
        if settings.id_column != settings.text_column:
            columns[settings.id_column] = _readable(columns[settings.id_column])
        keep = self.mask.keep(pa.RecordBatch.from_pydict(columns), rows.places[kept], path)
        verdict[kept[~keep]] = 1 + REASONS.index(Drop.MASKED)

    def _result(
        self,
        texts: pa.LargeStringArray,
        ids: pa.LargeBinaryArray,
        places: Int64Array,
        verdict: Uint8Array,
        faults: dict[int, str],
    ) -> tuple[Documents, Counter[Drop], list[BadRow]]:
        dropped = Counter(
            {
                REASONS[code - 1]: int(number)
                for code, number in enumerate(np.bincount(verdict))
                if code and number
            }
        )
        listed = np.flatnonzero(
            np.isin(
                verdict, [1 + REASONS.index(reason) for reason in dropped if not reason.requested]
            )
        )
        bad = [
            BadRow(int(places[row]), REASONS[verdict[row] - 1], faults.get(int(row), ""))
            for row in listed[:BAD_ROWS_LISTED]
        ]
        if dropped:
            keep = verdict == 0
            wanted = pa.array(keep)
            texts = texts.filter(wanted)
            ids = ids.filter(wanted)
            places = places[keep]
        return Documents(texts, ids, self.split.of_hashes(hash_ids(ids)), places), dropped, bad


def _numbers(column: pa.Array, name: str) -> pa.DoubleArray:
    """Convert a column to float64.

    Text that is not a number becomes null, because a JSON line can contain any value.
    """
    kind = column.type
    if (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_null(kind)
    ):
        return column.cast(pa.float64(), safe=False)
    if pa.types.is_boolean(kind):
        return pa.nulls(len(column), pa.float64())
    if is_text(kind):
        return pa.array([_number(value) for value in column.to_pylist()], pa.float64())
    raise UserError(
        f"column {name!r} is {kind}, not a number; name the score's column with --score-column"
    )


def _number(value: str | bytes | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None


def _filled(condition: pa.BooleanArray) -> BoolArray:
    return pc.fill_null(condition, False).to_numpy(zero_copy_only=False)


def _decoded(raw: pa.LargeBinaryArray) -> tuple[pa.LargeStringArray, dict[int, str]]:
    """Return the texts as strings, and the decoding errors by row.

    A text that is not UTF-8 becomes null.
    """
    try:
        return raw.cast(pa.large_string()), {}
    except pa.ArrowInvalid:
        pass
    faults = {}
    for row, text in enumerate(raw):
        try:
            str(text.as_buffer() or b"", "utf-8")
        except UnicodeDecodeError as error:
            faults[row] = f"byte {error.start}: {error.reason}"
    bad = np.zeros(len(raw), np.bool_)
    bad[list(faults)] = True
    return pc.if_else(pa.array(bad), pa.scalar(None, pa.large_binary()), raw).cast(
        pa.large_string()
    ), faults


def _readable(ids: pa.LargeBinaryArray) -> pa.LargeStringArray:
    try:
        return ids.cast(pa.large_string())
    except pa.ArrowInvalid:
        return pa.array(
            [value.decode(errors="replace") for value in ids.to_pylist()], pa.large_string()
        )
