"""``python -m tools.bench.traffic``: memory traffic per token and layer, and the modelled step.

The traffic is in bytes through a GPU's memory; no GPU is needed.

Modelled, not measured. ``--write`` writes the tables to docs/benchmarks/paper.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fem_common.cli import run
from fem_common.errors import UserError
from tools.bench import runner

PROGRAM = "tools.bench.traffic"
ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "benchmarks" / "paper.md"


def main(arguments: list[str] | None = None) -> int:
    """Print or write the tables and return the exit code."""
    parser = runner.command_line(PROGRAM, (__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="name in configs/model; default: all mixers at the 1.3B widths",
    )
    parser.add_argument(
        "--against", metavar="NAME", help="model to compare with, also a name in configs/model"
    )
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens of a sequence (default: 4096)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="sequences of a step; default: that of tools.bench.gpu_suite for this size, else 4",
    )
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="also print a row per kernel of the model's first layer",
    )
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/paper.md")
    return run(PROGRAM, lambda: report(parser.parse_args(arguments)))


def report(options: argparse.Namespace) -> int:
    """Print or write the tables.

    Return 0. Raises UserError if triton is missing or an argument is wrong.
    """
    if options.against and not options.model:
        raise UserError("--against needs --model")
    if options.tokens < 1 or (options.batch is not None and options.batch < 1):
        raise UserError("--tokens and --batch are at least 1")
    names = [name for name in (options.model, options.against) if name]
    for name in names:
        runner.model_file(name)
    # Imported after the checks, since torch takes seconds that a mistake need not wait for.
    from kernels.implementations import triton_version
    from tools.bench.traffic import tables
    from tools.bench.traffic.paper import ROOFS, SOURCES

    if triton_version() is None:
        raise UserError(
            "the package triton is not installed; it is needed to count the traffic of its "
            "kernels: pip install triton"
        )
    if options.write:
        PAGE.write_text(tables.page(), encoding="utf-8")
        print(f"wrote {PAGE.relative_to(ROOT)}")
        return 0
    if names:
        steps = [tables.of_part(name, options.tokens, options.batch) for name in names]
        print(f"{tables.steps_table(steps)}\n{tables.SAME}")
        if options.kernels:
            print("\n" + tables.kernels_table(steps[0]))
    else:
        steps = list(tables.every_mixer(options.tokens, options.batch or 2).values())
        print(tables.mixers_table(steps))
    found: dict[str, Any] = {"suite": "traffic", "modelled": SOURCES}
    if options.against:
        times = {roof.name: [step.time(roof).total for step in steps] for roof in ROOFS}
        found["ratio"] = {name: ours / theirs for name, (ours, theirs) in times.items()}
    runner.write_json(options.json, found | {"models": [step.as_json() for step in steps]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
