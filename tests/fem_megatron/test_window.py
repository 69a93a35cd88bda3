"""Tests of attention with a window against a loop over tokens, the limits of its switches, and a
state of fixed size.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.layer import windowed_attention
from fem_megatron.mixers.attention.shape import AttentionConfig, AttentionShape
from fem_megatron.state import Capacity, Context, State
from pretrain.config import RunConfig
from pretrain.plan.run_plan import make_plan
from tests.fem_megatron.test_catalogue import SWITCHED, block_of

FP64: Any = {"rtol": 1e-11, "atol": 1e-12}  # float64 over a few tens of terms


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_token(q: Tensor, k: Tensor, v: Tensor, window: int, valid: Tensor | None) -> Tensor:
    """Compute one query of one head of one row at a time. Padding is identified by its position
    only.
    """
    heads = q.shape[1]
    past = k.shape[2] - q.shape[2]
    each = q.shape[1] // k.shape[1]
    rows = []
    for row in range(q.shape[0]):
        for head in range(heads):
            for t in range(q.shape[2]):
                own = past + t
                seen = [
                    i
                    for i in range(max(0, own - window + 1), own + 1)
                    if i == own or valid is None or valid[row, i]
                ]
                scores = k[row, head // each, seen] @ q[row, head, t] / math.sqrt(q.shape[-1])
                rows.append(scores.softmax(0) @ v[row, head // each, seen])
    return torch.stack(rows).view(*q.shape)


@pytest.mark.parametrize("padding", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("new", "past"),
    [(1, 0), (4, 0), (5, 0), (6, 0), (17, 0), (1, 4), (1, 9), (3, 4), (13, 4), (7, 2), (2, 20)],
)
@pytest.mark.parametrize("window", [1, 5])
def test_equals_the_loop_with_all_gradients(
    window: int, new: int, past: int, padding: bool
) -> None:
    q = draw(2, 4, new, 6)
    k = draw(2, 2, past + new, 6, seed=1)
    v = draw(2, 2, past + new, 6, seed=2)
    valid = torch.ones(2, past + new, dtype=torch.bool)
    valid[1, : (past + new) // 2] = False
    results = []
    for function in (windowed_attention, by_token):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = function(leaves[0], leaves[1], leaves[2], window, valid if padding else None)
        loss = (out * draw(*out.shape, seed=3)).sum()
        results.append((out, *torch.autograd.grad(loss, leaves)))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, **FP64)


@pytest.mark.parametrize("places", [4, 40])
def test_a_state_with_a_fixed_capacity(places: int) -> None:
    """Simulates compiled decoding: 40 positions, of which the first are used; also fewer positions
    than the window.
    """
    block = block_of("switched", torch.float32)
    x = torch.randn(places, 2, 32, generator=torch.Generator().manual_seed(3))
    state: State = {}
    capacity = Capacity(places, torch.zeros((), dtype=torch.int64))
    outputs = []
    past = 0
    with torch.no_grad():
        for piece in x.split([2, 1, 1] if places == 4 else [7, 1, 1, 9, *[1] * 22]):
            length = len(piece)
            valid = capacity.valid(None, 2, length, x.device) if state else None
            positions = torch.arange(past, past + length)
            outputs.append(
                block(piece, Context(positions, valid, state=state, past=past, capacity=capacity))
            )
            capacity.taken.add_(length)
            past += length
        wanted = block(x, Context())
    torch.testing.assert_close(torch.cat(outputs), wanted, rtol=1e-5, atol=1e-5)


def test_flops_are_those_of_the_keys_that_a_token_sees() -> None:
    shape = AttentionShape.of(
        ModelConfig(mixer="transformer", attention=AttentionConfig(sliding_window=5))
    )
    for length in (1, 4, 5, 6, 17):
        seen = [min(token + 1, 5) for token in range(length)]
        assert shape.flops(length)["attention"] == pytest.approx(
            4 * 768 * sum(seen) / length, rel=1e-12
        )


def test_a_plan_compares_with_a_plain_transformer() -> None:
    """The heads of the plain Transformer follow the width, whatever the model's heads are."""
    run = RunConfig(
        model=ModelConfig(
            mixer="transformer",
            vocab_size=100,
            attention=AttentionConfig(head_dim=32, qkv_bias=True),
        )
    )
    run = replace(run, train=replace(run.train, steps=10, tokens=None))
    plan = make_plan(run, 1)
    assert (
        plan.transformer_parameters
        == make_plan(
            replace(run, model=ModelConfig(mixer="transformer", vocab_size=100)), 1
        ).total_parameters
    )
    assert plan.total_parameters < plan.transformer_parameters


def test_memory_grows_with_tokens_times_window() -> None:
    kept = []
    for length in (256, 512):
        q, k, v = (draw(1, 2, length, 8, seed=seed).requires_grad_() for seed in range(3))
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            windowed_attention(q, k, v, 16)
        kept.append(sum(storages.values()))
    # The margin covers parts that do not grow: the first window and the mask.
    assert kept[1] < 2.1 * kept[0]


def test_the_state_stops_growing() -> None:
    shape = AttentionShape.of(
        ModelConfig(mixer="transformer", attention=AttentionConfig(sliding_window=128))
    )
    assert [shape.state_bytes(length, 2) for length in (1, 127, 128, 10**6)] == [
        2 * n * 768 * 2 for n in (1, 127, 127, 127)
    ]


def test_a_hybrid_takes_the_section_for_its_transformer_layers() -> None:
    model = ModelConfig(
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        pattern=("transformer", "fem_softmax"),
        **SWITCHED,
    )
    switched, other = (block.mixer for block in model.blocks())
    assert "in_proj.bias" in switched.weights() and "in_proj.bias" not in other.weights()
