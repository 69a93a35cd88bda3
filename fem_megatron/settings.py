"""How a configuration field carries its documentation; importable without torch."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, doc: str, choices: tuple[Any, ...] | None = None) -> Any:
    """A documented dataclass field. ``default`` may be a class, which is then called for each instance."""
    metadata = {"doc": doc, "choices": choices}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
