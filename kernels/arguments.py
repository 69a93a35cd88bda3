"""Checks of the arguments of operations. Each fault is a ValueError of one line that begins with
the operation's name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def autocast_on(x: Tensor) -> bool:
    """Return True if torch.autocast changes the types of operations on x's device."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(function: F) -> F:
    """Decorate a backward to compute in its own types, as `operation` does.

    Gradients may be None; with all of them None, the call is passed on.
    """

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        x = next((each for each in args if isinstance(each, Tensor)), None)
        if x is None or not autocast_on(x):
            return function(*args)
        with torch.autocast(x.device.type, enabled=False):
            return function(*args)

    return cast(F, call)


def operation(like: str, *, state: bool = False, wide: str | None = None) -> Callable[[F], F]:
    """Decorate a function of tensors as an operation: torch.autocast changes no type inside, and
    float16 is computed in float32.

    All float16 arguments, including those in tuples and lists, become float32. like: the name of
    the argument whose type the results have; if it is float16, the results become float16 again.
    state: True if only the first of a pair of results does. wide: the name of a keyword argument
    that, if set, keeps the results in float32.
    """

    def decorate(function: F) -> F:
        place = list(inspect.signature(function).parameters).index(like)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            x: Tensor = args[place] if place < len(args) else kwargs[like]
            if autocast_on(x):
                with torch.autocast(x.device.type, enabled=False):
                    return call(*args, **kwargs)
            narrow = x.dtype == torch.float16
            if not narrow and torch.float16 not in [
                t.dtype for t in (*args, *kwargs.values()) if isinstance(t, Tensor)
            ]:
                return function(*args, **kwargs)
            made = function(
                *_cast(args, torch.float16, torch.float32),
                **_cast(kwargs, torch.float16, torch.float32),
            )
            if not narrow or (wide is not None and kwargs.get(wide)):
                return made
            if state:
                return _cast(made[0], torch.float32, torch.float16), made[1]
            return _cast(made, torch.float32, torch.float16)

        return cast(F, call)

    return decorate


def _cast(x: Any, before: torch.dtype, after: torch.dtype) -> Any:
    """Return x, a tensor or a container of tensors, with tensors of the type ``before`` converted
    to ``after``.
    """
    if isinstance(x, Tensor):
        return x.to(after) if x.dtype == before else x
    if isinstance(x, dict):
        return {name: _cast(each, before, after) for name, each in x.items()}
    if isinstance(x, tuple | list):
        parts = [_cast(each, before, after) for each in x]
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return x


def is_dynamic(*given: Any) -> bool:
    """Return True if torch.export runs and a size, or one of a tensor's sizes, is dynamic: reading
    its value would fix it.
    """
    if not torch.compiler.is_exporting():
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value

    sizes = [
        size for each in given for size in (each.shape if isinstance(each, Tensor) else [each])
    ]
    return any(
        isinstance(size, int | torch.SymInt) and not has_static_value(size) for size in sizes
    )


def check_first(
    op: str, name: str, x: Tensor, layout: str = "[batch, heads, tokens, width]"
) -> None:
    """Raise ValueError unless x, the tensor that the others are compared with, is not empty and has
    a supported type.

    layout: its dimensions; "[t, ...]" and similar: any number of dimensions.
    """
    if (
        (x.dim() != 4 and "..." not in layout)
        or x.dim() == 0
        or (not is_dynamic(x) and x.numel() == 0)
    ):
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}, expected {layout}, not empty")
    if x.dtype not in FLOATS:
        raise ValueError(f"{op}: {name} is {x.dtype}; use float64, float32, bfloat16 or float16")


def check_others(op: str, first: str, x: Tensor, others: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for an argument that does not fit ``x``, the argument called ``first``.

    others: name -> (tensor or None, its shape or a list of shapes, its types). Without types, any
    type on any device is allowed; with types, the device must be x's.
    """
    for name, (tensor, allowed, *types) in others.items():
        if tensor is None:
            continue
        shapes = allowed if isinstance(allowed, list) else [allowed]
        if tensor.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, expected {wanted} for {first}"
                f" {list(x.shape)}"
            )
        if types and (tensor.dtype not in types or tensor.device != x.device):
            wanted = " or ".join(str(kind) for kind in dict.fromkeys(types))
            raise ValueError(
                f"{op}: {name} is {tensor.dtype} on {tensor.device}, expected {wanted} on"
                f" {x.device} as {first} is {x.dtype}"
            )


def check_read(
    op: str,
    beta: Tensor | None,
    lam: Tensor | None,
    state: Tensor | None = None,
    causal: bool = True,
) -> None:
    """Raise ValueError for lam without beta, and for a state without causal=True."""
    if lam is not None and beta is None:
        raise ValueError(
            f"{op}: lam mixes mu with the free energy, so it needs beta; leave out lam for o = mu"
        )
    if state is not None and not causal:
        raise ValueError(f"{op}: a state stands for the past, so it needs causal=True")
