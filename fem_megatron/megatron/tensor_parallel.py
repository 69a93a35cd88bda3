"""Megatron-core's tensor and sequence parallelism as an implementation of ``Parallel``.

This is the only module that connects the layers to Megatron's tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.tensor_parallel.layers import (
    linear_with_grad_accumulation_and_async_allreduce,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fem_megatron.megatron import fp8, fusions
from fem_megatron.parallel import Parallel, parameter
from fem_megatron.shape import Weight


class _Share(torch.autograd.Function):
    """Identity forward, sum over ranks backward.

    Megatron's ``copy_to_tensor_model_parallel_region`` loses the sum if the gradient is not
    contiguous, as for a transposed weight (``mappings._reduce``, 0.16.1, reduces a copy and returns
    its input), and writes into a gradient that autograd may have shared.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """Sum over ranks forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _sum(x: Tensor, group: Any) -> Tensor:
    if group.size() == 1:
        return x
    full = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(full, group=group)
    return full


class TensorParallel(Parallel):
    """``fem_megatron.parallel.Parallel`` over a Megatron process group.

    eight_bit: True if suitable linear maps multiply 8-bit floats (`fp8`).
    """

    def __init__(
        self, group: Any, *, sequence_parallel: bool, dtype: torch.dtype, eight_bit: bool = False
    ) -> None:
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.dtype = dtype
        self.eight_bit = eight_bit
        self.size, self.rank = group.size(), group.rank()

    def enter(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            return mappings.gather_from_sequence_parallel_region(
                x, tensor_parallel_output_grad=True, group=self.group
            )
        return self.share(x)

    def project(self, x: Tensor, linear: nn.Module | nn.Parameter) -> Tensor:
        # one kernel adds the bias before rounding
        if isinstance(linear, nn.Module) and linear.bias is not None:
            biased: Tensor = linear(self.enter(x))
            return biased
        weight = linear.get_parameter("weight") if isinstance(linear, nn.Module) else linear
        if self._in_eight_bits(weight):
            return fp8.linear(self.enter(x), weight.flatten(0, -2), fp8.known_of(weight))
        return linear_with_grad_accumulation_and_async_allreduce(
            x,
            weight.flatten(0, -2),
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=self.size > 1 and not self.sequence_parallel,
            sequence_parallel=self.sequence_parallel,
            tp_group=self.group,
        )

    def project_with(
        self, x: Tensor, linear: nn.Module, others: Callable[[Tensor], list[Tensor]]
    ) -> tuple[list[Tensor], Tensor]:
        weight = linear.get_parameter("weight")
        # an 8-bit product keeps its complete operand
        if not self.sequence_parallel or self._in_eight_bits(weight):
            whole = self.enter(x)
            y = linear(whole)
            return others(whole), y

        def made(x: Tensor) -> tuple[list[Tensor], Tensor]:
            full = self.enter(x)
            # The product is last, so that the recomputation ends at its inputs.
            return others(full), nn.functional.linear(full, weight)

        # no RNG state: the operations are deterministic
        found: tuple[list[Tensor], Tensor] = checkpoint(
            made, x, use_reentrant=False, preserve_rng_state=False
        )
        return found

    def leave(self, partial: Tensor) -> Tensor:
        if self.sequence_parallel:
            return mappings.reduce_scatter_to_sequence_parallel_region(partial, group=self.group)
        summed: Tensor = _Sum.apply(partial, self.group)
        return summed

    def gather(self, part: Tensor) -> Tensor:
        return mappings.gather_from_tensor_model_parallel_region(part, self.group)

    def share(self, full: Tensor) -> Tensor:
        shared: Tensor = _Share.apply(full, self.group)
        return shared

    def total(self, partial: Tensor) -> Tensor:
        return self.share(_Sum.apply(partial, self.group))

    def swiglu(self, packed: Tensor) -> Tensor:
        return fusions.swiglu(packed)

    def parameter(self, weight: Weight) -> nn.Parameter:
        """Return this rank's parameter with the attributes that Megatron sets on parameters.

        The optimizer, the gradient norm and checkpoints read these attributes.

        Raises:
            ValueError: if the number of ranks does not divide the weight's split dimension.
        """
        shape = list(weight.shape)
        if weight.split is not None:
            if shape[weight.split] % self.size:
                raise ValueError(
                    f"{self.size} tensor-parallel ranks do not divide a weight of shape "
                    f"{weight.shape}"
                )
            shape[weight.split] //= self.size
        made = parameter(weight, tuple(shape), self.dtype)
        if weight.split is not None:
            set_tensor_model_parallel_attributes(made, True, weight.split, 1)
        made.sequence_parallel = (  # type: ignore[attr-defined]
            weight.per_token and self.sequence_parallel
        )
        return made

    def linear(self, weight: nn.Parameter) -> nn.Linear:
        made = fp8.Fp8Linear if self._in_eight_bits(weight) else nn.Linear
        return made(weight.shape[1], weight.shape[0], bias=False, device="meta")

    def _in_eight_bits(self, weight: nn.Parameter) -> bool:
        return self.eight_bit and weight.spec.eight_bit  # type: ignore[attr-defined]
