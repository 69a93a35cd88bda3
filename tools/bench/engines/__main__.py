"""The command: every variant's ranks started anew in every round, one variant after the other, so that all meet the same machine."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from fem_common.errors import Fault
from fem_common.text import duration
from fem_megatron.megatron import platform
from tools.bench import runner
from tools.bench.data_prep.processes import Neighbours, load
from tools.bench.engines.figures import MIB, Figures, as_json, of, step_seconds, table
from tools.bench.engines.variants import BASELINE, VARIANTS, Answer, CannotRun, Job, configuration, lacks, launch, planned

PROGRAM = "tools.bench.engines"


@dataclass
class Bench:
    """One run: what is measured, and what the ranks have answered so far. cannot: variant -> why it is not measured, or no more."""

    job: Job
    names: Sequence[str]
    rounds: int
    cuda: bool
    cannot: dict[str, str] = field(default_factory=dict)
    answers: dict[str, list[list[Answer]]] = field(default_factory=dict)  # variant -> of each round its ranks'
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """All rounds; ends early where the baseline cannot run."""
        for name in self.names:
            why = lacks(replace(self.job, variant=name))
            if why is not None:
                self.leave_out(name, why)
        launches = [name for _ in range(self.rounds) for name in self.names]
        for number, name in enumerate(launches):
            if BASELINE in self.cannot:
                return
            if name not in self.cannot:
                self.once(name, sum(other not in self.cannot for other in launches[number + 1 :]))

    def once(self, name: str, left: int) -> None:
        """Start a variant's ranks and keep their answers; ``left``: launches after this one."""
        try:
            answers = launch(replace(self.job, variant=name))
        except CannotRun as error:
            self.leave_out(name, str(error))
            return
        self.answers.setdefault(name, []).append(answers)
        done, elapsed = sum(map(len, self.answers.values())), time.monotonic() - self.began
        most = max(answer["peak_bytes"] for answer in answers)
        which = f"{name}, round {len(self.answers[name])} of {self.rounds}"
        told = f"{which}: {step_seconds(answers):.3f} s a step, at most {most / MIB:,.0f} MiB"
        print(f"[{duration(elapsed)}] {told}; about {duration(elapsed / done * left)} to go", file=sys.stderr, flush=True)

    def leave_out(self, name: str, why: str) -> None:
        """Measure a variant no more."""
        self.cannot[name] = why
        print(f"{name} cannot run: {why}", file=sys.stderr, flush=True)

    def figures(self) -> dict[str, Figures | str]:
        """Variant -> its figures, or why there are none."""
        return {
            name: self.cannot[name] if name in self.cannot else of(replace(self.job, variant=name), self.answers[name], cuda=self.cuda)
            for name in self.names
            if name in self.cannot or name in self.answers
        }


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Step time and peak memory of every engine and ZeRO stage, as ratios to the Megatron engine with its distributed "
        "optimizer. Random tokens; needs no data.",
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="over the model and run that the benchmark has")
    parser.add_argument("--ranks", type=_whole, default=None, help="processes (default: 2 on a CPU, 1 on a GPU)")
    parser.add_argument("--steps", type=_whole, default=8, help="timed steps of a round (default: 8)")
    parser.add_argument("--warmup", type=_whole, default=2, help="steps before them, whose memory is measured (default: 2)")
    parser.add_argument("--rounds", type=_whole, default=3, help="how often every variant is timed (default: 3)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default=None, help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument(
        "--variants", nargs="+", metavar="NAME", choices=list(VARIANTS), help=f"{BASELINE} and these; of {', '.join(VARIANTS)}"
    )
    parser.add_argument("--out", "--json", type=Path, metavar="PATH", help="write all numbers to this file, too")
    options = parser.parse_args(arguments)
    if options.warmup < 2:
        parser.error("--warmup: at least 2: the first step makes Adam's moments, the second is the first that holds all")
    return options


def _whole(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return number


def facts(bench: Bench) -> dict[str, Any]:
    """The machine, with the threads of a rank and the version of DeepSpeed."""
    machine = runner.facts()
    machine["threads"] = bench.answers[BASELINE][0][0]["threads"]
    with suppress(PackageNotFoundError):
        machine["packages"]["deepspeed"] = version("deepspeed")
    return machine


def conclude(bench: Bench, out: Path | None, load_before: float, others: float | None) -> None:
    """Print and write what was measured."""
    job, found, machine = replace(bench.job, variant=BASELINE), bench.figures(), facts(bench)
    base = found[BASELINE]
    assert isinstance(base, Figures)
    config, parameters = configuration(job), planned(job, cuda=bench.cuda).parameters
    meanwhile = "" if others is None else f"; other programs used {others:.2f} cores meanwhile"
    print(runner.sentence(machine))
    print(
        f"{parameters / 1e6:.1f}M parameters, {job.precision}; {job.ranks} ranks, steps of {config.train.global_batch_size} x "
        f"{config.data.seq_length} tokens; rounds of {job.steps} steps: {bench.rounds}; load average {load_before:.1f} at first{meanwhile}"
    )
    print(f"\n{table(found)}")
    content: dict[str, Any] = {"suite": "engines", "machine": machine, "ranks": job.ranks, "precision": job.precision}
    content |= {"parameters": parameters, "steps": job.steps, "warmup": job.warmup, "rounds": bench.rounds, "baseline": BASELINE}
    content |= {"overrides": list(job.overrides), "load": load_before, "others": others, "seconds": time.monotonic() - bench.began}
    runner.write_json(out, content | {"rows": [as_json(name, each, base) for name, each in found.items()]})


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table: 0; 1 where the Megatron engine cannot run; 2 for a mistake in the command."""
    options = parse(arguments)
    cuda = platform.has_cuda()
    job = Job(
        variant=BASELINE,
        ranks=options.ranks or (1 if cuda else 2),
        precision=options.precision or ("bf16" if cuda else "fp32"),
        size="gpu" if cuda else "cpu",
        warmup=options.warmup,
        steps=options.steps,
        overrides=tuple(options.overrides),
    )
    return run(PROGRAM, lambda: compare(job, options))


def compare(job: Job, options: argparse.Namespace) -> int:
    """Every variant in turn, and the table: 0. Raises ConfigError, Fault."""
    configuration(job)
    names = [name for name in VARIANTS if not options.variants or name in {*options.variants, BASELINE}]
    bench, load_before, neighbours = Bench(job, names, options.rounds, platform.has_cuda()), load(), Neighbours()
    bench.run()
    if BASELINE in bench.cannot:
        raise Fault(f"{BASELINE}, which the others are held against, cannot run: {bench.cannot[BASELINE]}")
    conclude(bench, options.out, load_before, neighbours.cores())
    return 0


if __name__ == "__main__":
    sys.exit(main())
