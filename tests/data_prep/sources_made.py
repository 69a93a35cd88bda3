"""Rows and files for the tests of sources."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.sources import (
    Columns,
    Rows,
    SourceFile,
    Span,
    Unreadable,
    open_files,
    read_span,
    spans,
)
from data_prep.sources.rows import BATCH_BYTES, ROW_BYTES

TEXT = 'plain words, naïve é, 東京 🙂, "quoted", back\\slash, tab\t, line\nend\r\n, \x00 '
COLUMNS = Columns()
WHOLE = 1 << 40
Read = tuple[Any, ...]  # (text, id, place)


def row(number: int, words: int) -> dict[str, Any]:
    """Return a row whose text has ``words`` words, the same for the same number."""
    random_ = random.Random(number)
    return {
        "text": f"{number} " + " ".join(random_.choices(TEXT.split(" "), k=words)),
        "id": f"id-{number}",
    }


def packed(name: str, content: bytes) -> bytes:
    """Compress content as the file name requires."""
    if name.endswith(".gz"):
        return gzip.compress(content, 1)
    return (
        bytes(pa.compress(content, codec="zstd", asbytes=True))
        if name.endswith(".zst")
        else content
    )


def written(
    path: Path, rows: list[dict[str, Any]], columns: Columns = COLUMNS, **options: Any
) -> SourceFile:
    """Write a file of rows, of the kind that its name indicates, and open it."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, **options)
    elif path.suffix == ".arrow":
        table = pa.Table.from_pylist(rows)
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=options.get("row_group_size"))
    else:
        path.write_bytes(
            packed(path.name, b"".join(json.dumps(item).encode() + b"\n" for item in rows))
        )
    return open_files([str(path)], columns)[0]


def opened(path: Path, content: bytes, columns: Columns = COLUMNS) -> SourceFile:
    """Write a file with this content and open it."""
    path.write_bytes(content)
    return open_files([str(path)], columns)[0]


def parts(
    file: SourceFile, cuts: Iterable[Span], columns: Columns = COLUMNS
) -> list[Rows | Unreadable]:
    """Read all parts of a file and check the invariants of each batch."""
    found = []
    for span in cuts:
        for part in read_span(file, span, columns):
            if isinstance(part, Rows):
                part.batch.validate(full=True)
                assert part.batch.schema.names == list(columns.all)
                assert {part.batch.column(name).type for name in (columns.text, columns.id)} == {
                    pa.large_binary()
                }
                assert len(part.places) == len(part.batch) > 0
                size = sum(
                    len(text or b"") for text in part.batch.column(columns.text).to_pylist()
                ) + ROW_BYTES * len(part.batch)
                assert len(part.batch) == 1 or size <= BATCH_BYTES
            found.append(part)
    return found


def read_all(
    file: SourceFile, cuts: Iterable[Span] | int = WHOLE, columns: Columns = COLUMNS
) -> list[Read]:
    """Return (text, id, …, place) of each row, and (reason, rows, place) of each unreadable part.

    ``cuts``: spans, or the bytes of a unit.
    """
    found: list[Read] = []
    for part in parts(file, spans(file, columns, cuts) if isinstance(cuts, int) else cuts, columns):
        if isinstance(part, Unreadable):
            found.append((str(part.reason), part.rows, part.place))
        else:
            found += zip(
                *(column.to_pylist() for column in part.batch.columns),
                part.places.tolist(),
                strict=True,
            )
    return found
