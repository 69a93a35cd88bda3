"""data_prep: want of memory told from damage: it stops the work, for what is counted as damaged must not depend on the machine."""

from __future__ import annotations

from data_prep.errors import one_line

SAID = ("not enough memory", "allocation_failed", "bad_alloc", "Error -4 ")  # by zstd, lz4, C++ and zlib, in errors of another type


def raise_if_memory(error: Exception) -> None:
    """Raises MemoryError where that is what a library's error means."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in SAID):
        raise MemoryError(one_line(error)) from None
