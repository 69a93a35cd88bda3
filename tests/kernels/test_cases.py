"""One contract for every operation, over its own cases: each implementation, outputs and all gradients, against the definition in float64.

`kernels.check` holds the bounds: 1e-5 of the norm in float32; in bfloat16 one and a half times the error that the definition has when
each of its steps is rounded to it. Nothing may be left unwritten or not finite. Triton kernels run interpreted, at lengths that are no
multiple of a block. `make test` takes every case in one of the two types, `make test-all` in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kernels.cem_attention.triton as cem
from kernels.check import check, relative, results, suites

SUITES = suites()
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
IMPLEMENTATIONS = {"fem_attention": ("fused", "reference", "sdpa", "triton"), "gated_delta_rule": ("reference",)}
# fem_attention's kernels have tests of their own; here are the cases in which they meet prep, epilogue and the exact heads.
JOINTS = ("normal", "full, documents, padding", "one token", "free energy alone", "mean")
# The reference's log-sum-exp rounds at 1e-6, so it knows F - mu to 1e-6 / beta only.
UNKNOWN = {("fem_attention", "small beta", "reference", "float32"): ("d beta", "d lam")}
EXACT = {"second_order_attention": 1e-11, "symmetric_attention": 1e-12, "conditioner_features": 1e-12}  # float64 rounding


def calls() -> Iterator[Any]:
    for op, suite in SUITES.items():
        for implementation in IMPLEMENTATIONS.get(op, ("triton",)):
            for n, case in enumerate(suite.cases):
                if (op, implementation) == ("fem_attention", "triton") and case not in JOINTS:
                    continue
                for m, kind in enumerate(TYPES):
                    marks = [] if n == 0 or n % 2 == m else [pytest.mark.slow]
                    yield pytest.param(op, case, implementation, kind, marks=marks, id=f"{op}: {case}, {implementation}, {kind}")


@pytest.mark.parametrize(("op", "case", "implementation", "kind"), calls())
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_against_the_definition(op: str, case: str, implementation: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cem, "STRIP", 16)  # several strips in so few tokens
    known = UNKNOWN.get((op, case, implementation, kind), ())
    found = [each for each in check(SUITES[op], case, implementation, TYPES[kind]) if each.result not in known]
    assert found and not [f"{each.result}: {each.error:.2e} > {each.bound:.2e}" for each in found if not each.good]


@pytest.mark.parametrize(("op", "case"), [(op, case) for op in EXACT for case in SUITES[op].cases])
def test_the_reference_is_the_definition_in_float64(op: str, case: str) -> None:
    suite = SUITES[op]
    x = suite.cases[case](suite.small)
    truth = results(suite.definition, x, torch.float64, "cpu")
    for name, got in results(lambda given: suite.call(given, "reference"), x, torch.float64, "cpu").items():
        assert relative(got, truth[name]) < EXACT[op], name
