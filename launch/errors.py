"""Errors that reach a person as one line."""

from __future__ import annotations


class UserError(Exception):
    """A mistake its maker can mend: the message says what is wrong, where, and the nearest fix."""


def describe_os_error(error: OSError) -> str:
    """``path: reason`` of an operating system's error."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
