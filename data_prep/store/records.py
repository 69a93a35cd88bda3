"""data_prep: JSON records read strictly: every field is there, nothing else is, each has its type. Knows no record.

A reader takes a JSON value and gives what it stands for. It raises ValueError that says what is wrong with the value.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

LARGEST = 2**63 - 1  # of a count: what numpy and the file system can hold

Reader = Callable[[Any], Any]


def record(cls: type[Any], raw: Any, /, **readers: Reader) -> Any:
    """A dataclass, each field read by its reader."""
    values = {name: only(raw, cls, name) for name in readers}
    read = {}
    for name, reader in readers.items():
        try:
            read[name] = reader(values[name])
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return cls(**read)


def only(raw: Any, cls: type[Any], name: str) -> Any:
    """The value of one field, after a look at all names."""
    if not isinstance(raw, dict):
        raise ValueError(f"{type(raw).__name__} where an object belongs")
    names = {field.name for field in fields(cls)}
    for kind, differing in (("lacks", names - raw.keys()), ("has an unknown", raw.keys() - names)):
        if differing:
            raise ValueError(f"{kind} {min(differing)!r}")
    return raw[name]


def an_object(value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return value


def a_list(value: Any) -> list[Any]:
    """A list of anything."""
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def listed(reader: Reader) -> Reader:
    """The reader of a list of such values, as a tuple."""
    return lambda value: tuple(reader(item) for item in a_list(value))


def optional(reader: Reader) -> Reader:
    """The reader of such a value, or null."""
    return lambda value: None if value is None else reader(value)


def count(value: Any) -> int:
    """A whole number from 0 on."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= LARGEST:
        raise ValueError(f"{value!r} is not a count")
    return value


def number(value: Any) -> float:
    """A number, whole or not."""
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > LARGEST:
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def sha256_json(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
