"""Every operation of this room that has a choice to make, and whether FEM_KERNELS names what exists. No tensors are computed here."""

from __future__ import annotations

import difflib
import importlib
import pkgutil

import kernels
from kernels.implementations import VARIABLE, Op, overrides


def operations() -> dict[str, Op]:
    """Every operation of this room that has a choice to make, by name."""
    found = {}
    for package in sorted(each.name for each in pkgutil.iter_modules(kernels.__path__) if each.ispkg):
        op = getattr(importlib.import_module(f"kernels.{package}"), "OP", None)
        if op is not None:
            found[op.name] = op
    return found


def check_overrides() -> None:
    """Raises ValueError where FEM_KERNELS names an operation or an implementation that does not exist."""
    known = operations() if overrides() else {}
    for name, implementation in overrides().items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(f"{VARIABLE}: there is no operation {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
        names = [each.name for each in known[name].implementations]
        if implementation not in (*names, "auto"):
            raise ValueError(f"{VARIABLE}: {name} has no implementation {implementation!r}; it has {', '.join(names)}")
