"""What a layer asks of its surroundings: seven moves of an activation between ranks, one product that may be fused, its parameters.

``OneProcess`` is the answer of a single process (tests, decoding, the exported model), ``megatron.tensor_parallel`` Megatron-core's.
No Megatron-core here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from fem_megatron.shape import Weight, Weights


class Parallel(Protocol):
    """One tensor-parallel rank's view. Outside a mixer an activation is [s / size, b, D] under sequence parallelism, else [s, b, D]."""

    size: int
    rank: int
    dtype: torch.dtype

    def enter(self, x: Tensor) -> Tensor:
        """The residual stream's slice -> [s, b, D], the whole sequence, for use by this rank's part; its gradient is summed over ranks."""

    def project(self, x: Tensor, linear: nn.Module | nn.Parameter) -> Tensor:
        """linear(enter(x)) for an x that nothing else needs entered: under sequence parallelism only the slice is kept.

        linear: a module of `linear` (with a bias what is entered is kept), or a weight [out, in], or one with more dimensions before the
        last, which are taken as one.
        """

    def project_beside(
        self, x: Tensor, linear: nn.Module, others: Callable[[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        """(others(enter(x)), linear(enter(x))), of which ``project`` keeps x's slice: the backward pass enters x and runs ``others`` again.

        linear: the larger product, which is not made twice.
        """

    def leave(self, partial: Tensor) -> Tensor:
        """This rank's summand of [s, b, D] -> the sum over ranks, in the residual stream's slicing."""

    def gather(self, part: Tensor) -> Tensor:
        """[..., n / size] -> [..., n]; what follows must be the same on every rank."""

    def share(self, whole: Tensor) -> Tensor:
        """A tensor that every rank holds whole, for use by this rank's part: the same values, its gradient summed over ranks."""

    def total(self, partial: Tensor) -> Tensor:
        """The sum over ranks, for use by this rank's part: its gradient is summed over ranks, too."""

    def swiglu(self, packed: Tensor) -> Tensor:
        """silu(a) * b of [a | b]: [s, b, 2 n] -> [s, b, n]."""

    def parameter(self, weight: Weight) -> nn.Parameter:
        """This rank's part of a weight, its constant filled in, or empty where it is to be drawn."""

    def linear(self, weight: nn.Parameter) -> nn.Linear:
        """The module that multiplies by a parameter [out, in], which is yet to be given to it."""


class OneProcess:
    """No parallelism: every move is the identity; and no fusion."""

    size = 1
    rank = 0

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def enter(self, x: Tensor) -> Tensor:
        return x

    def project(self, x: Tensor, linear: nn.Module | nn.Parameter) -> Tensor:
        if isinstance(linear, nn.Module):
            y: Tensor = linear(x)
            return y
        return nn.functional.linear(x, linear.flatten(0, -2))

    def project_beside(
        self, x: Tensor, linear: nn.Module, others: Callable[[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        y = linear(x)
        return others(x), y

    def leave(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor) -> Tensor:
        return part

    def share(self, whole: Tensor) -> Tensor:
        return whole

    def total(self, partial: Tensor) -> Tensor:
        return partial

    def swiglu(self, packed: Tensor) -> Tensor:
        return swiglu(packed)

    def parameter(self, weight: Weight) -> nn.Parameter:
        return parameter(weight, weight.shape, self.dtype)

    def linear(self, weight: nn.Parameter) -> nn.Linear:
        return nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")


def swiglu(packed: Tensor) -> Tensor:
    """silu(a) * b of [a | b], over the last dimension."""
    gate, up = packed.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def parameter(weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """A parameter of ``shape``, marked with the weight it is a part of (``parameter.spec``); constants are filled in."""
    constant = weight.init if isinstance(weight.init, int | float) else None
    made = nn.Parameter(
        torch.empty(shape, dtype=dtype)
        if constant is None
        else torch.full(shape, constant, dtype=dtype)
    )
    made.spec = weight  # type: ignore[attr-defined]
    return made


class Holder(nn.Module):
    """Weights that an update multiplies by itself. A call returns one of them, so hooks that load, gather or free weights run first."""

    def forward(self, name: str = "weight") -> Tensor:
        """The parameter called ``name``."""
        weight: Tensor = getattr(self, name)
        return weight


def add_weights(module: nn.Module, weights: Weights, parallel: Parallel) -> None:
    """Give ``module`` this rank's part of each weight: a matrix ``a.weight`` that is not bare in an nn.Linear, others in a `Holder`."""
    for name, weight in weights.items():
        *path, leaf = name.split(".")
        made = parallel.parameter(weight)
        owner = module
        for depth, part in enumerate(path):
            if not hasattr(owner, part):
                linear = (
                    depth == len(path) - 1
                    and leaf == "weight"
                    and made.ndim == 2
                    and not weight.bare
                )
                owner.add_module(part, parallel.linear(made) if linear else Holder())
            owner = owner.get_submodule(part)
        setattr(owner, leaf, made)
