"""Tensor, sequence and context parallelism of every mixer in float64 on two real ranks: output and gradients against the whole block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fem_megatron.block import Block
from fem_megatron.cut import Cut
from fem_megatron.megatron import platform
from fem_megatron.shape import Training, cut_kind
from fem_megatron.state import Context
from tests.fem_megatron import padding
from tests.fem_megatron.test_catalogue import CASES, block_of, is_causal, shape_of, tokens
from tests.ranks import answer

PLACES = ("TP2", "TP2+SP")
CUTS = ("CP2, all_to_all", "CP2, all_gather")  # the second where keys have names
# A case, or a vocabulary and whether it is tied; and the place.
GATHERED = [(case, CUTS[1]) for case in CASES if is_causal(case) and shape_of(case).mixer.keyed_widths()]
MIXERS = [*itertools.product(CASES, (*PLACES, CUTS[0])), *GATHERED]
EMBEDDINGS = list(itertools.product(padding.VOCABULARIES, (False, True), PLACES))
Z_LOSS = [("padded", False, 0.05, "TP2+SP"), ("a rank of padding", True, 0.05, "TP2")]  # the third: its weight
Errors = dict[tuple[Any, ...], dict[str, float]]


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """The largest relative errors of every case that this session asks for."""
    asked = [item.callspec.params["case"] for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    found: Errors = answer(2, compare_all, asked, output=tmp_path_factory.mktemp("ranks") / "rank", patience=560)
    return found


@pytest.mark.parametrize("case", MIXERS, ids=" ".join)
def test_two_ranks_compute_what_one_does(errors: Errors, case: tuple[str, str]) -> None:
    # 1e-10: float64 sums in another order; a gradient that is not summed over the ranks, or twice, is off by 1e-1.
    assert not {key: value for key, value in errors[case].items() if not value < 1e-10}


@pytest.mark.parametrize("case", [*EMBEDDINGS, *Z_LOSS], ids=str)
def test_two_ranks_leave_out_the_vocabulary_s_padding(errors: Errors, case: tuple[Any, ...]) -> None:
    # 1e-6: Megatron's cross-entropy is in float32 whatever the model is; the padding's 28 rows of 128 would move the loss by 5e-2.
    assert not padding.wrong(errors[case], 1e-6)


def compare_all(cases: list[tuple[Any, ...]]) -> Errors:
    """On each of two ranks."""
    platform.import_megatron()
    platform.initialize_distributed()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    errors = {}
    for case in cases:
        sequence = case[-1] == "TP2+SP"
        if case[-1] in CUTS:
            found = compare_cut(case[0], case[-1].split()[-1])
        elif case in MIXERS:
            found = compare(case[0], sequence)
        else:
            more = {} if case in EMBEDDINGS else {"z_loss": case[2]}
            found = padding.compare(case[0], case[1], sequence_parallel=sequence, params_dtype=torch.float64, **more)
        errors[case] = largest(found)
    torch.distributed.destroy_process_group()
    return errors


def compare(name: str, sequence_parallel: bool) -> dict[str, float]:
    """Relative errors of the split block's output and of each gradient against the whole one's, of this rank's part."""
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
    return errors


def compare_cut(name: str, kind: str) -> dict[str, float]:
    """The same of a block whose sequences are cut: gradients of weights are the sums over the ranks, as the data-parallel reduction's."""
    from megatron.core import parallel_state

    from fem_megatron.megatron.context_parallel import ContextParallel

    group, causal = parallel_state.get_tensor_model_parallel_group(), is_causal(name)
    found = cut_kind(shape_of(name).mixer, tensor=1, context=2, asked=kind, whole=causal)
    cut = Cut(ContextParallel(group), gathers=found == "all_gather")
    whole, split = block_of(name), block_of(name)
    x, weight = tokens(12), tokens(12).flip(0)
    wanted, wanted_x = run(whole, x, weight, causal)
    mine = cut.positions(6, x.device)
    context = Context(mine, causal=causal, cut=cut)
    with sent_by_this_rank() as sent:
        y, x_grad = run(split, x[mine], weight[mine], causal, context)
    errors = {"output": error(y, wanted[mine]), "x": error(x_grad, wanted_x[mine])}
    told = shape_of(name).mixer.cut_bytes(Training(8, 1, 1, 2, 12, cuda=False, ranks=2), found).sent(2, backward=True)
    errors["bytes"] = abs(told * shape_of(name).recurrence * x[mine].shape[0] * x.shape[1] / sum(sent) - 1)
    for (key, ours), (_, theirs) in zip(split.named_parameters(), whole.named_parameters(), strict=True):
        gradient = gradient_of(ours)
        torch.distributed.all_reduce(gradient, group=group)
        errors[key] = error(gradient, gradient_of(theirs))
    return errors


@contextmanager
def sent_by_this_rank() -> Iterator[list[int]]:
    """The bytes that each collective of a cut sequence sends to the other of two ranks."""
    sent, exchange, gather = list[int](), torch.distributed.all_to_all_single, torch.distributed.all_gather_into_tensor

    def exchanged(made: Tensor, parts: Tensor, **given: Any) -> None:
        sent.append(parts.nbytes // 2)
        exchange(made, parts, **given)

    def gathered(whole: Tensor, own: Tensor, **given: Any) -> None:
        sent.append(own.nbytes)
        gather(whole, own, **given)

    with mock.patch.multiple(torch.distributed, all_to_all_single=exchanged, all_gather_into_tensor=gathered):
        yield sent


def largest(errors: dict[str, float]) -> dict[str, float]:
    """Over the ranks; what is no number is the largest."""
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, errors)
    return {key: max((rank[key] for rank in everyone), key=lambda value: (math.isnan(value), value)) for key in errors}


def run(block: Block, x: Tensor, weight: Tensor, causal: bool, context: Context | None = None) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = block(x, context or Context(causal=causal))
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
