"""Tests of other dtypes than float32: torch.autocast over float32 weights, float16 weights,
products with quantised weights.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from kernels.check import relative
from tests.tools.hf.small import GREEDY, here, padded_batch, slow_but, tokens

EACH = slow_but("fem_softmax", "fem_gla", "cem", "hybrid")
STATIC: dict[str, Any] = {"cache_implementation": "static", "disable_compile": True}
BFLOAT16 = 2.0**-8  # unit roundoff of bfloat16


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


class Results(NamedTuple):
    """Results of a call with labels; all gradients concatenated."""

    loss: float
    logits: Tensor
    gradients: Tensor


def results(
    model: Any, region: AbstractContextManager[Any] | None = None, seed: int = 1
) -> Results:
    """Return the results of a call; the backward pass is outside the region."""
    ids = tokens(2, 40, seed=seed)
    with region or nullcontext():
        out = model.train()(ids, labels=ids)
    out.loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return Results(
        out.loss.item(), out.logits.detach(), torch.cat([g.flatten() for g in gradients])
    )


@functools.cache
def plain(name: str, dtype: torch.dtype = torch.float32, seed: int = 1) -> Results:
    """Return the results of the model with weights of a dtype, outside the caller's regions."""
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        return results(here(name, torch.float32).to(dtype), seed=seed)


def error(name: str, dtype: torch.dtype, which: str = "logits") -> float:
    """Return the error of weights of a dtype, against float32."""
    return relative(getattr(plain(name, dtype), which), getattr(plain(name), which))


@pytest.mark.parametrize("name", EACH)
def test_autocast_is_as_close_as_bfloat16_weights(name: str) -> None:
    """It rounds the same products and keeps the residual stream, so its error is smaller up to
    chance: a quarter.

    Errors of gradients have long tails where a relu or a solve is near its edge (up to 7 times
    bfloat16's for one of twelve texts): the median over five texts is compared.
    """
    found, wanted = results(here(name), autocast()), plain(name)
    assert abs(found.loss - wanted.loss) <= BFLOAT16 * wanted.loss
    assert relative(found.logits, wanted.logits) <= 1.25 * error(name, torch.bfloat16)
    errors = [
        (
            relative(results(here(name), autocast(), seed).gradients, exact),
            relative(plain(name, torch.bfloat16, seed).gradients, exact),
        )
        for seed in range(1, 6)
        for exact in (plain(name, seed=seed).gradients,)
    ]
    mixed, narrow = (median(each) for each in zip(*errors, strict=True))
    assert mixed <= 2 * narrow


@pytest.mark.parametrize("name", EACH)
def test_autocast_decodes_and_recomputes(name: str) -> None:
    """Token by token it is as close as at once; both caches count the tokens; recomputed blocks are
    equal bit for bit.
    """
    model = here(name)
    checkpointed = here(name)
    ids = tokens(2, 40)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    both = [results(each, autocast()) for each in (model, checkpointed)]
    assert torch.equal(both[0].logits, both[1].logits)
    assert torch.equal(both[0].gradients, both[1].gradients)
    cache, (prompt, mask) = model.eval().new_cache(), padded_batch()
    with torch.no_grad(), autocast():
        steps = [
            model(piece, past_key_values=cache).logits for piece in ids.split([36, 1, 1, 2], dim=1)
        ]
        for given in ({}, STATIC):
            options = GREEDY | {"attention_mask": mask, "max_new_tokens": 3} | given
            assert model.generate(prompt, **options).shape == (3, 11)
    assert relative(torch.cat(steps, 1), plain(name).logits) <= 1.25 * error(name, torch.bfloat16)


@pytest.mark.parametrize("name", EACH)
def test_float16_weights_compute(name: str) -> None:
    """float16 is eight times finer than bfloat16, so a quarter of its error allows for chance; few
    tokens are close to a tie.
    """
    loss, logits, gradients = plain(name, torch.float16)
    assert logits.dtype == gradients.dtype == torch.float16 and gradients.isfinite().all()
    assert abs(loss - plain(name).loss) <= BFLOAT16 / 4 * loss
    assert error(name, torch.float16) <= error(name, torch.bfloat16) / 4
    assert (logits.argmax(-1) == plain(name).logits.argmax(-1)).float().mean() > 0.95
    model, (prompt, mask) = here(name).to(torch.float16), padded_batch()
    options = GREEDY | {"attention_mask": mask, "max_new_tokens": 3}
    made = [model.generate(prompt, **options, **given) for given in ({}, STATIC)]
    assert torch.equal(*made)
    cache = model.new_cache()
    with torch.no_grad():
        steps = [
            model(piece, past_key_values=cache).logits
            for piece in tokens(2, 40).split([36, 1, 1, 2], dim=1)
        ]
        # PyTorch does not concatenate float16 tensors under bfloat16 autocast.
        if name != "yuriiformer":
            with autocast():
                assert relative(model(tokens(2, 40)).logits, plain(name).logits) <= 1.25 * error(
                    name, torch.bfloat16
                )
    assert relative(torch.cat(steps, 1), plain(name).logits) <= error(name, torch.bfloat16) / 4


class Quantised(nn.Module):
    """A product as in bitsandbytes, torchao and quanto: an int8 tensor called ``weight``, or no
    tensor with this name.

    Its result has the dtype of its input, also within autocast's region.
    """

    def __init__(self, of: nn.Linear, named: str) -> None:
        super().__init__()
        scale = of.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer(named, (of.weight.detach() / scale).round().to(torch.int8))
        self.named, self.scale, self.bias = named, scale, of.bias

    def dequantised(self) -> Tensor:
        return self.get_buffer(self.named) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.dequantised().to(x.dtype), self.bias).to(x.dtype)


@pytest.mark.parametrize("name", EACH)
def test_quantised_products_compute(name: str) -> None:
    """The results equal those of the original weights for every torch.nn.Linear of a block, also
    next to products that autocast rounds.
    """
    if name == "energy_transformer":
        pytest.skip("it has no torch.nn.Linear: every matrix is applied in both directions")
    model, ids = here(name).eval(), tokens(2, 40)
    linears = {
        path: module
        for path, module in model.model.layers.named_modules()
        if isinstance(module, nn.Linear)
    }
    assert linears
    for linear in linears.values():
        linear.weight.data.copy_(Quantised(linear, "weight").dequantised())
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits
        for named in ("weight", "packed"):
            for path, linear in linears.items():
                model.model.layers.set_submodule(path, Quantised(linear, named))
            # float32 rounding of scale and weight.
            assert relative(model(ids, use_cache=False).logits, wanted) < 1e-6
        with autocast():
            assert relative(model(ids, use_cache=False).logits, wanted) <= 1.25 * error(
                name, torch.bfloat16
            )
