"""Tests that each mutant's line occurs once in the current source and that its fault parses."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.mutant import ROOT, Mutant, read_mutants


@pytest.mark.parametrize("mutant", read_mutants(), ids=lambda mutant: mutant.id)
def test_a_mutant_is_a_fault_of_todays_source(mutant: Mutant) -> None:
    changed = mutant.text(ROOT)
    assert changed != (ROOT / mutant.file).read_text(encoding="utf-8")
    if mutant.file.endswith(".py"):
        ast.parse(changed)
    file, _, test = (mutant.slow or "").partition("::")
    assert not file or f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8")
