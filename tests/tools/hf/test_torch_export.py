"""torch.export of the exported models: a program for any batch and length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

from tests.tools.hf.small import NAMES, close, here, tokens

SHAPES = ((1, 5), (2, 17), (5, 2), (1, 1), (2, 70), (1, 300))  # under and over a window, a chunk of 64, CEM's 48 hidden channels


class Logits(nn.Module):
    """Of ids [b, t] and a mask, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.model(ids, attention_mask=mask, use_cache=False).logits
        return logits


def some(quick: tuple[str, ...], *modes: Any) -> list[Any]:
    """Every name with every mode; what is not of the first mode or not ``quick`` is slow."""
    pairs = [(name, mode) for name in NAMES for mode in modes]
    return [pair if pair[0] in quick and pair[1] == modes[0] else pytest.param(*pair, marks=pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("name", "mode"), some(("hybrid", "cem"), "masked", "plain", "strict"))
@torch.no_grad()
def test_a_program_takes_any_batch_and_length(name: str, mode: str) -> None:
    """float64: a node of the graph runs the code that eager runs; CEM's preconditioner alone takes one order for all lengths."""
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
