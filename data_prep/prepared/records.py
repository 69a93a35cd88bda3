"""Strict conversion of JSON into dataclasses by the types of their fields.

Missing and unknown fields are errors. A keyword-only field (``kw_only``) was added later and may be
missing, because older files do not contain it.
"""

from __future__ import annotations

import functools
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 2**63 - 1  # largest number: the limit of numpy and the file system


def read(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``kind`` and return the result.

    Supported types are dataclasses, enums, str, int (a count), float and Any; tuples, lists and
    dicts of them; and unions with None. Raises ValueError with a description of the fault.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (tuple, list):
        items = _checked(value, list, "not a list")
        if origin is tuple and inner[-1] is not ...:
            if len(items) != len(inner):
                raise ValueError(f"not a list of {len(inner)}")
            return tuple(map(read, inner, items))
        return origin(read(inner[0], item) for item in items)
    if origin is dict:
        return {
            key: read(inner[1], item)
            for key, item in _checked(value, dict, "not an object").items()
        }
    if inner:  # X | None
        return None if value is None else read(inner[0], value)
    if is_dataclass(kind):
        return _record(kind, value)
    if kind in (int, float):
        right_type = isinstance(value, int) and not isinstance(value, bool)
        if kind is float:
            right_type = right_type or isinstance(value, float)
        if not right_type or abs(value) > LARGEST or (kind is int and value < 0):
            raise ValueError(f"{value!r} is not a {'count' if kind is int else 'number'}")
        return kind(value)
    if kind is str:
        return _checked(value, str, f"{value!r} is not text")
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum) else value


def _checked(value: Any, kind: type, fault: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(fault)
    return value


_types = functools.cache(get_type_hints)


def _record(cls: Any, raw: Any) -> Any:
    kinds = _types(cls)
    _checked(raw, dict, f"{type(raw).__name__} where an object belongs")
    later = {item.name for item in fields(cls) if item.kw_only}
    for problem, differing in (
        ("lacks", kinds.keys() - raw.keys() - later),
        ("has an unknown", raw.keys() - kinds.keys()),
    ):
        if differing:
            raise ValueError(f"{problem} {min(differing)!r}")
    values = {}
    for name, kind in kinds.items():
        if name not in raw:
            continue
        try:
            values[name] = read(kind, raw[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return cls(**values)
