"""``python -m tools.layout CONFIG --gpus 64 --device h100``: every layout that the run could have there, the fastest first, and why.

Refused by the run's own checks, then by the planned memory; the rest ranked by ``step``'s model. Modelled, not measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from fem_common.config import ConfigErrors, dump_yaml
from fem_common.errors import ConfigError
from fem_common.files import write_whole
from fem_common.plot import COLOURS, new_figure, plain_axes, save
from fem_common.text import aligned, gib
from pretrain.config import ParallelConfig, RunConfig, load_run
from pretrain.plan.devices import memory_gib
from pretrain.plan.run_plan import Plan, make_plan
from pretrain.validate import validate
from tools.layout.step import NODE, Machine, machines, mfu, seconds

PROGRAM = "tools.layout"
_SHOWN = 12


@dataclass(frozen=True)
class Candidate:
    """A layout that fits, and its step's seconds by what they are spent on."""

    plan: Plan
    spent: dict[str, float]
    mfu: float

    @property
    def step(self) -> float:
        """Seconds."""
        return sum(self.spent.values())

    @property
    def name(self) -> str:
        """As tables have it."""
        layout, train = self.plan.config.parallel, self.plan.config.train
        tensor, chunks = layout.tensor_model_parallel_size, layout.virtual_pipeline_model_parallel_size
        parts = [f"TP{tensor}{'+SP' if layout.sequence_parallel else ''}" if tensor > 1 else ""]
        parts += [
            f"PP{layout.pipeline_model_parallel_size}{f'x{chunks}' if chunks else ''}" if layout.pipeline_model_parallel_size > 1 else ""
        ]
        parts += [f"DP{self.plan.data_parallel}", f"micro-batch {train.micro_batch_size}", "recompute" if train.recompute == "full" else ""]
        return " ".join(filter(None, parts))

    @property
    def limit(self) -> str:
        """What most of the step beyond products and attention is spent on, with its share."""
        rest = {name: each for name, each in self.spent.items() if name not in ("products", "attention")}
        most = max(rest, key=lambda name: rest[name])
        return f"{most} {100 * rest[most] / self.step:.0f}%"


def layouts(config: RunConfig, gpus: int) -> Iterator[RunConfig]:
    """Every layout that the run's own checks let pass."""
    model, batch = config.model, config.train.global_batch_size
    for tensor in (1, 2, 4, 8):
        for stages in (each for each in range(1, model.num_layers + 1) if model.num_layers % each == 0 and gpus % (tensor * each) == 0):
            data, deep = gpus // (tensor * stages), model.num_layers // stages
            for chunks in (None, *(each for each in (2, 3, 4) if stages > 1 and deep % each == 0)):
                for micro in (each for each in (1, 2, 4, 8, 16) if batch % (each * data) == 0):
                    for recompute in ("none", "full"):
                        parallel = replace(
                            config.parallel, world_size=gpus, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1,
                            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=chunks,
                            use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True,
                        )  # fmt: skip
                        made = replace(config, parallel=parallel, train=replace(config.train, micro_batch_size=micro, recompute=recompute))
                        try:
                            validate(made, gpus)
                        except ConfigErrors:
                            continue
                        yield made


def ranked(config: RunConfig, gpus: int, machine: Machine) -> tuple[list[Candidate], int]:
    """(the layouts that fit, the fastest first; how many do not fit)."""
    room, fit, over = (memory_gib(machine.name) or 0) * 2**30 * float(machine.rest["room"]), list[Candidate](), 0
    for made in layouts(config, gpus):
        plan = make_plan(made, gpus)
        if plan.peak_memory > room:
            over += 1
            continue
        spent = seconds(plan, machine)
        fit.append(Candidate(plan, spent, mfu(plan, sum(spent.values()), machine.name)))
    return sorted(fit, key=lambda each: each.step), over


def main(arguments: list[str] | None = None) -> int:
    """Print the table; write the best as a part, and the picture."""
    known = machines()
    parser = Parser(prog=PROGRAM, description="Rank the layouts of a run on so many GPUs by a stated model of a step.")
    parser.add_argument("config", metavar="CONFIG.yaml", help="a run, such as configs/run/demo.yaml")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help=f"in nodes of {NODE}")
    parser.add_argument("--device", choices=sorted(known["devices"]), default="h100")
    parser.add_argument("--fabric", choices=sorted(known["fabrics"]), default="ib-400", help="between nodes (ib-400)")
    parser.add_argument("--out", type=Path, metavar="PART.yaml", help="write the best layout as a part, such as configs/parallel/best.yaml")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw what each of the best spends its step on")
    return run(PROGRAM, lambda: _report(parser.parse_intermixed_args(arguments)))


def _report(options: argparse.Namespace) -> int:
    config = load_run(options.config, options.overrides)
    if config.engine.name == "deepspeed":
        raise ConfigError("engine.name = deepspeed has no layouts to choose from here; set engine.name=megatron")
    if config.parallel.context_parallel_size > 1:
        raise ConfigError("parallel.context_parallel_size: layouts of sequences that are cut are not modelled; set it to 1")
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size = null: a plan without data needs it, as model.vocab_size=32000")
    if options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: at least 1")
    machine = Machine.of(options.device, options.fabric)
    found, over = ranked(config, options.gpus, machine)
    if not found:
        raise ConfigError(f"no layout of {config.name} on {options.gpus} x {options.device} fits ({over} need more memory)")
    print(f"{config.name} on {options.gpus} x {options.device}, {options.fabric}: {len(found)} layouts fit, {over} do not; modelled")
    rows = [["layout", "step, s", "MFU", "tokens/s/GPU", "memory", "limited by"]]
    for each in found[:_SHOWN]:
        tokens = each.plan.schedule.step_tokens / each.step / options.gpus
        rows.append([each.name, f"{each.step:.3f}", f"{100 * each.mfu:.1f}%", f"{tokens:,.0f}", gib(each.plan.peak_memory), each.limit])
    print("\n".join(aligned(rows, left=[0, 5])))
    best = found[0]
    if options.out:
        train = best.plan.config.train
        note = (
            f"# {best.name} for {config.name} on {options.gpus} x {options.device}, by tools.layout's model: {100 * best.mfu:.0f}% MFU.\n"
        )
        note += f"# With train.micro_batch_size={train.micro_batch_size} train.recompute={train.recompute}.\n"
        write_whole(options.out, (note + dump_yaml(_part(best.plan.config.parallel))).encode())
        print(f"wrote {options.out}; with train.micro_batch_size={train.micro_batch_size} train.recompute={train.recompute}")
    if options.picture:
        draw(found[:_SHOWN], options.picture)
    return 0


def _part(layout: ParallelConfig) -> dict[str, Any]:
    """What differs from the defaults."""
    usual = ParallelConfig()
    return {name: value for name, value in vars(layout).items() if value != getattr(usual, name)}


def draw(found: list[Candidate], file: Path) -> None:
    """Writes ``file`` as PNG: a bar a layout, by what the step is spent on."""
    figure = new_figure((9.0, 1.4 + 0.4 * len(found)))
    axes = figure.subplots()
    left, colours = [0.0] * len(found), [*COLOURS, "#888888", "#bbbbbb"]
    for kind, colour in zip(found[0].spent, colours, strict=False):
        widths = [each.spent[kind] for each in found]
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
