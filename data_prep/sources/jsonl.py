"""Reader of JSON lines files, plain or compressed, in bounded memory.

Lines are independent: a bad line affects no other line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from data_prep.aliases import Json
from data_prep.sources.rows import (
    BATCH_BYTES,
    ID,
    MESSAGES,
    PAIR,
    ROW_BYTES,
    Columns,
    Drop,
    Rows,
    Span,
    Unreadable,
    messages_json,
    missing_column,
)
from data_prep.sources.streams import DamagedStream, chunks, size_of
from fem_common.errors import UserError

# Python uses 12 times this memory for a line with escapes and a character above U+FFFF.
MAX_LINE_BYTES = 96 << 20
HEAD_BYTES = 1 << 20  # bytes of lines that are checked before any work
MAX_UNREADABLE = 1000  # unreadable lines that are buffered while a batch fills
BLANK, BOM = b" \t\r", b"\xef\xbb\xbf"
MISSING = object()

# Byte offset, size, and bytes of a line without "\n" (None if larger than MAX_LINE_BYTES).
Line = tuple[int, int, bytes | None]


class Integer(str):
    """JSON integer as text, in its written form.

    JSON does not limit integers, and Python parses very large ones slowly.
    """

    __slots__ = ()

    @property
    def digits(self) -> str:
        """The number as written for an integer of a parquet file; ``-0`` becomes ``0``."""
        return "0" if self == "-0" else str(self)


DECODER = json.JSONDecoder(parse_int=Integer)
WORDS = {
    str: "text",
    Integer: "a number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    type(None): "null",
}


class MalformedLine(ValueError):
    """Error raised for a line that is not a valid row; the message describes the fault."""


def check(path: str, file: BinaryIO, kind: str, columns: Columns) -> tuple[int, bool]:
    """Check the first lines of a file, and return (approximate bytes of text, True if it has ids).

    Raises UserError if the file is not JSONL or lacks a column other than the id.
    """
    head = _head(file, kind)
    document = head.fault.startswith("line 1: ") and ".json" in [
        suffix.lower() for suffix in PurePath(path).suffixes
    ]
    if not head.objects or document:
        advice = (
            "; a .json file must have one object per line: convert it (jq -c), or select the "
            "other files with a glob"
            if document
            else ""
        )
        raise UserError(
            f"{path} is not JSONL: {head.fault}{advice}"
            if head.fault
            else f"{path} contains no line"
        )
    names = list(dict.fromkeys(name for item in head.objects for name in _names(item)))
    has_id = columns.id != ID or any(ID in item for item in head.objects)
    for name in columns.all if has_id else replace(columns, id=columns.text).all:
        values = [_column(item, name, head.path(name), columns) for item in head.objects]
        if all(value is MISSING for value in values):
            where = (
                f" in its first {len(head.objects)} lines"
                if len(head.objects) > 1
                else " in its first line"
            )
            raise missing_column(path, name, columns, names, where)
        found = [type(value) for value in values if value is not None and value is not MISSING]
        wanted = {list, dict} if columns.messages else {str}
        if name == columns.text and found and not wanted & set(found):
            what = "a list of messages" if columns.messages else "text"
            raise UserError(
                f"{path}: {name!r} is {WORDS[found[0]]}, not {what}; name the text column with "
                "--text-column"
            )
        if name == columns.id and found and not {str, Integer} & set(found):
            raise UserError(
                f"{path}: {name!r} is {WORDS[found[0]]}, neither text nor a whole number; "
                "name the id column with --id-column"
            )
    path_of_text = head.path(columns.text)
    texts = (_column(item, columns.text, path_of_text, columns) for item in head.objects)
    if columns.messages:
        texts = (messages_json(value) for value in texts if value is not MISSING)
    text = sum(len(value.encode("utf-8", "surrogatepass")) for value in texts if type(value) is str)
    return round(text / max(1, head.stored) * size_of(file)), has_id


def spans(kind: str, size: int, text_bytes: int, unit_bytes: int) -> list[Span]:
    """Divide a file of ``size`` bytes into equal ranges with about ``unit_bytes`` of text each.

    A range has at most ten times as many bytes as ``unit_bytes``. A compressed file is a single
    span.
    """
    if kind != "jsonl":
        return [Span(0, 1, None, text_bytes)]
    number = max(1, min(size, round(max(text_bytes, size / 10) / unit_bytes)))
    cuts = [size * i // number for i in range(number + 1)]
    return [
        Span(start, stop, None, text_bytes // number)
        for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
    ]


def read(
    path: str, file: BinaryIO, kind: str, span: Span, columns: Columns
) -> Iterator[Rows | Unreadable]:
    """Yield the rows of the lines that start within a span.

    The places of rows are byte offsets in the uncompressed file. Blank lines are not rows. From a
    damaged stream, the rows before the damage are read. Raises UserError.
    """
    head = Head()
    if columns.extra or any("." in name for name in columns.all):
        head = _head(file, kind)
    gathered = Gathered(columns, head)
    plain = kind == "jsonl"
    # The byte before the span shows if a line starts at the span's first byte.
    begin = max(0, span.start - 1) if plain else 0
    place = begin
    file.seek(begin)
    try:
        for place, size, line in lines(chunks(file, kind), begin):
            if plain and place >= span.stop:
                break
            if place >= span.start or not plain:
                yield from gathered.add(place, line)
            place += size + 1
    except DamagedStream as damage:
        message = (
            f"{path} is damaged at byte {place} of its uncompressed content ({damage}): the rest "
            "is lost; fetch or compress it again"
        )
        gathered.unreadable.append(Unreadable(place, 1, Drop.CUT_OFF, message))
    yield from gathered.flush()


def lines(stream: Iterable[bytes], start: int) -> Iterator[Line]:
    """Yield the lines of a byte stream whose first byte has the offset ``start`` in the file.

    The content of a line longer than MAX_LINE_BYTES is not kept in memory.
    """
    place = start
    size = 0
    pieces = list[bytes]()
    for chunk in stream:
        first, *others = chunk.split(b"\n")
        size += len(first)
        if size <= MAX_LINE_BYTES:
            pieces.append(first)
        else:
            pieces.clear()
        for following in others:
            yield place, size, _joined(pieces, size)
            place += size + 1
            size, pieces = len(following), [following]
    if size:
        yield place, size, _joined(pieces, size)


def _joined(pieces: list[bytes], size: int) -> bytes | None:
    line = b"".join(pieces) if size <= MAX_LINE_BYTES else None
    pieces.clear()
    return line


# --- a line ---------------------------------------------------------------------------------------


def parse(line: bytes) -> Json:
    """Return the JSON object that a line contains.

    Bytes that are not UTF-8 become lone surrogates, as with Python's surrogateescape. Raises
    MalformedLine if the line is not a JSON object.
    """
    try:
        value = DECODER.decode(_text(line))
    except RecursionError:
        raise MalformedLine("it is nested too deep") from None
    except json.JSONDecodeError as error:
        raise MalformedLine(f"{error.msg} at its character {error.pos + 1}") from None
    if type(value) is not dict:
        raise MalformedLine(f"it is {WORDS[type(value)]}, not an object")
    return value


def _text(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    """Encode a string of a parsed line as UTF-8.

    Bytes that were not UTF-8 in the line are restored. The result is not valid UTF-8 if the string
    contains lone surrogates; escaped surrogates never become valid UTF-8.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        pass
    try:
        raw = text.encode("utf-8", "surrogateescape")
        raw.decode()  # bytes of the line that are UTF-8 would have been decoded
    except UnicodeDecodeError:
        return raw
    except UnicodeEncodeError:
        pass
    return text.encode("utf-8", "surrogatepass")


def _value(item: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        item = item.get(name, MISSING) if type(item) is dict else MISSING
    return item


def _column(item: Json, name: str, path: tuple[str, ...], columns: Columns) -> Any:
    """Return the value of a column, or MISSING.

    The messages of a row without the column may be the object of its keys PAIR.
    """
    value = _value(item, path)
    pair = value is MISSING and columns.messages and name == columns.text == MESSAGES
    return {key: item[key] for key in PAIR} if pair and set(PAIR) <= item.keys() else value


def _whole(value: Any) -> Any:
    """Return a JSON value in which every Integer is an int."""
    if type(value) is Integer:
        return int(value)
    if type(value) is list:
        return [_whole(each) for each in value]
    return {key: _whole(each) for key, each in value.items()} if type(value) is dict else value


def _names(item: Json, above: str = "") -> Iterator[str]:
    for name, value in item.items():
        yield above + name
        if type(value) is dict and above.count(".") < 3:
            yield from _names(value, f"{above}{name}.")


# --- the first lines ------------------------------------------------------------------------------


@dataclass
class Head:
    """First lines of a file, parsed to find columns and types.

    objects: objects of the lines.
    stored: approximate bytes that these lines use in the file, compressed if the file is.
    fault: fault of the first line without an object, or "".
    """

    objects: list[Json] = field(default_factory=list)
    stored: float = 0
    fault: str = ""

    def path(self, name: str) -> tuple[str, ...]:
        """Return the keys that lead to a column in a line's object.

        ``a.b`` is the key b of the object a, unless a line has the key ``a.b`` itself.
        """
        if "." not in name or any(name in item for item in self.objects):
            return (name,)
        return tuple(name.split("."))

    def kind(self, name: str) -> pa.DataType | None:
        """Return the Arrow type of a column from its first value in the first lines.

        Return None if these lines have no value; the type is then chosen for each batch.
        """
        values = (_value(item, self.path(name)) for item in self.objects)
        first = next(
            (value for value in values if value is not None and value is not MISSING), None
        )
        return None if first is None else _arrow_kind(first)


def first_object(file: BinaryIO, kind: str) -> Json:
    """Return the object of the first line that contains one, or {}."""
    return next(iter(_head(file, kind).objects), {})


def _head(file: BinaryIO, kind: str) -> Head:
    head = Head()
    number = 0
    given = 0
    unpacked = 0
    consumed = 0

    def counted() -> Iterator[bytes]:
        nonlocal given
        for chunk in chunks(file, kind):
            given += len(chunk)
            yield chunk

    try:
        for place, size, line in lines(counted(), 0):
            unpacked, consumed = place + size + 1, file.tell()
            line = _stripped(place, line)
            if line != b"":
                number += 1
                try:
                    head.objects.append(_parsed(line))
                except MalformedLine as error:
                    head.fault = head.fault or f"line {number}: {error}"
            if unpacked >= HEAD_BYTES:
                break
    except DamagedStream as damage:
        head.fault = head.fault or str(damage)
    head.stored = unpacked if kind == "jsonl" else consumed * unpacked / max(1, given)
    return head


def _stripped(place: int, line: bytes | None) -> bytes | None:
    if line is None:
        return None
    return (line if place else line.removeprefix(BOM)).strip(BLANK)


def _parsed(line: bytes | None) -> Json:
    if line is None:
        raise MalformedLine(f"it is longer than {MAX_LINE_BYTES >> 20} MiB")
    return parse(line)


# --- rows -----------------------------------------------------------------------------------------


def _arrow_kind(value: Any) -> pa.DataType:
    if type(value) is bool:
        return pa.bool_()
    return pa.float64() if type(value) in (float, Integer) else pa.large_string()


class Gathered:
    """Accumulator that collects rows and yields them in batches."""

    def __init__(self, columns: Columns, head: Head) -> None:
        self.columns = columns
        self.names, self.own = columns.all, 1 if columns.id == columns.text else 2
        self.paths = [head.path(name) for name in self.names]
        self.kinds = [head.kind(name) for name in self.names[self.own :]]
        self.unreadable: list[Unreadable] = []
        self._clear()

    def _clear(self) -> None:
        self._size = 0
        self._places: list[int] = []
        self._values: list[list[Any]] = [[] for _ in self.paths]

    def add(self, place: int, line: bytes | None) -> Iterator[Rows | Unreadable]:
        """Add a line, and yield the batches and unreadable rows that are complete.

        place: byte offset of the line.
        line: its content, or None if it is too long.
        """
        line = _stripped(place, line)
        if line == b"":
            return
        try:
            values = self._of(_parsed(line))
        except MalformedLine as error:
            self.unreadable.append(Unreadable(place, 1, Drop.MALFORMED, str(error)))
            if len(self.unreadable) >= MAX_UNREADABLE:
                yield from self.flush()
            return
        del line
        more = ROW_BYTES + len(values[0] or b"")
        if self._places and self._size + more > BATCH_BYTES:
            yield from self.flush()
        self._size += more
        self._places.append(place)
        for column, value in zip(self._values, values, strict=True):
            column.append(value)

    def _of(self, item: Json) -> list[Any]:
        """Return the column values of a row, with text and id as bytes.

        Raises MalformedLine if the row has no text or a value of a wrong type.
        """
        names = self.names
        own = self.own
        values = [
            _column(item, name, path, self.columns)
            for name, path in zip(names, self.paths, strict=True)
        ]
        if values[0] is MISSING:
            raise MalformedLine(f"it has no {names[0]!r}")
        if self.columns.messages and values[0] is not None:
            try:
                values[0] = messages_json(_whole(values[0]))
            except (ValueError, RecursionError) as error:
                raise MalformedLine(f"its {names[0]!r} cannot be read: {error}") from None
        known = [None if value is MISSING else value for value in values]
        row: list[Any] = [_binary(known[0], names[0], (str,), "not text")]
        if own == 2:
            row.append(
                _binary(known[1], names[1], (str, Integer), "neither text nor a whole number")
            )
        for name, value, kind in zip(names[own:], known[own:], self.kinds, strict=True):
            if (
                value is not None
                and kind in (pa.bool_(), pa.float64())
                and _arrow_kind(value) != kind
            ):
                expected = "true or false" if kind == pa.bool_() else "a number"
                raise MalformedLine(
                    f"its {name!r} is {WORDS[type(value)]}, not {expected} as in the first lines"
                )
            row.append(value)
        return row

    def flush(self) -> Iterator[Rows | Unreadable]:
        """Yield all rows that have not been yielded yet."""
        if self._places:
            arrays = [pa.array(values, pa.large_binary()) for values in self._values[: self.own]]
            arrays += [
                _extra(values, kind)
                for values, kind in zip(self._values[self.own :], self.kinds, strict=True)
            ]
            places = np.array(self._places, np.int64)
            self._clear()
            yield Rows(places, pa.RecordBatch.from_arrays(arrays, names=list(self.names)))
        unreadable, self.unreadable = self.unreadable, []
        yield from unreadable


def _binary(value: Any, name: str, types: tuple[type, ...], wanted: str) -> bytes | None:
    if value is None:
        return None
    if type(value) not in types:
        raise MalformedLine(f"its {name!r} is {WORDS[type(value)]}, {wanted}")
    return _bytes(value.digits if type(value) is Integer else value)


def _extra(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    """Return the values of an additional column as an array of the type ``kind``.

    If ``kind`` is None, the type is inferred: null without any value, the common type if all values
    have one, else large_string.
    """
    if kind is None:
        kinds = {_arrow_kind(value) for value in values if value is not None}
        if not kinds:
            return pa.nulls(len(values))
        kind = kinds.pop() if len(kinds) == 1 else pa.large_string()
    if kind == pa.large_string():
        return pa.array([None if value is None else _as_text(value) for value in values], kind)
    return pa.array([float(value) if type(value) is Integer else value for value in values], kind)


def _as_text(value: Any) -> str:
    """Return text without lone surrogates, a number as its digits, and any other value as JSON."""
    text = str(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
