"""Tests of speculative decoding: greedy decoding's tokens whatever is drafted, and drafts equal to
the prediction of the modules over the complete text, as in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tools.hf.small import GREEDY, NAMES, VOCAB, close, here, pairs, tokens
from tools.generate import speculative
from tools.generate.speculative import Drafter, speculate

NEW = 13
MOST = 2  # pending tokens, fewer than in use, to reach a pass without drafts soon
RIGHT = (2, 1, 2, 0, 0, 0, 2)  # right drafts of each pass: all, some, none


@torch.no_grad()
def over_the_text(model: Any, text: list[int]) -> Iterator[Tensor]:
    """Yield h^k [len(text) - k, 1, D] of each module over a complete text."""
    ids = torch.tensor([text])
    hidden = model.model(ids, use_cache=False).last_hidden_state.transpose(0, 1)
    for k, module in enumerate(model.mtp_modules, 1):
        positions = torch.arange(len(text) - k)
        embedded = model.model.embed(ids[:, k:]).transpose(0, 1)
        hidden = module(hidden[: len(positions)], embedded, positions)
        yield hidden


# Quick: attention, linear states, a convolution, an energy, iterations, velocities.
QUICK = ("transformer", "fem_gla", "mamba2", "cem", "hyperset", "yuriiformer")


@pytest.mark.parametrize(("name", "sizes"), pairs(NAMES, (2, 1), (1, 9), quick=QUICK))
def test_greedy_tokens_whatever_is_drafted(
    name: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of the modules are checked, and replaced so that every branch runs.

    sizes: modules, tokens of the prompt.
    """
    depth, length = sizes
    model, prompt = here(name, torch.float64, mtp_depth=depth), tokens(1, length)
    greedy = model.generate(prompt, max_new_tokens=NEW, **GREEDY)[0].tolist()
    ids, of_modules = prompt[0].tolist(), Drafter.drafts
    made: dict[Any, Tensor] = {}
    for module in model.mtp_modules:
        module.register_forward_hook(lambda self, _, states: made.update({self: states[-1]}))
    counts: list[int] = []
    right = chain(RIGHT, repeat(2))

    def replaced(self: Drafter, hidden: Tensor, text: list[int], count: int) -> list[int]:
        own = of_modules(self, hidden, text, count)
        incremental = [made[module] for module in self.modules[:count]]
        for draft, one, states in zip(
            own, incremental, over_the_text(model, text + own), strict=False
        ):
            whole = states[len(text) - 2]
            # Float64 rounding, which the perturbed weights enlarge.
            close(one, whole, 1e-9)
            assert draft == model.lm_head(whole).argmax()
        counts.append(count)
        true, places = greedy[len(text) : len(text) + count], next(right) if count else 0
        return [*true[:places], *((token + 1) % VOCAB for token in true[places:])]

    monkeypatch.setattr(Drafter, "drafts", replaced)
    monkeypatch.setattr(speculative, "MOST_PENDING", MOST)
    *_, found = speculate(model, ids, NEW)
    assert found.tokens == greedy[length:]
    assert 0 in counts[:-1] and found.drafted == sum(counts)
    used = [count for count in counts if count]
    accepted = [min(pair) for pair in zip(used, chain(RIGHT, repeat(2)), strict=False)]
    assert found.accepted == sum(accepted) and {0, 1, depth} <= set(accepted)
    assert found.passes + found.accepted == NEW

    right = chain(RIGHT, repeat(2))
    end = found.tokens[5]
    *_, ended = speculate(model, ids, NEW, {end})
    assert ended.tokens == found.tokens[: found.tokens.index(end) + 1]
