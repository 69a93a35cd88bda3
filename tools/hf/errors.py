"""The exception of an export. Standard library alone, so that a command can catch it before it has imported torch."""

from __future__ import annotations

from fem_common.errors import UserError


class ExportError(UserError, ValueError):
    """What a user asked to export cannot be exported, or not there; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
