"""Tests of decoding for every mixer of the catalogue: with its state, token by token or in chunks,
a block gives the result of the full sequence.

A new name is tested without changes to this file. float32, as in decoding; every weight is
perturbed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.block import Block
from fem_megatron.state import Context, State
from tests.fem_megatron.test_catalogue import CAUSAL, NAMES, block_of, model_of

STEPS = 300
EVERY_MIXER = pytest.mark.parametrize("name", NAMES)
EVERY_CASE = pytest.mark.parametrize("name", CAUSAL)
DOUBLE: Any = {"dtype": torch.float64}
# Mixers that use the distance between tokens, including the padding between them: convolutions,
# ALiBi, a window.
COUNTING = ("deltanet", "mamba2", "cem", "switched")


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def tokens(
    name: str, length: int = STEPS, batch: int = 2, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(
        length,
        batch,
        model_of(name).stream_size,
        generator=torch.Generator().manual_seed(5),
        dtype=dtype,
    )


def decode(
    block: Block, x: Tensor, pieces: list[int], state: State | None = None, past: int = 0
) -> Tensor:
    """Return the block's outputs on consecutive chunks of x."""
    state = {} if state is None else state
    outputs = []
    for piece in x.split(pieces):
        outputs.append(block(piece, Context(state=state, past=past)))
        past += len(piece)
    return torch.cat(outputs)


def close(got: Tensor, wanted: Tensor) -> None:
    """Check equality up to rounding over sums of 300 terms, relative to the largest output."""
    assert got.shape == wanted.shape and got.isfinite().all()
    assert (got - wanted).abs().max() <= (1e-5 if got.dtype == torch.float32 else 1e-10) * max(
        1.0, wanted.abs().max().item()
    )


def state_bytes(state: State) -> int:
    return sum(value.numel() * value.element_size() for value in state.values())


@EVERY_MIXER
def test_step_by_step_is_the_parallel_forward(name: str) -> None:
    block, x = block_of(name, torch.float32), tokens(name)
    close(decode(block, x, [1] * STEPS), block(x, Context()))


@EVERY_CASE
@pytest.mark.parametrize("again", [{}, {"recurrence": 3}], ids=["as it is", "thrice"])
def test_pieces_are_the_parallel_forward(name: str, again: dict[str, Any]) -> None:
    """A prompt, single tokens, chunks of any length; every iteration of a recurrent block has a
    separate state.
    """
    block, x = block_of(name, **again), tokens(name, 123, **DOUBLE)
    close(decode(block, x, [50, 1, 1, 1, 7, 2, 61]), block(x, Context()))


@EVERY_CASE
def test_padding_before_and_between_changes_nothing(name: str) -> None:
    """Prompts of different lengths, a chunk that is shorter in every other row, single tokens: each
    row gives its result without the others.
    """
    block = block_of(name)
    lengths = (3, 9, 1, 6)
    width = 9
    more = [3, 1, 1]
    valid = torch.arange(width + sum(more)) >= width - torch.tensor(lengths)[:, None]
    if not any(word in name for word in COUNTING):
        valid[::2, width : width + 2] = False
    x = tokens(name, width + sum(more), len(lengths), **DOUBLE).masked_fill(
        ~valid.T[..., None], 50.0
    )
    positions = (valid.long().cumsum(1) - 1).clamp_min(0).T
    state: State = {}
    outputs, past = [], 0
    for piece in x.split([width, *more]):
        seen = past + len(piece)
        outputs.append(
            block(piece, Context(positions[past:seen], valid[:, :seen], state=state, past=past))
        )
        past = seen
    full = block(x, Context(positions, valid))
    for row, own in enumerate(valid):
        alone = block(x[own, row : row + 1], Context())[:, 0]
        close(torch.cat(outputs)[own, row], alone)
        close(full[own, row], alone)
    assert all(output.isfinite().all() for output in outputs)


@EVERY_CASE
def test_right_padding_changes_nothing(name: str) -> None:
    """No gradients reach or pass through the padding."""
    block = block_of(name)
    lengths = (4, 11)
    x = tokens(name, 11, **DOUBLE).requires_grad_()
    valid = torch.arange(11) < torch.tensor(lengths)[:, None]
    with torch.enable_grad():
        full = block(x, Context(valid=valid))
        (full * valid.T[..., None]).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and not x.grad[~valid.T].any()
    assert full.isfinite().all()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in block.parameters())
    for row, length in enumerate(lengths):
        close(full[:length, row], block(x[:length, row : row + 1], Context())[:, 0])


@EVERY_MIXER
def test_rows_of_the_state_are_the_batch(name: str) -> None:
    """Rows are repeated, dropped and reordered, as in beam search."""
    block, x = block_of(name, torch.float32), tokens(name, 20, 3)
    state: State = {}
    decode(block, x[:12], [12], state)
    rows = torch.tensor([2, 0, 0, 1])
    state = {key: value[rows] for key, value in state.items()}
    close(decode(block, x[12:, rows], [5, 1, 2], state, past=12), block(x, Context())[12:, rows])


@EVERY_CASE
@pytest.mark.parametrize(
    ("dtype", "again"),
    [(torch.float32, {}), (torch.bfloat16, {"recurrence": 2})],
    ids=["fp32", "bf16, twice"],
)
def test_the_state_has_the_bytes_that_the_plan_states(
    name: str, dtype: torch.dtype, again: dict[str, Any]
) -> None:
    block = block_of(name, dtype, **again)
    (shape, *_) = model_of(name, **again).blocks()
    for length in (1, 2, 7, 70):
        state: State = {}
        decode(block, tokens(name, length, 3).to(dtype), [length], state)
        assert all(value.shape[0] == 3 and not value.requires_grad for value in state.values())
        assert state_bytes(state) == 3 * shape.state_bytes(length, dtype.itemsize), length
