"""Our use of flash-linear-attention, whose kernels need a GPU.

Its naive references are oracles of our reads, and its kernels are called with arguments that their
signatures accept.

The package is imported in another process, which takes it seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kernels.gated_delta_rule.op as delta
import kernels.linear_attention.op as attention
from kernels.check import relative
from tests.kernels.test_linear_attention import inputs as attention_inputs
from tests.kernels.test_scans import inputs as delta_inputs
from tests.ranks import answer

Errors = dict[str, float]
TOKENS, SCALE = 9, 0.7


def naive_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **named: Any) -> Any:
    """The reference has a scale of its own."""
    named.pop("scale")
    reference = import_module("fla.ops.gla.naive").naive_recurrent_gla
    return reference(q * q.shape[-1] ** 0.5, k, v, g, **named)


def naive_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, **named: Any) -> Any:
    decay = q.new_zeros(q.shape[:3]) if g is None else g
    return import_module("fla.ops.simple_gla.naive").naive_recurrent_simple_gla(
        q, k, v, decay, **named
    )


def naive_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float, **named: Any) -> Any:
    """The reference has a scale of its own, and heads before tokens."""
    reference = import_module("fla.ops.delta_rule.naive").delta_rule_recurrence
    scaled = q * (scale * q.shape[-1] ** 0.5)
    out, state = reference(*(x.transpose(1, 2) for x in (scaled, k, v, beta)), **named)
    return out.transpose(1, 2), state


def naive_gated_delta(*given: Tensor, **named: Any) -> Any:
    return import_module("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule(
        *given, **named
    )


ENTRIES: dict[tuple[str, str], Callable[..., Any]] = {
    ("fla.ops.gla", "chunk_gla"): naive_gla,
    ("fla.ops.simple_gla", "chunk_simple_gla"): naive_simple_gla,
    ("fla.ops.delta_rule", "chunk_delta_rule"): naive_delta,
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"): naive_gated_delta,
}
"""Kernels that we call -> the package's reference for each, with the kernel's arguments."""


def errors() -> dict[str, Errors]:
    """Return case -> name -> relative error of our read, where the kernels are the references.

    A call with arguments that a kernel's signature refuses raises TypeError.
    """
    for (module, name), reference in ENTRIES.items():
        signature = inspect.signature(getattr(import_module(module), name))

        def entry(*given: Any, of: Any, instead: Any, **named: Any) -> Any:
            of.bind(*given, **named)
            return instead(*given, **named)

        setattr(import_module(module), name, partial(entry, of=signature, instead=reference))
    found: dict[str, Errors] = {}

    def compare(case: str, got: Any, wanted: Any) -> None:
        found[case] = {
            name: relative(one, other)
            for name, one, other in zip(("output", "state"), got, wanted, strict=True)
        }

    for decay in ("no decay", "a decay a head", "a decay a channel"):
        x = attention_inputs(TOKENS, decay)
        x["k"][:, :, :2] = 0  # the first reads have no mass
        for normalise in (True, False):
            initial = None if normalise else torch.rand(1, 1, 3, 4)
            wanted = attention.linear_attention(**x | {"normalise": normalise}, initial=initial)
            got = attention._by_fla(x["q"], x["k"], x["v"], x.get("log_decay"), initial, normalise)
            compare(f"{decay}, normalise={normalise}", got, wanted)
    given: Any = delta_inputs(TOKENS)
    rule: Any = delta.gated_delta_rule
    for case, x in (("gated delta rule", given), ("delta rule", given | {"log_decay": None})):
        wanted = rule(**x, scale=SCALE, implementation="reference")
        by_fla: Any = delta._by_fla
        compare(case, by_fla(*x.values(), SCALE), wanted)
    return found


def test_our_reads_are_the_references_through_the_kernels_signatures(tmp_path: Path) -> None:
    found = answer(1, errors, output=tmp_path / "said")
    assert len(found) == 8
    for case, parts in found.items():
        # The references compute in float32: rounding of sums over 9 tokens.
        assert all(error < 2e-6 for error in parts.values()), (case, parts)
