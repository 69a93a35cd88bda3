"""Convert ZeRO's weights and optimizer state to Megatron's sharded tensors and back.

The tensors have the model's own shapes. The format is that of the Megatron engine: ``<name>`` in
the training precision, ``optimizer.state.<one of STATE>.<name>`` in fp32, steps and learning rates
in the common part. Therefore each engine can resume the other's checkpoints, and a run can resume
with another ZeRO stage, DP size or TP size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from fem_megatron.config import ModelConfig
from pretrain.engines.building import is_muons
from pretrain.engines.muon import Muon, Part
from pretrain.engines.sharding import (
    MOMENTS,
    Held,
    Read,
    data_parallel_group,
    in_rounds,
    largest_part,
    only_here,
    optimizer_state,
    parts,
    read_optimizer,
)

PIECE = 2**28  # number of elements of full weights that are read at a time


class ZeroState:
    """Weights and optimizer state of a DeepSpeed engine at any ZeRO stage.

    Methods are collective: all ranks of the data-parallel group must call the same ones. At stage 0
    the optimizer is torch's, and it updates the model's parameters directly.
    """

    def __init__(self, engine: Any, weights: dict[torch.nn.Parameter, ShardedTensor]) -> None:
        self.engine, self.weights = engine, weights
        self.stage: int = engine.zero_optimization_stage()
        self.names = {parameter: name for name, parameter in engine.module.named_parameters()}

    @property
    def adam(self) -> torch.optim.Optimizer:
        """The inner optimizer, which computes the update."""
        return self.engine.optimizer.optimizer if self.stage else self.engine.optimizer

    def prepare(self) -> None:
        """Initialize the optimizer's missing state with zeros.

        AdamW would otherwise do this at its first step.
        """
        for flat in self.flat():
            state = self.adam.state[flat]
            if not state:
                moments = self.adam.moments(flat) if isinstance(self.adam, Muon) else MOMENTS
                state["step"] = self._step(0, flat)
                state.update({name: torch.zeros_like(flat) for name in moments})

    def connect(self, model: ModelConfig) -> None:
        """Give Muon the parts of its weights that this rank updates; no effect with AdamW.

        All ranks must call it together.
        """
        if isinstance(self.adam, Muon):
            numbered = enumerate(parameter for parameter in self.names if is_muons(parameter))
            parts = [
                Part(number, parameter, *place)
                for number, parameter in numbered
                if (place := self._part(parameter))
            ]
            self.adam.connect(model, parts, all_parts=None if self.stage else [parts])

    def saved(self) -> dict[str, Any]:
        """Return this rank's part of the weights and the optimizer state as sharded tensors.

        The weights are the fp32 weights, cast to the training precision.
        """
        self.prepare()
        held = {parameter: one for parameter in self.weights if (one := self.held(parameter))}
        largest = largest_part(held.values())
        weights = {
            self.names[parameter]: parts(
                one.place, one.start, one.tensors["param"].to(one.place.dtype), largest
            )
            for parameter, one in held.items()
        }
        return {"model0": weights, "optimizer": optimizer_state(held.values(), self.groups())}

    def groups(self) -> list[dict[str, Any]]:
        """Return the optimizer's parameter groups in the form that Megatron's optimizer stores.

        Each group has its step count and no parameters.
        """
        steps = {float(self.adam.state[flat]["step"]) for flat in self.flat()}
        assert len(steps) == 1, steps
        groups, defaults = [], torch.optim.AdamW([torch.zeros(1)]).param_groups[0]
        for group in self.engine.optimizer.param_groups:
            stored = {**defaults, **group}
            stored["step"] = max(steps)
            del stored["params"]
            stored.pop("bias_correction", None)
            groups.append(stored)
        return groups

    @torch.no_grad()
    def restore(self, read: Read, *, model_only: bool) -> None:
        """Read the weights and the optimizer state of a checkpoint.

        About PIECE elements of the weights are read at a time. The optimizer state is read in
        place.

        model_only: read only the weights, and also copy them to the fp32 weights.
        """
        self.prepare()
        sizes = [(parameter, _numel(place)) for parameter, place in self.weights.items()]
        for piece in in_rounds(sizes, PIECE):
            given = read(
                {
                    "model0": {
                        self.names[parameter]: _empty(self.weights[parameter])
                        for parameter in piece
                    }
                }
            )
            for parameter in piece:
                self._take(parameter, given["model0"][self.names[parameter]], with_main=model_only)
        if model_only:
            return
        given = read_optimizer(read, filter(None, map(self.held, self.weights)))
        steps = float(given["optimizer"]["optimizer"]["param_groups"][0]["step"])
        # Every tensor needs a separate step tensor: Adam increments each.
        for flat in self.flat():
            self.adam.state[flat]["step"] = self._step(steps, flat)
        if not isinstance(self.adam, torch.optim.AdamW):
            self._replay(int(steps))

    def _replay(self, steps: int) -> None:
        """Restore the bias correction of DeepSpeedCPUAdam by repeating its steps.

        The steps are taken on one-element tensors. The correction is a running product inside the
        optimizer, which is not in the checkpoint. Without the exact product, the last bits of every
        update would differ.
        """
        adam: Any = self.adam
        group = adam.param_groups[0]
        rest = (
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            group["bias_correction"],
        )
        weight, gradient, mean, square = (torch.zeros(1) for _ in range(4))
        for step in range(1, steps + 1):
            for _ in self.flat():
                adam.ds_opt_adam.adam_update(
                    adam.opt_id, step, *rest, weight, gradient, mean, square
                )

    def flat(self) -> list[torch.Tensor]:
        """Return the flat tensors of this rank that the optimizer updates."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        if self.stage:
            # DeepSpeed has a different optimizer for stage 1 in bf16.
            names = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition")
            return list(
                next(getattr(optimizer, name) for name in names if hasattr(optimizer, name))
            )
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _step(self, value: float, flat: torch.Tensor) -> Any:
        """Return a value as the optimizer's step count.

        It is an int for DeepSpeed's Adam, and a tensor on the parameters' device for torch's fused
        Adam.
        """
        if not isinstance(self.adam, torch.optim.AdamW):
            return int(value)
        return torch.tensor(value, dtype=torch.float32, device=flat.device)

    def held(self, parameter: torch.nn.Parameter) -> Held | None:
        """Return this rank's part of a parameter, or None if the rank has no part of it."""
        part, place = self._part(parameter), self.weights[parameter]
        if part is None:
            return None
        flat, *extent = part
        place = only_here(place) if self.stage else place
        return Held.of(place, flat, self.adam.state[flat], flat.grad, *extent)

    def updating(self, clipped: float) -> Iterator[Held]:
        """Yield this rank's parts of the parameters that the optimizer is about to update.

        During an update, DeepSpeed passes the optimizer one group at a time.

        clipped: factor by which DeepSpeed has already multiplied the gradients.
        """
        given = {id(flat) for group in self.adam.param_groups for flat in group["params"]}
        for parameter in self.weights:
            part = self._part(parameter)
            if part and id(part[0]) in given and (held := self.held(parameter)):
                yield replace(held, clipped=clipped)

    def _part(self, parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int, int, int] | None:
        """Return the location of this rank's part of a parameter, or None if it has none.

        Returns (the optimizer's tensor that contains it, its start in the flattened parameter, its
        size, its offset in the optimizer's tensor).
        """
        optimizer, place = self.engine.optimizer, self.weights[parameter]
        if not self.stage:
            flat = parameter
            start = 0
            offset = 0
            numel = parameter.numel()
        elif self.stage == 3:
            group, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
            flat = optimizer.fp32_partitioned_groups_flat[group]
            start = numel * data_parallel_group().rank()
            numel = min(numel, _numel(place) - start)  # the last ranks have padding
        else:
            mapping = parameter._hp_mapping  # type: ignore[attr-defined]
            if mapping is None:
                return None
            flat = self.flat()[mapping.param_group_index]
            start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
            offset = mapping.hp_fragment_address.start
        return (flat, start, numel, offset) if numel > 0 else None

    def _take(
        self, parameter: torch.nn.Parameter, weight: torch.Tensor, *, with_main: bool
    ) -> None:
        """Copy a full weight into the model's parameter.

        with_main: also copy it into this rank's fp32 weights.
        """
        if self.stage == 3:
            from deepspeed.runtime.zero import GatheredParameters

            with GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(weight)
        else:
            parameter.data.copy_(weight)
        if with_main and (held := self.held(parameter)):
            held.tensors["param"].copy_(weight.reshape(-1)[held.start : held.start + held.numel])


def _numel(place: ShardedTensor) -> int:
    return torch.Size(place.local_shape).numel()


def _empty(place: ShardedTensor) -> ShardedTensor:
    return replace(place, data=torch.empty(place.local_shape, dtype=place.dtype))
