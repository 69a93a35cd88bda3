"""Strict YAML into frozen dataclasses: every mistake is one line with file, line, key, value and what would do.

Numbers and words are read as they are written: `24:00:00` and `010` stay text where a key takes text and are refused where it takes a
number, which YAML 1.1 would make of them. A file may have a `base`, whose keys it overrides.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fem_common.errors import UserError

Check = Callable[[str], str | None]
_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9_]*)")
_NUMBER = re.compile(r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")
_TAG = "tag:yaml.org,2002:"
_KINDS = "str int float bool null timestamp merge value seq map".split()  # what YAML may take a value for
_HUGE = 2**63


@dataclass(frozen=True)
class Spec:
    """What `setting` says of a field."""

    doc: str
    choices: tuple[str, ...] | None  # of the text, or of each entry of a list
    check: Check | None  # of the text, each entry or each value: what is wrong with it, or None
    least: float | None  # of a number


def setting(
    default: Any, doc: str, *, choices: tuple[str, ...] | None = None, check: Check | None = None, least: float | None = None
) -> Any:
    """A documented dataclass field. ``default`` may be a class, which is then called for each instance."""
    metadata = {"spec": Spec(doc, choices, check, least)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def spec(item: Field[Any]) -> Spec:
    """What `setting` said of a field."""
    said = item.metadata["spec"]
    assert isinstance(said, Spec)
    return said


def read(cls: type, path: Path, overrides: Sequence[str] = (), shipped: Path | None = None) -> Any:
    """An instance of ``cls`` from the YAML file ``path``, with ``section.key=value`` overrides in order.

    A ``base`` that is a name is the file of that name beside its own file, else the one in the folder ``shipped``.

    Raises:
        UserError: the file cannot be read, a key is unknown or written twice, a value has the wrong type or is refused.
    """
    tree = _file(path, (), shipped)
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key.strip() or key.startswith("-"):
            raise UserError(f"--set {text!r}: expected section.key=value")
        tree = _merged(tree, _at(key.strip().split("."), _parse(value, f"--set {key.strip()}")))
    return _build(cls, tree, ())


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Every key under a class as (dotted key, its field, its type), sections left out."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from walk(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, item, hints[item.name]


def plain(value: Any) -> Any:
    """A dataclass as the mappings, lists and scalars that JSON knows."""
    if is_dataclass(value):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, tuple):
        return [plain(entry) for entry in value]
    return dict(value) if isinstance(value, dict) else value


def from_plain(cls: Any, values: dict[str, Any]) -> Any:
    """The dataclass that `plain` gave."""
    hints = typing.get_type_hints(cls)
    made = {}
    for name, value in values.items():
        kind = hints[name]
        made[name] = from_plain(kind, value) if is_dataclass(kind) else tuple(value) if isinstance(value, list) else value
    return cls(**made)


def describe(kind: Any) -> str:
    """A type in a user's words."""
    kind, optional = _strip_optional(kind)
    if is_dataclass(kind):
        words = "a mapping"
    elif typing.get_origin(kind) is dict:
        words = "a mapping of names to text"
    elif typing.get_origin(kind) is tuple:
        words = "a list of text"
    else:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    return words + (" or null" if optional else "")


# --- files ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """A value as it was written, and where."""

    value: dict[str, _Node] | list[_Node] | str
    where: str  # file:line
    tag: str = "str"  # of a scalar: what YAML takes it for
    quoted: bool = False


def _file(path: Path, chain: tuple[str, ...], shipped: Path | None) -> _Node:
    """A file's tree, over its base's."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.stem, [other.stem for other in path.parent.glob("*.yaml")], 1, 0.4)
        hint = f"; did you mean {path.with_name(near[0] + '.yaml')}?" if near else ""
        raise UserError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    node = _parse(text, str(path))
    if not isinstance(node.value, dict):
        raise UserError(f"{path}: expected a mapping of keys to values, got {'nothing' if node.tag == 'null' else show(node)}")
    chain = (*chain, os.path.abspath(path))
    base = node.value.pop("base", None)
    if base is None:
        return node
    if not isinstance(base.value, str) or base.tag == "null":
        raise UserError(f"{base.where}: base = {show(base)}: expected the name of a file beside this one, or a path")
    by_name = not base.value.endswith((".yaml", ".yml"))
    below = path.parent / (f"{base.value}.yaml" if by_name else base.value)
    if by_name and shipped is not None and not below.is_file():
        below = shipped / below.name
    if os.path.abspath(below) in chain:
        raise UserError(f"{base.where}: base = {show(base)} goes round in a circle")
    if not below.is_file():
        near = difflib.get_close_matches(below.stem, [other.stem for other in below.parent.glob("*.yaml")], 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else "name a shipped profile, or a file from this one's folder on"
        raise UserError(f"{base.where}: base = {show(base)}: there is no file {below}; {hint}")
    return _merged(_file(below, chain, shipped), node)


def _parse(text: str, where: str) -> _Node:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        for token in yaml.scan(text):
            if isinstance(token, yaml.AliasToken):
                raise UserError(f"{_line(where, token.start_mark)}: alias *{token.value}: write the value out, or put it in a base")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{_line(where, mark)}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None
    return _Node("", where, "null") if node is None else _tree(node, where)


def _line(where: str, mark: Any) -> str:
    return where if mark is None or where.startswith("--set") else f"{where}:{mark.line + 1}"


def _tree(node: yaml.Node, where: str) -> _Node:
    here = _line(where, node.start_mark)
    if node.tag.removeprefix(_TAG) not in _KINDS:
        raise UserError(f"{here}: tag {node.tag}: a plain value is expected")
    if isinstance(node, yaml.SequenceNode):
        return _Node([_tree(entry, where) for entry in node.value], here, "list")
    if isinstance(node, yaml.ScalarNode):
        return _Node(node.value, here, node.tag.removeprefix(_TAG), quoted=node.style is not None)
    values: dict[str, _Node] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{_line(where, key.start_mark)}: a key must be a word")
        if key.value in values:
            raise UserError(f"{_line(where, key.start_mark)}: key {key.value!r} is given twice")
        values[key.value] = replace(_tree(value, where), where=_line(where, key.start_mark))
    return _Node(values, here, "map")


def _at(keys: list[str], node: _Node) -> _Node:
    """``node`` under a path of keys."""
    for key in reversed(keys):
        node = _Node({key: node}, node.where, "map")
    return node


def _merged(under: _Node, over: _Node) -> _Node:
    """Mappings key by key, all else replaced."""
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    values = dict(under.value)
    for key, node in over.value.items():
        values[key] = _merged(values[key], node) if key in values else node
    return _Node(values, over.where, "map")


# --- types ---------------------------------------------------------------------------------------------------------------------


def show(node: _Node) -> str:
    """A value as a message shows it."""
    if isinstance(node.value, str):
        text = repr(node.value) if node.quoted or node.tag == "str" else node.value or "null"
    else:
        text = "a mapping" if isinstance(node.value, dict) else "a list"
    return text if len(text) <= 60 else text[:57] + "..."


def _strip_optional(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return inner, True
    return kind, False


def _build(cls: Any, node: _Node, path: tuple[str, ...]) -> Any:
    if not isinstance(node.value, dict):
        raise UserError(f"{node.where}: {'.'.join(path)} = {show(node)}: expected a mapping")
    hints = typing.get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}
    values = {}
    for key, value in node.value.items():
        if key not in known:
            raise UserError(f"{value.where}: unknown key {'.'.join((*path, key))}; {_suggest(cls, path, key)}")
        values[key] = _convert(hints[key], value, (*path, key), known[key])
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise UserError(f"{node.where}: key {'.'.join((*path, name))} is missing: {spec(item).doc}")
    return cls(**values)


def _suggest(cls: type, path: tuple[str, ...], key: str) -> str:
    """The nearest valid key: in this section, or the same name in another."""
    here = [item.name for item in fields(cls)]
    near = difflib.get_close_matches(key, here, 1, 0.6)
    return f"did you mean {'.'.join((*path, near[0]))}?" if near else f"valid keys: {', '.join(here)}"


def _convert(kind: Any, node: _Node, path: tuple[str, ...], item: Field[Any]) -> Any:
    inner, optional = _strip_optional(kind)
    if optional and node.tag == "null":
        return None
    if is_dataclass(inner):
        return _build(inner, node, path)
    if typing.get_origin(inner) is tuple and isinstance(node.value, list):
        return tuple(_scalar(str, entry, (*path, str(index)), item, kind) for index, entry in enumerate(node.value))
    if typing.get_origin(inner) is dict and isinstance(node.value, dict):
        return {name: _scalar(str, entry, (*path, name), item, str) for name, entry in node.value.items() if entry.tag != "null"}
    return _scalar(inner, node, path, item, kind)


def _scalar(kind: Any, node: _Node, path: tuple[str, ...], item: Field[Any], wanted: Any) -> Any:
    said, name = spec(item), ".".join(path)
    value = _of(kind, node)
    if value is None:
        hint = ", in quotes" if kind is str and node.tag == "bool" else ""
        raise UserError(f"{node.where}: {name} = {show(node)}: expected {describe(wanted)}{hint}")
    if said.choices and value not in said.choices:
        near = difflib.get_close_matches(str(value), said.choices, 1, 0.6)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(said.choices)}"
        raise UserError(f"{node.where}: {name} = {show(node)} is not a choice; {hint}")
    if said.least is not None and value < said.least:
        raise UserError(f"{node.where}: {name} = {show(node)}: must be {said.least:g} or more")
    fault = said.check(value) if said.check else None
    if fault:
        raise UserError(f"{node.where}: {name} = {show(node)}: {fault}")
    return value


def _of(kind: Any, node: _Node) -> Any:
    """The scalar as a ``kind``, or None. Text may be written without quotes unless YAML takes it for true, false or null."""
    text = node.value
    if not isinstance(text, str) or kind not in (bool, int, float, str):
        return None
    if kind is str:
        return text if node.quoted or node.tag not in ("bool", "null") else None
    if node.quoted:
        return None
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower())
    if not (_WHOLE if kind is int else _NUMBER).fullmatch(text) or not abs(float(text)) < _HUGE:
        return None
    return int(text) if kind is int else float(text)
