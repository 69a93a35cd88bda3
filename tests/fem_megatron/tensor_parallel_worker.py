"""Two ranks compute every mixer's block in float64, split and whole: ``torchrun ... tensor_parallel_worker.py OUT.json``.

Writes, for each case, the largest relative error of the output and of each gradient of the split block against the whole one.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fem_megatron.block import Block
from fem_megatron.megatron import platform
from fem_megatron.state import Context
from tests.fem_megatron import padding
from tests.fem_megatron.test_catalogue import CASES, block_of, is_causal, shape_of, tokens


def main() -> None:
    platform.import_megatron()
    platform.initialize_distributed()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    errors = {f"{name}{' SP' * sequence}": compare(name, sequence) for name in CASES for sequence in (False, True)}
    for vocabulary, tied, sequence in itertools.product(padding.VOCABULARIES, (False, True), (False, True)):
        found = padding.compare(vocabulary, tied, sequence_parallel=sequence, params_dtype=torch.float64)
        errors[f"{vocabulary}{' tied' * tied}{' SP' * sequence}"] = largest(found)
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(errors))
    torch.distributed.destroy_process_group()


def compare(name: str, sequence_parallel: bool) -> dict[str, float]:
    from megatron.core import parallel_state

    from fem_megatron.megatron.tensor_parallel import TensorParallel

    group = parallel_state.get_tensor_model_parallel_group()
    parallel = TensorParallel(group, sequence_parallel=sequence_parallel, dtype=torch.float64)
    whole, split = block_of(name), Block(shape_of(name), parallel)
    with torch.no_grad():
        for (_, ours), (_, theirs) in zip(split.named_parameters(), whole.named_parameters(), strict=True):
            ours.copy_(part(theirs, ours, parallel))
    x, weight = tokens(12), tokens(12).flip(0)
    wanted, wanted_x = run(whole, x, weight, is_causal(name))
    mine = slice(6 * parallel.rank, 6 * parallel.rank + 6) if sequence_parallel else slice(None)
    y, x_grad = run(split, x[mine], weight[mine], is_causal(name))
    errors = {"output": error(y, wanted[mine]), "x": error(x_grad, wanted_x[mine])}
    for (key, ours), (_, theirs) in zip(split.named_parameters(), whole.named_parameters(), strict=True):
        gradient = gradient_of(ours)
        if ours.sequence_parallel:  # type: ignore[attr-defined]
            torch.distributed.all_reduce(gradient, group=group)  # what Megatron's finalize_model_grads does
        errors[key] = error(gradient, part(gradient_of(theirs), ours, parallel))
    return largest(errors)


def largest(errors: dict[str, float]) -> dict[str, float]:
    """Over the ranks; what is no number is the largest."""
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, errors)
    return {key: max((rank[key] for rank in everyone), key=lambda value: (math.isnan(value), value)) for key in errors}


def run(block: Block, x: Tensor, weight: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, Context(causal=causal))
    (y * weight).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def gradient_of(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad


def part(whole: Tensor, like: Tensor, parallel: Any) -> Tensor:
    split = like.spec.split  # type: ignore[attr-defined]
    return whole if split is None else whole.chunk(parallel.size, split)[parallel.rank]


def error(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-12)).item()


if __name__ == "__main__":
    main()
