"""Documentation and allowed values of configuration fields, stored in the fields' metadata.

The module uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Spec:
    """Documentation and allowed values of a configuration field, as passed to `setting`.

    doc: description.
    choices: allowed values, or None for no restriction.
    check: function that returns the error text of an invalid value, or None.
    least, above, below: bounds of a number; ``least`` is inclusive, the other two are exclusive.
    expand: function that converts a short form of the value to its full form.
    path: True if the value is a path or a URL.

    For a list or a mapping, bounds, choices and ``check`` apply to each entry.
    """

    doc: str = ""
    choices: tuple[Any, ...] | None = None  # "fla.*" allows any name after the dot
    check: Callable[[Any], str | None] | None = None  # returns the error text of a value, or None
    least: float | None = None
    above: float | None = None
    below: float | None = None
    # Expands a short form of the value: `config.Node` -> the node of the full form.
    expand: Callable[[Any], Any] | None = None
    path: bool = False  # a path, or a URL: a leading ~ is expanded

    def fault(self, value: Any) -> str | None:
        """Return the error text if ``value`` violates the range or ``check``, or None.

        ``choices`` are not checked.
        """
        wanted = self.range()
        for limit, holds in (
            (self.least, lambda: value >= self.least),
            (self.above, lambda: value > self.above),
        ):
            if limit is not None and not holds():
                return f"must be {wanted}"
        if self.below is not None and not value < self.below:
            return f"must be {wanted}"
        return self.check(value) if self.check else None

    def range(self) -> str:
        """Return the valid range in words, or "" if every number is valid.

        Examples: ``1 or more``, ``more than 0 and less than 1``.
        """
        least, above, below = (
            f"{limit:g}" if isinstance(limit, float) else str(limit)
            for limit in (self.least, self.above, self.below)
        )
        low = ""
        if self.least is not None:
            low = f"{least} or more"
        elif self.above is not None:
            low = f"more than {above}"
        high = f"less than {below}" if self.below is not None else ""
        return " and ".join(filter(None, (low, high)))


def setting(
    default: Any,
    doc: str,
    choices: tuple[Any, ...] | None = None,
    *,
    check: Callable[[Any], str | None] | None = None,
    least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    expand: Callable[[Any], Any] | None = None,
    path: bool = False,
) -> Any:
    """Return a dataclass field with the default, documentation and allowed values of a key.

    The parameters are those of `Spec`. If ``default`` is a class, it is called for each instance.
    """
    metadata = {"spec": Spec(doc, choices, check, least, above, below, expand, path)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def spec(item: Field[Any]) -> Spec:
    """Return the `Spec` of a dataclass field; it is empty for a field without `setting`."""
    declared = item.metadata.get("spec", Spec())
    assert isinstance(declared, Spec)
    return declared


def moved(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return plain ``values`` with renamed keys.

    ``names`` maps an old "section.key" to the new one. An old key is not renamed if its new name is
    also present.
    """
    given = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in values.items()
    }
    for old, new in names.items():
        (section, key), (place, name) = old.split("."), new.split(".")
        if (
            isinstance(given.get(section), dict)
            and key in given[section]
            and name not in given.setdefault(place, {})
        ):
            given[place][name] = given[section].pop(key)
    return given
