"""Readers of parquet, JSONL and .txt inputs, local or on the Hugging Face Hub."""

from data_prep.sources.reading import (
    Columns,
    Rows,
    SourceFile,
    Span,
    Unreadable,
    locate,
    open_files,
    open_found,
    read_span,
    spans,
    unchanged,
)

__all__ = [
    "Columns",
    "Rows",
    "SourceFile",
    "Span",
    "Unreadable",
    "locate",
    "open_files",
    "open_found",
    "read_span",
    "spans",
    "unchanged",
]
