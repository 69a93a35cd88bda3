"""Interface between a layer and the tensor-parallel ranks that share it.

`Parallel` has methods that gather, sum and share activations over ranks, a fusible product, and the
creation of parameters. ``OneProcess`` implements it for a single process (tests, decoding, the
exported model), ``megatron.tensor_parallel`` for Megatron-core. This module does not import
Megatron-core.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from fem_megatron.shape import Weight, Weights


class Parallel(Protocol):
    """Operations of one tensor-parallel rank, for use in layers.

    Outside a mixer an activation is [s / size, b, D] under sequence parallelism, else [s, b, D].
    The residual stream's slice is this activation of one rank.

    size: number of ranks. rank: number of this rank. dtype: type of the parameters.
    """

    size: int
    rank: int
    dtype: torch.dtype

    def enter(self, x: Tensor) -> Tensor:
        """Gather the residual stream's slice x into the full sequence [s, b, D].

        Each rank uses the result for its part of the layer, so the gradient is summed over ranks.
        """

    def project(self, x: Tensor, linear: nn.Module | nn.Parameter) -> Tensor:
        """Return linear(enter(x)) for an x that is gathered for no other use.

        Under sequence parallelism only the slice is kept for the backward pass.

        linear: a module that `Parallel.linear` returned (if it has a bias, the gathered input is
            kept), or a weight [out, in] whose leading dimensions are flattened.
        """

    def project_with(
        self, x: Tensor, linear: nn.Module, others: Callable[[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        """Return (others(enter(x)), linear(enter(x))).

        Like ``project`` this keeps only x's slice: the backward pass gathers x and runs ``others``
        again. Therefore ``linear`` should be the larger product, which is not repeated.
        """

    def leave(self, partial: Tensor) -> Tensor:
        """Sum the ranks' summands [s, b, D] of a layer's output.

        Under sequence parallelism the result is this rank's slice [s / size, b, D].
        """

    def gather(self, part: Tensor) -> Tensor:
        """Gather [..., n / size] of every rank into [..., n].

        All ranks must apply the same operations to the result.
        """

    def share(self, full: Tensor) -> Tensor:
        """Return a replicated tensor unchanged, for use in this rank's part of the layer.

        Its gradient is summed over ranks.
        """

    def total(self, partial: Tensor) -> Tensor:
        """Return the sum of ``partial`` over ranks, for use in this rank's part of the layer.

        The gradient is summed over ranks, too.
        """

    def swiglu(self, packed: Tensor) -> Tensor:
        """Return silu(a) * b of [a | b]: [s, b, 2 n] -> [s, b, n]."""

    def parameter(self, weight: Weight) -> nn.Parameter:
        """Return this rank's part of a weight as a parameter.

        A constant weight is filled with its constant. Any other weight is uninitialised memory.
        """

    def linear(self, weight: nn.Parameter) -> nn.Linear:
        """Return a module that multiplies by a parameter [out, in].

        The caller assigns the parameter to the module afterwards.
        """


class OneProcess:
    """Implementation of `Parallel` for a single process: gathers and sums are the identity."""

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

    def project_with(
        self, x: Tensor, linear: nn.Module, others: Callable[[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        y = linear(x)
        return others(x), y

    def leave(self, partial: Tensor) -> Tensor:
        return partial

    def gather(self, part: Tensor) -> Tensor:
        return part

    def share(self, full: Tensor) -> Tensor:
        return full

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
    """Return a parameter of ``shape`` for a weight, filled if the weight is constant.

    Its attribute ``spec`` is the `Weight`. ``shape`` may be smaller than the weight's shape.
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
    """Container for weights that an update multiplies without an nn.Linear.

    Calling the module returns one of the weights, so that hooks that load, gather or free weights
    run first.
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
