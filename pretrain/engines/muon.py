"""Muon (Jordan et al. 2024; torch.optim.Muon) for linear maps, AdamW for all other weights.

The update of a linear map is its orthogonalized momentum.

A weight's shape defines its linear maps (``fem_megatron.shape.Weight.maps``). A packed projection
has one map for each slice of each head. A rank updates full parameters, tensor-parallel parts of
them, or ranges of flattened parameters (Megatron's or ZeRO's). These elements are divided into
stretches; a stretch is a rank's contiguous part of one map.

A map that is completely on one rank needs no transfer. A map that is divided among ranks has one of
them as its owner. The owner receives the other ranks' stretches, orthogonalizes the map and sends
the results back. An element is therefore sent at most twice, in the dtype of the iteration. At most
ROUND elements per rank are in progress at a time.

torch's own iteration computes only in bfloat16 and on one matrix: fp32 runs would differ between
layouts by its rounding, and each map of a head would be a separate product. Megatron-core's Muon
needs a package that is not available for Python 3.11, and refuses the distributed optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.megatron import platform
from fem_megatron.mup import update_scale
from fem_megatron.shape import Weight
from pretrain.config import OptimizerConfig
from pretrain.engines.sharding import in_rounds
from pretrain.plan.muon import ROUND, STEPS, newton_schulz_flops

COEFFICIENTS, EPS = (3.4445, -4.7750, 2.0315), 1e-7  # values of torch.optim.Muon
Group = torch.distributed.ProcessGroup


def orthogonal(x: Tensor) -> Tensor:
    """Return approximately U V^T for each matrix x = U S V^T of a batch.

    x: [n, rows, columns] in any dtype. The function takes five quintic Newton-Schulz steps. The
    result has singular values from 0.7 to 1.2.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@dataclass(frozen=True)
class Part:
    """The part of a parameter that this rank updates.

    It consists of ``numel`` elements of the flattened parameter from ``start`` on.

    number: index of the parameter, equal on all ranks of this pipeline stage. flat: the optimizer's
    tensor that contains the part, from its element ``offset`` on.
    """

    number: int
    parameter: torch.nn.Parameter
    flat: Tensor
    start: int
    numel: int
    offset: int = 0


@dataclass(frozen=True)
class Stretch:
    """Contiguous part of a linear map that one rank updates, described equally on all ranks.

    map: (parameter, copy, first row). The copy is the tensor-parallel rank for a weight that each
    rank has completely, else 0. shape: of the full map. box: the tensor-parallel rank's part of the
    map as (row, column, rows, columns). The stretch consists of the elements
    [start, start + numel) of the flattened box.
    """

    map: tuple[int, int, int]
    shape: tuple[int, int]
    box: tuple[int, int, int, int]
    start: int
    numel: int


def stretches(part: Part, rank: int) -> Iterator[tuple[Stretch, int]]:
    """Yield (stretch, its offset in the part) for each map that a part of a parameter overlaps.

    rank: the tensor-parallel rank that has the part.
    """
    spec: Weight = part.parameter.spec  # type: ignore[attr-defined]
    rows, columns = part.parameter.shape[-2:]
    split = None if spec.split is None else spec.split - len(spec.shape)
    assert split in (None, -1, -2), "a leading index is not split"
    row, column = (rank * size if split == dim else 0 for size, dim in ((rows, -2), (columns, -1)))
    for first, size in spec.linear_maps():
        lead, top = divmod(first, spec.shape[-2])
        here = range(max(top, row), min(top + size, row + rows))
        begin = (lead * rows + here.start - row) * columns
        low = max(begin, part.start)
        high = min(begin + len(here) * columns, part.start + part.numel)
        if here and low < high:
            box = (here.start - top, column, len(here), columns)
            key = (part.number, rank if split is None else 0, first)
            yield (
                Stretch(key, (size, spec.shape[-1]), box, low - begin, high - low),
                low - part.start,
            )


@dataclass(frozen=True)
class LocalStretch:
    """Location of a stretch on this rank, and the scale of its update.

    The stretch consists of the elements [low, high) of the optimizer's tensor ``flat``.
    """

    flat: Tensor
    low: int
    high: int
    scale: float

    def of(self, tensor: Tensor) -> Tensor:
        """Return the elements [low, high) of ``tensor``, which has the size of ``flat``."""
        return tensor.view(-1)[self.low : self.high]


class Muon(torch.optim.AdamW):
    """Muon for the groups marked ``muon``, AdamW for the other groups.

    Call ``connect`` before the first step. Muon's state is AdamW's first moment, ``exp_avg``,
    written B, with gradient G: B = momentum B + (1 - momentum) G. The update is
    orthogonal((1 - momentum) G + momentum B), which is Nesterov's form. dtype: of the
    Newton-Schulz iteration. All ranks of the group given to ``connect`` must take each step
    together.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], config: OptimizerConfig, dtype: torch.dtype
    ) -> None:
        betas = (config.beta1, config.beta2)
        super().__init__(
            [{"params": []}], config.lr, betas, config.eps, config.weight_decay, fused=True
        )
        # Set directly, since torch's constructor refuses views, which Megatron's ranges of fp32
        # weights are.
        self.param_groups = [
            {**self.defaults, "muon": False, **group, "fused": True} for group in groups
        ]
        self.momentum, self.dtype = config.momentum, dtype
        self.mine: dict[Stretch, LocalStretch] = {}
        self.exchange = _Exchange([[]], 0, None)

    def moments(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the names of the moments that the optimizer has for one of its tensors."""
        found = any(
            tensor is one for group in self.param_groups if group["muon"] for one in group["params"]
        )
        return ("exp_avg",) if found else ("exp_avg", "exp_avg_sq")

    def prepare(self) -> None:
        """Create the initial state of every tensor that has none."""
        for group in self.param_groups:
            for tensor in group["params"]:
                state = self.state[tensor]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                    state.update({name: torch.zeros_like(tensor) for name in self.moments(tensor)})

    def connect(
        self,
        model: ModelConfig,
        parts: Sequence[Part],
        *,
        all_parts: Sequence[Sequence[Part]] | None = None,
    ) -> None:
        """Set this rank's parts of Muon's weights, and plan the exchange between the ranks.

        all_parts: the parts of each data-parallel rank (``flat`` of other ranks is not read). A
        single entry means that all data-parallel ranks have the same parts and each computes all of
        them. None: the parts are gathered from the ranks that share these weights; all ranks must
        call it together.
        """
        rank = parallel_state.get_tensor_model_parallel_rank()
        group = parallel_state.get_tensor_model_parallel_group()
        sizes = range(group.size())
        if all_parts is None or len(all_parts) > 1:
            # Tensor-parallel ranks are adjacent in this group.
            group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        self.prepare()
        self.mine = {}
        for part in parts:
            spec: Weight = part.parameter.spec  # type: ignore[attr-defined]
            for stretch, begin in stretches(part, rank):
                low, scale = part.offset + begin, update_scale(model, spec, stretch.shape[0])
                self.mine[stretch] = LocalStretch(part.flat, low, low + stretch.numel, scale)
        table: list[Any] = [None] * group.size()
        if all_parts is None:
            torch.distributed.all_gather_object(table, list(self.mine), group=group)
        else:
            table = []
            for some in all_parts:
                for number in sizes:
                    table.append([one for part in some for one, _ in stretches(part, number)])
        self.exchange = _Exchange(table, group.rank(), group)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update each group by its method, Muon or AdamW.

        DeepSpeed's ZeRO passes one group at a time.
        """
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"] and all(tensor.grad is not None for tensor in group["params"]):
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        for tensor in group["params"]:
            state = self.state[tensor]
            state["step"] += 1
            state["exp_avg"].lerp_(tensor.grad, 1 - self.momentum)
            tensor.mul_(1 - group["lr"] * group["weight_decay"])
        for some in self.exchange.rounds:
            directions = {one: self._direction(self.mine[one]) for one in some[self.exchange.rank]}
            updates = self.exchange.made(
                some, directions, torch.empty(0, dtype=self.dtype, device=platform.device())
            )
            for one in directions:
                place = self.mine[one]
                place.of(place.flat.detach()).add_(updates[one], alpha=-group["lr"] * place.scale)

    def _direction(self, place: LocalStretch) -> Tensor:
        assert place.flat.grad is not None
        momentum = self.state[place.flat]["exp_avg"]  # loading a checkpoint may replace it
        return place.of(place.flat.grad).lerp(place.of(momentum), self.momentum).to(self.dtype)


Key = tuple[int, int, int]


class _Exchange:
    """Assignment of each map to an owner rank, and the transfers to and from the owners.

    ``table``: the stretches of each rank, the same list on every rank of ``group``.
    """

    def __init__(self, table: list[list[Stretch]], rank: int, group: Group | None) -> None:
        self.rank = rank
        self.group = group
        self.size = len(table)
        shapes = {one.map: one.shape for some in table for one in some}
        holders: dict[Key, set[int]] = {}
        for number, some in enumerate(table):
            for one in some:
                holders.setdefault(one.map, set()).add(number)
        work = {key: newton_schulz_flops(*shape) for key, shape in shapes.items()}
        load, self.owner = [0.0] * self.size, dict[Key, int]()
        # Assign the maps that are on one rank first, then the other maps, the largest first. The
        # owner is the rank with the least work among the ranks that have stretches of the map.
        for key in sorted(shapes, key=lambda key: (len(holders[key]) > 1, -work[key], key)):
            self.owner[key] = min(holders[key], key=lambda number: (load[number], number))
            load[self.owner[key]] += work[key]
        self.cut = {key for key, found in holders.items() if len(found) > 1}
        sizes = [(key, math.prod(shapes[key])) for key in sorted(shapes)]
        self.rounds = list[list[list[Stretch]]]()  # of each round: the stretches of each rank
        for found in in_rounds(sizes, ROUND * self.size):
            keys = set(found)
            self.rounds.append([[one for one in some if one.map in keys] for some in table])

    def made(
        self, some: list[list[Stretch]], mine: dict[Stretch, Tensor], empty: Tensor
    ) -> dict[Stretch, Tensor]:
        """Orthogonalize the maps of a round and return this rank's stretches with their updates.

        some: the stretches of each rank in this round. mine: this rank's stretches with their
        momentum. Tensors have the dtype and device of ``empty``.
        """
        others = [number for number in range(self.size) if number != self.rank]
        theirs = {
            number: [one for one in some[number] if self.owner[one.map] == self.rank]
            for number in others
        }
        sent = {
            number: [one for one in some[self.rank] if self.owner[one.map] == number]
            for number in others
        }
        kept = [one for one in mine if self.owner[one.map] == self.rank]
        moves = any(one.map in self.cut for found in some for one in found)
        came = self._all_to_all(mine, sent, theirs, empty) if moves else {}
        maps = _assembled({one: mine[one] for one in kept} | came)
        by_shape: dict[torch.Size, list[Key]] = {}
        for key, full in maps.items():
            by_shape.setdefault(full.shape, []).append(key)
        for keys in by_shape.values():
            maps |= zip(keys, orthogonal(torch.stack([maps[key] for key in keys])), strict=True)
        made = {one: _cut(maps[one.map], one) for one in (*kept, *came)}
        return made | (self._all_to_all(made, theirs, sent, empty) if moves else {})

    def _all_to_all(
        self, given: dict[Stretch, Tensor], sent: _Ways, wanted: _Ways, empty: Tensor
    ) -> dict[Stretch, Tensor]:
        """Send the ``given`` tensors, and return the received stretches.

        ``sent`` and ``wanted`` list the stretches to send to and to receive from each rank.
        """
        out_sizes, back_sizes = self._sizes(sent), self._sizes(wanted)
        out = torch.cat([empty, *(given[one] for number in sorted(sent) for one in sent[number])])
        back = empty.new_empty(sum(back_sizes))
        torch.distributed.all_to_all_single(back, out, back_sizes, out_sizes, group=self.group)
        order = [one for number in sorted(wanted) for one in wanted[number]]
        return dict(zip(order, back.split([one.numel for one in order]), strict=True))

    def _sizes(self, ways: _Ways) -> list[int]:
        """Return the number of elements in the stretches of each rank."""
        return [sum(one.numel for one in ways.get(number, ())) for number in range(self.size)]


_Ways = dict[int, list[Stretch]]  # rank -> stretches to send to it or to receive from it


def _assembled(found: dict[Stretch, Tensor]) -> dict[Key, Tensor]:
    """Return full maps [rows, columns], each assembled from all of its stretches."""
    maps: dict[Key, Tensor] = {}
    boxes: dict[tuple[Key, tuple[int, ...]], Tensor] = {}
    for one, tensor in found.items():
        if one.numel == math.prod(one.shape):
            maps[one.map] = tensor.view(one.shape)
            continue
        if one.map not in maps:
            maps[one.map] = tensor.new_empty(one.shape)
        if (one.map, one.box) not in boxes:
            boxes[one.map, one.box] = tensor.new_empty(one.box[2] * one.box[3])
        boxes[one.map, one.box][one.start : one.start + one.numel] = tensor
    for (key, (row, column, rows, columns)), box in boxes.items():
        maps[key][row : row + rows, column : column + columns] = box.view(rows, columns)
    return maps


def _cut(full: Tensor, one: Stretch) -> Tensor:
    """Return the elements of the stretch ``one`` of a full map as a flat tensor."""
    row, column, rows, columns = one.box
    return full[row : row + rows, column : column + columns].reshape(-1)[
        one.start : one.start + one.numel
    ]
