"""data_prep: want of memory told from damage: it stops the work, for what is counted as damaged must not depend on the machine."""

from __future__ import annotations

from data_prep.errors import is_want_of_memory, one_line


def raise_if_memory(error: Exception) -> None:
    """Raises MemoryError where that is what a library's error means."""
    if is_want_of_memory(error):
        raise MemoryError(one_line(error)) from None
