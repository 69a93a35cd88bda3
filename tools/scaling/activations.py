"""Train a model of one width for some steps with the real engine on one fixed batch, and record the
size of every activation.

Uses one process, whatever the layout of the run. Megatron-core's groups exist within `one_process`,
an engine within `measure`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fem_megatron.megatron import platform
from fem_megatron.state import Context
from fem_megatron.update import Update
from pretrain.config import RunConfig
from pretrain.data.datasets import Batch
from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
from pretrain.engines.megatron import MegatronEngine
from pretrain.report.observer import blocks_of
from pretrain.schedule import Schedule
from tools.scaling.verbs.coord_check import Record

ZIPF_SEED = 1


@contextmanager
def one_process(config: RunConfig) -> Iterator[None]:
    """Create Megatron-core's process groups for one process, and destroy them at exit.

    Any number of engines may be created within the context. ``config`` may be any run that uses
    one process.
    """
    own = not torch.distributed.is_initialized()
    if own:
        platform.initialize_distributed()
    try:
        initialize_model_parallel(config)
        yield
    finally:
        destroy_model_parallel()
        if own:
            torch.distributed.destroy_process_group()


def zipf_tokens(count: int, vocabulary: int) -> np.ndarray:
    """Return ``count`` token ids (int64) drawn independently by Zipf's law.

    The probability of id i is proportional to 1 / (i + 1). The seed is fixed, so every call with
    the same arguments returns the same ids.
    """
    weights = 1.0 / np.arange(1, vocabulary + 1)
    return (
        np.random.default_rng(ZIPF_SEED)
        .choice(vocabulary, size=count, p=weights / weights.sum())
        .astype(np.int64)
    )


def measure(variant: str, config: RunConfig, tokens: np.ndarray, steps: int) -> list[Record]:
    """Train the run's model for ``steps`` steps on one fixed batch and return its records.

    ``tokens`` contains at least batch * (length + 1) ids, of which the first are used. The run must
    use one process, with its batch as one micro-batch; call this within `one_process`. The result
    has one record per site and step, from step 0 (before training) to ``steps``; non-finite numbers
    are recorded unchanged.
    """
    model, train = config.model, config.train
    batch = one_batch(tokens, train.global_batch_size, config.data.seq_length)
    engine = MegatronEngine(config, Schedule.of(config))
    try:
        (chunk,) = engine.models
        assert model.vocab_size is not None
        sites, records = Sites(chunk, model.vocab_size), []
        for step in range(steps + 1):
            if step < steps:
                engine.train_step(iter([batch]), (step + 1) * train.global_batch_size)
            else:
                engine.evaluate(iter([batch]), 1)
            of_this = (variant, model.parametrization, model.hidden_size, train.seed, step)
            records += [Record(*of_this, site, *numbers) for site, numbers in sites.read().items()]
        sites.remove()
    finally:
        engine.close()
    return records


def one_batch(tokens: np.ndarray, sequences: int, length: int) -> Batch:
    """Return the first sequences * (length + 1) ``tokens`` as one micro-batch on this machine's
    device.
    """
    rows = (
        torch.from_numpy(tokens[: sequences * (length + 1)])
        .view(sequences, length + 1)
        .to(platform.device())
    )
    positions = torch.arange(length, device=rows.device).expand(sequences, -1)
    return {
        "tokens": rows[:, :-1].contiguous(),
        "labels": rows[:, 1:].contiguous(),
        "loss_mask": torch.ones(sequences, length, device=rows.device),
        "position_ids": positions,
    }


class Sites:
    """Forward hooks that collect the output of the last forward pass at each site of a model.

    The outputs of the first pass are stored too, as the start of all changes.
    """

    def __init__(self, chunk: Any, vocabulary: int) -> None:
        self.now: dict[str, Tensor] = {}
        self.start: dict[str, Tensor] = {}
        blocks = blocks_of([chunk])
        entered = (("embedding", blocks[min(blocks)]), ("residual", chunk.decoder.final_layernorm))
        self.handles = [
            module.register_forward_pre_hook(partial(self._entered, site), with_kwargs=True)
            for site, module in entered
        ]
        for number, block in sorted(blocks.items()):
            site = f"layer_{number:02}" + ("/iteration_{:02}" if block.recurrence > 1 else "")
            parts = (("mixer", block.mixer), ("mlp", block.mlp))
            self.handles += [
                update.register_forward_hook(partial(self._added, f"{site}/{part}"))
                for part, update in parts
                if update is not None
            ]
        self.handles.append(
            chunk.output_layer.register_forward_hook(partial(self._logits, vocabulary))
        )

    def read(self) -> dict[str, tuple[float, float]]:
        """Return site -> (scale, change) of the last forward pass.

        Both are root mean squares: of the output, and of its difference from the outputs that the
        first call of `read` found.
        """
        now = self.now
        self.start = self.start or now
        self.now = {}
        return {site: (_rms(value), _rms(value - self.start[site])) for site, value in now.items()}

    def remove(self) -> None:
        """Remove the hooks from the model."""
        for handle in self.handles:
            handle.remove()

    def _keep(self, site: str, value: Tensor) -> None:
        self.now[site] = value.detach().float().clone()

    def _entered(
        self, site: str, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._keep(site, arguments[0] if arguments else next(iter(named.values())))

    def _added(
        self, site: str, update: nn.Module, arguments: tuple[Tensor, Context], after: Tensor
    ) -> None:
        x, context = arguments
        assert isinstance(update, Update)
        # Subtract the start of the update: CEM may step from the normalised stream, which would
        # hide the size of the steps. The stream of YuriiFormer also carries velocities.
        tokens = after.detach()[..., : update.hidden]
        self._keep(site.format(context.iteration), tokens - update.start(x.detach()).detach())

    def _logits(
        self, vocabulary: int, layer: nn.Module, arguments: Any, output: tuple[Tensor, Any]
    ) -> None:
        self._keep("logits", output[0][..., :vocabulary])


def _rms(value: Tensor) -> float:
    return float(value.double().square().mean().sqrt())
