"""A logging filter for warnings that would come at every step. Nothing about tensors."""

from __future__ import annotations

import logging


class OncePerMessage(logging.Filter):
    """Lets each message through once in a process; a message's identity is its template, so its figures may differ."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record's template comes for the first time."""
        first = str(record.msg) not in self._said
        self._said.add(str(record.msg))
        return first
