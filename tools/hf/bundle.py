"""The code that an exported folder carries: the files that trained the model, flat, as transformers' loader of remote code wants them.

transformers copies the modeling file and, recursively, what it imports by ``from .name import``; it knows no sub-packages. So
``fem_megatron/mixers/fem/layer.py`` becomes ``fem_megatron_mixers_fem_layer.py``, and
``from fem_megatron.mixers.fem.layer import FemMixer`` becomes
``from .fem_megatron_mixers_fem_layer import FemMixer``. Four more things change:

- a table from shapes to what computes them loses the lines of shapes that the model has not, with their imports: a softmax model's folder
  has no file of another mixer, and asks for no package that only others need;
- an import of an outside package comes into ``try: ... finally: pass``: elsewhere transformers takes it, inside a function too, for a
  requirement of the whole folder, and a GPU's kernel would keep the model from a CPU;
- the two files that config.json names end with the names of all that they come to import: older versions copy no further;
- the configuration's file ends with a digest of all code: in one process transformers takes a second folder of the same name for the
  first where their configurations' code is the same, whatever their models' code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = "tools.hf."
ENTRIES = (HERE + "configuration_fem", HERE + "modeling_fem")
COPIED = ("fem_common.", "fem_megatron.", "kernels.", HERE)
OURS = ("fem_common", "fem_megatron", "kernels", "pretrain", "tools", "data_prep")
SHAPES = ("fem_megatron.shape", "fem_megatron.mixers.")
GIVEN = {"torch", "transformers", *OURS, *sys.stdlib_module_names}

OPTIONAL = {"triton"}  # without it torch's forms of the operations run

Edits = dict[tuple[int, int], list[str]]
"""First and last line of a statement, from 1 -> the lines in its place."""


class BundleError(ValueError):
    """A source file imports in a way that has no flat form; one line that says where."""


def bundle(shapes: Iterable[Any]) -> dict[str, str]:
    """File name -> text of every file that a model of these shapes needs, the modeling and the configuration file among them.

    Raises:
        BundleError: an import has no flat form, or two files would have one name.
    """
    used = shape_classes(shapes)
    files: dict[str, str] = {}
    needed: dict[str, frozenset[str]] = {}
    waiting, seen = list(ENTRIES), set(ENTRIES)
    while waiting:
        module = waiting.pop()
        name = f"{flat(module)}.py"
        if name in files:
            raise BundleError(f"{module} and another module would both be {name}")
        path = module_file(module)
        assert path is not None
        files[name], needed[module] = flatten(module, without_unused(path.read_text(encoding="utf-8"), used))
        waiting += sorted(needed[module] - seen)
        seen |= needed[module]
    for entry in ENTRIES:
        files[f"{flat(entry)}.py"] += _named(_reached(entry, needed) - {entry})
    digest = hashlib.sha256("".join(name + files[name] for name in sorted(files)).encode()).hexdigest()
    files["configuration_fem.py"] += f"\n# The digest of all of this folder's code: {digest}\n"
    return files


def _reached(entry: str, needed: dict[str, frozenset[str]]) -> set[str]:
    """The modules that importing ``entry`` imports, itself among them."""
    found, waiting = {entry}, [entry]
    while waiting:
        new = needed[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _named(modules: set[str]) -> str:
    """Lines that import nothing, for versions of transformers that copy of a folder on this machine only what an entry itself names."""
    return "\n\nif False:\n" + "".join(f"    from .{flat(module)} import __name__ as _\n" for module in sorted(modules))


def packages(files: dict[str, str]) -> list[str]:
    """Outside packages that the files need, imported at their top or inside functions, besides torch and transformers."""
    return sorted(set().union(*(_outside_names(text) for text in files.values())) - OPTIONAL)


def shape_classes(shapes: Iterable[Any]) -> set[str]:
    """Names of the dataclasses that the shapes are made of."""
    names: set[str] = set()
    for shape in shapes:
        if is_dataclass(shape):
            names |= {type(shape).__name__} | shape_classes(getattr(shape, field.name) for field in fields(shape))
        elif isinstance(shape, list | tuple):
            names |= shape_classes(shape)
    return names


def module_file(module: str) -> Path | None:
    """The file of a module that may be copied; None: it is none of ours, or there is none of this name."""
    if not f"{module}.".startswith(COPIED):
        return None
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def flat(module: str) -> str:
    """The module's name in the folder."""
    return module.removeprefix(HERE).replace(".", "_")


@functools.cache
def flatten(module: str, text: str) -> tuple[str, frozenset[str]]:
    """The module's text with flat imports, and the modules of ours that it imports. Raises BundleError (see ``bundle``)."""
    edits: Edits = {}
    wanted: set[str] = set()
    tree = ast.parse(text)
    for node in _statements(tree):
        if isinstance(node, ast.Import) and any(alias.name.split(".")[0] in OURS for alias in node.names):
            raise BundleError(f"{module}, line {node.lineno}: only `from ... import ...` has a flat form")
        if isinstance(node, ast.ImportFrom) and (source := _absolute(module, node)).split(".")[0] in OURS:
            if module_file(source) is None:
                raise BundleError(f"{module}, line {node.lineno}: {source} is no file that an export may copy")
            edits[_lines(node)], imported = _flat_import(source, node)
            wanted |= imported
    for outside in _outside_imports(tree):
        space = " " * outside.col_offset
        edits[_lines(outside)] = [f"{space}try:", f"{space}    {ast.unparse(outside)}", f"{space}finally:", f"{space}    pass"]
    return _edited(text, edits), frozenset(wanted)


def without_unused(text: str, used: set[str]) -> str:
    """The text without the lines of tables whose keys are classes of the shapes' modules, none of ``used``, and without their imports.

    A table that is not written one line (or more) an entry stays as it is.
    """
    tree = ast.parse(text)
    edits: Edits = {}
    kept: list[str] = []
    dropped: set[str] = set()
    for table in _tables(tree):
        for key, value in zip(table.keys, table.values, strict=True):
            assert isinstance(key, ast.Name)
            if key.id in used:
                kept.append(key.id)
            else:
                edits[key.lineno, value.end_lineno or value.lineno] = []
                dropped |= _names(key) | _names(value)
    if not edits:
        return text
    try:
        shorter = ast.parse(_edited(text, edits))
    except SyntaxError:
        return text
    if [ast.unparse(key) for table in _tables(shorter) for key in table.keys if key] != kept:
        return text
    dropped -= _names(shorter)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            wanted = [alias for alias in node.names if (alias.asname or alias.name) not in dropped]
            if len(wanted) < len(node.names):
                edits[_lines(node)] = [ast.unparse(ast.ImportFrom(node.module, wanted, node.level))] if wanted else []
    return _edited(text, edits)


def _tables(tree: ast.Module) -> list[ast.Dict]:
    """Module-level dictionaries all of whose keys are imported from the shapes' modules."""
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(SHAPES)]
    shapes = {alias.asname or alias.name for node in imports for alias in node.names}
    values = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    dictionaries = [value for value in values if isinstance(value, ast.Dict)]
    return [table for table in dictionaries if all(isinstance(key, ast.Name) and key.id in shapes for key in table.keys)]


def _flat_import(source: str, node: ast.ImportFrom) -> tuple[list[str], set[str]]:
    """The lines for a ``from source import ...``, and the modules that they need."""
    space, lines, wanted = " " * node.col_offset, [], set()
    names = []
    for alias in node.names:
        module = f"{source}.{alias.name}"
        if module_file(module) is None:
            names.append(alias)
            continue
        wanted.add(module)
        # transformers does not follow the second form, so the first shows it the file.
        lines += [
            f"{space}from .{flat(module)} import __name__ as _",
            f"{space}from . import {flat(module)} as {alias.asname or alias.name}",
        ]
    if names:
        wanted.add(source)
        lines.append(space + ast.unparse(ast.ImportFrom(flat(source), names, 1)))
    return lines, wanted


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """The module that a ``from`` in ``module`` names."""
    if not node.level:
        return node.module or ""
    path = module_file(module)
    inside = module.split(".") if path is not None and path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join([*inside[: len(inside) + 1 - node.level], *filter(None, [node.module])])


def _outside_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports of outside packages, besides torch and transformers, that are in no ``try``."""
    for child in _inner(node):
        if isinstance(child, ast.Import | ast.ImportFrom) and _outside(child):
            yield child
        elif not isinstance(child, ast.Try):
            yield from _outside_imports(child)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements inside, at any depth."""
    for child in _inner(node):
        yield child
        yield from _statements(child)


def _inner(node: ast.AST) -> Iterator[ast.AST]:
    """The statements, handlers and cases right inside a module, class, function or statement; no expressions, which import nothing."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        inside = getattr(node, field, None)
        if isinstance(inside, list):
            yield from inside


@functools.cache
def _outside_names(text: str) -> frozenset[str]:
    """The outside packages, besides torch and transformers, that a file imports anywhere."""
    return frozenset(name for node in _statements(ast.parse(text)) for name in _outside(node))


def _outside(node: ast.AST) -> set[str]:
    """The outside packages, besides torch and transformers, that a statement imports."""
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    else:
        modules = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
    return {module.split(".")[0] for module in modules} - GIVEN


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _lines(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _edited(text: str, edits: Edits) -> str:
    lines = text.split("\n")
    for (first, last), new in sorted(edits.items(), reverse=True):
        lines[first - 1 : last] = new
    return "\n".join(lines)
