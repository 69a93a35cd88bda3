"""Selection of an operation's implementation: one `Op` for each operation, evaluated at every call,
logged once. No tensors are computed.

An operation lists its implementations, the fastest first; the last is its definition, which runs
anywhere. ``choose`` returns the requested one or, for "auto", the first that this machine and this
call support. The environment variable FEM_KERNELS overrides "auto":
``FEM_KERNELS=fem_attention=triton,cem_attention=reference``. A choice is logged once at level INFO,
with the reasons against faster ones; on a machine with a GPU, a call that falls back to the
definition is logged once as a warning.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from kernels import machine

VARIABLE = "FEM_KERNELS"
OLDEST_TRITON = (3, 6)


class OncePerMessage(logging.Filter):
    """Filter that passes each message once in a process. Messages are equal if their templates are
    equal, whatever their arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True the first time that the record's template occurs."""
        first = str(record.msg) not in self._logged
        self._logged.add(str(record.msg))
        return first


Unfit = Callable[[str], str | None]


def nothing(name: str) -> None:
    """Return None: the default reason of a call that excludes no implementation."""


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation. lacks(device) returns the reason why this machine cannot run
    it on the device, or None.
    """

    name: str
    what: str
    lacks: Callable[[torch.device], str | None] = lambda device: None
    automatic: bool = True  # False: runs only on request


@dataclass(frozen=True)
class Op:
    """An operation and its implementations, the fastest first, the definition last."""

    name: str
    what: str
    implementations: tuple[Implementation, ...]

    @property
    def log(self) -> logging.Logger:
        """Return the operation's logger, ``kernels.<name>``. Each of its messages is logged once in
        a process.
        """
        logger = logging.getLogger(f"kernels.{self.name}")
        if not any(isinstance(f, OncePerMessage) for f in logger.filters):
            logger.addFilter(OncePerMessage())
        return logger

    def choose(self, requested: str, device: torch.device, unfit: Unfit = nothing) -> str:
        """Return the name of the implementation for a call on ``device``.

        unfit(name): the reason why this call's shapes or types exclude it, or None. Raises
        ValueError for an unknown name, and if the implementation that the argument requests cannot
        run.
        """
        names = ("auto", *(implementation.name for implementation in self.implementations))
        if requested not in names:
            raise ValueError(
                f"{self.name}: implementation {requested!r} is not one of {', '.join(names)}"
            )
        if requested == "auto":
            name, against = self.automatic(device, unfit)
            fallback = (
                device.type != "cpu" and bool(against) and name == self.implementations[-1].name
            )
            self._log_once(f"{name} runs", against, logging.WARNING if fallback else logging.INFO)
            return name
        (chosen,) = (
            implementation
            for implementation in self.implementations
            if implementation.name == requested
        )
        if reason := chosen.lacks(device) or unfit(requested):
            raise ValueError(
                f"{self.name}: implementation {requested!r} cannot run: {reason}; use auto"
            )
        self._log_once(f"{requested} runs (requested)")
        return requested

    def automatic(self, device: torch.device, unfit: Unfit = nothing) -> tuple[str, dict[str, str]]:
        """Return the choice of "auto" and the reason against each faster one. Raises ValueError if
        FEM_KERNELS names an unknown implementation.
        """
        forced = overrides().get(self.name, "auto")
        if forced != "auto" and forced not in [
            implementation.name for implementation in self.implementations
        ]:
            raise ValueError(
                f"{VARIABLE}: {self.name} has no implementation {forced!r}; it has"
                f" {', '.join(each.name for each in self.implementations)}"
            )
        against: dict[str, str] = {}
        for implementation in self.implementations:
            if forced != implementation.name and (forced != "auto" or not implementation.automatic):
                continue
            # Triton's interpreter is for tests, which request it.
            reason = (
                "no GPU"
                if device.type == "cpu" and implementation.lacks is lacks_triton
                else implementation.lacks(device)
            )
            if torch.compiler.is_compiling() and implementation.lacks is lacks_triton:
                # a registered operation chooses when it runs
                reason = "torch.compile sees through the definition"
            reason = reason or unfit(implementation.name)
            if reason is None:
                return implementation.name, against
            against[implementation.name] = reason
        return self.implementations[-1].name, against

    def _log_once(
        self, what: str, against: Mapping[str, str] | None = None, level: int = logging.INFO
    ) -> None:
        """Log once; not while torch.compile traces, which does not support loggers. An earlier call
        has usually logged the choice.
        """
        if torch.compiler.is_compiling():
            return
        reasons = "; ".join(
            f"{other} does not: {reason}" for other, reason in (against or {}).items()
        )
        # The template is logged once: one line for each implementation that runs, whatever the
        # reasons of later calls.
        self.log.log(level, f"{self.name}: {what}%s", f" ({reasons})" if reasons else "")


def overrides() -> dict[str, str]:
    """Return operation -> implementation from FEM_KERNELS. Raises ValueError unless its form is
    ``op=implementation,...``.
    """
    return _parsed(os.environ.get(VARIABLE, ""))


@functools.cache
def _parsed(text: str) -> dict[str, str]:
    chosen = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, implementation = entry.partition("=")
        if not equals or not name or not implementation:
            raise ValueError(
                f"{VARIABLE}: {entry!r} is not of the form operation=implementation, separated by"
                " commas"
            )
        chosen[name] = implementation
    return chosen


def operations() -> dict[str, Op]:
    """Return name -> operation for every operation of this package that has several
    implementations.
    """
    found = {}
    for package in sorted(
        each.name for each in pkgutil.iter_modules([str(Path(__file__).parent)]) if each.ispkg
    ):
        op = getattr(importlib.import_module(f"kernels.{package}"), "OP", None)
        if op is not None:
            found[op.name] = op
    return found


def check_overrides() -> None:
    """Raise ValueError if FEM_KERNELS names an unknown operation or implementation."""
    known = operations() if overrides() else {}
    for name, implementation in overrides().items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise ValueError(
                f"{VARIABLE}: there is no operation {name!r}"
                + (f"; did you mean {near[0]}?" if near else "")
            )
        names = [each.name for each in known[name].implementations]
        if implementation not in (*names, "auto"):
            raise ValueError(
                f"{VARIABLE}: {name} has no implementation {implementation!r}; it has"
                f" {', '.join(names)}"
            )


@functools.cache
def triton_version() -> tuple[int, int] | None:
    """Return (major, minor) of the installed Triton, or None, without importing it."""
    for distribution in ("triton", "pytorch-triton"):
        try:
            numbers = re.match(r"(\d+)\.(\d+)", version(distribution))
        except PackageNotFoundError:
            continue
        return (int(numbers[1]), int(numbers[2])) if numbers else None
    return None


def lacks_triton(device: torch.device) -> str | None:
    """Return the reason why Triton kernels cannot run on ``device``, or None. On a CPU they run
    only in Triton's interpreter (tests).
    """
    found = triton_version()
    if found is None:
        return "the package triton is not installed"
    if found < OLDEST_TRITON:
        return f"triton {found[0]}.{found[1]} is older than {OLDEST_TRITON[0]}.{OLDEST_TRITON[1]}"
    if device.type == "cpu" and not interpreted():
        return "no GPU"
    if not machine.is_current(device):
        return f"the current device is not {device}; torch.cuda.set_device makes it so"
    return None


def lacks_fla(device: torch.device) -> str | None:
    """Return the reason why flash-linear-attention's kernels cannot run on ``device``, or None."""
    if device.type != "cuda":
        return "no GPU"  # first, because torch 2.11 cannot compile a call of find_spec
    if device != machine.FAKE_GPU and find_spec("fla") is None:
        return "the package flash-linear-attention is not installed"
    return None


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    """Return the first reason whose condition is True, or None."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def uneven(what: str, width: int, device: torch.device, step: int = 16) -> str | None:
    """Return the reason why kernels on a GPU do not support a width, or None.

    Rows wider than 64 whose addresses are not multiples of ``step`` spill registers on sm_90.
    """
    if device.type == "cpu" or width <= 64 or width % step == 0:
        return None
    return (
        f"{what} {width} spills registers on a GPU, {width // step * step} and"
        f" {width // step * step + step} do not"
    )


def interpreted() -> bool:
    """Return True if Triton kernels run in its interpreter, on the CPU."""
    if triton_version() is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)
