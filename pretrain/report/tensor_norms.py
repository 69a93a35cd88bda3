"""Compute the norms of every parameter's weight, gradient, update and moments over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch import Tensor

from fem_megatron.megatron import platform
from fem_megatron.megatron.model import global_name
from pretrain.engines import Engine, unobserved
from pretrain.engines.sharding import MOMENTS, Held

PREFIX = "tensors/"
KINDS = ("weight", "gradient", "update", *MOMENTS)


@dataclass
class TensorNorms:
    """Norms of all parameters at every ``interval``-th step (0: never).

    It is a `pretrain.report.loggers.Watch`. The values are named
    ``tensors/<name of the parameter>/<one of KINDS>``. They are the norms of the step's gradient,
    which is the mean over its tokens before clipping; of the weight after the step; of the update
    |w_after - w_before| of the optimizer's fp32 weight; and of the optimizer's moments after the
    step.

    During the step a rank has a copy of the weights that it updates. The squares of a part are
    summed in fp32: numbers below 1e-19 count as zero.
    """

    engine: Engine
    interval: int
    rows: dict[str, int] = field(default_factory=dict)  # see `_rows`

    @contextmanager
    def __call__(self, step: int) -> Iterator[dict[str, float]]:
        values: dict[str, float] = {}
        if not self.interval or step % self.interval:
            yield values
            return
        self.rows = self.rows or _rows(self.engine)
        sums = _Sums(self.rows)
        self.engine.around_update = sums
        try:
            yield values
        finally:
            self.engine.around_update = unobserved
        values |= {PREFIX + name: value for name, value in sums.norms().items()}


class _Sums:
    """Sums of squares of tensor elements over all ranks, each element counted on one rank.

    An instance is an `AroundUpdate`: a context manager around the optimizer's update.
    """

    def __init__(self, rows: dict[str, int]) -> None:
        self.rows = rows
        # Each sum has its number of elements next to it: 0 for a moment that does not exist.
        self.sums = torch.zeros(
            len(rows), len(KINDS), 2, dtype=torch.float64, device=platform.device()
        )

    @contextmanager
    def __call__(self, parts: Callable[[], Iterable[Held]]) -> Iterator[None]:
        mine = _spoken_for(parts())
        before = [_param(one).clone() for one in mine]
        self._add("gradient", mine, [one.gradient for one in mine])
        yield
        mine = _spoken_for(parts())
        self._add("weight", mine, [_param(one) for one in mine])
        for old, one in zip(before, mine, strict=True):
            old.sub_(_param(one))
        self._add("update", mine, before)
        for name in MOMENTS:
            self._add(name, mine, [one.tensors.get(name) for one in mine])

    def norms(self) -> dict[str, float]:
        """Return ``<name>/<kind>`` -> norm on rank 0, {} on other ranks.

        The host reads the device once. All ranks must call it together.
        """
        torch.distributed.all_reduce(self.sums)
        if torch.distributed.get_rank():
            return {}
        norms = {}
        for name, row in zip(self.rows, self.sums.tolist(), strict=True):
            for kind, (square, count) in zip(KINDS, row, strict=True):
                if count:
                    norms[f"{name}/{kind}"] = square**0.5
        return norms

    @torch.no_grad()
    def _add(self, kind: str, parts: Iterable[Held], tensors: Iterable[Tensor | None]) -> None:
        """Add the squared norms of the parts' tensors to the sums of ``kind``.

        None: the part has no tensor of this kind. Gradients are first divided by the factor with
        which they were clipped.
        """
        found = [
            (part, tensor[: part.numel])
            for part, tensor in zip(parts, tensors, strict=True)
            if tensor is not None
        ]
        if not found:
            return
        device = self.sums.device
        each = torch._foreach_norm([tensor for _, tensor in found])
        norms = torch.stack(each).to(device, torch.float64)
        facts = [
            (self.rows[part.place.key], part.clipped if kind == "gradient" else 1.0, part.numel)
            for part, _ in found
        ]
        rows, factors, counts = torch.tensor(facts, dtype=torch.float64, device=device).unbind(1)
        self.sums[:, KINDS.index(kind)].index_add_(
            0, rows.long(), torch.stack(((norms / factors).square(), counts), dim=1)
        )


def _spoken_for(parts: Iterable[Held]) -> list[Held]:
    """Return the parts that this rank must report.

    If several ranks have the same part, only one of them reports it.
    """
    return [one for one in parts if is_main_replica(one.place.replica_id)]


def _param(held: Held) -> Tensor:
    return held.tensors["param"][: held.numel]


def _rows(engine: Engine) -> dict[str, int]:
    """Return parameter name -> row number for every parameter of the model.

    The result is the same on every rank. All pipeline stages must call it together.
    """
    mine = [
        global_name(chunk, name) for chunk in engine.models for name, _ in chunk.named_parameters()
    ]
    group = parallel_state.get_pipeline_model_parallel_group()
    stages: list[list[str]] = [[]] * group.size()
    torch.distributed.all_gather_object(stages, mine, group=group)
    names = dict.fromkeys(name for stage in stages for name in stage)
    return {name: number for number, name in enumerate(names)}
