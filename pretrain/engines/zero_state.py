"""ZeRO's weights and optimizer state as Megatron's sharded tensors and back: one parameter at a time, in the model's own shapes.

What is written is what the Megatron engine writes: ``<name>`` in the training precision, ``optimizer.state.<one of STATE>.<name>`` in fp32,
steps and rates in the common part. So either engine resumes the other's checkpoint, and any stage, DP and TP size resumes any other's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt import GPTModel

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = ("param", *MOMENTS)  # Megatron's names of the fp32 weight and of Adam's moments
PIECE = 2**28  # elements that are read at a time
Read = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Fragment:
    """What this rank holds of a flattened parameter: ``numel`` elements from ``start`` on, as views into the optimizer's fp32 tensors."""

    start: int
    numel: int
    tensors: dict[str, torch.Tensor]  # by STATE's names; flat, at least numel long


def sharded_weights(model: GPTModel, metadata: dict[str, Any]) -> dict[torch.nn.Parameter, ShardedTensor]:
    """Every parameter's place in the checkpoint; while the model's parameters are still whole."""
    found = {}
    for entry in model.sharded_state_dict(metadata=metadata).values():
        if isinstance(entry, ShardedTensor):
            found[entry.data] = replace(entry, data=None)
    missing = [name for name, parameter in model.named_parameters() if parameter not in found]
    assert not missing and len(found) == len(list(model.parameters())), missing
    return found


class ZeroState:
    """The state of one DeepSpeed engine of any stage.

    Collectives over the data-parallel group: all of its ranks call the same methods. Stage 0's optimizer is torch's own, over the model's
    parameters themselves.
    """

    def __init__(self, engine: Any, weights: dict[torch.nn.Parameter, ShardedTensor]) -> None:
        self.engine, self.weights = engine, weights
        self.stage: int = engine.zero_optimization_stage()
        self.group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.names = {parameter: name for name, parameter in engine.module.named_parameters()}

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The optimizer that does the arithmetic."""
        return self.engine.optimizer.optimizer if self.stage else self.engine.optimizer

    def prepare(self) -> None:
        """Give a fresh optimizer its zero state, which AdamW makes at its first step."""
        for flat in self._flat():
            state = self.adam.state[flat]
            if not state:
                state["step"] = self._step(0, flat)
                state.update({name: torch.zeros_like(flat) for name in MOMENTS})

    def saved(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """(weights, optimizer state) as sharded tensors on the host: whole tensors, each on one data-parallel rank, spread by size."""
        self.prepare()
        load = [0] * self.group.size()
        weights: dict[str, Any] = {}
        states: list[dict[str, Any]] = []
        for parameter, place in self.weights.items():
            owner = load.index(min(load))
            load[owner] += _numel(place)
            whole = self._gather(parameter, owner)
            if owner != self.group.rank():
                continue
            main = {replica: value.view(place.local_shape).cpu() for replica, value in whole.items()}
            here = replace(place, replica_id=_first_replica(place))
            weights[self.names[parameter]] = replace(here, data=main["param"].to(place.dtype))
            states.append({name: _named(here, name, value) for name, value in main.items()})
        return weights, states

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups without their parameters, with their step, as Megatron's optimizer stores them."""
        defaults = {key: value for key, value in torch.optim.AdamW([torch.zeros(1)]).param_groups[0].items() if key != "params"}
        steps = {float(self.adam.state[flat]["step"]) for flat in self._flat()}
        assert len(steps) == 1, steps
        ours = [{key: value for key, value in group.items() if key != "params"} for group in self.engine.optimizer.param_groups]
        return [{**defaults, **{k: v for k, v in group.items() if k != "bias_correction"}, "step": max(steps)} for group in ours]

    @torch.no_grad()
    def restore(self, read: Read, *, model_only: bool) -> None:
        """Read everything, PIECE elements at a time; without optimizer state the fp32 weights are the weights."""
        self.prepare()
        steps = 0.0
        for piece in self._pieces():
            asked: dict[str, Any] = {"model0": {}, "optimizer": {"param_state": {}}}
            for number, parameter in enumerate(piece):
                place = self.weights[parameter]
                asked["model0"][self.names[parameter]] = _empty(place)
                if not model_only:
                    asked["optimizer"]["param_state"][number] = {name: _empty(_named(place, name, None)) for name in STATE}
            given = read(asked)
            for number, parameter in enumerate(piece):
                weight = given["model0"][self.names[parameter]]
                state = {"param": weight.float()} if model_only else given["optimizer"]["param_state"][number]
                self._scatter(parameter, weight, state)
            if not model_only:
                steps = float(given["optimizer"]["optimizer"]["param_groups"][0]["step"])
        # A step of its own for every tensor: Adam adds to each.
        for flat in self._flat():
            self.adam.state[flat]["step"] = self._step(steps, flat)
        if not isinstance(self.adam, torch.optim.AdamW):
            self._replay(int(steps))

    def _replay(self, steps: int) -> None:
        """DeepSpeedCPUAdam's bias correction is a running product inside it, which a new one lacks: last bits would be others.

        So it does its steps again, on one number.
        """
        adam: Any = self.adam
        group = adam.param_groups[0]
        rest = (group["lr"], *group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
        weight, gradient, mean, square = (torch.zeros(1) for _ in range(4))
        for step in range(1, steps + 1):
            for _ in self._flat():
                adam.ds_opt_adam.adam_update(adam.opt_id, step, *rest, weight, gradient, mean, square)

    def _pieces(self) -> Iterator[list[torch.nn.Parameter]]:
        piece: list[torch.nn.Parameter] = []
        room = PIECE
        for parameter, place in self.weights.items():
            if piece and room < _numel(place):
                yield piece
                piece, room = [], PIECE
            piece.append(parameter)
            room -= _numel(place)
        yield piece

    def _flat(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates on this rank."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        if self.stage:
            # Stage 1 in bf16 is another optimizer of DeepSpeed's.
            names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
            return list(next(getattr(optimizer, name) for name in names if hasattr(optimizer, name)))
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _step(self, value: float, flat: torch.Tensor) -> Any:
        """Adam's count of steps: a number for DeepSpeed's, a tensor for torch's, which the fused one wants on the device."""
        if not isinstance(self.adam, torch.optim.AdamW):
            return int(value)
        return torch.tensor(value, device=flat.device if self.adam.defaults["fused"] else "cpu")

    def fragment(self, parameter: torch.nn.Parameter) -> Fragment | None:
        """This rank's part of a parameter, None where it holds none."""
        optimizer = self.engine.optimizer
        if not self.stage:
            flat, start, offset, numel = parameter, 0, 0, parameter.numel()
        elif self.stage == 3:
            group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            flat = optimizer.fp32_partitioned_groups_flat[group]
            start = numel * self.group.rank()
            numel = min(numel, _numel(self.weights[parameter]) - start)  # the last ranks hold padding
        else:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                return None
            flat = self._flat()[mapping.param_group_index]
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            offset = mapping.hp_fragment_address.start
        if numel <= 0:
            return None
        state = {"param": flat, **{name: self.adam.state[flat][name] for name in MOMENTS}}
        return Fragment(start, numel, {name: tensor.detach().view(-1).narrow(0, offset, numel) for name, tensor in state.items()})

    @torch.no_grad()
    def _gather(self, parameter: torch.nn.Parameter, owner: int) -> dict[str, torch.Tensor]:
        """The whole parameter's state on ``owner`` (a rank of the data-parallel group), flat; elsewhere what is there is of no use."""
        fragment, numel = self.fragment(parameter), _numel(self.weights[parameter])
        found = {}
        for name in STATE:
            whole = torch.zeros(numel, dtype=torch.float32, device=self.engine.device)
            if fragment is not None:
                whole[fragment.start : fragment.start + fragment.numel] = fragment.tensors[name].to(whole.device)
            if self.stage:
                # As integers: one rank's bits plus zeros are those bits, of -0.0 and NaN too.
                torch.distributed.reduce(whole.view(torch.int32), torch.distributed.get_global_rank(self.group, owner), group=self.group)
            found[name] = whole
        return found

    def _scatter(self, parameter: torch.nn.Parameter, weight: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        if self.stage == 3:
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(weight)
        else:
            parameter.data.copy_(weight)
        fragment = self.fragment(parameter)
        if fragment is not None:
            for name, value in state.items():
                fragment.tensors[name].copy_(value.reshape(-1)[fragment.start : fragment.start + fragment.numel])


def _numel(place: ShardedTensor) -> int:
    return torch.Size(place.local_shape).numel()


def _first_replica(place: ShardedTensor) -> Any:
    """The place's replica id as if this were the first data-parallel rank: the only one that has the tensor at all."""
    return (*place.replica_id[:-1], 0) if isinstance(place.replica_id, tuple) else place.replica_id


def _named(place: ShardedTensor, name: str, data: torch.Tensor | None) -> ShardedTensor:
    return replace(place, key=f"optimizer.state.{name}.{place.key}", data=data, dtype=torch.float32)


def _empty(place: ShardedTensor) -> ShardedTensor:
    return replace(place, data=torch.empty(place.local_shape, dtype=place.dtype))
