"""Reads a run's YAML into the typed configuration: composition of parts, overrides, strict keys and types.

Knows files, YAML and the dataclasses' types; what a value means for training is ``pretrain.validate``'s business. No torch.
Long, because composition and types share the tree that knows where each value was written, and keep their mistakes in it.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fem_common.errors import ConfigError, told
from pretrain.config import ABSENT, RunConfig

__all__ = ["COMMAND_LINE", "ConfigError", "ConfigErrors", "Mistake", "describe", "dump_yaml", "load_run", "load_values"]
__all__ += ["nearest", "noted", "read_values", "to_dict", "typed", "walk"]

COMMAND_LINE = "command line"
_HUGE = {int: 2.0**63, float: 1e300}
_EXPONENT_FORM = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)[eE][+-]?\d{1,3}")


Mistake = tuple[str, ConfigError]
"""The section of the configuration that it is in, "" where nobody knows, and what is wrong."""


class ConfigErrors(ConfigError):
    """Everything that is wrong, found at once: the text has a line for each mistake.

    config: what could be read, with defaults in place of what could not; None where that is no configuration of a run.
    """

    def __init__(self, mistakes: list[Mistake], config: RunConfig | None = None) -> None:
        super().__init__("")
        self.args = ("\n".join(str(error) for _, error in mistakes),)
        self.mistakes, self.config = mistakes, config


@contextmanager
def noted(mistakes: list[Mistake], section: str) -> Iterator[None]:
    """A mistake inside is kept for the end, so that the next one is found as well."""
    try:
        yield
    except ConfigError as error:
        mistakes.append((section if section in {item.name for item in fields(RunConfig)} else "", error))


def load_run(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Reads the run at ``path``, applies ``section.key=value`` overrides in order, and returns the typed configuration.

    A section is a mapping, the name of a part (``<run's folder>/../<section>/<name>.yaml``), the path of a file that holds the section
    (with a slash, or ending in .yaml or .yml; from the folder of the file that names it, or from the working directory), or a mapping
    whose ``base`` is one of these. An override of a whole section (``model=fem_sm_340m``) replaces it and is applied before those of
    single keys.

    Raises:
        ConfigError: the run's file is not there or not to be read.
        ConfigErrors: a part's file is not, a key is unknown, a value has the wrong type or is not one of the choices: all such mistakes.
        StorageError: a file system failed.
    """
    path = Path(path)
    return load_values(_read(path), path, overrides)


def load_values(values: dict[Any, Any], path: Path, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """As `load_run` of a file that holds ``values``; errors name ``path``.

    Raises:
        ConfigError, StorageError: see `load_run`.
    """
    tree = _Tree({}, {(): str(path)})
    for key, value in values.items():
        with noted(tree.mistakes, str(key)):
            if key in _sections():
                tree.merge(_section(path.parent, key, value, str(path), path.parent), (key,))
            else:
                tree.merge(_Tree(value, {(): str(path)}), (str(key),))
    assignments = []
    for text in overrides:
        with noted(tree.mistakes, text.partition("=")[0].partition(".")[0]):
            assignments.append(_assignment(text))
    for keys, value in assignments:
        if len(keys) == 1 and keys[0] in _sections():
            with noted(tree.mistakes, keys[0]):
                tree.replace(_section(path.parent, keys[0], value, COMMAND_LINE, Path()), keys)
    for keys, value in assignments:
        if len(keys) > 1 or keys[0] not in _sections():
            with noted(tree.mistakes, keys[0]):
                _assign(tree, keys, value)
    config = _build(RunConfig, tree.value, (), tree)
    config = config if config.name else replace(config, name=path.stem)
    if tree.mistakes:
        raise ConfigErrors(tree.mistakes, config)
    return config


def read_values(path: Path) -> dict[Any, Any]:
    """A YAML file's mapping as plain values; keys given twice and aliases are refused.

    Raises:
        ConfigError, StorageError: see `load_run`.
    """
    return _read(path)


def typed(cls: Any, values: dict[Any, Any], where: str) -> Any:
    """``values`` as the dataclass ``cls``, as strictly as a run's configuration; errors name ``where``.

    Raises:
        ConfigErrors: keys are unknown, values have the wrong type or are not one of the choices.
    """
    tree = _Tree(values, {(): where}, cls)
    built = _build(cls, values, (), tree)
    if tree.mistakes:
        raise ConfigErrors(tree.mistakes)
    return built


def to_dict(config: Any) -> Any:
    """The configuration as plain mappings, lists and scalars, in the order of the fields."""
    if is_dataclass(config):
        return {item.name: to_dict(getattr(config, item.name)) for item in fields(config)}
    if isinstance(config, tuple):
        return [to_dict(item) for item in config]
    return config


def dump_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML text; ``load_run`` on a file with it gives the same configuration."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=120)


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every key under a configuration class as (dotted key, its dataclass field, its type), list items as ``<key>.N.<key>``."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        key, kind = prefix + item.name, hints[item.name]
        yield key, item, kind
        inner = _item_type(kind)
        if is_dataclass(kind):
            yield from walk(typing.cast(type, kind), key + ".")
        elif is_dataclass(inner):
            yield from walk(typing.cast(type, inner), key + ".N.")


def nearest(word: str, known: list[str], cutoff: float = 0.6) -> str | None:
    """The entry of ``known`` most like ``word``, or None where none is."""
    return next(iter(difflib.get_close_matches(word, known, 1, cutoff)), None)


# --- files and composition -----------------------------------------------------------------------------------------------------


@dataclass
class _Tree:
    """A raw value and where each part of it was written (path of keys -> file or command line)."""

    value: Any
    origins: dict[tuple[str, ...], str] = field(default_factory=dict)
    root: type = RunConfig  # whose keys are suggested
    mistakes: list[Mistake] = field(default_factory=list)

    def where(self, path: tuple[str, ...]) -> str:
        while path not in self.origins:
            path = path[:-1]
        return self.origins[path]

    def merge(self, other: _Tree, at: tuple[str, ...] = ()) -> None:
        """Lays ``other`` over what stands at ``at``: mappings key by key, all else replaced."""
        old = self._get(at)
        if isinstance(old, dict) and isinstance(other.value, dict):
            for key, value in other.value.items():
                inner = {path[1:]: origin for path, origin in other.origins.items() if path[:1] == (str(key),)}
                self.merge(_Tree(value, {(): other.where(()), **inner}), (*at, key))
        else:
            self.replace(other, at)

    def replace(self, other: _Tree, at: tuple[str, ...]) -> None:
        """Puts ``other`` in place of what stands at ``at``."""
        self.origins = {path: origin for path, origin in self.origins.items() if path[: len(at)] != at or not at}
        self.origins.update({(*at, *path): origin for path, origin in other.origins.items()})
        if at:
            self._get(at[:-1])[at[-1]] = other.value
        else:
            self.value = other.value

    def _get(self, at: tuple[str, ...]) -> Any:
        value = self.value
        for key in at:
            value = value.get(key) if isinstance(value, dict) else None
        return value


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice, and aliases, through which one override would change two keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"alias *{event.anchor}: write the value out, or put it in a part", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key_node.value!r} is given twice", key_node.start_mark)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = where if mark is None or where.startswith(COMMAND_LINE) else f"{where}:{mark.line + 1}"
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None


def _read(path: Path) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.stem, sorted(other.stem for other in path.parent.glob("*.yaml")), 0.4)
        hint = f"; did you mean {path.with_name(near + '.yaml')}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise told(error) from None
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {'nothing' if raw is None else _show(raw)}")
    return raw


def _sections() -> dict[str, type]:
    hints = typing.get_type_hints(RunConfig)
    return {item.name: hints[item.name] for item in fields(RunConfig) if is_dataclass(hints[item.name])}


def _section(folder: Path, section: str, raw: Any, where: str, here: Path, chain: tuple[str, ...] = ()) -> _Tree:
    """A section's raw mapping, its base (a part, which may have a base of its own) laid under it.

    ``folder`` is the run's, beside which the parts are; ``here`` is the folder that a base given as a path starts from.
    """
    if isinstance(raw, str):
        raw = {"base": raw}
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{where}: {section} = {_show(raw)}: expected a mapping or the name of a part in {section}/ or the path of a .yaml file"
        )
    base = raw.get("base")
    own = _Tree({key: value for key, value in raw.items() if key != "base"}, {(): where})
    if "base" not in raw:
        return own
    if not isinstance(base, str):
        raise ConfigError(f"{where}: {section}.base = {_show(base)}: expected the name of a part in {section}/ or the path of a .yaml file")
    by_path = "/" in base or base.endswith((".yaml", ".yml"))
    file = Path(os.path.normpath(here / base)) if by_path else folder.parent / section / f"{base}.yaml"
    chain, before = (*chain, os.path.abspath(file)), chain
    if chain[-1] in before:
        raise ConfigError(f"{where}: {section}.base = '{base}' goes round in a circle: {' -> '.join(chain)}")
    if not file.is_file():
        what = f"names the file '{base}'" if by_path else f"names the part '{base}'"
        raise ConfigError(f"{where}: {section} {what}, but there is no file {file}{_hint_for_part(base, file, by_path, here)}")
    tree = _section(folder, section, _read(file), str(file), file.parent, chain)
    tree.merge(own)
    return tree


def _hint_for_part(base: str, file: Path, by_path: bool, here: Path) -> str:
    """The nearest file that is there, as it would be named."""
    if not by_path and (here / f"{base}.yaml").is_file():
        return f"; did you mean {base}.yaml, the file in {here.absolute()}?"
    near = nearest(file.stem, sorted(other.stem for other in file.parent.glob("*.yaml")), 0.4)
    if near is None:
        return ""
    return f"; did you mean {file.with_name(f'{near}.yaml') if by_path else near}?"


def _assignment(text: str) -> tuple[tuple[str, ...], Any]:
    key, equals, value = text.partition("=")
    if not equals or not key or key.startswith("-"):
        raise ConfigError(f"{COMMAND_LINE}: '{text}' is not of the form section.key=value")
    return tuple(key.strip().split(".")), _parse(value, f"{COMMAND_LINE}: {key}")


def _assign(tree: _Tree, keys: tuple[str, ...], value: Any) -> None:
    """Sets one key from the command line; a number in ``keys`` counts a list's items from 0, one past the end appends."""
    target = tree.value
    for depth, key in enumerate(keys):
        name, last = ".".join(keys[: depth + 1]), depth == len(keys) - 1
        empty: Any = [] if not last and keys[depth + 1].isdigit() else {}
        if isinstance(target, list):
            if not key.isdigit() or int(key) > len(target):
                raise ConfigError(f"{COMMAND_LINE}: {name}: the list has {len(target)} items, counted from 0")
            index: Any = int(key)
            if index == len(target):
                target.append(empty)
        elif isinstance(target, dict):
            index = key
            if target.get(key) is None:
                target[key] = empty
                tree.origins[keys[: depth + 1]] = COMMAND_LINE
        else:
            raise ConfigError(f"{COMMAND_LINE}: unknown key {name}: {'.'.join(keys[:depth])} is a single value")
        if last:
            target[index] = value
        target = target[index]
    tree.origins = {path: origin for path, origin in tree.origins.items() if path[: len(keys)] != keys}
    tree.origins[keys] = COMMAND_LINE


# --- types ---------------------------------------------------------------------------------------------------------------------


def _item_type(kind: Any) -> Any:
    """``Source`` for ``tuple[Source, ...]``, else None."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None


def _strip_optional(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return inner, True
    return kind, False


def describe(kind: Any) -> str:
    """A type in a user's words."""
    kind, optional = _strip_optional(kind)
    if is_dataclass(kind) or typing.get_origin(kind) is dict:
        words = "a mapping"
    elif _item_type(kind) is not None:
        item = _item_type(kind)
        words = f"a list of {{{', '.join(part.name for part in fields(item))}}}" if is_dataclass(item) else f"a list of {describe(item)}"
    else:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    return words + (" or null" if optional else "")


def _show(value: Any) -> str:
    text = {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _build(cls: Any, raw: Any, path: tuple[str, ...], tree: _Tree) -> Any:
    if not isinstance(raw, dict):
        raise ConfigError(f"{tree.where(path)}: {'.'.join(path)} = {_show(raw)}: expected a mapping")
    hints = typing.get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}
    values = {}
    for key, value in raw.items():
        here = (*path, str(key))
        with noted(tree.mistakes, here[0]):
            if key not in known:
                raise ConfigError(f"{tree.where(here)}: unknown key {'.'.join(here)}; {_suggest(tree.root, path, str(key), list(known))}")
            converted = _convert(hints[key], value, here, tree)
            _check_choice(known[key].metadata.get("choices"), converted, here, tree)
            values[key] = converted
    return None if tree.mistakes and _required(cls) - values.keys() else cls(**values)


def _required(cls: Any) -> set[str]:
    """The fields without a default."""
    return {item.name for item in fields(cls) if item.default is MISSING and item.default_factory is MISSING}


def _check_choice(choices: tuple[Any, ...] | None, value: Any, path: tuple[str, ...], tree: _Tree) -> None:
    """``value``, each entry of it if it is a list, is one of the choices; one that ends in ``.*`` stands for any name after the dot."""
    for entry in value if isinstance(value, tuple) else (value,):
        if not choices or entry is None or any(entry == choice or _matches(entry, choice) for choice in choices):
            continue
        near = nearest(str(entry), [str(choice) for choice in choices])
        hint = f"did you mean {near}?" if near else f"choose one of {', '.join(map(str, choices))}"
        raise ConfigError(f"{tree.where(path)}: {'.'.join(path)} = {_show(entry)} is not a choice; {hint}")


def _matches(entry: Any, choice: Any) -> bool:
    return isinstance(choice, str) and choice.endswith(".*") and isinstance(entry, str) and entry.startswith(choice[:-1])


def _suggest(root: type, path: tuple[str, ...], key: str, known: list[str]) -> str:
    """The nearest valid key: the same name in another section, a like name in this one, a like name anywhere; or what is not here."""
    if root is RunConfig:
        for pattern, absent in ABSENT.items():
            if re.fullmatch(pattern, key):
                return f"{absent}; leave it out"
    everywhere = {name.rsplit(".", 1)[-1]: name for name, _, _ in reversed(list(walk(root))) if ".N." not in name}
    here = nearest(key, known)
    if key in everywhere:
        near: str | None = everywhere[key]
    elif here:
        near = ".".join((*path, here))
    else:
        near = everywhere.get(nearest(key, list(everywhere)) or "")
    return f"did you mean {near}?" if near else f"valid keys: {', '.join(known)}"


def _convert(kind: Any, value: Any, path: tuple[str, ...], tree: _Tree) -> Any:
    inner, optional = _strip_optional(kind)
    if value is None and optional:
        return None
    if is_dataclass(inner):
        return _build(inner, value, path, tree)
    if typing.get_origin(inner) is dict and isinstance(value, dict):
        entry_kind = typing.get_args(inner)[1]
        return value if entry_kind is Any else {key: _convert(entry_kind, item, (*path, str(key)), tree) for key, item in value.items()}
    item = _item_type(inner)
    if item is not None and isinstance(value, list):
        return tuple(_convert(item, entry, (*path, str(index)), tree) for index, entry in enumerate(value))
    converted = _scalar(inner, value) if item is None else None
    if converted is None:
        raise ConfigError(f"{tree.where(path)}: {'.'.join(path)} = {_show(value)}: expected {describe(kind)}")
    return converted


def _scalar(kind: type, value: Any) -> Any:
    """``value`` as a ``kind``, or None. A whole number is a number, a bool is neither; 1e-4 and 5e9, text to YAML 1.1, are numbers."""
    if kind in (bool, str):
        return value if type(value) is kind else None
    if isinstance(value, str) and _EXPONENT_FORM.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _HUGE[kind]:
        return None
    if kind is float:
        return float(value)
    return int(value) if value == int(value) else None
