"""Reader of .txt files: one document per file or per paragraph.

The .txt files of one input are one source, a SourceFile with ``parts``. A place in the source is a
byte offset in the concatenation of all files with one additional byte between two files. A place
therefore identifies its file even if a file is empty.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from data_prep.sources.finding import BOM, check_text
from data_prep.sources.jsonl import MAX_LINE_BYTES, lines
from data_prep.sources.rows import (
    BATCH_BYTES,
    ID,
    ROW_BYTES,
    Columns,
    Drop,
    Rows,
    SourceFile,
    Span,
    Unreadable,
    missing_column,
)
from data_prep.sources.streams import chunks, open_input, sampled, size_of
from fem_common.errors import UserError

FILE, PARAGRAPH = "txt", "paragraphs"  # kinds of sources: one document per file or per paragraph


def open_files(
    folder: str, names: Sequence[str], columns: Columns, *, paragraphs: bool
) -> SourceFile:
    """Open the files ``names`` in ``folder`` as one source.

    Raises UserError for a file that is not text, or for columns that text files do not have.
    """
    for name in (*columns.extra, *[columns.id] * (columns.id not in (ID, columns.text))):
        raise missing_column(
            str(PurePath(folder, names[0])),
            name,
            columns,
            [columns.text, ID],
            ", like every .txt file",
        )
    parts = tuple((name, _check(str(PurePath(folder, name)))) for name in names)
    size = sum(size for _, size in parts)
    kind, rows = (PARAGRAPH, None) if paragraphs else (FILE, len(parts))
    return SourceFile(folder, kind, size, rows, size, fingerprint(folder, kind, names), parts=parts)


def _check(path: str) -> int:
    with open_input(path) as file:
        begin = file.read(512)
        check_text(path, begin)
        first = begin.removeprefix(BOM).lstrip().split(b"\n")[0]
        if first.startswith(b"{"):
            try:
                json.loads(first)
            except ValueError:
                pass
            else:
                raise UserError(
                    f"{path} is named .txt and begins with a JSON object; name it .jsonl if "
                    "it has one per line"
                )
        return size_of(file)


def fingerprint(folder: str, kind: str, names: Sequence[str]) -> str:
    """Return a hash of the files' sizes and contents.

    Files of up to 4 MiB are hashed completely, and larger files in blocks spread over the file.
    """
    digest = hashlib.sha256()
    for name in names:
        with open_input(str(PurePath(folder, name))) as file:
            digest.update(f"{sampled(file)}\n".encode())
    return f"{kind}:{digest.hexdigest()}"


def _placed(file: SourceFile) -> Iterator[tuple[str, int, int]]:
    """Yield (name, size in bytes, place of the first byte) for each file of the source."""
    first = 0
    for name, size in file.parts:
        yield name, size, first
        first += size + 1


def locate(file: SourceFile, place: int) -> tuple[str, int]:
    """Return (path of the file that contains a place, byte offset in this file)."""
    name, first = next(
        (name, first) for name, size, first in _placed(file) if place <= first + size
    )
    return str(PurePath(file.path, name)), place - first


def spans(file: SourceFile, unit_bytes: int) -> list[Span]:
    """Divide the files of the source into spans of consecutive files.

    A span ends with the file with which its size reaches ``unit_bytes``. If documents are
    paragraphs, a file may also be divided between two paragraphs.
    """
    cuts, rows = [0], [0]
    for name, size, first in _placed(file):
        if first - cuts[-1] >= unit_bytes:
            cuts.append(first)
            rows.append(0)
        rows[-1] += 1
        while file.kind == PARAGRAPH and first + size - cuts[-1] > unit_bytes:
            at = _next_paragraph(
                str(PurePath(file.path, name)), max(1, cuts[-1] + unit_bytes - first)
            )
            if at is None:
                break
            cuts.append(first + at)
            rows.append(0)
    ends = [*cuts[1:], file.bytes + len(file.parts)]
    known = rows if file.kind == FILE else [None] * len(cuts)
    return [
        Span(start, stop, number, stop - start)
        for start, stop, number in zip(cuts, ends, known, strict=True)
    ]


def _next_paragraph(path: str, offset: int) -> int | None:
    """Return the byte offset of the first paragraph after the next blank line, or None.

    The search starts at byte ``offset`` of the file.
    """
    with open_input(path) as stream:
        stream.seek(offset)
        blank = None  # the first line may be incomplete
        for place, _, line in lines(chunks(stream, FILE), offset):
            if blank and not _is_blank(line):
                return place
            blank = False if blank is None else _is_blank(line)
    return None


def _is_blank(line: bytes | None) -> bool:
    return line is not None and not line.strip()


def read(file: SourceFile, span: Span, columns: Columns) -> Iterator[Rows | Unreadable]:
    """Yield the documents that start within a span, as rows.

    The id of a document is the file's name. The id of a paragraph is the file's name and the byte
    offset of its beginning. Raises UserError if a file cannot be read.
    """
    held: list[tuple[int, str, bytes]] = []
    size = 0
    for place, name, text in _documents(file, span):
        more = ROW_BYTES + len(text or b"")
        if held and (text is None or size + more > BATCH_BYTES):
            yield _rows(held, columns)
            held, size = [], 0
        if text is None:
            advice = (
                ""
                if file.kind == PARAGRAPH
                else "; --paragraphs makes a document of each paragraph"
            )
            yield Unreadable(
                place, 1, Drop.MALFORMED, f"it is longer than {MAX_LINE_BYTES >> 20} MiB{advice}"
            )
        else:
            held.append((place, name, text))
            size += more
    if held:
        yield _rows(held, columns)


def _rows(held: list[tuple[int, str, bytes]], columns: Columns) -> Rows:
    places, names, texts = zip(*held, strict=True)
    values = {columns.id: [name.encode() for name in names], columns.text: list(texts)}
    arrays = [pa.array(values[name], pa.large_binary()) for name in columns.all]
    return Rows(
        np.array(places, np.int64), pa.RecordBatch.from_arrays(arrays, names=list(columns.all))
    )


def _documents(file: SourceFile, span: Span) -> Iterator[tuple[int, str, bytes | None]]:
    """Yield (place, id, text) for each document of a span.

    The text is None if it is larger than MAX_LINE_BYTES.
    """
    for name, size, first in _placed(file):
        if first + size < span.start or first >= span.stop:
            continue
        path = str(PurePath(file.path, name))
        with open_input(path) as stream:
            if (found := size_of(stream)) != size:
                raise UserError(
                    f"{path} has {found} bytes, {size} when it was planned: it has changed"
                )
            if file.kind == PARAGRAPH:
                for at, text in _paragraphs(stream, max(0, span.start - first)):
                    if first + at >= span.stop:
                        break
                    yield first + at, f"{name}:{at}", text
            else:
                yield (
                    first,
                    name,
                    None if size > MAX_LINE_BYTES else stream.read().removeprefix(BOM),
                )


def _paragraphs(stream: BinaryIO, start: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield (byte offset, text) for each paragraph of a file from the offset ``start`` on.

    The text is unchanged, without the last line end. It is None if it is larger than
    MAX_LINE_BYTES.
    """
    stream.seek(start)
    begin = 0
    held = list[bytes]()
    size = 0
    for place, length, line in lines(chunks(stream, FILE), start):
        line = line if place or line is None else line.removeprefix(BOM)
        if _is_blank(line):
            if size:
                yield begin, _paragraph(held, size)
            held, size = [], 0
            continue
        begin = begin if size else place
        size += length + 1
        if size <= MAX_LINE_BYTES and line is not None:
            held.append(line)
        else:
            held.clear()
    if size:
        yield begin, _paragraph(held, size)


def _paragraph(held: list[bytes], size: int) -> bytes | None:
    return b"\n".join(held).rstrip(b"\r") if size <= MAX_LINE_BYTES else None
