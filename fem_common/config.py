"""Strict reader of YAML configuration files into frozen dataclasses.

A file may have bases, and ``section.key=value`` overrides are applied to it. The fields of the
dataclasses are `setting`s. Each mistake is one line with file, line, key, value and the nearest
fix; all mistakes are reported together. A scalar is read according to the type of the field:
`24:00:00` and `010` stay text for a text key and are rejected for a number key (YAML 1.1 would
convert them to numbers); `1e-4` and `15e9`, which YAML 1.1 reads as text, are numbers. PyYAML is
imported only when a file is read or written. Long, because schema, composition and types share the
tree that records where each value was written.
"""

from __future__ import annotations

import functools
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fem_common.errors import ConfigError, from_os_error
from fem_common.files import expand_home
from fem_common.settings import Spec, spec
from fem_common.text import did_you_mean, nearest

T = TypeVar("T")
COMMAND_LINE = "command line"
_HUGE = {int: 2.0**63, float: 1e300}
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*(_\d+)*)(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_EXPONENT = re.compile(r"[+-]?[\d_.]+[eE][+-]?\d{1,3}")
_TRUTH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
# Tags that YAML may assign to a plain value.
_KINDS = "str int float bool null timestamp merge value seq map".split()
_hints = functools.cache(typing.get_type_hints)  # evaluates every annotation of a class

Key = tuple[str, ...]
"""Names of the sections from the root, and of the key."""
Mistake = tuple[str, ConfigError]
"""Section of the configuration ("" if unknown), and the error."""


class ConfigErrors(ConfigError):
    """Error that contains all mistakes of a configuration; its text has one line for each mistake.

    config: the configuration with defaults in place of the invalid values, or None if no part could
    be read.
    """

    def __init__(self, mistakes: Sequence[Mistake], config: Any = None) -> None:
        super().__init__("")
        self.args = ("\n".join(str(error) for _, error in mistakes),)
        self.mistakes, self.config = list(mistakes), config


@contextmanager
def noted(mistakes: list[Mistake], section: str) -> Iterator[None]:
    """Catch configuration errors raised in the block and append them to ``mistakes``.

    ``section`` is recorded as the key of a single ConfigError; ConfigErrors contain their own keys.
    """
    try:
        yield
    except ConfigErrors as errors:
        mistakes.extend(errors.mistakes)
    except ConfigError as error:
        mistakes.append((section, error))


def load(
    cls: type[T],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    parts: bool = False,
    shipped: Path | None = None,
    absent: Mapping[str, str] | None = None,
) -> T:
    """Load the YAML file ``path`` and return it as an instance of ``cls``.

    overrides: texts ``section.key=value``, applied in order. An override of an entire section
    (``model=fem_sm_340m``) replaces the section and is applied before the overrides of single keys.

    parts: if True, a section (a field that is a dataclass) may be any of these:

    - a mapping;
    - the name of a part, which is the file ``<file's folder>/../<section>/<name>.yaml``;
    - the path of a file that contains the section: a text with a slash or the ending .yaml or .yml.
      A relative path starts at the folder of the file that contains it; in an override it starts at
      the working directory;
    - a mapping whose ``base`` is a name or a path as above.

    If False, the file itself may have a ``base``: a path, or the name of a file in the same folder
    or else in the folder ``shipped``. This does not apply if the class has its own field ``base``.

    absent: patterns of (dotted) keys that similar configurations have but this one lacks, with an
    explanation of each.

    Raises:
        ConfigErrors: the configuration has mistakes.
        ConfigError: the file is missing or unreadable.
        StorageError: a file system failed.
    """
    path = Path(expand_home(str(path)))
    return _Reader(cls, path, parts, shipped, absent or {}).read(_file(path), overrides)


def build(
    cls: type[T],
    values: Mapping[Any, Any],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    parts: bool = False,
    absent: Mapping[str, str] | None = None,
) -> T:
    """Return an instance of ``cls`` from plain ``values``, as if `load` had read them from a file.

    ``path`` is the name of the file in errors; it is not read. Only files of parts are read, and
    YAML is not needed for the values.
    """
    return _Reader(cls, Path(path), parts, None, absent or {}).read(
        node_of(values, str(path)), overrides
    )


def read_values(path: Path) -> dict[str, Any]:
    """Return the content of a YAML file, a mapping, as PyYAML's safe loader reads it.

    Duplicate keys, aliases and tags are errors.

    Raises:
        ConfigError, StorageError: see `load`.
    """
    import yaml

    _file(path)
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return values


def plain(config: Any) -> Any:
    """Return a configuration as nested dictionaries, lists and scalars, for JSON and YAML.

    Keys are in the order of the fields.
    """
    if is_dataclass(config):
        return {item.name: plain(getattr(config, item.name)) for item in fields(config)}
    if isinstance(config, tuple | list):
        return [plain(item) for item in config]
    return (
        {key: plain(value) for key, value in config.items()} if isinstance(config, dict) else config
    )


def from_plain(cls: type[T], values: Mapping[str, Any]) -> T:
    """Return an instance of ``cls`` from the output of `plain`, validated like a file."""
    return build(cls, values, "saved values")


def dump_yaml(config: Any) -> str:
    """Return the complete configuration as YAML text.

    `load` of that text gives the same configuration.
    """
    import yaml

    return yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True, width=120)


# --- the schema ----------------------------------------------------------------------------------


def walk(cls: type, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield (dotted key, dataclass field, type) for every key of a configuration class.

    Keys of list items have the form ``<key>.N.<key>``.
    """
    hints = _hints(cls)
    for item in fields(cls):
        key, kind = prefix + item.name, hints[item.name]
        yield key, item, kind
        inner, entry = _strip_optional(kind)[0], _entry(kind)
        if is_dataclass(inner):
            yield from walk(typing.cast(type, inner), key + ".")
        elif is_dataclass(entry):
            yield from walk(typing.cast(type, entry), key + ".N.")


class Row(NamedTuple):
    """One row of a configuration reference page; it documents one key.

    key: dotted key.
    section: True if the key contains other keys.
    wanted: type or choices, and the range.
    default: default value as text, or None if the key is required.
    doc: description.
    """

    key: str
    section: bool
    wanted: str
    default: str | None
    doc: str


def reference(cls: type) -> Iterator[Row]:
    """Yield a `Row` for every key of a configuration class."""
    for key, item, kind in walk(cls):
        declared = spec(item)
        words = ", ".join(map(str, declared.choices)) if declared.choices else describe(kind)
        default = None
        if not required(item):
            value = item.default if item.default_factory is MISSING else item.default_factory()
            default = _plainly(plain(value))
        yield Row(
            key,
            is_dataclass(kind),
            f"{words}: {declared.range()}" if declared.range() else words,
            default,
            declared.doc,
        )


def required(item: Field[Any]) -> bool:
    """Return True if a field has no default."""
    return item.default is MISSING and item.default_factory is MISSING


def describe(kind: Any) -> str:
    """Return the name of a type for users, for example ``a list of text`` or ``a mapping``."""
    kind, optional = _strip_optional(kind)
    entry = _entry(kind)
    if is_dataclass(kind):
        words = "a mapping"
    elif typing.get_origin(kind) is dict:
        words = "a mapping" if entry is Any else f"a mapping of names to {describe(entry)}"
    elif entry is not None:
        words = (
            f"a list of {{{', '.join(part.name for part in fields(entry))}}}"
            if is_dataclass(entry)
            else f"a list of {describe(entry)}"
        )
    else:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]
    return words + (" or null" if optional else "")


def _entry(kind: Any) -> Any:
    """Return the entry type of a tuple or dictionary type, or None for other types.

    Example: ``Source`` for ``tuple[Source, ...]`` and for ``dict[str, Source]``.
    """
    kind = _strip_optional(kind)[0]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return arguments[0]
    return arguments[1] if origin is dict else None


def _strip_optional(kind: Any) -> tuple[Any, bool]:
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return inner, True
    return kind, False


# --- files ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """Configuration value as written, before conversion to its type.

    where: location for messages: ``file:line``, the file alone if the value is not from YAML, or
    the command line. tag: YAML type, for example ``str``, ``null``, ``map`` or ``seq``. quoted:
    True if the value is text that must not be read as another type.
    """

    value: dict[str, Node] | list[Node] | str
    where: str
    tag: str = "str"  # the tag that YAML assigns to a scalar
    quoted: bool = False

    def __str__(self) -> str:
        """Return the value in the form in which messages show it, at most 60 characters long."""
        if not isinstance(self.value, str):
            if not self.value:
                return "{}" if isinstance(self.value, dict) else "[]"
            return "a mapping" if isinstance(self.value, dict) else "a list"
        text = repr(self.value) if self.quoted or self.tag == "str" else self.value or "null"
        return text if len(text) <= 60 else text[:57] + "..."


def node_of(value: Any, where: str) -> Node:
    """Convert plain values to nodes, as if they had been read from a file."""
    if isinstance(value, Mapping):
        return Node(
            {_plainly(key): node_of(entry, where) for key, entry in value.items()}, where, "map"
        )
    if isinstance(value, list | tuple):
        return Node([node_of(entry, where) for entry in value], where, "seq")
    if isinstance(value, str):  # YAML 1.1 reads 1e-4 as text
        return Node(value, where, "str", quoted=not _EXPONENT.fullmatch(value))
    return Node(_plainly(value), where, "null" if value is None else type(value).__name__)


def _plainly(value: Any) -> str:
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def _file(path: Path) -> Node:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = nearest(path.stem, _stems(path.parent), 0.4)
        hint = f"; did you mean {path.with_name(near + '.yaml')}?" if near else ""
        if "=" in path.name:
            hint = "; name CONFIG.yaml first, then the settings section.key=value"
        raise ConfigError(f"{path}: no such file{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise from_os_error(error) from None
    node = _parse(text, str(path))
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{path}: expected a mapping of keys to values, got "
            f"{'an empty file' if node.tag == 'null' else node}"
        )
    return node


def _stems(folder: Path) -> list[str]:
    return sorted(other.stem for other in folder.glob("*.yaml"))


def _tree(text: str) -> Any:
    """Parse YAML text and return PyYAML's node tree.

    libyaml is used if available, because it is ten times faster. Invalid text is parsed again by
    PyYAML's own parser, which describes mistakes better.
    """
    import yaml

    with suppress(yaml.YAMLError, AttributeError):
        return yaml.compose(text, Loader=yaml.CSafeLoader)
    return yaml.compose(text, Loader=yaml.SafeLoader)


def _parse(text: str, where: str) -> Node:
    import yaml

    def place(mark: Any) -> str:
        return (
            where if mark is None or where.startswith(COMMAND_LINE) else f"{where}:{mark.line + 1}"
        )

    def node(found: Any) -> Node:
        here = place(found.start_mark)
        tag = found.tag.removeprefix("tag:yaml.org,2002:")
        if tag not in _KINDS:
            raise ConfigError(f"{here}: tag {found.tag}: a plain value is expected")
        if isinstance(found, yaml.SequenceNode):
            return Node([node(entry) for entry in found.value], here, "seq")
        if isinstance(found, yaml.ScalarNode):
            return Node(found.value, here, tag, quoted=bool(found.style))
        values: dict[str, Node] = {}
        for key, value in found.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"{place(key.start_mark)}: a key must be a word")
            if key.value in values:
                raise ConfigError(f"{place(key.start_mark)}: key {key.value!r} is given twice")
            values[key.value] = replace(node(value), where=place(key.start_mark))
        return Node(values, here, "map")

    try:
        tree = _tree(text)
        for token in yaml.scan(text) if "*" in text else ():
            if isinstance(token, yaml.AliasToken):
                raise ConfigError(
                    f"{place(token.start_mark)}: alias *{token.value}: write the value out, or "
                    "put it in a base"
                )
    except yaml.MarkedYAMLError as error:
        raise ConfigError(
            f"{place(error.problem_mark or error.context_mark)}: not valid YAML: "
            f"{error.problem or error.context}"
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
    return Node("", where, "null") if tree is None else node(tree)


def _merged(under: Node, over: Node) -> Node:
    """Return ``under`` with the values of ``over`` on top.

    Mappings are merged key by key; a value of any other type in ``over`` replaces that in
    ``under``.
    """
    if not isinstance(under.value, dict) or not isinstance(over.value, dict):
        return over
    values = dict(under.value)
    for key, node in over.value.items():
        values[key] = _merged(values[key], node) if key in values else node
    return replace(over, value=values)


def _moved(cls: type, path: Key = ()) -> Iterator[tuple[Key, Key]]:
    """Yield (old key, new key) for every renamed key of a configuration class and its sections.

    The names are in the class attributes ``moved``.
    """
    for old, new in getattr(cls, "moved", {}).items():
        yield (*path, *old.split(".")), (*path, *new.split("."))
    hints = _hints(cls)
    for item in fields(cls):
        if is_dataclass(kind := hints[item.name]):
            yield from _moved(typing.cast(type, kind), (*path, item.name))


def _under(names: Mapping[Key, Key], keys: Sequence[str]) -> dict[Key, Key]:
    """Return the renames of keys inside the section ``keys``, with names relative to the section.

    ``names`` maps old keys to new ones.
    """
    here, n = tuple(keys), len(keys)
    return {old[n:]: new[n:] for old, new in names.items() if old[:n] == new[:n] == here}


def _renamed(node: Node, names: Mapping[Key, Key]) -> Node:
    """Return the tree of one file with old key names replaced by the new ones.

    An old key is not renamed if its new name is also present.
    """
    for old, new in names.items():
        found, rest = _taken(node, old)
        if found is not None and _taken(node, new)[0] is None:
            node = _assigned(rest, new, found)
    return node


def _taken(node: Node, keys: Sequence[str]) -> tuple[Node | None, Node]:
    """Return (node at the path ``keys`` or None if absent, tree without that node)."""
    if not isinstance(node.value, dict) or keys[0] not in node.value:
        return None, node
    if len(keys) == 1:
        return node.value[keys[0]], replace(
            node, value={key: entry for key, entry in node.value.items() if key != keys[0]}
        )
    found, rest = _taken(node.value[keys[0]], keys[1:])
    return found, replace(node, value={**node.value, keys[0]: rest})


def _assignment(text: str) -> tuple[list[str], Node]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or key.startswith("-"):
        raise ConfigError(f"{COMMAND_LINE}: '{text}' is not of the form section.key=value")
    return key.strip().split("."), replace(
        _parse(value, f"{COMMAND_LINE}: {key.strip()}"), where=COMMAND_LINE
    )


def _assigned(node: Node, keys: Sequence[str], value: Node, above: Key = ()) -> Node:
    """Return a copy of the tree ``node`` with the node ``value`` at the path ``keys``.

    A number in ``keys`` is the index of a list item, from 0; the index after the last item appends.
    ``above`` is the path of ``node`` from the root, for messages.
    """
    if not keys:
        return value
    (key, *rest), name = keys, ".".join((*above, keys[0]))
    if node.tag == "null":
        node = Node([] if key.isdigit() else {}, COMMAND_LINE, "map")
    empty = Node("", COMMAND_LINE, "null")
    if isinstance(node.value, list):
        if not key.isdigit() or int(key) > len(node.value):
            raise ConfigError(
                f"{COMMAND_LINE}: {name}: the list has {len(node.value)} items, counted from 0"
            )
        items = [*node.value, *([empty] if int(key) == len(node.value) else [])]
        items[int(key)] = _assigned(items[int(key)], rest, value, (*above, key))
        return replace(node, value=items)
    if isinstance(node.value, dict):
        return replace(
            node,
            value={
                **node.value,
                key: _assigned(node.value.get(key, empty), rest, value, (*above, key)),
            },
        )
    raise ConfigError(f"{COMMAND_LINE}: unknown key {name}: {'.'.join(above)} is a single value")


# --- reading -------------------------------------------------------------------------------------


class _Reader:
    """Reader for one call of `load` or `build`; it collects all mistakes of the configuration."""

    def __init__(
        self, cls: type, path: Path, parts: bool, shipped: Path | None, absent: Mapping[str, str]
    ) -> None:
        self.cls = cls
        self.path = path
        self.parts = parts
        self.shipped = shipped
        self.absent = absent
        hints = _hints(cls)
        self.known = set(hints)
        self.sections = (
            {item.name for item in fields(cls) if is_dataclass(hints[item.name])}
            if parts
            else set()
        )
        self.moved = dict(_moved(cls))
        self.mistakes: list[Mistake] = []

    def noted(self, section: str) -> Any:
        return noted(self.mistakes, section if section in self.known else "")

    def read(self, tree: Node, overrides: Sequence[str]) -> Any:
        tree = self.composed(_renamed(tree, self.moved), overrides)
        config = None
        with self.noted(""):
            config = self.build(self.cls, tree, ())
        if self.mistakes:
            raise ConfigErrors(self.mistakes, config)
        return config

    def composed(self, tree: Node, overrides: Sequence[str]) -> Node:
        """Return the file's tree merged over its bases, with the command-line overrides applied."""
        if not self.parts and "base" not in self.known:
            tree = self.over_base(tree, "", self.path.parent, (os.path.abspath(self.path),))
        elif self.sections:
            assert isinstance(tree.value, dict)
            given, values = tree.value, dict(tree.value)
            for key in self.sections & given.keys():
                values[key] = Node({}, tree.where, "map")  # used if the section is invalid
                with self.noted(key):
                    values[key] = self.over_base(given[key], key, self.path.parent)
            tree = replace(tree, value=values)
        assignments = []
        for text in overrides:
            with self.noted(text.partition("=")[0].partition(".")[0]):
                keys, value = _assignment(text)
                assignments += self.renamed(keys, value)
        for full in (True, False):
            for keys, value in assignments:
                if (len(keys) == 1 and keys[0] in self.sections) is full:
                    with self.noted(keys[0]):
                        tree = _assigned(
                            tree, keys, self.over_base(value, keys[0], Path()) if full else value
                        )
        return tree

    def renamed(self, keys: list[str], value: Node) -> list[tuple[list[str], Node]]:
        """Return the (keys, value) assignments of an override, with renamed keys replaced.

        Renamed keys inside a mapping ``value`` are removed from it and become separate assignments.
        """
        found = []
        for old, new in self.moved.items():
            if list(old) == keys:
                return [(list(new), value)]
            if list(old[: len(keys)]) == keys:
                moved, value = _taken(value, old[len(keys) :])
                found += [] if moved is None else [(list(new), moved)]
        return [(keys, value), *found]

    def over_base(
        self, node: Node, section: str, folder: Path, chain: tuple[str, ...] = ()
    ) -> Node:
        """Return the mapping ``node`` merged over the files that its ``base`` names, recursively.

        section: name of the section, or "" for an entire file.
        folder: folder that relative paths in ``base`` start from.
        chain: absolute paths of the files that led to this one, to detect a cycle.
        """
        what = f"the name of a part in {section}/ or the path of a .yaml file"
        key = f"{section}.base"
        if not section:
            what, key = "the name of a file in the same folder, or a path", "base"
        if (
            section
            and isinstance(node.value, str)
            and node.tag != "null"
            and (node.quoted or node.tag == "str")
        ):
            node = Node({"base": node}, node.where, "map")
        if not isinstance(node.value, dict):
            raise ConfigError(f"{node.where}: {section} = {node}: expected a mapping or {what}")
        base, own = _taken(node, ["base"])
        if base is None or (not section and base.tag == "null"):
            return own
        if (
            not isinstance(base.value, str)
            or base.tag == "null"
            or (base.tag != "str" and not base.quoted)
        ):
            raise ConfigError(f"{base.where}: {key} = {base}: expected {what}")
        name = expand_home(base.value)
        by_path = "/" in name or name.endswith((".yaml", ".yml"))
        if by_path:
            places = [Path(os.path.normpath(folder / name))]
        elif section:
            places = [self.path.parent.parent / section / f"{name}.yaml"]
        else:
            folders = [folder, self.shipped] if self.shipped else [folder]
            places = [folder / f"{name}.yaml" for folder in folders]
        file = next((place for place in places if place.is_file()), places[0])
        if os.path.abspath(file) in chain:
            raise ConfigError(
                f"{base.where}: {key} = '{name}' is circular: "
                f"{' -> '.join((*chain, os.path.abspath(file)))}"
            )
        if not file.is_file():
            kind = "part" if section and not by_path else "file"
            named = f"{section or 'base'} names the {kind} '{name}'"
            raise ConfigError(
                f"{base.where}: {named}, but there is no file "
                f"{file}{_hint(name, places, by_path, folder)}"
            )
        under = _renamed(_file(file), _under(self.moved, [section]) if section else self.moved)
        return _merged(
            self.over_base(under, section, file.parent, (*chain, os.path.abspath(file))), own
        )

    def build(self, cls: Any, node: Node, path: Key) -> Any:
        if not isinstance(node.value, dict):
            raise ConfigError(f"{node.where}: {'.'.join(path)} = {node}: expected a mapping")
        hints = _hints(cls)
        known = {item.name: item for item in fields(cls)}
        values = {}
        for key, value in node.value.items():
            here = (*path, key)
            with self.noted(here[0]):
                if key not in known:
                    raise ConfigError(
                        f"{value.where}: unknown key {'.'.join(here)}; "
                        f"{self.suggestion(path, key, list(known))}"
                    )
                declared = spec(known[key])
                values[key] = self.convert(
                    hints[key], declared.expand(value) if declared.expand else value, here, declared
                )
        for name, item in known.items():
            if name not in values and required(item):
                raise ConfigError(
                    f"{node.where}: key {'.'.join((*path, name))} is missing: {spec(item).doc}"
                )
        return cls(**values)

    def suggestion(self, path: Key, key: str, known: Sequence[str]) -> str:
        """Return a suggestion for the unknown key ``key`` of the section ``path``.

        The first that exists is returned: the explanation in ``absent``, the same key in another
        section, a similar key in this section or anywhere, the list of valid keys.
        """
        for pattern, advice in self.absent.items():
            if re.fullmatch(pattern, key) or re.fullmatch(pattern, ".".join((*path, key))):
                return f"{advice}; leave it out"
        everywhere = {
            name.rsplit(".", 1)[-1]: name
            for name, _, _ in reversed(list(walk(self.cls)))
            if ".N." not in name
        }
        here = nearest(key, known)
        if key in everywhere:
            near: str | None = everywhere[key]
        elif here:
            near = ".".join((*path, here))
        else:
            near = everywhere.get(nearest(key, everywhere) or "")
        return f"did you mean {near}?" if near else f"valid keys: {', '.join(known)}"

    def convert(self, kind: Any, node: Node, path: Key, declared: Spec) -> Any:
        if kind is Any:
            return _as_written(node)
        inner, optional = _strip_optional(kind)
        if optional and node.tag == "null":
            return None
        if is_dataclass(inner):
            return self.build(inner, node, path)
        origin, entry = typing.get_origin(inner), _entry(inner)
        if origin is tuple and isinstance(node.value, list):
            return tuple(
                self.convert(entry, item, (*path, str(number)), declared)
                for number, item in enumerate(node.value)
            )
        if origin is dict and isinstance(node.value, dict):  # null removes an entry of the base
            return {
                name: self.convert(entry, item, (*path, name), declared)
                for name, item in node.value.items()
                if entry is Any or item.tag != "null"
            }
        value = None if entry is not None else _scalar(inner, node)
        name = ".".join(path)
        if value is None:
            hint = ", in quotes" if inner is str and node.tag == "bool" else ""
            if origin is tuple and node.value and isinstance(node.value, str):
                hint = f"; {_as_list(node, name, entry)}"
            raise ConfigError(f"{node.where}: {name} = {node}: expected {describe(kind)}{hint}")
        if declared.path:
            try:
                value = expand_home(value)
            except ConfigError as error:
                raise ConfigError(f"{node.where}: {name}: {error}") from None
        if declared.choices and not any(
            value == choice or _matches(value, choice) for choice in declared.choices
        ):
            choices = [str(choice) for choice in declared.choices]
            raise ConfigError(
                f"{node.where}: {name} = {node} is not a choice; "
                f"{did_you_mean(str(value), choices)}"
            )
        if fault := declared.fault(value):
            raise ConfigError(f"{node.where}: {name} = {node}: {fault}")
        return value


def _as_list(node: Node, name: str, entry: Any) -> str:
    """Return the advice to write the single value ``node`` of the key ``name`` as a list."""
    words = ", ".join(word.strip() for word in str(node.value).split(","))
    if is_dataclass(entry):
        words = f"{{{fields(entry)[0].name}: {words}}}"
    given = node.where.startswith(COMMAND_LINE)
    return f"write '{name}=[{words}]', with the quotes" if given else f"write [{words}]"


def _hint(name: str, places: Sequence[Path], by_path: bool, here: Path) -> str:
    """Return ``; did you mean …?`` with the existing file most similar to ``name``, or "".

    A file in the last parameter's folder, named ``name`` and .yaml, is preferred unless
    ``by_path``. Other files are named by their path if ``by_path``, else by their name without the
    ending.
    """
    if not by_path and (here / f"{name}.yaml").is_file():
        return f"; did you mean {name}.yaml, the file in {here.absolute()}?"
    near = nearest(places[0].stem, [stem for place in places for stem in _stems(place.parent)], 0.4)
    if near is None:
        return ""
    return f"; did you mean {places[0].with_name(f'{near}.yaml') if by_path else near}?"


def _as_written(node: Node) -> Any:
    """Convert a node to plain Python values according to its YAML form, for keys of type Any."""
    if isinstance(node.value, dict):
        return {key: _as_written(entry) for key, entry in node.value.items()}
    if isinstance(node.value, list):
        return [_as_written(entry) for entry in node.value]
    if node.tag == "null":
        return None
    if node.quoted:
        return node.value
    if node.tag == "bool":
        kind: type = bool
    else:
        kind = float if re.search("[.eE]", node.value) else int
    value = _scalar(kind, node)
    return node.value if value is None else value


def _matches(value: Any, choice: Any) -> bool:
    return (
        isinstance(choice, str)
        and choice.endswith(".*")
        and isinstance(value, str)
        and value.startswith(choice[:-1])
    )


def _scalar(kind: Callable[..., Any], node: Node) -> Any:
    """Return the value of a scalar node as type ``kind``, or None if it is not of that type.

    Text needs no quotes unless YAML reads it as true, false or null.
    """
    text = node.value
    if not isinstance(text, str):
        return None
    if kind is str:
        return text if node.quoted or node.tag not in ("bool", "null") else None
    if node.quoted:
        return None
    if kind is bool:
        return _TRUTH.get(text.lower())
    if not _NUMBER.fullmatch(text) or not abs(float(text)) < _HUGE[kind]:  # type: ignore[index]
        return None
    if kind is float:
        return float(text)
    if text.lstrip("+-").replace("_", "").isdigit():
        return int(text)
    number = float(text)
    return int(number) if number == int(number) else None
