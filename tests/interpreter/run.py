"""Triton's interpreter with the fixes and accelerations that the tests need.

`sanitizer` checks the addresses that a kernel uses. `gpu` emulates a GPU's approximate
instructions. ``python -m tests.interpreter`` runs all cases under both. The patches change
Triton only, no code of this project.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import kernels


def interpret() -> None:
    """Make this process, but not its children, run Triton kernels in the interpreter.

    Call it before Triton is imported.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language

    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]  # the line above also sets it
    # Import all kernels now: `fem_megatron.meta.trace` pretends that a GPU exists, and a kernel
    # whose module is first imported under it would be compiled.
    for module in pkgutil.walk_packages(kernels.__path__, "kernels."):
        if ".triton" in module.name:
            importlib.import_module(module.name)
    mend_bfloat16()
    mend_fma()
    mend_calls()
    mend_types()


def mend_bfloat16() -> None:
    """Make ``tl.dot`` multiply bfloat16 values, and round casts to bfloat16 as a GPU does.

    The interpreter multiplies the bits of the operands. A GPU rounds to nearest. Other arithmetic
    in bfloat16 is not fixed: kernels convert to float32 first.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        ]
        return dot(self, *wide, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        pair = (source.dtype.scalar, target.scalar)
        if pair == (tl.float32, tl.bfloat16):
            numbers = torch.from_numpy(np.ascontiguousarray(source.data))
            rounded = numbers.bfloat16().view(torch.uint16).numpy()
            return TensorHandle(rounded.reshape(source.data.shape), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return cast(self, source, target)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl


def mend_fma() -> None:
    """Make ``tl.fma`` round float32 only once; the interpreter also rounds the product."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def mend_calls() -> None:
    """Make a launch patch ``triton.language`` once, for all functions that the kernel calls.

    The interpreter (triton 3.6, runtime/interpreter.py, InterpretedFunction.__call__) patches it
    again for each call of a function and wraps the functions that it has already wrapped. Each call
    of a launch is therefore slower than the one before.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    taken = False

    def patch_once(function: Any) -> Any:
        nonlocal taken
        if taken:
            # The call is for a function that the kernel calls; no caller uses the return value.
            return None
        taken, scope = True, patch(everything)
        restore = scope.restore

        def give_back() -> None:
            nonlocal taken
            taken = False
            restore()

        scope.restore = give_back
        return scope

    interpreter._patch_lang = patch_once


def mend_types() -> None:
    """Make the interpreter cache the properties that follow from a type or a shape.

    Without the cache, it computes them at every step of every operation, which takes half of its
    time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    numpy_type = interpreter._get_np_dtype
    tensor = tl.tensor.__init__
    block = tl.block_type.__init__
    equal = tl.dtype.__eq__
    of_types: dict[str, Any] = {}
    of_tensors: dict[tuple[int, ...], Any] = {}
    of_blocks: dict[tuple[Any, ...], Any] = {}

    def known_numpy_type(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in of_types:
            of_types[name] = numpy_type(kind)
        return of_types[name]

    def known_tensor(self: Any, handle: Any, kind: Any) -> None:
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in of_tensors:
            tensor(self, handle, kind)
            of_tensors[shape] = self.numel, self.shape
        self.handle = handle
        self.type = kind
        self.dtype = kind.scalar
        self.numel, self.shape = of_tensors[shape]

    def known_block(self: Any, element: Any, shape: Any) -> None:
        key = (
            element.name,
            *(each.value if isinstance(each, tl.constexpr) else each for each in shape),
        )
        if key not in of_blocks:
            block(self, element, shape)
            of_blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element
        self.shape, self.numel, self.name = of_blocks[key]

    interpreter._get_np_dtype = known_numpy_type
    tl.tensor.__init__ = known_tensor
    tl.block_type.__init__ = known_block
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
