"""Interface between a layer and its ranks.

It has seven moves of activations, a fusible product, and parameters. ``OneProcess``
implements it for a single process (tests, decoding, the exported model);
``megatron.tensor_parallel`` for Megatron-core. This module does not import Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from fem_megatron.shape import Weight, Weights


class Parallel(Protocol):
    """One tensor-parallel rank's interface.

    Outside a mixer an activation is [s / size, b, D] under sequence parallelism, else [s, b, D].
    """

    size: int
    rank: int
    dtype: torch.dtype

    def enter(self, x: Tensor) -> Tensor:
        """Gather the residual stream's slice into the full sequence [s, b, D].

        It is for use by this rank's part. Its gradient is summed over ranks.
        """

    def project(self, x: Tensor, linear: nn.Module | nn.Parameter) -> Tensor:
        """Return linear(enter(x)) for an x that is gathered for no other use.

        Under sequence parallelism only the slice is kept. linear: a module of `linear` (with a
        bias, the gathered input is kept), or a weight [out, in]; dimensions before the last are
        flattened.
        """

    def project_beside(
        self, x: Tensor, linear: nn.Module, others: Callable[[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return (others(enter(x)), linear(enter(x))).

        Like ``project`` it keeps x's slice: the backward pass gathers x and runs ``others`` again.
        linear: the larger product, which is not repeated.
        """

    def leave(self, partial: Tensor) -> Tensor:
        """Sum this rank's summand [s, b, D] over ranks.

        The result is sliced like the residual stream.
        """

    def gather(self, part: Tensor) -> Tensor:
        """Gather [..., n / size] -> [..., n]. Later operations must be equal on every rank."""

    def share(self, whole: Tensor) -> Tensor:
        """Return a replicated tensor unchanged, for use by this rank's part.

        Its gradient is summed over ranks.
        """

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum over ranks, for use by this rank's part.

        Its gradient is summed over ranks, too.
        """

    def swiglu(self, packed: Tensor) -> Tensor:
        """Return silu(a) * b of [a | b]: [s, b, 2 n] -> [s, b, n]."""

    def parameter(self, weight: Weight) -> nn.Parameter:
        """Return this rank's part of a weight.

        It is filled with its constant, or empty if it is drawn later.
        """

    def linear(self, weight: nn.Parameter) -> nn.Linear:
        """Return the module that multiplies by a parameter [out, in].

        The caller assigns the parameter afterwards.
        """


class OneProcess:
    """A single process without fusion: every move is the identity."""

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
    """Return silu(a) * b of [a | b], over the last dimension."""
    gate, up = packed.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


def parameter(weight: Weight, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter of ``shape``, filled if its weight is constant.

    Its attribute ``spec`` is the weight of which it is a part.
    """
    constant = weight.init if isinstance(weight.init, int | float) else None
    made = nn.Parameter(
        torch.empty(shape, dtype=dtype)
        if constant is None
        else torch.full(shape, constant, dtype=dtype)
    )
    made.spec = weight  # type: ignore[attr-defined]
    return made


class Holder(nn.Module):
    """Weights that an update multiplies itself.

    A call returns one of them, so that hooks that load, gather or free weights run first.
    """

    def forward(self, name: str = "weight") -> Tensor:
        """Return the parameter called ``name``."""
        weight: Tensor = getattr(self, name)
        return weight


def add_weights(module: nn.Module, weights: Weights, parallel: Parallel) -> None:
    """Add this rank's part of each weight to ``module``.

    A matrix ``a.weight`` that is not bare is put into an nn.Linear, every other weight into a
    `Holder`.
    """
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
