"""Command of the engine benchmark.

Every round starts the ranks of every variant again, one variant after the other, so that all
variants run under the same conditions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fem_common.cli import Parser, run
from fem_common.errors import Fault
from fem_common.text import duration
from fem_megatron.megatron import platform
from tools.bench import runner
from tools.bench.engines import variants
from tools.bench.engines.figures import MIB, Figures, as_json, of, table
from tools.bench.engines.runs import CannotRun, Round, environment, is_partial, launch
from tools.bench.engines.variants import BASELINE, VARIANTS, Job, configuration, lacks, plan_of

PROGRAM = "tools.bench.engines"
LOGS = Path("runs/bench_engines")


@dataclass
class Bench:
    """State of one benchmark: its settings, and the measurements so far.

    names: variants to measure.
    out: JSON file, written after every round of a variant and after every timed step.
    logs: folder for the logs of incomplete runs (see `launch`).
    cannot: variant -> reason why it is not measured, or no longer measured.
    measured: variant -> its rounds.
    """

    job: Job
    names: Sequence[str]
    rounds: int
    cuda: bool
    out: Path | None = None
    logs: Path | None = None
    cannot: dict[str, str] = field(default_factory=dict)
    measured: dict[str, list[Round]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def run(self) -> None:
        """Run all rounds, or return early if the baseline cannot run."""
        for name in self.names:
            why = lacks(replace(self.job, variant=name))
            if why is not None:
                self.leave_out(name, why)
        launches = [name for _ in range(self.rounds) for name in self.names]
        for number, name in enumerate(launches):
            if BASELINE in self.cannot:
                return
            if not self.ended(name):
                self.once(name, launches[number + 1 :])

    def ended(self, name: str) -> bool:
        """Return True if the variant is not started again: it failed or reached its limit."""
        return name in self.cannot or any(
            is_partial(self.job, each) for each in self.measured.get(name, ())
        )

    def once(self, name: str, later: Sequence[str]) -> None:
        """Run a variant once and store its measurements.

        later: variants of the launches after this one, for the estimate of the remaining time.
        """
        before = self.measured.get(name, [])

        def keep(measured: Round) -> None:
            self.measured[name] = [*before, measured]
            self.write()

        try:
            measured = launch(
                replace(self.job, variant=name), log=self.log, partial=keep, logs=self.logs
            )
        except CannotRun as error:
            self.leave_out(name, str(error))
            return
        keep(measured)
        done = sum(map(len, self.measured.values()))
        elapsed = time.monotonic() - self.began
        which = f"{name}, round {len(before) + 1} of {self.rounds}"
        took = f"{statistics.median(measured.seconds):.3f} s a step"
        rest = elapsed / done * sum(not self.ended(other) for other in later)
        peak = f"at most {measured.peak / MIB:,.0f} MiB"
        self.log(f"{which}: {took}, {peak}; about {duration(rest)} to go")

    def log(self, line: str) -> None:
        """Write a line of progress to stderr."""
        print(f"[{duration(time.monotonic() - self.began)}] {line}", file=sys.stderr, flush=True)

    def leave_out(self, name: str, why: str) -> None:
        """Exclude a variant from further measurement, with the reason ``why``."""
        self.cannot[name] = why
        self.log(f"{name} cannot run: {why}")

    def figures(self) -> dict[str, Figures | str]:
        """Return variant -> its figures, or the reason why none exist."""
        found: dict[str, Figures | str] = {}
        for name in self.names:
            if name in self.cannot:
                found[name] = self.cannot[name]
            elif name in self.measured:
                job = replace(self.job, variant=name)
                found[name] = of(job, self.measured[name], cuda=self.cuda)
        return found

    @cached_property
    def machine(self) -> dict[str, Any]:
        """Facts of the machine, the number of threads of a rank, and the version of DeepSpeed."""
        machine = runner.facts()
        machine["threads"] = int(environment()["OMP_NUM_THREADS"])
        with suppress(PackageNotFoundError):
            machine["packages"]["deepspeed"] = version("deepspeed")
        return machine

    def write(self) -> None:
        """Write the results so far to the file ``out``, if it is set and a baseline exists."""
        job, found = self.job, self.figures() if self.out else {}
        base = found.get(BASELINE)
        if not isinstance(base, Figures):
            return
        plan = plan_of(replace(job, variant=BASELINE), cuda=self.cuda)
        content = {
            "suite": "engines",
            "machine": self.machine,
            "ranks": job.ranks,
            "precision": job.precision,
            "model": job.model,
            "parameters": plan.total_parameters,
            "steps": job.steps,
            "warmup": job.warmup,
            "rounds": self.rounds,
            "baseline": BASELINE,
            "overrides": list(job.overrides),
            "seconds": time.monotonic() - self.began,
            "rows": [as_json(name, each, base) for name, each in found.items()],
        }
        runner.write_json(self.out, content)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        prog=f"python -m {PROGRAM}",
        description="Measure step time and peak memory of every engine and ZeRO stage, as ratios "
        "to the Megatron engine with its distributed optimizer. Trains on random tokens; needs no "
        "data.",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="overrides of the benchmark's model and run",
    )
    model = (
        "name in configs/model, or path of a YAML file; sequence length and micro-batch are those "
        "of its run in configs/run, smaller on a CPU; "
    )
    model += (
        f"on a GPU a step has {variants.MICRO_BATCHES} micro-batches; "
        "a model without a vocabulary gets "
        f"{runner.VOCABULARY} tokens (default: a 374M model, on a CPU 45M)"
    )
    parser.add_argument("--model", type=Path, metavar="NAME", help=model)
    parser.add_argument(
        "--ranks",
        type=_positive_integer,
        default=None,
        help="processes (default: 2 on a CPU, 1 on a GPU)",
    )
    parser.add_argument(
        "--steps", type=_positive_integer, default=8, help="timed steps of a round (default: 8)"
    )
    parser.add_argument(
        "--warmup",
        type=_positive_integer,
        default=2,
        help="steps before the timed ones (default: 2)",
    )
    parser.add_argument(
        "--rounds",
        type=_positive_integer,
        default=3,
        help="how often every variant is timed (default: 3)",
    )
    parser.add_argument(
        "--limit",
        type=_positive_integer,
        default=Job.limit,
        metavar="SECONDS",
        help="time limit of a round; completed steps count (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp32", "bf16"),
        default=None,
        help="default: fp32 on a CPU, bf16 on a GPU",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        choices=list(VARIANTS),
        help=f"measure only {BASELINE} and these; choices: {', '.join(VARIANTS)}",
    )
    parser.add_argument(
        "--out",
        "--json",
        type=Path,
        metavar="PATH",
        help="also write all numbers to this file, after every step",
    )
    parser.add_argument(
        "--logs",
        type=Path,
        default=LOGS,
        metavar="DIR",
        help="folder for the logs of ranks that fail (default: %(default)s)",
    )
    options = parser.parse_args(arguments)
    if options.warmup < 2:
        parser.error(
            "--warmup: must be at least 2: the first step creates Adam's moments, "
            "the second is the first with all tensors in memory"
        )
    return options


def _positive_integer(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return number


def conclude(bench: Bench) -> None:
    """Write and print the results."""
    bench.write()
    job = replace(bench.job, variant=BASELINE)
    plan, model = plan_of(job, cuda=bench.cuda), f"{job.model}: " if job.model else ""
    train = plan.config.train
    micro_batch = f"{plan.config.train.micro_batch_size} x {plan.config.data.seq_length} tokens"
    print(runner.sentence(bench.machine))
    print(
        f"{model}{plan.total_parameters / 1e6:.1f}M parameters, "
        f"vocabulary {plan.config.model.vocab_size:,}, {job.precision}; {job.ranks} ranks, "
        f"steps of {train.global_batch_size} sequences in micro-batches of {micro_batch}; "
        f"rounds of {job.steps} steps: {bench.rounds}"
    )
    print(f"\n{table(bench.figures())}")


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the table.

    Return 0; 1 if the Megatron engine cannot run; 2 for a mistake in the command.
    """
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
        limit=options.limit,
        model=None if options.model is None else str(options.model),
    )
    return run(
        PROGRAM,
        lambda: compare(job, options),
        kept=f"timed steps are in {options.out}" if options.out else "--out keeps timed steps",
    )


def compare(job: Job, options: argparse.Namespace) -> int:
    """Measure every variant in turn and print the table. Return 0. Raises ConfigError, Fault."""
    if job.model is not None:
        file = runner.model_file(job.model)
        job = replace(job, model=file.stem if file.parent == runner.MODELS else str(file))
    configuration(job)
    names = [
        name for name in VARIANTS if not options.variants or name in {*options.variants, BASELINE}
    ]
    bench = Bench(job, names, options.rounds, platform.has_cuda(), options.out, options.logs)
    bench.run()
    if BASELINE in bench.cannot:
        raise Fault(f"{BASELINE}, the baseline of all ratios, cannot run: {bench.cannot[BASELINE]}")
    conclude(bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
