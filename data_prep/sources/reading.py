"""Entry points to the readers of parquet, Arrow, JSONL and .txt inputs, local or on the Hub.

Inputs are checked before any work starts and then read span by span. This package does not depend
on tokenizers, documents or the data folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa

from data_prep.sources import arrow, jsonl, parquet, txt
from data_prep.sources.finding import Found, find_files, kind_of
from data_prep.sources.rows import Columns, Rows, SourceFile, Span, Unreadable
from data_prep.sources.streams import open_input, parquet_footer, sampled, size_of
from fem_common.errors import UserError

OPEN_AT_ONCE = 8  # opening mostly waits for the network


def open_files(
    inputs: list[str], columns: Columns, subset: str | None = None, *, paragraphs: bool = False
) -> list[SourceFile]:
    """Find the input files, check each, and return them.

    The check covers the kind, the columns and the column types of each file. The files are in the
    given order, sorted within each folder and glob. For ``subset`` see hub.resolve, for
    ``paragraphs`` see `open_found`. Raises UserError for the first invalid file.
    """
    return open_found(find_files(inputs, subset), columns, paragraphs=paragraphs)


def open_found(
    found: list[Found], columns: Columns, *, paragraphs: bool = False
) -> list[SourceFile]:
    """Check files that are already found, as ``open_files`` does, and return them.

    The .txt files of one input become one SourceFile; a document is a file, or a paragraph if
    ``paragraphs``. A file may lack the column ``id``: a row's id then consists of the file's name
    and the row's place.
    """
    if paragraphs and not any(file.is_text for file in found):
        raise UserError("--paragraphs goes with .txt inputs, and there are none")
    if columns.messages and any(file.is_text for file in found):
        raise UserError("--messages goes with JSONL, parquet and Arrow inputs, not with .txt files")
    with ThreadPoolExecutor(OPEN_AT_ONCE) as pool:
        opening: list[Future[SourceFile]] = []
        for (text, folder), files in itertools.groupby(
            found, lambda file: (file.is_text, file.folder)
        ):
            if text:
                opening.append(
                    pool.submit(
                        txt.open_files,
                        folder,
                        [file.name for file in files],
                        columns,
                        paragraphs=paragraphs,
                    )
                )
            else:
                opening += [pool.submit(_open, file, columns) for file in files]
        try:
            return [future.result() for future in opening]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _open(found: Found, columns: Columns) -> SourceFile:
    path, rows = found.path, None
    with open_input(path) as file:
        kind, size = kind_of(path, file), size_of(file)
        if found.remote is not None:
            fingerprint = f"hub:{size}:{found.remote.etag}"
        else:
            fingerprint = parquet_footer(file) if kind == "parquet" else sampled(file)
        if kind == "parquet":
            rows, text_bytes, has_id = parquet.check(path, file, columns)
        elif kind == "arrow":
            rows, text_bytes, has_id = arrow.check(path, file, columns)
        else:
            text_bytes, has_id = jsonl.check(path, file, kind, columns)
    prefix = None if has_id else found.name
    return SourceFile(path, kind, size, rows, text_bytes, fingerprint, id_prefix=prefix)


def unchanged(file: SourceFile, columns: Columns) -> bool:
    """Return True if a local file has the same content as when it was checked.

    A file on the Hub is fixed by its commit, so the result is True. Raises UserError if the file
    cannot be read.
    """
    if "://" in file.path:
        return True
    if file.parts:
        return (
            txt.fingerprint(file.path, file.kind, [name for name, _ in file.parts])
            == file.fingerprint
        )
    return open_files([file.path], columns)[0].fingerprint == file.fingerprint


def spans(file: SourceFile, columns: Columns, unit_bytes: int) -> list[Span]:
    """Divide a file into spans of about ``unit_bytes`` of text.

    The same content always gives the same spans. Raises UserError if ``unit_bytes`` is below 1 or
    the file cannot be read.
    """
    if unit_bytes < 1:
        raise UserError(f"units of {unit_bytes} bytes; at least 1")
    if file.parts:
        return txt.spans(file, unit_bytes)
    if file.kind == "parquet":
        with open_input(file.path) as stream:
            return parquet.spans(file.path, stream, columns, unit_bytes)
    if file.kind == "arrow":
        with open_input(file.path) as stream:
            return arrow.spans(file.path, stream, columns, unit_bytes)
    return jsonl.spans(file.kind, file.bytes, file.text_bytes, unit_bytes)


def read_span(file: SourceFile, span: Span, columns: Columns) -> Iterator[Rows | Unreadable]:
    """Yield the rows of a span in order, in batches of at most about 4 MB of text.

    A larger row is a batch by itself. Rows that cannot be read are reported after the rows before
    them. Raises UserError if the file is missing, has another size than when it was planned, or
    cannot be read at the moment.
    """
    if file.parts:
        yield from txt.read(file, span, columns)
        return
    own = columns if file.id_prefix is None else replace(columns, id=columns.text)
    with open_input(file.path, ahead=True) as stream:
        if (size := size_of(stream)) != file.bytes:
            raise UserError(
                f"{file.path} has {size} bytes, {file.bytes} when it was planned: it has changed"
            )
        if file.kind == "parquet":
            parts = parquet.read(file.path, stream, span, own)
        elif file.kind == "arrow":
            parts = arrow.read(file.path, stream, span, own)
        else:
            parts = jsonl.read(file.path, stream, file.kind, span, own)
        for part in parts:
            if isinstance(part, Rows) and file.id_prefix is not None and columns.id != columns.text:
                part = _with_ids(part, file.id_prefix, columns.id)
            yield part


def _with_ids(rows: Rows, prefix: str, column: str) -> Rows:
    """Return the rows with a column of ids of the form ``PREFIX:PLACE``."""
    ids = pa.array(
        [f"{prefix}:{place}".encode() for place in rows.places.tolist()], pa.large_binary()
    )
    return replace(rows, batch=rows.batch.add_column(1, column, ids))
