"""``python -m tools.demo [--out DIR] [--readme] [section.key=value ...]``: run the full pipeline.

This takes a few minutes on a CPU.

Exit codes: those of all commands (``fem_common/README.md``). 1: a step failed, or the model learned
too little.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

from fem_common.cli import Parser, run
from fem_common.fem import command_line, next_steps
from fem_common.files import write_atomically
from fem_common.text import aligned
from pretrain.config import load_run
from pretrain.report.history import History
from tools.demo import pages, report, steps
from tools.demo.shell import DemoError, Shell, print_now

ROOT = Path(__file__).resolve().parents[2]
# One thread per rank, since the ranks already use all cores. The demo needs no network.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

# Their commands run in forks of a process that has imported torch, Megatron-core and transformers.
FORKED = ("pretrain", "tools.demo.megatron_logits", "tools.hf", "torch.distributed.run")


def main(arguments: list[str] | None = None) -> int:
    """Run the demo and return the exit code."""
    parser = Parser(
        prog="tools.demo", description="Run the complete pipeline in a few minutes on a CPU."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "runs" / "demo",
        help="output folder; default: runs/demo",
    )
    parser.add_argument(
        "--readme",
        action="store_true",
        help="also write the results into README.md and docs/ of this checkout",
    )
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="section.key=value",
        help="settings of every training run, as for python -m pretrain",
    )
    given = parser.parse_args(arguments)
    return run(
        "tools.demo",
        lambda: _demo(given.out.absolute(), given.settings, given.readme),
        kept="its commands have been ended",
    )


def _demo(out: Path, settings: list[str], readme: bool) -> None:
    config = load_run(ROOT / "configs" / "run" / "demo.yaml", settings)
    if readme:
        pages.check(ROOT, settings)
    demo = steps.Demo(Shell(ROOT, ENVIRONMENT, FORKED), out, config, tuple(settings))
    print_now(f"$ cd {ROOT}" if Path.cwd() != ROOT else f"in {ROOT}")
    print_now("$ export " + " ".join(f"{key}={value}" for key, value in ENVIRONMENT.items()))
    print_now(f"# {', '.join(FORKED)}: run in forks of one process with their imports")
    found = steps.run(demo)
    _publish(found, demo)
    if readme:
        demo.evaluate()
        pages.write(ROOT, demo.out, found)
        print_now(
            f"rewritten: {', '.join(pages.PAGES.values())}, docs/demo.png, docs/evaluation.png"
        )


def _publish(found: dict[str, Any], demo: steps.Demo) -> None:
    """Print the table and write report.json and report.png.

    Raises DemoError after that if the model learned too little.
    """
    fem, transformer = (History.read(demo.out / name) for name in report.NAMES)
    pages.draw(fem, transformer, found, demo.out / "report.png")
    write_atomically(demo.out / "report.json", json.dumps(found, indent=1) + "\n")
    times = [f"{name} {report.minutes(value)}" for name, value in found["seconds"].items()]
    heads = ["", "nats per token", "bits per byte", "parameters", "tokens/s"]
    lines = aligned([heads, *report.rows(found)], left=(0,))
    print_now("\n".join(["", *lines, "", fill(report.conditions(found), 100)]))
    print_now(f"\ntime: {', '.join(times)}")
    print_now(
        f"the same in {demo.path('report.json')}, both loss curves in {demo.path('report.png')}, "
        f"the model in {demo.path('hf', 'fem')}"
    )
    short = report.shortfall(found)
    if short:
        raise DemoError(f"the report failed: {short}")
    curves = command_line("curves", *(demo.path(name) for name in report.NAMES))
    generate = command_line("generate", demo.path(), "def read(self", "--max-new-tokens", 40)
    print_now(next_steps(curves, generate))


if __name__ == "__main__":
    sys.exit(main())
