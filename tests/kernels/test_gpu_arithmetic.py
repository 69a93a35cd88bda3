"""Every operation's cases as a GPU would run them: programs in any order, watched, with approximate instructions one unit off.

`make test` takes one case an operation, `make test-all` all of them. ``python -m tests.interpreter`` is the same by hand.
"""

from __future__ import annotations

import random

import pytest

from tests.interpreter.__main__ import Run, faults, runs

RUNS = runs()
QUICK = {random.Random(7).choice([run for run in RUNS if run.op == op]) for op in sorted({run.op for run in RUNS})}


@pytest.mark.parametrize("run", [pytest.param(run, id=str(run), marks=[] if run in QUICK else [pytest.mark.slow]) for run in RUNS])
def test_a_case_holds_on_a_gpu(run: Run) -> None:
    assert not faults(run, ulps=1.0, seed=0)
