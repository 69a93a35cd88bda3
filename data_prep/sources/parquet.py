"""Reader of parquet files in small batches of rows.

Row groups and values may be larger than a worker's memory, but each page must fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.sources.pages import BadHeader, pages_of
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
    is_text,
    messages_json,
    missing_column,
    raise_if_memory,
)
from fem_common.errors import UserError
from fem_common.text import one_line

BUFFER_BYTES = 1 << 20  # read buffer of a column chunk
# Target size of one read, by the mean size of a row. Small, because rows may far exceed the mean.
READ_BYTES = 1 << 15
MAX_ROWS = 1 << 14
HELD_BYTES = 256 << 20  # limit of the memory of one read, unless a single row is larger
MAX_PAGE_BYTES = 640 << 20  # Arrow holds a complete page, compressed and uncompressed
FAULTS = (pa.ArrowException, OSError, UnicodeError)


def check(path: str, file: BinaryIO, columns: Columns) -> tuple[int, int, bool]:
    """Check a file's columns, and return (rows, approximate bytes of text, True if it has ids).

    Raises UserError if a column other than the id is missing or a column has the wrong type.
    """
    reader = _reader(path, file)
    has_id = check_columns(path, reader.schema_arrow, columns)
    return reader.metadata.num_rows, sum(_sizes(reader, columns)), has_id


def check_columns(path: str, schema: pa.Schema, columns: Columns) -> bool:
    """Check the columns of a table, and return True if it has ids.

    Raises UserError if a column other than the id is missing or a column has the wrong type.
    """
    has_id = columns.id != ID or ID in schema.names
    stored = _stored(schema.names, columns)
    for name in columns.all if has_id else replace(columns, id=columns.text).all:
        if name == columns.text and stored == PAIR:
            continue
        kind = _field(path, schema, name, columns).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if name == columns.text and not (_is_list if columns.messages else is_text)(kind):
            what = "a list of messages" if columns.messages else "text"
            raise UserError(
                f"{path}: column {name!r} is {kind}, not {what}; name the text column with "
                "--text-column"
            )
        if name == columns.id and not (is_text(kind) or pa.types.is_integer(kind)):
            raise UserError(
                f"{path}: column {name!r} is {kind}, neither text nor integer; name the id "
                "column with --id-column"
            )
    return has_id


def spans(path: str, file: BinaryIO, columns: Columns, unit_bytes: int) -> list[Span]:
    """Divide a file into spans of consecutive row groups.

    A span ends with the row group with which its text reaches ``unit_bytes``. Raises UserError if
    the file cannot be read.
    """
    found: list[Span] = []
    reader = _reader(path, file)
    metadata = reader.metadata
    start = 0
    rows = 0
    text = 0
    for group, size in enumerate(_sizes(reader, columns)):
        rows, text = rows + metadata.row_group(group).num_rows, text + size
        if text >= unit_bytes or group + 1 == metadata.num_row_groups:
            found.append(Span(start, group + 1, rows, text))
            start = group + 1
            rows = 0
            text = 0
    return found


def read(path: str, file: BinaryIO, span: Span, columns: Columns) -> Iterator[Rows | Unreadable]:
    """Yield the rows of the row groups [start, stop) of a span.

    The places of rows are row numbers of the file. From a damaged row group, the rows before the
    damage are read. Raises UserError, and MemoryError if memory is exhausted, which does not count
    as damage.
    """
    reader = _reader(path, file)
    metadata = reader.metadata
    if span.stop > metadata.num_row_groups:
        raise UserError(
            f"{path} has {metadata.num_row_groups} row groups, {span.stop} when it was "
            "planned: it has changed"
        )
    place = sum(metadata.row_group(group).num_rows for group in range(span.start))
    for group in range(span.start, span.stop):
        rows = metadata.row_group(group).num_rows
        done, fault = 0, "it has fewer rows than its footer says"
        try:
            for batch in gathered(
                _pieces(reader, group, columns, _rows_per_read(file, reader, group, columns)),
                columns,
            ):
                yield Rows(
                    np.arange(place + done, place + done + len(batch), dtype=np.int64), batch
                )
                done += len(batch)
        except FAULTS as error:
            raise_if_memory(error)
            fault = one_line(error).rstrip(".")
        if done < rows:
            message = (
                f"{path}: row group {group} of {metadata.num_row_groups} cannot be read from its "
                f"row {done} on ({fault})"
            )
            yield Unreadable(place + done, rows - done, Drop.UNREADABLE, message)
        place += rows


def _reader(path: str, file: BinaryIO) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(
            file, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except FAULTS as error:
        raise_if_memory(error)
        raise UserError(
            f"{path} is not a readable parquet file ({one_line(error).rstrip('.')}); fetch "
            "or write it again"
        ) from None


# --- columns --------------------------------------------------------------------------------------


def _field(path: str, schema: pa.Schema, name: str, columns: Columns) -> pa.Field:
    number = schema.names.count(name)
    if number > 1:
        raise UserError(f"{path} has {number} columns named {name!r}")
    if number:
        return schema.field(name)
    first, *rest = name.split(".")
    field = schema.field(first) if schema.names.count(first) == 1 else None
    for part in rest:
        kind = field.type if field is not None else None
        field = (
            kind.field(part)
            if kind is not None and pa.types.is_struct(kind) and kind.get_field_index(part) >= 0
            else None
        )
    if field is None:
        raise missing_column(path, name, columns, list(_names(schema)), "")
    return field


def _names(fields: pa.Schema | pa.StructType, above: str = "") -> Iterator[str]:
    for field in fields:
        yield above + field.name
        if pa.types.is_struct(field.type):
            yield from _names(field.type, f"{above}{field.name}.")


def _leaves(metadata: pq.FileMetaData, names: Sequence[str]) -> list[int]:
    """Return the indices of the physical columns that belong to the columns ``names``.

    A nested column has several physical columns.
    """
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    return [
        i
        for i, path in enumerate(paths)
        if any(path == name or path.startswith(f"{name}.") for name in names)
    ]


def _sizes(reader: pq.ParquetFile, columns: Columns) -> list[int]:
    """Return the uncompressed bytes of the text in each row group."""
    metadata = reader.metadata
    wanted = _leaves(metadata, _stored(reader.schema_arrow.names, columns))
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    return [sum(group.column(i).total_uncompressed_size for i in wanted) for group in groups]


# --- rows -----------------------------------------------------------------------------------------


def _rows_per_read(file: BinaryIO, reader: pq.ParquetFile, group: int, columns: Columns) -> int:
    """Return the number of rows of a row group to read at once, so that HELD_BYTES suffice.

    Raises pa.ArrowInvalid if a page is too large to be read.
    """
    metadata = reader.metadata
    names = _stored_all(reader.schema_arrow.names, columns)
    chunks = [metadata.row_group(group).column(i) for i in _leaves(metadata, names)]
    size = sum(chunk.total_uncompressed_size for chunk in chunks)
    rows = min(MAX_ROWS, max(1, READ_BYTES * metadata.row_group(group).num_rows // max(1, size)))
    # With a dictionary, every row may be the largest value.
    encoded = any("DICTIONARY" in encoding for chunk in chunks for encoding in chunk.encodings)
    if size * (rows if encoded else 1) <= HELD_BYTES:
        return rows
    try:
        pages = [pages_of(file, chunk) for chunk in chunks]
    except BadHeader:
        return 1
    largest = max(page.largest for page in pages)
    if largest > MAX_PAGE_BYTES:
        raise pa.ArrowInvalid(
            f"it has a page of {largest >> 20} MiB, the limit is {MAX_PAGE_BYTES >> 20}; "
            "write it with smaller pages"
        )
    while rows > 1 and sum(page.held(rows) for page in pages) > HELD_BYTES:
        rows //= 2
    return rows


def _pieces(
    reader: pq.ParquetFile, group: int, columns: Columns, rows: int
) -> Iterator[pa.RecordBatch]:
    names = _stored_all(reader.schema_arrow.names, columns)
    for batch in reader.iter_batches(
        batch_size=rows, row_groups=[group], columns=list(names), use_threads=False
    ):
        yield selected(batch, columns)


def selected(batch: pa.RecordBatch, columns: Columns) -> pa.RecordBatch:
    """Return the columns of a batch that are read, without dictionaries."""
    names = list(columns.all)
    arrays = [
        _messages(batch, columns)
        if columns.messages and name == columns.text
        else _column(batch, name)
        for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, names=names)


def _messages(batch: pa.RecordBatch, columns: Columns) -> pa.LargeStringArray:
    """Return the messages of each row as JSON, null if the row has none."""
    stored = _stored(batch.schema.names, columns)
    arrays = [_column(batch, name).to_pylist() for name in stored]
    rows = arrays[0]
    if stored == PAIR:
        rows = [dict(zip(PAIR, values, strict=True)) for values in zip(*arrays, strict=True)]
    return pa.array(
        [None if row is None else messages_json(_without_nulls(row)) for row in rows],
        pa.large_string(),
    )


def _without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its structs.

    A column has the fields of all its messages; those that a message lacks are null.
    """
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _stored(names: Sequence[str], columns: Columns) -> tuple[str, ...]:
    """Return the columns of a file that contain its text: the text column, or PAIR."""
    pair = columns.messages and columns.text == MESSAGES and MESSAGES not in names
    return PAIR if pair and set(PAIR) <= set(names) else (columns.text,)


def _stored_all(names: Sequence[str], columns: Columns) -> tuple[str, ...]:
    own = _stored(names, columns)
    return tuple(dict.fromkeys((*own, *(name for name in columns.all if name != columns.text))))


def _column(batch: pa.RecordBatch, name: str) -> pa.Array:
    first, *rest = (name,) if name in batch.schema.names else name.split(".")
    column = batch.column(first)
    if rest:
        column = pc.struct_field(column, rest)
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _joined(pieces: list[pa.RecordBatch], columns: Columns) -> pa.RecordBatch:
    """Concatenate batches into one, with text and id as large_binary."""
    together = list(zip(*(piece.columns for piece in pieces), strict=True))
    arrays = [parts[0] if len(parts) == 1 else pa.concat_arrays(parts) for parts in together]
    for i in range(1 if columns.id == columns.text else 2):
        full = arrays[i].cast(pa.string()) if pa.types.is_integer(arrays[i].type) else arrays[i]
        arrays[i] = full.cast(pa.large_binary())
    return pa.RecordBatch.from_arrays(arrays, names=list(columns.all))


def gathered(pieces: Iterator[pa.RecordBatch], columns: Columns) -> Iterator[pa.RecordBatch]:
    """Regroup small batches into batches of at most BATCH_BYTES of text, or of one larger row.

    Rows that were read before a fault are yielded before it is raised.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    fault: Exception | None = None
    while fault is None:
        try:
            piece = next(pieces, None)
        except FAULTS as error:
            raise_if_memory(error)
            piece, fault = None, error
        more = piece.nbytes + ROW_BYTES * len(piece) if piece is not None else 0
        if held and (piece is None or size + more > BATCH_BYTES):
            yield from _cut(_joined(held, columns))
            held, size = [], 0
        if piece is None:
            break
        held.append(piece)
        size += more
    if fault is not None:
        raise fault


def _cut(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    sizes = pc.fill_null(pc.binary_length(batch.column(0)), 0).to_numpy(zero_copy_only=False)
    others = (batch.nbytes - int(sizes.sum())) // max(1, len(batch))
    ends = np.cumsum(sizes + max(ROW_BYTES, others))
    start = 0
    while start < len(batch):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + BATCH_BYTES, side="right")))
        yield batch.slice(start, stop - start)
        start = stop
