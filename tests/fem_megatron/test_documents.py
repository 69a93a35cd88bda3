"""Tests of documents that share a sequence: every mixer reads each one separately, and no bit of
one depends on another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fem_megatron.block import Block
from fem_megatron.documents import Documents, row_length
from fem_megatron.state import Context
from kernels.implementations import Op, Unfit, nothing
from kernels.symmetric_attention import op as symmetric_attention
from tests.fem_megatron.test_catalogue import CASES, block_of, is_causal, model_of

Packs = tuple[tuple[int, ...], ...]
# Lengths of the documents of each sequence, in tokens: documents of one and two tokens, one that
# fills a sequence and continues, fifty documents, one that ends with its sequence.
PACKED: Packs = ((1, 2, 30, 17, 14), (64,), (5, 1, 58), (1, 2) * 14 + (1,) * 22)
# Short rows for kernels, which are slow in the interpreter: documents of 1 to 13 tokens.
FEW: Packs = ((1, 2, 5, 13, 3), (7, 1, 9, 7))
LENGTH = 64
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def begins(packs: Packs = PACKED) -> Tensor:
    """Return the first tokens of documents as a mask, [b, s] bool."""
    made = torch.zeros(len(packs), sum(packs[0]), dtype=torch.bool)
    for row, sizes in zip(made, packs, strict=True):
        row[torch.tensor((0, *sizes[:-1])).cumsum(0)] = True
    return made


def spans(packs: Packs = PACKED) -> list[tuple[int, int, int]]:
    """Return (sequence, first token, end) of every document."""
    found = []
    for row, sizes in enumerate(packs):
        first = 0
        for size in sizes:
            found.append((row, first, first + size))
            first += size
    return found


def packed(name: str, packs: Packs = PACKED) -> Context:
    documents = Documents.of(begins(packs))
    return Context(documents.positions, documents=documents, causal=is_causal(name))


def draw(name: str, seed: int, packs: Packs = PACKED) -> Tensor:
    shape = (sum(packs[0]), len(packs), model_of(name).stream_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Found = dict[str, Tensor]


def gradients(block: Block, x: Tensor, context: Context, pull: Tensor) -> Found:
    """Return the block's output for x, "out", and the gradients of its inner product with ``pull``:
    of x and of every weight.
    """
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x, context)
    out.backward(pull)
    weights = {
        name: weight.grad.clone()
        for name, weight in block.named_parameters()
        if weight.grad is not None
    }
    assert x.grad is not None
    return weights | {"out": out.detach(), "x": x.grad}


def alone(block: Block, x: Tensor, pull: Tensor, packs: Packs, *, causal: bool) -> Found:
    """Return the same for each document separately; documents of one length form a batch, whose
    sequences do not interact (test_catalogue.py).
    """
    made = {name: torch.zeros_like(weight) for name, weight in block.named_parameters()} | {
        "out": x.clone(),
        "x": x.clone(),
    }
    for size in {end - first for _, first, end in spans(packs)}:
        where = [
            (slice(first, end), row) for row, first, end in spans(packs) if end - first == size
        ]
        xs = torch.stack([x[here] for here in where], dim=1)
        pulls = torch.stack([pull[here] for here in where], dim=1)
        own = gradients(block, xs, Context(causal=causal), pulls)
        for number, here in enumerate(where):
            made["out"][here] = own["out"][:, number]
            made["x"][here] = own["x"][:, number]
        for name in own.keys() - {"out", "x"}:
            made[name] += own[name]
    return made


def distance(got: Found, wanted: Found) -> dict[str, float]:
    return {
        name: float((got[name] - t).norm() / t.norm().clamp_min(1.0)) for name, t in wanted.items()
    }


def in_both_types(name: str, packs: Packs, **changes: str) -> tuple[Block, Block, Tensor, Tensor]:
    """Return one block in float32 and in float64, x, and the cotangent of its outputs."""
    narrow, wide = block_of(name, torch.float32, **changes), block_of(name)
    wide.load_state_dict({key: weight.double() for key, weight in narrow.state_dict().items()})
    return narrow, wide, draw(name, 1, packs).float(), draw(name, 2, packs).float()


@EVERY_CASE
def test_a_document_in_a_sequence_is_the_document_alone(name: str) -> None:
    """Outputs, and the gradients of all tokens and weights, agree.

    Tolerance in float64: rounding over sums of some hundred terms, in matrix products of other
    shapes. float32: 1e-6; if a block amplifies rounding, at most four times the distance of
    separate documents, in another order of summation, from float64. The gradient of a scalar is one
    sum of 64 x 4 x 32 terms of both signs, about 90 times smaller than they are together, so that
    its rounding depends on the machine's matrix products: 1e-5. A leak gives 1e-2 and more.
    """
    (narrow, wide, x, pull), causal = in_both_types(name, PACKED), is_causal(name)
    wanted = alone(wide, x.double(), pull.double(), PACKED, causal=causal)
    assert (
        max(distance(gradients(wide, x.double(), packed(name), pull.double()), wanted).values())
        <= 1e-12
    )
    theirs = distance(alone(narrow, x, pull, PACKED, causal=causal), wanted)
    for key, off in distance(gradients(narrow, x, packed(name), pull), wanted).items():
        limit = 1e-5 if wanted[key].numel() == 1 else 1e-6
        assert off <= max(limit, 4 * theirs[key]), key


KERNELS = (
    "transformer",
    "fem_softmax",
    "fem_gla",
    "fem_aft",
    "fem_mamba",
    "cem",
    "mha2nd1st",
    "hyperset sigmoid",
    "mamba2",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*KERNELS, "fem bidirectional", "gla bidirectional", "hyperset both ways"]
)
def test_kernels_read_documents_separately(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted Triton kernels in float32 against separate documents in float64: 1e-5, as for
    each kernel (tests/README.md), or four times the error of the definition.
    """
    ran, automatic = set(), Op.automatic

    def triton(op: Op, device: torch.device, unfit: Unfit = nothing) -> tuple[str, dict[str, str]]:
        if (
            "triton" not in [each.name for each in op.implementations]
            or unfit("triton") is not None
        ):
            return automatic(op, device, unfit)
        ran.add(op.name)
        return "triton", {}

    monkeypatch.setattr(Op, "automatic", triton)
    changes = {"attention_backend": "auto"} if name.startswith(("fem", "gla")) else {}
    narrow, wide, x, pull = in_both_types(name, FEW, **changes)
    found = gradients(narrow, x, packed(name, FEW), pull)
    assert ran
    monkeypatch.undo()
    wanted = alone(wide, x.double(), pull.double(), FEW, causal=is_causal(name))
    theirs = distance(alone(narrow, x, pull, FEW, causal=is_causal(name)), wanted)
    for key, off in distance(found, wanted).items():
        assert off <= max(1e-5, 4 * theirs[key]), key


@EVERY_CASE
def test_not_a_bit_of_a_document_comes_from_another(name: str) -> None:
    """Any content of a document, including infinities, leaves outputs and gradients of the others
    unchanged.
    """
    block = block_of(name)
    x = draw(name, 1)
    pull = draw(name, 2)
    kept = torch.ones(LENGTH, len(PACKED), dtype=torch.bool)
    # One document of each of three sequences, all at once.
    for row, first, end in ((0, 3, 33), (2, 0, 5), (3, 30, 33)):
        kept[first:end, row] = False
    wanted = gradients(block, x, packed(name), pull * kept[..., None])
    for value in (1e30, torch.inf):
        changed = x.masked_fill(~kept[..., None], value)
        found = gradients(block, changed, packed(name), pull * kept[..., None])
        assert all(torch.equal(found[which][kept], wanted[which][kept]) for which in ("out", "x"))


@pytest.mark.parametrize("name", ["transformer", "switched", "fem_softmax", "hyperset"])
def test_cudnn_plans_for_whole_sequences_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents, padding, a decoding state and ragged lengths have different shapes in each call,
    forward and recomputed.
    """
    seen, attend = list[bool](), F.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    for module in (F, symmetric_attention):
        monkeypatch.setattr(module, "scaled_dot_product_attention", attention)
    changes = {"attention_backend": "auto"} if name == "fem_softmax" else {}
    block, packs = block_of(name, torch.float32, **changes), ((128, 128),)
    x, causal = draw(name, 1, packs).float(), is_causal(name)
    once = replace(packed(name, packs), recompute=True)
    padding = torch.ones(1, 256, dtype=torch.bool)
    for context in (
        once,
        Context(valid=padding, causal=causal),
        Context(state={}, causal=causal),
        Context(causal=causal),
    ):
        seen.clear()
        block(x, context).sum().backward()
        full = context.documents is None and context.valid is None and context.state is None
        assert seen and set(seen) == {full}
    seen.clear()
    block(x[:200], Context(causal=causal))
    assert set(seen) == {False} and torch.backends.cuda.cudnn_sdp_enabled()


def test_joined_is_another_read() -> None:
    """The comparisons above would fail for a block that ignores documents."""
    block, x = block_of("fem_softmax"), draw("fem_softmax", 1)
    assert (block(x, packed("fem_softmax")) - block(x, Context())).abs().max() > 1e-3


def test_rows_are_few_and_little_longer_than_their_documents() -> None:
    """No pair of tokens of two documents is computed: attention's work is at most 1.25^2 times that
    of the documents.
    """
    assert all(
        size <= row_length(size, 4096) <= max(size + 3, 1.25 * size) for size in range(1, 4097)
    )
    assert len({row_length(size, 4096) for size in range(1, 4097)}) <= 4 * 11
    documents = Documents.of(begins())
    assert documents.rows == ((53, 4), (1, 8), (1, 16), (1, 20), (1, 32), (2, 64))
    assert (
        sum(count * length**2 for count, length in documents.rows) < 0.7 * len(PACKED) * LENGTH**2
    )


@pytest.mark.parametrize("mean", [3, 30, 300])
def test_reads_go_over_a_quarter_more_tokens_than_there_are(mean: int) -> None:
    """Counts the inputs of a read: positions at most 1.25 times the tokens, and pairs at most
    1.25^2 times those of the documents; below 13 tokens a document has at most 3 more positions.
    """
    sizes = (
        torch.empty(4096)
        .exponential_(1 / mean, generator=torch.Generator().manual_seed(mean))
        .ceil()
        .long()
    )
    length = 4096
    sizes = sizes[sizes.cumsum(0) < length]
    sizes = torch.cat([sizes, length - sizes.sum()[None]])
    given: list[tuple[int, int]] = []

    def read(valid: Tensor | None, x: Tensor) -> Tensor:
        given.append((x.shape[0], x.shape[1]))
        return x

    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    x = torch.arange(length)[None]
    documents = Documents.of(torch.isin(torch.arange(length), starts)[None])
    assert torch.equal(documents.per_document(read, [x], batch=0, time=1, causal=True), x)
    places = sum(rows * row for rows, row in given)
    pairs = sum(rows * row**2 for rows, row in given)
    most = torch.maximum(sizes + 3, 1.25 * sizes)
    assert length <= places <= most.sum() and sizes.square().sum() <= pairs <= most.square().sum()
    assert pairs < length**2 / 4
    if mean >= 300:
        assert pairs <= 1.25**2 * sizes.square().sum()
