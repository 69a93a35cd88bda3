"""Greedy self-speculative decoding: the modules of multi-token prediction draft tokens, which the
model checks in one forward pass.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; the acceptance rule is that of arXiv 2211.17192
at temperature 0. The tokens are those of greedy decoding, up to rounding: several tokens in one
pass are summed in another order than one token, so two nearly equal logits may change places.

The state of a recurrent layer cannot be cropped. A layer replaces the tensors of its state and
never writes them in place, so references to them restore an earlier state. After a rejected draft
the state from before the pass is restored, and the accepted tokens are fed again with the next
drafts, in the same pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

MOST_PENDING = 8  # tokens outside the cache, after which one pass without drafts adds them


@dataclass
class Speculation:
    """Result of `speculate`.

    tokens: new tokens. drafted, accepted: numbers of drafts. passes: forward passes of the model.
    cache: the model's cache. modules_cache: that of the modules.
    """

    cache: Any
    modules_cache: Any
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    passes: int = 0


class Drafter:
    """Modules of a model in decoding, each with the state of the positions that are certain.

    With the tokens 0 .. T of the text and h^0 of 0 .. T - 1, the output h^k of module k is certain
    at positions up to T - k, which enter its state. Later positions depend on the drafts.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.modules = model, list(model.mtp_modules)
        self.cache = model.new_cache()
        self.cache.layers = [type(self.cache.layers[0])() for _ in self.modules]
        # Certain rows [n, 1, D] of each module's input h^(k-1) that its state does not contain.
        self.waiting: list[list[Tensor]] = [[] for _ in self.modules]

    def drafts(self, hidden: Tensor, tokens: list[int], count: int) -> list[int]:
        """Return ``count`` drafts of the tokens after ``tokens``, one of each module.

        hidden: h^0 [n, 1, D] of the positions before the last token that were not given before.
        """
        text, certain, ahead = list(tokens), hidden, hidden[:0]
        self.waiting[0].append(hidden)
        for k, (module, layer) in enumerate(
            zip(self.modules[:count], self.cache.layers, strict=False), 1
        ):
            rows = torch.cat(self.waiting[k - 1])
            ready = max(0, len(tokens) - k - layer.tokens)
            self.waiting[k - 1] = [rows[ready:]]
            certain = self._run(k, module, rows[:ready], text)
            before = _state(layer)
            ahead = self._run(k, module, torch.cat((rows[ready:], ahead)), text)
            _restore(layer, before)
            if k < len(self.modules):
                self.waiting[k].append(certain)
            last = torch.cat((certain, ahead))[-1:]
            text += _choices(self.model, last)
        return text[len(tokens) :]

    def _run(self, k: int, module: Any, rows: Tensor, text: list[int]) -> Tensor:
        """Return h^k of the positions after module k's state, given their h^(k-1) ``rows``."""
        if not len(rows):
            return rows
        first = self.cache.layers[k - 1].tokens
        ids = torch.tensor([text[first + k : first + k + len(rows)]], device=rows.device)
        positions = torch.arange(first, first + len(rows), device=rows.device)
        embedded = self.model.model.embed(ids).transpose(0, 1)
        made: Tensor = module(rows, embedded, positions, None, self.cache)
        return made


@torch.no_grad()
def speculate(
    model: Any,
    prompt: list[int],
    new: int,
    ends: Collection[int | None] = (),
    depth: int | None = None,
) -> Iterator[Speculation]:
    """Continue the ids ``prompt`` by up to ``new`` tokens, or until one of ``ends``.

    Yield the result after each forward pass; it is one object, which later passes change.

    model: a FemLMForCausalLM with ``mtp_modules``. depth: number of modules that draft; None: all;
    0: greedy decoding.
    """
    drafter, cache = Drafter(model), model.new_cache()
    found = Speculation(cache, drafter.cache)
    pending, drafts, seen = list(prompt), list[int](), 0
    depth = len(drafter.modules) if depth is None else depth
    while True:
        before = [_state(layer) for layer in cache.layers]
        ids = torch.tensor([pending + drafts], device=model.device)
        hidden = model.model(ids, past_key_values=cache).last_hidden_state.transpose(0, 1)
        choices = _choices(model, hidden[len(pending) - 1 :])
        right = 0
        while right < len(drafts) and drafts[right] == choices[right]:
            right += 1
        taken = choices[: right + 1]
        stop = next((place + 1 for place, token in enumerate(taken) if token in ends), None)
        found.tokens += taken[:stop]
        found.passes += 1
        found.drafted += len(drafts)
        found.accepted += right
        yield found
        left = new - len(found.tokens)
        if stop is not None or left <= 0:
            return
        certain = hidden[seen : len(pending) + right]
        if right == len(drafts):
            pending, seen = taken[-1:], 0
        else:
            for layer, state in zip(cache.layers, before, strict=True):
                _restore(layer, state)
            pending, seen = pending + taken, len(pending) + right
        count = 0 if len(pending) > MOST_PENDING else min(depth, left - 1)
        drafts = drafter.drafts(certain, prompt + found.tokens, count)


def _choices(model: Any, hidden: Tensor) -> list[int]:
    """Return the likeliest next token after each row of hidden [n, 1, D]."""
    tokens: list[int] = model.lm_head(hidden)[:, 0].argmax(dim=-1).tolist()
    return tokens


def _state(layer: Any) -> tuple[dict[str, Tensor], int, bool]:
    return dict(layer.state), layer.tokens, layer.is_initialized


def _restore(layer: Any, before: tuple[dict[str, Tensor], int, bool]) -> None:
    layer.state, layer.tokens, layer.is_initialized = before
