"""A GPU's approximate instructions in Triton's interpreter: what Triton 3.7's PTX for sm_90 has in place of the CPU's rounded functions.

    tl.exp    x log2(e), rounded, then ex2.approx          /         div.full
    tl.exp2   ex2.approx.ftz: denormals are zeros          tl.sqrt   sqrt.approx.ftz
    tl.log    a polynomial in rounded steps, and tl.log2

Each is off by up to ``ulps`` units in the last place, by an amount that depends on the operands' bits and ``seed`` alone: the same operands
give the same bits, as they do on a device. PTX's own bound is 2 for ex2.approx and div.full. float32 alone is touched. Not emulated: where
a compiler makes one fma of a product and a sum, the order of sums, and the tensor cores' sums.
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
    """The interpreter with these instructions in place of its own."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def approximate(name: str, function: Callable[..., Any], flush: bool) -> Callable[..., Any]:
        own = getattr(InterpreterBuilder, name)

        def instruction(self: Any, *handles: Any) -> Any:
            data = [handle.data for handle in handles]
            if any(each.dtype != np.float32 for each in data):
                return own(self, *handles)
            with np.errstate(all="ignore"):
                exact = function(
                    *((flushed(each) if flush else each).astype(np.float64) for each in data)
                )
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
    """``exact`` (float64) in float32, up to ``ulps`` units of its last place away, as the operands' bits say; 0, 1, infinity stay."""
    bits: Any = np.uint32(seed)
    for operand in operands:
        bits = (
            bits ^ np.ascontiguousarray(operand).view(np.uint32).reshape(operand.shape)
        ) * np.uint32(0x9E3779B1)
        bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x85EBCA77)
        bits = bits ^ (bits >> np.uint32(13))
    rounded = exact.astype(np.float32)
    moved = (
        exact + ulps * (bits / 2.0**31 - 1) * np.spacing(np.abs(rounded)).astype(np.float64)
    ).astype(np.float32)
    return np.where(np.isfinite(rounded) & (rounded != 0) & (exact != 1), moved, rounded)


def flushed(x: Any) -> Any:
    """x with 0 for denormals."""
    return np.where(np.abs(x) < TINY, np.copysign(np.float32(0), x), x)
