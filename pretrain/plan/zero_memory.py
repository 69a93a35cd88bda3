"""Compute the memory of one rank under DeepSpeed's ZeRO in bytes from the configuration alone.

P: parameters of the rank; d: data-parallel ranks; e: bytes of the training precision; b: elements
of a reduction bucket. All optimizer state of ZeRO is fp32: a copy of the weights and Adam's two
moments, 12 P / d, also in fp32 training (stage 0 has only the moments, 8 P). Parameters updated by
Muon have one moment, which is 4 bytes less.

    stage 0          weights eP      gradients 4P             reduction 4b
    stage 1, fp32    weights eP      gradients 4P + 4P/d      reduction 4b
    stage 1, bf16    weights eP      gradients 4P + eP *      reduction 4b
    stage 2          weights eP      gradients 4P/d, twice    reduction eb (in bf16 4b more)
    stage 3          weights eP/d    gradients 4P/d *         reduction 4b + 4g

In stage 2 the 4b more in bf16 are the converted gradients. With overlap_grad_reduce, stages 1 and 2
use two buckets. In stage 3 with gloo the reduction is 8b + 4g. The update makes no temporaries,
because both Adam implementations are fused. Stage 3 updates g elements at a time, the smaller of
P/d and sub_group_size, and flattens their gradients (4g) first.

Gradients marked * exist from the start. Other gradients appear while activations are freed, unless
a step has several micro-batches.

Stage 3 always uses a bucket (4b) and, while activations exist, L gathered elements (eL). L is the
smallest of P, max_live_parameters and max_reuse_distance. Beyond L, DeepSpeed gathers a parameter
again for every use.

If the optimizer is offloaded, its state (12 P / d) and two copies of the gradients (4 P / d each)
are on the host, and a bucket (eb in stages 1 and 2) is on the device; in stage 1 also the
gradients (4 P). If the parameters of stage 3
are offloaded, they (e P / d) are on the host too.

On a CPU the result is within 15% of the measured memory of processes
(tests/pretrain/test_memory.py, docs/engines.md); it was not measured on a GPU. The module does not
import torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.config import EngineConfig, RunConfig
from pretrain.plan.placement import Placement

WIDE = 4  # bytes of fp32
BUCKET = 500_000_000  # elements, DeepSpeed's default
LIVE = 1_000_000_000  # DeepSpeed's max_live_parameters and max_reuse_distance
SUB_GROUP = 1_000_000_000  # DeepSpeed's sub_group_size


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes of a rank's device memory, and of host memory if the device is a GPU.

    bucket: used all the time. fresh: the part of the gradients, on device or host, that appears
    during the backward pass. forward: used in addition to the activations. reduction: used in
    addition to all gradients, after the activations have been freed.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int
    bucket: int
    fresh: int
    forward: int
    reduction: int

    @property
    def workspace(self) -> int:
        """Bytes that are neither weights, gradients, optimizer state nor activations."""
        return self.bucket + max(self.forward, self.reduction)

    def peak(self, activations: int) -> int:
        """Return the peak bytes of the device.

        activations: bytes of the model's activations, including their workspace.
        """
        steady = self.weights + self.gradients - self.fresh + self.optimizer + self.bucket
        return steady + max(activations + self.forward, self.fresh + self.reduction)


def zero_memory(placement: Placement, parameters: int, muon_parameters: int = 0) -> ZeroMemory:
    """Return the memory under ZeRO of a rank with ``parameters`` parameters.

    muon_parameters: number of parameters that Muon updates. On a CPU the host's memory counts as
    the device's.
    """
    config = placement.config
    e = placement.element
    cuda = placement.cuda
    engine = config.engine
    stage = engine.zero_stage
    settings = engine.deepspeed
    offload = engine.offload_optimizer
    part = -(-parameters // placement.replicas)
    bucket = min(settings.reduce_bucket_size or BUCKET, parameters)
    buffers = 2 if config.parallel.overlap_grad_reduce and stage in (1, 2) else 1
    converted = WIDE * bucket if e < WIDE else 0
    weights = e * parameters
    optimizer = 3 * WIDE * part
    host = 0
    held = 0
    forward = 0
    if stage == 0:
        optimizer = 2 * WIDE * parameters
        gradients = WIDE * parameters
        reduction = WIDE * bucket
    elif stage == 1:
        gradients = (WIDE + e) * parameters if e < WIDE else WIDE * (parameters + part)
        reduction = WIDE * bucket * buffers
    elif stage == 2:
        gradients, reduction = 2 * WIDE * part, e * bucket * buffers + converted
    else:
        live = min(
            parameters, settings.max_live_parameters or LIVE, settings.max_reuse_distance or LIVE
        )
        weights = e * part
        gradients = WIDE * part
        forward = e * live
        held = WIDE * bucket
        group = min(part, settings.sub_group_size or SUB_GROUP)
        reduction = WIDE * ((1 if cuda else 2) * bucket + group)
    optimizer -= WIDE * placement.optimizer_part(muon_parameters)
    several = placement.micro_batches > 1
    fresh = gradients
    if several or stage == 3 or (stage == 1 and e < WIDE):
        fresh = 0
    if offload:
        host, optimizer = optimizer + 2 * WIDE * part, 0
        gradients = WIDE * parameters if stage == 1 else 0
        if stage < 3:
            held = e * bucket * buffers
            forward = 0
            reduction = converted
            fresh = gradients if cuda else gradients + WIDE * part
            if several:
                fresh = 0
    if engine.offload_parameters:
        host, weights = host + weights, 0
    if not cuda:
        optimizer, host = optimizer + host, 0
    return ZeroMemory(weights, gradients, optimizer, host, held, fresh, forward, reduction)


def variants(config: RunConfig) -> list[tuple[str, EngineConfig]]:
    """Return (name, settings) of every ZeRO stage and offload that the run could use.

    Stages that do not fit the run's precision, optimizer or offloading of activations are absent.
    The settings include the run's bucket sizes.
    """
    found = []
    for stage in (0, 1, 2, 3):
        if stage == 0 and config.train.precision == "bf16":
            continue
        for optimizer, weights in ((False, False), (True, False), (True, True)):
            if (optimizer and stage == 0) or (weights and stage < 3):
                continue
            if config.optimizer.name == "muon" and (optimizer or stage == 3):
                continue
            if config.train.offload_activations and stage == 3:
                continue
            engine = EngineConfig("deepspeed", stage, optimizer, weights, config.engine.deepspeed)
            found.append((zero_name(engine), engine))
    return found


def zero_name(engine: EngineConfig) -> str:
    """Return the name of a ZeRO stage with its offload, for example ``stage 3, all offloaded``."""
    offloaded = ""
    if engine.offload_parameters:
        offloaded = ", all offloaded"
    elif engine.offload_optimizer:
        offloaded = ", optimizer offloaded"
    return f"stage {engine.zero_stage}{offloaded}"
