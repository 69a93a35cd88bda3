"""Run every operation's cases on Triton's interpreter and compare the results with float64.

The kernels run under a sanitizer and with a GPU's approximate instructions. Usage:
``python -m tests.interpreter [--noise ULPS] [--sample N] [--seed S] [--op NAME]``. Each case must
meet its own bounds (`kernels.check`).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from typing import NamedTuple

from tests.interpreter.gpu import gpu_arithmetic
from tests.interpreter.run import interpret
from tests.interpreter.sanitizer import Sanitizer

PLAIN = ("fused", "reference")  # implementations without a Triton kernel
TYPES = ("float32", "bfloat16")


class Run(NamedTuple):
    """A case of an operation, one of its implementations with Triton kernels, and a type."""

    op: str
    implementation: str
    case: str
    kind: str

    def __str__(self) -> str:
        return f"{self.op}: {self.case}, {self.implementation}, {self.kind}"


def runs() -> list[Run]:
    """Return the runs of all operations."""
    from tests.kernels.operations import IMPLEMENTATIONS, SUITES, fits

    made = []
    for op, suite in SUITES.items():
        for implementation in IMPLEMENTATIONS.get(op, ("triton",)):
            if implementation in PLAIN:
                continue
            for case, inputs in suite.cases.items():
                if not fits(op, implementation, case):
                    continue
                # Without beta, sdpa only calls torch's attention and runs no Triton kernel.
                if implementation == "sdpa" and inputs(suite.small)["beta"] is None:
                    continue
                made += [Run(op, implementation, case, kind) for kind in TYPES]
    return made


def faults(run: Run, ulps: float, seed: int) -> list[str]:
    """Describe the faults of a run: sanitizer findings, then results out of bounds."""
    import torch

    from kernels.check import check
    from tests.kernels.operations import SUITES

    sanitizer = Sanitizer(seed)
    with warnings.catch_warnings(), sanitizer.watching(), gpu_arithmetic(ulps, seed):
        # numpy warns of infinities that a mask removes later.
        warnings.simplefilter("ignore", RuntimeWarning)
        found = check(SUITES[run.op], run.case, run.implementation, getattr(torch, run.kind))
    assert sanitizer.launches, f"{run} launched no kernel"
    return sorted(sanitizer.faults) + [
        f"{each.result}: {each.error:.1e} > {each.bound:.1e}" for each in found if not each.good
    ]


def main() -> int:
    """Run the chosen cases. Return 0 without faults, else 1."""
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
            f"--op: no operation {options.op!r} with kernels; there are"
            f" {', '.join(sorted({run.op for run in runs()}))}"
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
