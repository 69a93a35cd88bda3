"""Build the code files of an export: this project's model code in one flat folder.

transformers' loader of remote code copies the modeling file and, recursively, the files that it
imports by ``from .name import``; it does not support sub-packages. Therefore
``fem_megatron/mixers/fem/layer.py`` becomes ``fem_megatron_mixers_fem_layer.py``, and ``from
fem_megatron.mixers.fem.layer import FemMixer`` becomes ``from .fem_megatron_mixers_fem_layer
import FemMixer``.

A layer shape contains the name of its layer class, which is imported when the layer is built
(``fem_megatron.shape.located``). The export therefore contains only the layers that the model
uses, and does not require the packages of other mixers.

Three more things change:

- An import of an external package is placed into ``try: ... finally: pass``. Otherwise transformers
  treats it as a requirement of the entire folder, even inside a function, and the requirement of a
  GPU package would prevent use on a CPU.
- The two files that config.json names (configuration and modeling) end with the names of all
  modules that they import indirectly, because older versions of transformers copy no further.
- The configuration file ends with a digest of all code. Within one process transformers treats two
  folders of the same name as identical if their configuration files are equal, even if their
  modeling files differ.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = "tools.hf."
MODELING = HERE + "modeling_fem"
ENTRIES = (HERE + "configuration_fem", MODELING)
COPIED = ("fem_common.", "fem_megatron.", "kernels.", HERE)
OURS = ("fem_common", "fem_megatron", "kernels", "pretrain", "tools", "data_prep")
GIVEN = {"torch", "transformers", *OURS, *sys.stdlib_module_names}

# Optional engines of some operations, used on a GPU if they are installed; without them the torch
# implementations run.
OPTIONAL = {"fla", "triton"}
LICENSE, LICENSE_ID = "LICENSE", "Apache-2.0"

Edits = dict[tuple[int, int], list[str]]
"""First and last line of a statement, counted from 1 -> the lines that replace it."""


class BundleError(ValueError):
    """Error for a source file with an import that has no flat form; names the file and the line."""


def bundle(shapes: Iterable[Any]) -> dict[str, str]:
    """Return file name -> content of all code files of an export, for the layer shapes of the
    model.

    The configuration and modeling files are included.

    Raises:
        BundleError: an import has no flat form, or two files would have one name.
    """
    files: dict[str, str] = {}
    needed: dict[str, frozenset[str]] = {}
    layers = layer_modules(shapes)
    waiting, seen = list(ENTRIES), set(ENTRIES)
    while waiting:
        module = waiting.pop()
        name = f"{flat(module)}.py"
        if name in files:
            raise BundleError(f"{module} and another module would both be {name}")
        path = module_file(module)
        if path is None:
            raise BundleError(f"{module} is not a file that an export may copy")
        files[name], needed[module] = flatten(module, path.read_text(encoding="utf-8"))
        if module == MODELING:
            needed[module] |= layers
        waiting += sorted(needed[module] - seen)
        seen |= needed[module]
    for entry in ENTRIES:
        files[f"{flat(entry)}.py"] += _named(_reached(entry, needed) - {entry})
    code = "".join(name + files[name] for name in sorted(files))
    digest = hashlib.sha256(code.encode()).hexdigest()
    files["configuration_fem.py"] += f"\n# The digest of all of this folder's code: {digest}\n"
    return files


def _reached(entry: str, needed: dict[str, frozenset[str]]) -> set[str]:
    """Return ``entry`` and all modules that it imports, directly or indirectly.

    needed: module -> modules that it imports directly.
    """
    found, waiting = {entry}, [entry]
    while waiting:
        new = needed[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _named(modules: set[str]) -> str:
    """Return lines of code that name the modules in imports that are never executed.

    Older versions of transformers copy only files that the entry file itself imports.
    """
    return "\n\nif False:\n" + "".join(
        f"    from .{flat(module)} import __name__ as _\n" for module in sorted(modules)
    )


def packages(files: dict[str, str]) -> list[str]:
    """Return the external packages that the files import, without torch, transformers and the
    optional ones (OPTIONAL).
    """
    nodes = (node for text in files.values() for node in ast.walk(ast.parse(text)))
    return sorted(set().union(*map(_outside, nodes)) - OPTIONAL)


def license_text() -> str:
    """Return the text of this project's license, which applies to the exported code."""
    file = ROOT / LICENSE  # absent if the project is installed from a wheel
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return distribution("fem-megatron").read_text(f"licenses/{LICENSE}") or ""


def layer_modules(shapes: Iterable[Any]) -> frozenset[str]:
    """Return the modules of the layers that the shapes and their nested shapes name."""
    found: set[str] = set()
    for shape in filter(is_dataclass, shapes):
        if hasattr(shape, "layer_class"):
            found.add(shape.layer_class.partition(":")[0])
        found |= layer_modules(getattr(shape, field.name) for field in fields(shape))
    return frozenset(found)


def module_file(module: str) -> Path | None:
    """Return the source file of a module, or None if it does not exist or may not be copied.

    Only modules of the packages in COPIED may be copied.
    """
    if not f"{module}.".startswith(COPIED):
        return None
    path = ROOT.joinpath(*module.split("."))
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


def flat(module: str) -> str:
    """Return the flat name of a module in the exported folder: ``kernels.scan`` ->
    ``kernels_scan``.
    """
    return module.removeprefix(HERE).replace(".", "_")


@functools.cache
def flatten(module: str, text: str) -> tuple[str, frozenset[str]]:
    """Return the text of a module with flat imports, and the project's modules that it imports.
    Raises BundleError (see ``bundle``).
    """
    edits: Edits = {}
    wanted: set[str] = set()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(
            alias.name.split(".")[0] in OURS for alias in node.names
        ):
            raise BundleError(
                f"{module}, line {node.lineno}: only `from ... import ...` has a flat form"
            )
        if isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            if source.split(".")[0] not in OURS:
                continue
            if module_file(source) is None:
                raise BundleError(
                    f"{module}, line {node.lineno}: {source} is not a file that an export may copy"
                )
            edits[_lines(node)], imported = _flat_import(source, node)
            wanted |= imported
    for outside in _outside_imports(tree):
        space = " " * outside.col_offset
        edits[_lines(outside)] = [
            f"{space}try:",
            f"{space}    {ast.unparse(outside)}",
            f"{space}finally:",
            f"{space}    pass",
        ]
    return _edited(text, edits), frozenset(wanted)


def _flat_import(source: str, node: ast.ImportFrom) -> tuple[list[str], set[str]]:
    """Return the lines that replace ``from source import ...``, and the project's modules that they
    import.
    """
    space = " " * node.col_offset
    lines = []
    wanted = set()
    names = []
    for alias in node.names:
        module = f"{source}.{alias.name}"
        if module_file(module) is None:
            names.append(alias)
            continue
        wanted.add(module)
        # transformers finds files only through the first form of import.
        lines += [
            f"{space}from .{flat(module)} import __name__ as _",
            f"{space}from . import {flat(module)} as {alias.asname or alias.name}",
        ]
    if names:
        wanted.add(source)
        lines.append(space + ast.unparse(ast.ImportFrom(flat(source), names, 1)))
    return lines, wanted


def _absolute(module: str, node: ast.ImportFrom) -> str:
    """Return the absolute name of the module in a ``from`` statement of ``module``."""
    if not node.level:
        return node.module or ""
    path = module_file(module)
    package = module.split(".")
    if path is None or path.name != "__init__.py":
        package.pop()
    parts = package[: len(package) + 1 - node.level]
    if node.module:
        parts.append(node.module)
    return ".".join(parts)


def _outside_imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the import statements of external packages that are not inside a ``try``.

    torch and transformers do not count as external.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom) and _outside(child):
            yield child
        elif not isinstance(child, ast.Try):
            yield from _outside_imports(child)


@functools.cache
def _outside(node: ast.AST) -> set[str]:
    """Return the external packages that a statement imports, without torch and transformers."""
    modules = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        modules = [node.module]
    return {module.split(".")[0] for module in modules} - GIVEN


def _lines(node: ast.stmt) -> tuple[int, int]:
    return node.lineno, node.end_lineno or node.lineno


def _edited(text: str, edits: Edits) -> str:
    lines = text.split("\n")
    for (first, last), new in sorted(edits.items(), reverse=True):
        lines[first - 1 : last] = new
    return "\n".join(lines)
