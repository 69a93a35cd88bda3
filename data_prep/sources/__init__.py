"""Readers of parquet, Arrow, JSONL and .txt inputs, local or on the Hugging Face Hub."""

from data_prep.sources.reading import open_files, open_found, read_span, spans, unchanged
from data_prep.sources.rows import Columns, Rows, SourceFile, Span, Unreadable
from data_prep.sources.txt import locate

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
