"""Emulation of a GPU's approximate instructions in Triton's interpreter.

It replaces the CPU's rounded functions by those that Triton 3.7's PTX for sm_90 contains:

    tl.exp    x log2(e), rounded, then ex2.approx          /         div.full
    tl.exp2   ex2.approx.ftz: denormals are zeros          tl.sqrt   sqrt.approx.ftz
    tl.log    a polynomial in rounded steps, and tl.log2

Each result is off by up to ``ulps`` units in the last place. The amount depends only on the
operands' bits and on ``seed``: the same operands give the same bits, as on a device. PTX's bound
is 2 for ex2.approx and div.full. Only float32 changes. Three effects are not emulated: fused
products and sums, the order of sums, and the sums of the tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

LOG2E = np.float32(1.4426950408889634)
TINY = np.finfo(np.float32).tiny


@contextmanager
def gpu_arithmetic(ulps: float, seed: int = 0) -> Iterator[None]:
    """Replace the interpreter's instructions by the approximate ones within the context."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def approximate(name: str, function: Callable[..., Any], flush: bool) -> Callable[..., Any]:
        own = getattr(InterpreterBuilder, name)

        def instruction(self: Any, *handles: Any) -> Any:
            data = [handle.data for handle in handles]
            if any(each.dtype != np.float32 for each in data):
                return own(self, *handles)
            with np.errstate(all="ignore"):
                given = [flushed(each) if flush else each for each in data]
                exact = function(*(each.astype(np.float64) for each in given))
                found = off(exact, ulps, seed, *data)
            return TensorHandle(flushed(found) if flush else found, handles[0].dtype.scalar)

        return instruction

    made = {
        "create_exp": approximate(
            "create_exp",
            lambda x: np.exp2((x.astype(np.float32) * LOG2E).astype(np.float64)),
            flush=False,
        ),
        "create_exp2": approximate("create_exp2", np.exp2, flush=True),
        "create_log": approximate("create_log", np.log, flush=False),
        "create_log2": approximate("create_log2", np.log2, flush=False),
        "create_fdiv": approximate("create_fdiv", np.divide, flush=False),
        "create_sqrt": approximate("create_sqrt", np.sqrt, flush=True),
        "create_rsqrt": approximate("create_rsqrt", lambda x: 1 / np.sqrt(x), flush=True),
    }
    before = {name: getattr(InterpreterBuilder, name) for name in made}
    for name, instruction in made.items():
        setattr(InterpreterBuilder, name, instruction)
    try:
        yield
    finally:
        for name, instruction in before.items():
            setattr(InterpreterBuilder, name, instruction)


def off(exact: Any, ulps: float, seed: int, *operands: Any) -> Any:
    """Return ``exact`` (float64) in float32, changed by up to ``ulps`` units in the last place.

    The operands' bits determine the change. 0, 1, and values that are not finite stay exact.
    """
    bits: Any = np.uint32(seed)
    for operand in operands:
        operand_bits = np.ascontiguousarray(operand).view(np.uint32).reshape(operand.shape)
        bits = (bits ^ operand_bits) * np.uint32(0x9E3779B1)
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x85EBCA77)
        bits = bits ^ (bits >> np.uint32(13))
    rounded = exact.astype(np.float32)
    units = np.spacing(np.abs(rounded)).astype(np.float64)
    moved = (exact + ulps * (bits / 2.0**31 - 1) * units).astype(np.float32)
    return np.where(np.isfinite(rounded) & (rounded != 0) & (exact != 1), moved, rounded)


def flushed(x: Any) -> Any:
    """Return x with denormals replaced by zeros of the same sign."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)
