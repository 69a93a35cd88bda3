"""Flat view and comparison of nested dictionaries, such as JSON records and plain configurations.

The module uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for every value that is not a dictionary with content.

    Dictionaries in a list are numbered by position. Other lists count as one value.

    key: dotted key of ``value`` itself.
    """
    if isinstance(value, dict) and value:
        items = list(value.items())
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        items = list(enumerate(value))
    else:
        yield key, value
        return
    for name, inner in items:
        yield from leaves(inner, f"{key}.{name}" if key else str(name))


def differences(
    old: Any, new: Any, absent: Any = None, key: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted key, old value, new value) for each difference between two JSON values.

    The order is that of the new value's keys; keys of the old value only are last. Lists of the
    same length are compared by item. The type counts: 1, 1.0 and true differ.

    absent: value of a missing key.
    key: dotted key of ``old`` and ``new`` themselves.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys([*new, *old])
        pairs = [(name, old.get(name, absent), new.get(name, absent)) for name in names]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = [(number, *pair) for number, pair in enumerate(zip(old, new, strict=True))]
    else:
        if old != new or type(old) is not type(new):
            yield key, old, new
        return
    for name, was, now in pairs:
        yield from differences(was, now, absent, f"{key}.{name}" if key else str(name))
