"""Tests of torch.export with the exported models: a program for any batch and length, and a
decoding step with a static cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from tests.tools.hf.small import NAMES, close, here, pairs, tokens

# Lengths below and above a window, a chunk of 64, and CEM's 48 hidden channels.
SHAPES = ((1, 5), (2, 17), (5, 2), (1, 1), (2, 70), (1, 300))
STEPS = 7


class Logits(nn.Module):
    """Logits of ids [b, t] and a mask, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(ids, attention_mask=mask, use_cache=False).logits
        return logits


@pytest.mark.parametrize(
    ("name", "mode"), pairs(NAMES, "masked", "plain", "strict", quick=("hybrid", "cem"))
)
@torch.no_grad()
def test_a_program_takes_any_batch_and_length(name: str, mode: str) -> None:
    """float64: a node of the graph runs the eager code; only CEM's preconditioner uses one order
    for all lengths.
    """
    model = Logits(here(name, torch.float64))
    sizes, ids = {0: Dim("batch", max=64), 1: Dim("length", max=512)}, tokens(3, 11)
    given = (ids, torch.ones_like(ids).tril(4)) if mode == "masked" else (ids,)
    shapes = dict(zip(("ids", "mask"), [sizes] * len(given), strict=False))
    program: Any = export(model, given, dynamic_shapes=shapes, strict=mode == "strict").module()
    for shape in (tuple(ids.shape), *SHAPES):
        ids = tokens(*shape)
        mask = torch.ones_like(ids)
        mask[0, : shape[1] // 2] = 0
        given = (ids, mask) if mode == "masked" else (ids,)
        close(program(*given), model(*given), 1e-10)  # float64 rounding


class Step(nn.Module):
    """A decoding step of ``batch`` sequences; the tensors of its static cache are buffers of the
    module.
    """

    def __init__(self, model: Any, batch: int, places: int, assigned: bool) -> None:
        super().__init__()
        self.model = model
        self.cache = model.new_cache(places)
        self.assigned = assigned
        first = torch.zeros(batch, 1, dtype=torch.long)
        # A masked token creates the tensors but leaves no value in them.
        model(first, attention_mask=first, past_key_values=self.cache)
        for n, layer in enumerate(self.cache.layers):
            layer.capacity.taken.zero_()
            for name, tensor in (*layer.state.items(), ("taken", layer.capacity.taken)):
                self.register_buffer(self.name(n, name), tensor, persistent=False)

    def name(self, layer: int, name: str) -> str:
        """Return the name of a buffer."""
        return f"layer_{layer}_{name}".replace(".", "_")

    def forward(self, ids: Tensor) -> Tensor:
        if self.assigned:
            for n, layer in enumerate(self.cache.layers):
                layer.state = {name: self.get_buffer(self.name(n, name)) for name in layer.state}
                layer.capacity.taken = self.get_buffer(self.name(n, "taken"))
        logits: Tensor = self.model(ids, past_key_values=self.cache).logits
        return logits


@pytest.mark.parametrize(("name", "strict"), pairs(NAMES, False, True, quick=("hybrid",)))
@torch.no_grad()
def test_a_decoding_step_with_a_static_cache(name: str, strict: bool) -> None:
    """Each step writes the program's buffers; logits equal those of full sequences, and the cache
    of eager steps is unchanged.
    """
    model, ids = here(name, torch.float64), tokens(2, STEPS)
    program = export(Step(model, 2, STEPS, assigned=not strict), (ids[:, :1],), strict=strict)
    assert len(program.run_decompositions().graph_signature.buffers_to_mutate) >= 2 * len(
        model.model.layers
    )
    step: Any = program.module()
    close(
        torch.cat([step(token) for token in ids.split(1, dim=1)], dim=1),
        model(ids, use_cache=False).logits,
        1e-10,
    )  # float64 rounding


@torch.no_grad()
def test_a_static_cache_is_no_constant_of_a_program() -> None:
    ids = tokens(2, 1)
    with pytest.raises(
        ValueError,
        match=(
            r"^torch.export\(strict=False\) would store this cache as a constant: use strict=True,"
            r" or assign"
        ),
    ):
        export(Step(here("fem_softmax"), 2, STEPS, assigned=False), (ids,), strict=False)


@torch.no_grad()
def test_torch_compile_with_the_default_cache() -> None:
    """Two lengths, so that the second is dynamic; the compiled graphs run as traced, so rounding is
    the same.
    """
    torch.compiler.reset()
    model = here("fem_softmax")
    compiled = torch.compile(model, backend="eager")
    for ids in (tokens(2, 5), tokens(2, 9)):
        output = compiled(ids)
        assert torch.equal(output.logits, model(ids).logits)
        step = model(ids[:, :1], past_key_values=output.past_key_values).logits
        # float32: sums in a different order.
        close(step, model(torch.cat((ids, ids[:, :1]), dim=1)).logits[:, -1:], 1e-5)
