"""Every operation's cases on Triton's interpreter under a sanitizer and a GPU's approximate instructions, against float64.

``python -m tests.interpreter [--noise ULPS] [--sample N] [--seed S] [--op NAME]``. A case is held to its own bounds (`kernels.check`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from typing import NamedTuple

from tests.interpreter import interpret
from tests.interpreter.gpu import gpu_arithmetic
from tests.interpreter.sanitizer import Sanitizer

PLAIN = ("fused", "reference")  # implementations without a kernel of Triton's
TYPES = ("float32", "bfloat16")


class Run(NamedTuple):
    """A case of an operation, one of its Triton implementations, and a type."""

    op: str
    implementation: str
    case: str
    kind: str

    def __str__(self) -> str:
        return f"{self.op}: {self.case}, {self.implementation}, {self.kind}"


def runs() -> list[Run]:
    """All of them."""
    from tests.kernels.operations import IMPLEMENTATIONS, SUITES, fits

    return [
        Run(op, implementation, case, kind)
        for op, suite in SUITES.items()
        for implementation in IMPLEMENTATIONS.get(op, ("triton",))
        if implementation not in PLAIN
        for case in suite.cases
        # Without beta sdpa is torch's attention alone.
        if fits(op, implementation, case)
        and (implementation != "sdpa" or suite.cases[case](suite.small)["beta"] is not None)
        for kind in TYPES
    ]


def faults(run: Run, ulps: float, seed: int) -> list[str]:
    """What is wrong with a run: results out of their bounds, and what the sanitizer finds."""
    import torch

    from kernels.check import check
    from tests.kernels.operations import SUITES

    sanitizer = Sanitizer(seed)
    with warnings.catch_warnings(), sanitizer.watching(), gpu_arithmetic(ulps, seed):
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # numpy's, of infinities that a mask takes out
        found = check(SUITES[run.op], run.case, run.implementation, getattr(torch, run.kind))
    assert sanitizer.launches, f"{run} launched no kernel"
    return sorted(sanitizer.faults) + [
        f"{each.result}: {each.error:.1e} > {each.bound:.1e}" for each in found if not each.good
    ]


def main() -> int:
    """0: no faults, 1: faults."""
    parser = argparse.ArgumentParser(prog="python -m tests.interpreter", description=__doc__)
    parser.add_argument(
        "--noise",
        type=float,
        default=1.0,
        metavar="ULPS",
        help="how far off the approximate instructions are (1)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="so many cases, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--op", metavar="NAME", help="an operation's cases alone")
    options = parser.parse_args()
    interpret()
    chosen = [run for run in runs() if options.op in (None, run.op)]
    if not chosen:
        parser.error(
            f"--op: no operation {options.op!r} with kernels; there are {', '.join(sorted({run.op for run in runs()}))}"
        )
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    bad, began = 0, time.monotonic()
    for done, run in enumerate(chosen, 1):
        found = faults(run, options.noise, options.seed)
        bad += bool(found)
        left = (time.monotonic() - began) / done * (len(chosen) - done)
        print(
            f"[{done} of {len(chosen)}, {left:.0f} s left] {run}: {'; '.join(found) or 'ok'}",
            flush=True,
        )
    print(f"{len(chosen) - bad} of {len(chosen)} runs without a fault")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
