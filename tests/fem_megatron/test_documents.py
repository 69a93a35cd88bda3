"""Documents that share a sequence: every mixer reads each as if it were alone, and no bit of one is moved by another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fem_megatron.block import Block
from fem_megatron.documents import Documents, row_length
from fem_megatron.state import Context
from tests.fem_megatron.test_catalogue import CASES, SMALL, block_of, is_causal

# Tokens of the documents of each sequence: of one and two tokens, one of a whole sequence, many short ones, and ends at the sequence's.
PACKED = ((1, 2, 30, 17, 14), (64,), (5, 1, 58), (3,) * 21 + (1,))
LENGTH = 64
EVERY_CASE = pytest.mark.parametrize("name", CASES)


def begins() -> Tensor:
    """[b, s] bool."""
    made = torch.zeros(len(PACKED), LENGTH, dtype=torch.bool)
    for row, sizes in zip(made, PACKED, strict=True):
        row[torch.tensor((0, *sizes[:-1])).cumsum(0)] = True
    return made


def spans() -> list[tuple[int, int, int]]:
    """(Sequence, first token, end) of every document."""
    return [(row, sum(sizes[:number]), sum(sizes[: number + 1])) for row, sizes in enumerate(PACKED) for number in range(len(sizes))]


def packed(name: str) -> Context:
    documents = Documents.of(begins())
    return Context(documents.positions, documents=documents, causal=is_causal(name))


def draw(seed: int) -> Tensor:
    shape = (LENGTH, len(PACKED), SMALL.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(block: Block, x: Tensor, context: Context, pull: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """What the block makes of x, and the gradients of <pull, that>: of x and of every weight."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x, context)
    out.backward(pull)
    assert x.grad is not None
    return out.detach(), {"x": x.grad} | {name: weight.grad.clone() for name, weight in block.named_parameters() if weight.grad is not None}


def close(got: Tensor, wanted: Tensor) -> None:
    """float64's rounding over sums of some hundred terms, in matrix products of other shapes: 1.1e-12 was seen."""
    assert (got - wanted).abs().max() <= 5e-12 * max(1.0, wanted.abs().max().item())


@EVERY_CASE
def test_a_document_in_a_sequence_is_the_document_alone(name: str) -> None:
    """Outputs, and the gradients of all tokens and weights."""
    block, x, pull = block_of(name), draw(1), draw(2)
    out, found = gradients(block, x, packed(name), pull)
    summed = {key: torch.zeros_like(value) for key, value in found.items()}
    for row, first, end in spans():
        here = (slice(first, end), slice(row, row + 1))
        alone, own = gradients(block, x[here], Context(causal=is_causal(name)), pull[here])
        close(out[here], alone)
        summed["x"][here] = own.pop("x")
        for key, value in own.items():
            summed[key] += value
    for key, wanted in summed.items():
        close(found[key], wanted)


@EVERY_CASE
def test_not_a_bit_of_a_document_comes_from_another(name: str) -> None:
    """Whatever stands in a document, infinities too: the others' outputs, and the gradients of their tokens, are what they were."""
    block, x, pull = block_of(name), draw(1), draw(2)
    for value in (1e30, torch.inf):
        for row, first, end in ((0, 3, 33), (2, 0, 5), (3, 30, 33)):
            changed, kept = x.clone(), torch.ones(LENGTH, len(PACKED), dtype=torch.bool)
            changed[first:end, row], kept[first:end, row] = value, False
            wanted, theirs = gradients(block, x, packed(name), pull * kept[..., None])
            out, found = gradients(block, changed, packed(name), pull * kept[..., None])
            assert torch.equal(out[kept], wanted[kept]) and torch.equal(found["x"][kept], theirs["x"][kept])


def test_joined_is_another_read() -> None:
    """What the tests above compare is not what a block says that knows of no documents."""
    block, x = block_of("fem_softmax"), draw(1)
    assert (block(x, packed("fem_softmax")) - block(x, Context())).abs().max() > 1e-3


def test_rows_are_few_and_little_longer_than_their_documents() -> None:
    """Of pairs of tokens of two documents nothing is computed: attention's work is the documents' own, times 1.25^2 at most."""
    assert all(size <= row_length(size, 4096) <= max(size + 3, 1.25 * size) for size in range(1, 4097))
    assert len({row_length(size, 4096) for size in range(1, 4097)}) <= 4 * 11
    documents = Documents.of(begins())
    assert documents.rows == ((25, 4), (1, 8), (1, 16), (1, 20), (1, 32), (2, 64))
    assert sum(count * length**2 for count, length in documents.rows) < 0.7 * len(PACKED) * LENGTH**2


@pytest.mark.parametrize("mean", [3, 30, 300])
def test_reads_go_over_a_quarter_more_tokens_than_there_are(mean: int) -> None:
    """What a read is given, counted: places at most 1.25 times the tokens, and pairs 1.25^2 times the documents' own; below 13 tokens a
    document has 3 places more at most."""
    sizes, length = (torch.empty(4096).exponential_(1 / mean, generator=torch.Generator().manual_seed(mean)).ceil().long(), 4096)
    sizes = sizes[sizes.cumsum(0) < length]
    sizes = torch.cat([sizes, length - sizes.sum()[None]])
    given: list[tuple[int, int]] = []

    def read(valid: Tensor | None, x: Tensor) -> Tensor:
        given.append((x.shape[0], x.shape[1]))
        return x

    starts = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    x = torch.arange(length)[None]
    documents = Documents.of(torch.isin(torch.arange(length), starts)[None])
    assert torch.equal(documents.apart(read, [x], batch=0, time=1, causal=True), x)
    places, pairs = (sum(rows * row**power for rows, row in given) for power in (1, 2))
    most = torch.maximum(sizes + 3, 1.25 * sizes)
    assert length <= places <= most.sum() and sizes.square().sum() <= pairs <= most.square().sum()
    assert pairs < length**2 / 4
    if mean >= 300:
        assert pairs <= 1.25**2 * sizes.square().sum()
