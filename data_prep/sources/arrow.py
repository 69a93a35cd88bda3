"""Reader of Arrow streams, the files that `datasets.save_to_disk` writes.

A local file is mapped into memory, so that batches which are not read cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from data_prep.sources.parquet import (
    FAULTS,
    MAX_ROWS,
    READ_BYTES,
    check_columns,
    gathered,
    selected,
)
from data_prep.sources.rows import Columns, Drop, Rows, Span, Unreadable, raise_if_memory
from fem_common.errors import UserError
from fem_common.text import one_line


def check(path: str, file: BinaryIO, columns: Columns) -> tuple[int, int, bool]:
    """Check a file, and return (rows, approximate bytes of text, True if it has ids).

    Raises UserError if the file is damaged, a column other than the id is missing or a column has
    the wrong type.
    """
    has_id = check_columns(path, _open(path, file).schema, columns)
    sizes = _sizes(path, file, columns)
    return sum(rows for rows, _ in sizes), sum(size for _, size in sizes), has_id


def schema(path: str, file: BinaryIO) -> tuple[pa.Schema, int]:
    """Return the columns and the number of record batches. Raises UserError for a damaged file."""
    return _open(path, file).schema, sum(1 for _ in _batches(path, file))


def spans(path: str, file: BinaryIO, columns: Columns, unit_bytes: int) -> list[Span]:
    """Divide a file into spans of consecutive record batches.

    A span ends with the batch with which its text reaches ``unit_bytes``. Raises UserError if the
    file cannot be read.
    """
    found: list[Span] = []
    sizes = _sizes(path, file, columns)
    start = rows = text = 0
    for number, (more, size) in enumerate(sizes, 1):
        rows, text = rows + more, text + size
        if text >= unit_bytes or number == len(sizes):
            found.append(Span(start, number, rows, text))
            start, rows, text = number, 0, 0
    return found


def read(path: str, file: BinaryIO, span: Span, columns: Columns) -> Iterator[Rows | Unreadable]:
    """Yield the rows of the record batches [start, stop) of a span.

    The places of rows are row numbers of the file. Raises UserError, and MemoryError if memory is
    exhausted.
    """
    place = 0
    for number, batch in enumerate(_batches(path, file)):
        if number >= span.stop:
            return
        if number >= span.start:
            done = 0
            try:
                for part in gathered(_pieces(batch, columns), columns):
                    yield Rows(np.arange(place + done, place + done + len(part)), part)
                    done += len(part)
            except FAULTS as error:
                raise_if_memory(error)
                fault = one_line(error).rstrip(".")
                message = (
                    f"{path}: record batch {number} cannot be read from row {done} on ({fault})"
                )
                yield Unreadable(place + done, len(batch) - done, Drop.UNREADABLE, message)
        place += len(batch)


def _pieces(batch: pa.RecordBatch, columns: Columns) -> Iterator[pa.RecordBatch]:
    """Yield small parts of a batch with the columns that are read."""
    part = selected(batch, columns)
    rows = min(MAX_ROWS, max(1, READ_BYTES * len(part) // max(1, part.nbytes)))
    for start in range(0, len(part), rows):
        yield part.slice(start, rows)


def _sizes(path: str, file: BinaryIO, columns: Columns) -> list[tuple[int, int]]:
    """Return (rows, bytes of text) of each record batch."""
    wanted = Columns(columns.text, columns.text, messages=columns.messages)
    return [(len(batch), selected(batch, wanted).nbytes) for batch in _batches(path, file)]


def _batches(path: str, file: BinaryIO) -> Iterator[pa.RecordBatch]:
    reader = _open(path, file)
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except FAULTS as error:
            raise _damaged(path, error) from None
        yield batch


def _open(path: str, file: BinaryIO) -> pa.ipc.RecordBatchStreamReader:
    file.seek(0)
    try:
        return pa.ipc.open_stream(file if "://" in path else pa.memory_map(path))
    except FAULTS as error:
        raise _damaged(path, error) from None


def _damaged(path: str, error: Exception) -> UserError:
    raise_if_memory(error)
    fault = one_line(error).rstrip(".")
    return UserError(f"{path} is not a readable Arrow stream ({fault}); fetch or write it again")
