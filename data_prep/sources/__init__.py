"""data_prep: what is read: parquet and JSONL, local or on the Hugging Face Hub, checked before any work starts, then span by span.

Nothing in this room knows tokenizers, documents or the data folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from data_prep.errors import UserError
from data_prep.sources import jsonl, parquet
from data_prep.sources.finding import Found, find_files, kind_of
from data_prep.sources.opening import open_input, parquet_footer, sampled, size_of
from data_prep.sources.types import Columns, Rows, SourceFile, Span, Unreadable

__all__ = ["Columns", "Rows", "SourceFile", "Span", "Unreadable", "open_files", "read_span", "spans"]

OPEN_AT_ONCE = 8  # waits of the network, mostly


def open_files(inputs: list[str], columns: Columns, subset: str | None = None) -> list[SourceFile]:
    """Find the input files and check kind, columns and column types of each: files in the order given, sorted within folder and glob.

    Raises UserError for the first that is not as it should be.
    """
    found = find_files(inputs, subset)
    with ThreadPoolExecutor(OPEN_AT_ONCE) as pool:
        opening = [pool.submit(_open, file, columns) for file in found]
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
            rows, text_bytes = parquet.check(path, file, columns)
        else:
            text_bytes = jsonl.check(path, file, kind, columns)
    return SourceFile(path, kind, size, rows, text_bytes, fingerprint)


def spans(file: SourceFile, columns: Columns, unit_bytes: int) -> list[Span]:
    """Cut a file into spans of about ``unit_bytes`` of text, the same for the same content always. Raises UserError."""
    if unit_bytes < 1:
        raise UserError(f"units of {unit_bytes} bytes; at least 1")
    if file.kind == "parquet":
        with open_input(file.path) as stream:
            return parquet.spans(file.path, stream, columns, unit_bytes)
    return jsonl.spans(file.kind, file.bytes, file.text_bytes, unit_bytes)


def read_span(file: SourceFile, span: Span, columns: Columns) -> Iterator[Rows | Unreadable]:
    """Rows of a span in order, in batches of at most about 4 MB of text (one row where that is larger); what cannot be read comes after the
    rows before it. Raises UserError where the file is gone, has changed its size, or cannot be read at the moment."""
    with open_input(file.path) as stream:
        if (size := size_of(stream)) != file.bytes:
            raise UserError(f"{file.path} has {size} bytes, {file.bytes} when it was planned: it has changed")
        if file.kind == "parquet":
            yield from parquet.read(file.path, stream, span, columns)
        else:
            yield from jsonl.read(file.path, stream, file.kind, span, columns)
