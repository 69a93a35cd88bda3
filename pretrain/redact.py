"""Values of secrets, which an exception's text could quote, are kept out of what is written. Standard library alone."""

from __future__ import annotations

from collections.abc import Mapping

_ENDINGS = ("KEY", "TOKEN", "JWT")
_PARTS = ("SECRET", "PASSWORD", "CREDENTIAL")
_SHORTEST = 8  # characters; shorter values would be found in any text


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """``text`` with *** for every value, of 8 characters or more, of a variable whose name says that it is a secret.

    Such a name ends in KEY, TOKEN or JWT, or contains SECRET, PASSWORD or CREDENTIAL, in any case. Spaces and line ends are compared as
    one space, and a value of several lines counts line by line, too; ``text`` comes back on one line.
    """
    text = " ".join(text.split())
    values: set[str] = set()
    for name, value in environ.items():
        if name.upper().endswith(_ENDINGS) or any(part in name.upper() for part in _PARTS):
            values.update(" ".join(part.split()) for part in (value, *value.splitlines()))
    for value in sorted(values, key=len, reverse=True):  # one may contain another
        if len(value) >= _SHORTEST:
            text = text.replace(value, "***")
    return text
