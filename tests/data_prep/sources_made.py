"""Rows and files for the tests of sources."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_prep.sources import Columns, Rows, SourceFile, Span, Unreadable, read_span
from data_prep.sources.rows import BATCH_BYTES, ROW_BYTES

TEXT = 'plain words, naïve é, 東京 🙂, "quoted", back\\slash, tab\t, line\nend\r\n, \x00 '

Read = tuple[Any, ...]  # (text, id, place)


def row(number: int, words: int) -> dict[str, Any]:
    """A row whose text has ``words`` words, the same for the same number."""
    random_ = random.Random(number)
    return {"text": f"{number} " + " ".join(random_.choices(TEXT.split(" "), k=words)), "id": f"id-{number}"}


def packed(name: str, content: bytes) -> bytes:
    """Content as a file of that name holds it."""
    if name.endswith(".gz"):
        return gzip.compress(content, 1)
    return bytes(pa.compress(content, codec="zstd", asbytes=True)) if name.endswith(".zst") else content


def write_lines(path: Path, lines: Iterable[bytes]) -> Path:
    """A JSONL file, packed as its name says."""
    path.write_bytes(packed(path.name, b"".join(line + b"\n" for line in lines)))
    return path


def parts(file: SourceFile, spans: Iterable[Span], columns: Columns) -> list[Rows | Unreadable]:
    """All that is read, each batch checked for what every batch promises."""
    found = []
    for span in spans:
        for part in read_span(file, span, columns):
            if isinstance(part, Rows):
                part.batch.validate(full=True)
                assert part.batch.schema.names == list(columns.all)
                assert {part.batch.column(name).type for name in (columns.text, columns.id)} == {pa.large_binary()}
                assert len(part.places) == len(part.batch) > 0
                size = sum(len(text or b"") for text in part.batch.column(columns.text).to_pylist()) + ROW_BYTES * len(part.batch)
                assert len(part.batch) == 1 or size <= BATCH_BYTES
            found.append(part)
    return found


def read_all(file: SourceFile, spans: Iterable[Span], columns: Columns | None = None) -> list[Read]:
    """(text, id, …, place) of each row; (reason, rows, place) of what could not be read."""
    found: list[Read] = []
    for part in parts(file, spans, columns or Columns()):
        if isinstance(part, Unreadable):
            found.append((str(part.reason), part.rows, part.place))
        else:
            found += zip(*(column.to_pylist() for column in part.batch.columns), part.places.tolist(), strict=True)
    return found
