"""Tests of the operations against the float64 fixtures in ``tests/fixtures``.

Implementations that share no code with this project computed the outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.fem_attention import fem_attention
from kernels.free_energy import free_energy_read
from kernels.gated_delta_rule import gated_delta_rule
from kernels.second_order_attention import second_order_attention
from kernels.time_decay_scan import time_decay_scan
from tests.kernels.operations import load


def softmax_read(how: str) -> Callable[..., list[Tensor]]:
    """Return a function that computes [o, mu, F].

    how: an implementation of `fem_attention`, or else `free_energy_read` with softmax weights.
    """

    def one(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        lam: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        if how in ("reference", "fused"):
            return fem_attention(q, k, v, beta, lam, gate, implementation=how)
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)
        # The logarithms of the weights may have any additive constant.
        known: Any = (
            lambda streams: scores.softmax(-1) @ streams,
            lambda start, stop: scores[:, :, start:stop] + 7.0,
        )
        weights = scores[0].log_softmax(-1)
        requested: Any = {
            "log_read": lambda heads, x: (weights[heads, :, :, None] + x[:, None]).logsumexp(2),
            "exact": how == "exact" or None,
        }
        return free_energy_read(v, beta, lam, gate, *known, **requested)

    def call(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, g: Tensor, beta: Tensor) -> list[Tensor]:
        q, k, v, lam, g = (t[None, None] for t in (q, k, v, lam, g))
        return [
            one(q, k, v, *rest)[0, 0]
            for rest in ((beta[None], lam, g), (None, None, None), (beta[None], None, None))
        ]

    return call


def newton_step(exact: bool) -> Callable[..., list[Tensor]]:
    def call(z: Tensor, Wq: Tensor, Wk: Tensor, Wo: Tensor, T: Tensor, Tb: Tensor) -> list[Tensor]:
        step = second_order_attention(
            (z @ Wq.mT)[None], (z @ Wk.mT)[None], Wq @ Wq.mT, T, Tb, exact=exact
        )
        return [z + torch.einsum("hde,bhte->td", Wo, step)]

    return call


SOFTMAX_READS = ("reference", "fused", "fast", "exact")
CALLS: list[tuple[str, str, Callable[..., Any]]] = [
    *(("fem_read_normal", how, softmax_read(how)) for how in SOFTMAX_READS),
    *(("fem_read_adversarial", how, softmax_read(how)) for how in SOFTMAX_READS),
    ("time_decay_scan", "", lambda a, x: [time_decay_scan(a, x)]),
    ("gated_delta_rule", "", partial(gated_delta_rule, chunk=16)),
    ("mha2nd1st", "", newton_step(False)),
    ("mha2nd", "", newton_step(True)),
]


@pytest.mark.parametrize(
    ("name", "how", "call"), CALLS, ids=[f"{name}: {how}" for name, how, _ in CALLS]
)
def test_fixture(name: str, how: str, call: Callable[..., Any]) -> None:
    stored = load(name)
    leaves = {
        key.removeprefix("in/"): t.requires_grad_()
        for key, t in stored.items()
        if key.startswith("in/")
    }
    keys = [key for key in stored if key.startswith("out/")]
    outputs = dict(zip(keys, call(**leaves), strict=False))
    weights = [stored[key] for key in ("w", "w/o", "w/state") if key in stored]
    loss = torch.zeros(())
    for o, w in zip(outputs.values(), weights, strict=False):
        loss = loss + (o * w).sum()
    names = [key for key in leaves if f"grad/{key}" in stored]
    gradients = torch.autograd.grad(loss, [leaves[key] for key in names])
    assert outputs and gradients
    found = outputs | {f"grad/{key}": g for key, g in zip(names, gradients, strict=True)}
    for key, got in found.items():
        # Both sides are float64; the fixtures define the tolerance.
        torch.testing.assert_close(
            got, stored[key], rtol=1e-9, atol=1e-9 * float(stored[key].abs().max()), msg=key
        )
