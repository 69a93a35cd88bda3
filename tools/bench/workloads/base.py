"""What a workload is: an operation's inputs at production shapes, the call, and what it must at least compute. Nothing is timed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Size:
    """Sequences, tokens of each, heads, a head's width of queries and keys, and of values."""

    batch: int
    tokens: int
    heads: int
    key: int
    value: int

    @property
    def pairs(self) -> float:
        """Query-key pairs of all heads and sequences under a causal mask."""
        return self.batch * self.heads * self.tokens * (self.tokens + 1) / 2

    @property
    def rows(self) -> float:
        """Tokens of all heads and sequences."""
        return float(self.batch * self.heads * self.tokens)

    def wider(self, factor: int) -> Size:
        """The same with values ``factor`` times as wide."""
        return replace(self, value=factor * self.value)


class Draw:
    """Random leaves of one type on one device; those in float take gradients. Equal seeds give equal numbers."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device, self.dtype = device, dtype
        self.rng = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, change: Callable[[Tensor], Tensor] = lambda x: x, wide: bool = False) -> Tensor:
        """change(normal(0, 1)) of this shape; wide: float32 whatever the type is."""
        drawn = torch.randn(shape, generator=self.rng, device=self.device)
        return change(drawn).to(torch.float32 if wide else self.dtype).requires_grad_()

    def heads(self, size: Size, width: int, change: Callable[[Tensor], Tensor] = lambda x: x, *, wide: bool = False) -> Tensor:
        """[batch, heads, tokens, width] over memory laid out as the layers have it, [tokens, batch, heads, width]."""
        drawn = torch.randn(size.tokens, size.batch, size.heads, width, generator=self.rng, device=self.device)
        return change(drawn).to(torch.float32 if wide else self.dtype).permute(1, 2, 0, 3).requires_grad_()

    def packed(self, *shape: int, parts: int) -> tuple[Tensor, ...]:
        """``parts`` tensors of this shape whose numbers lie side by side, as a projection's slices do."""
        drawn = torch.randn(*shape, parts, generator=self.rng, device=self.device).to(self.dtype)
        return tuple(part.requires_grad_() for part in drawn.unbind(-1))

    def steps(self, size: Size, change: Callable[[Tensor], Tensor], *, wide: bool = False) -> Tensor:
        """[batch, heads, tokens], one number a token and head."""
        return (
            change(torch.randn(size.batch, size.heads, size.tokens, generator=self.rng, device=self.device))
            .to(torch.float32 if wide else self.dtype)
            .requires_grad_()
        )


@dataclass(frozen=True)
class Baseline:
    """What an operation is compared with. engine: the implementation of ours that runs on the same engine, where there is one.

    lacks(device): why it cannot run there, or None.
    """

    name: str
    inputs: Callable[[Draw, Size], Inputs]
    call: Callable[[Inputs], Outputs]
    flops: Callable[[Size], tuple[float, float]]
    lacks: Callable[[torch.device], str | None] = lambda device: None
    engine: str | None = None


@dataclass(frozen=True)
class Workload:
    """An operation as a layer of this project calls it.

    name: of the workload; op: of the operation (``kernels.implementations``). call(inputs, implementation): its outputs.
    flops(size): matrix FLOPs that a forward, and a backward pass cannot do without (a multiply-add is two); 0: no matrix products.
    heads, key, value: the 1.3B model's; small: a CPU's. baselines: name in ``BASELINES`` -> the size that is the same amount of reading.
    """

    name: str
    op: str
    about: str
    inputs: Callable[[Draw, Size], Inputs]
    call: Callable[[Inputs, str], Outputs]
    flops: Callable[[Size], tuple[float, float]]
    heads: int = 16
    key: int = 128
    value: int = 64
    small: tuple[int, int, int] = (2, 32, 16)
    baselines: Mapping[str, Callable[[Size], Size]] = field(default_factory=dict)

    def size(self, tokens: int, total: int) -> Size:
        """The production shape: as many sequences of ``tokens`` as make ``total``, at least one."""
        return Size(max(1, total // tokens), tokens, self.heads, self.key, self.value)

    def small_size(self, tokens: int) -> Size:
        """A CPU's shape."""
        return Size(1, tokens, *self.small)


def no_products(size: Size) -> tuple[float, float]:
    """Of operations without matrix products."""
    return 0.0, 0.0


def per_pair(widths: Callable[[Size], float]) -> Callable[[Size], tuple[float, float]]:
    """Attention: 2 FLOPs for each of ``widths`` numbers of a pair; the backward, which makes the scores again, 2.5 times as many."""
    return lambda size: (2 * size.pairs * widths(size), 5 * size.pairs * widths(size))


def per_token(products: Callable[[Size], float]) -> Callable[[Size], tuple[float, float]]:
    """A recurrence: 2 FLOPs for each of ``products`` products of a token; the backward has two for each."""
    return lambda size: (2 * size.rows * products(size), 4 * size.rows * products(size))
