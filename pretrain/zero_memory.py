"""Memory of one rank under DeepSpeed's ZeRO, from the configuration alone, in bytes. No torch: the terms are what its stages keep.

P parameters of the rank, d data-parallel ranks, e bytes of the training precision, b elements of a reduction bucket. Everything that ZeRO
updates is fp32: a copy of the weights and Adam's two moments, 12 P / d, in fp32 training too (stage 0 has the moments alone, 8 P).

    stage 0    weights eP          gradients 4P                          bucket 4b
    stage 1    weights eP          gradients 4P (+ eP in bf16) + 4P/d    bucket 4b
    stage 2    weights eP          gradients 4P/d, twice                 bucket eb
    stage 3    weights eP/d + eL   gradients 4P/d, twice                 bucket eb; L: elements that are whole at once

L is the smaller of P and max_live_parameters (and max_reuse_distance), beyond which DeepSpeed gathers a parameter anew for every use.
Offload moves the 12 P / d and one 4 P / d of gradients to the host, offloaded parameters also their e P / d; a bucket in between stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import EngineConfig, RunConfig

WIDE = 4  # bytes of fp32
BUCKET = 500_000_000  # elements, DeepSpeed's default
LIVE = 1_000_000_000  # DeepSpeed's max_live_parameters and max_reuse_distance


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes of a rank's device, and of its host where that is another memory."""

    weights: int
    gradients: int
    optimizer: int
    buckets: int
    host: int

    @property
    def device(self) -> int:
        """All that the device holds."""
        return self.weights + self.gradients + self.optimizer + self.buckets


def zero_memory(config: RunConfig, engine: EngineConfig, parameters: int, data_parallel: int, *, cuda: bool) -> ZeroMemory:
    """What ZeRO keeps for a rank of ``parameters`` parameters; ``engine`` may be another than the run's own. On a CPU there is no host."""
    e = 2 if config.train.precision == "bf16" else WIDE
    stage, settings = engine.zero_stage, engine.deepspeed
    part = -(-parameters // data_parallel)
    bucket = min(settings.reduce_bucket_size or BUCKET, parameters)
    if stage == 0:
        return ZeroMemory(e * parameters, WIDE * parameters, 2 * WIDE * parameters, WIDE * bucket, 0)
    weights, offloaded_weights = e * parameters, 0
    buckets = (WIDE if stage == 1 else e) * bucket * (2 if config.parallel.overlap_grad_reduce and stage < 3 else 1)
    if stage == 3:
        live = min(parameters, settings.max_live_parameters or LIVE, settings.max_reuse_distance or LIVE)
        weights, offloaded_weights = e * live, e * part
    gradients = 2 * WIDE * part if stage > 1 else WIDE * parameters + (e * parameters if e < WIDE else 0) + WIDE * part
    optimizer = 3 * WIDE * part
    host = 0
    if engine.offload_optimizer:
        host, optimizer, gradients = optimizer + WIDE * part, 0, gradients - WIDE * part
    if engine.offload_parameters:
        host += offloaded_weights
    else:
        weights += offloaded_weights
    if not cuda:
        return ZeroMemory(weights, gradients, optimizer + host, buckets, 0)
    return ZeroMemory(weights, gradients, optimizer, buckets, host)


def variants(config: RunConfig) -> list[tuple[str, EngineConfig]]:
    """(name, settings) of every stage and offload that the run could have in its precision, the run's own bucket sizes kept."""
    found = []
    for stage in (0, 1, 2, 3):
        if stage == 0 and config.train.precision == "bf16":
            continue
        for optimizer, weights in ((False, False), (True, False), (True, True)):
            if (optimizer and stage == 0) or (weights and stage < 3):
                continue
            engine = EngineConfig("deepspeed", stage, optimizer, weights, config.engine.deepspeed)
            found.append((zero_name(engine), engine))
    return found


def zero_name(engine: EngineConfig) -> str:
    """A stage with its offload in words."""
    offloaded = ", all offloaded" if engine.offload_parameters else ", optimizer offloaded" if engine.offload_optimizer else ""
    return f"stage {engine.zero_stage}{offloaded}"
