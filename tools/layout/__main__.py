"""``python -m tools.layout CONFIG --gpus 64 --device h100``: rank the layouts of a run.

The fastest is first; the table includes what limits each of them.

Layouts that fail the run's own checks or that exceed the planned memory are left out. The others
are ranked by the model in ``step``. The times are modelled, not measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from fem_common.config import dump_yaml
from fem_common.errors import ConfigError
from fem_common.files import write_atomically
from fem_common.plot import COLOURS, new_figure, plain_axes, save
from fem_common.text import aligned, gib
from pretrain.config import ParallelConfig, load_run
from tools.layout.search import Candidate, ranked
from tools.layout.step import NODE, Machine, assumed, check, machines

PROGRAM = "tools.layout"
_SHOWN = 12


def main(arguments: list[str] | None = None) -> int:
    """Print the table of layouts and return the exit code.

    If requested, also write the best layout as YAML, and the picture.
    """
    known = machines()
    parser = Parser(
        prog=PROGRAM,
        description="Rank the parallel layouts of a run on N GPUs by an analytic model of a step.",
    )
    parser.add_argument(
        "config", metavar="CONFIG.yaml", help="a run, such as configs/run/demo.yaml"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
    )
    parser.add_argument(
        "--gpus", type=int, required=True, metavar="N", help=f"number of GPUs, in nodes of {NODE}"
    )
    parser.add_argument("--device", choices=sorted(known["devices"]), default="h100")
    parser.add_argument(
        "--fabric",
        choices=sorted(known["fabrics"]),
        default="ib-400",
        help="network between nodes (default: ib-400)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PART.yaml",
        help="write the best layout as a configuration part, such as configs/parallel/best.yaml",
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="draw the step time of the best layouts by category",
    )
    return run(PROGRAM, lambda: _report(parser.parse_intermixed_args(arguments)))


def _report(options: argparse.Namespace) -> int:
    config = load_run(options.config, options.overrides)
    check(config)
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size = null: a plan without data needs it, as model.vocab_size=32000"
        )
    if options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: at least 1")
    machine = Machine.of(options.device, options.fabric)
    found, over = ranked(config, options.gpus, machine)
    if not found:
        raise ConfigError(
            f"no layout of {config.name} on {options.gpus} x {options.device} fits "
            f"({over} need more memory)"
        )
    print(
        f"{config.name} on {options.gpus} x {options.device}, {options.fabric}: "
        f"{len(found)} layouts fit, {over} do not; modelled"
    )
    for line in assumed(config):
        print(f"assumed: {line}")
    rows = [["layout", "step, s", "MFU", "tokens/s/GPU", "memory", "limited by"]]
    for each in found[:_SHOWN]:
        tokens = each.plan.schedule.step_tokens / each.time.total / options.gpus
        rows.append(
            [
                each.name,
                f"{each.time.total:.3f}",
                f"{100 * each.mfu:.1f}%",
                f"{tokens:,.0f}",
                gib(each.plan.peak_memory),
                each.limit,
            ]
        )
    print("\n".join(aligned(rows, left=[0, 5])))
    best = found[0]
    if options.out:
        extra = " ".join(best.extra_overrides)
        note = (
            f"# {best.name} for {config.name} on {options.gpus} x {options.device}, "
            f"by tools.layout's model: {100 * best.mfu:.0f}% MFU.\n"
            f"# With {extra}.\n"
        )
        write_atomically(options.out, (note + dump_yaml(_part(best.plan.config.parallel))).encode())
        print(f"wrote {options.out}; with {extra}")
    if options.picture:
        draw(found[:_SHOWN], options.picture)
    return 0


def _part(layout: ParallelConfig) -> dict[str, Any]:
    """Return name -> value for the settings of the layout that differ from the defaults."""
    usual = ParallelConfig()
    return {name: value for name, value in vars(layout).items() if value != getattr(usual, name)}


def draw(found: list[Candidate], file: Path) -> None:
    """Write ``file`` as PNG: one bar per layout, divided into the categories of the step's time."""
    figure = new_figure((9.0, 1.4 + 0.4 * len(found)))
    axes = figure.subplots()
    left, colours = [0.0] * len(found), [*COLOURS, "#888888", "#bbbbbb"]
    for kind, colour in zip(found[0].time.seconds, colours, strict=False):
        widths = [each.time.seconds[kind] for each in found]
        axes.barh(range(len(found)), widths, left=left, color=colour, label=kind)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for place, each in enumerate(found):
        axes.text(left[place], place, f"  {100 * each.mfu:.0f}% MFU", va="center", fontsize=8)
    axes.set_yticks(range(len(found)), [each.name for each in found], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(left))
    plain_axes(axes, "seconds of a step, modelled", grid="x")
    figure.legend(loc="outside upper center", fontsize=8, ncols=5, frameon=False)
    save(figure, file)


if __name__ == "__main__":
    sys.exit(main())
