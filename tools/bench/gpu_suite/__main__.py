"""The command: plan, have the tasks done, write JSON, Markdown and a picture, print a short table last."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import UserError, end
from fem_megatron.megatron import platform
from kernels.fem_attention.table import write as write_table
from tools.bench import runner
from tools.bench.gpu_suite.plan import PARTS, Task, tasks
from tools.bench.gpu_suite.pool import Clock, Outcome, Worker, work
from tools.bench.gpu_suite.report import draw, report, short
from tools.bench.gpu_suite.results import Results
from tools.bench.workloads import WORKLOADS

BYTES_A_WORKER = 24 * 10**9  # of GPU memory, for a case at its real size
MOST_WORKERS = 4
TOGETHER_SHARE = 0.5  # of the time, at most, for what is not timed, where something else is wanted
EVERY = 10.0  # seconds between lines of progress


@dataclass
class Progress:
    """Lines on the console: every gap, and where the suite is, now and then."""

    clock: Clock
    last: float = 0.0

    def __call__(self, outcome: Outcome, left: int, seconds: float) -> None:
        """One task is done."""
        now = self.clock.elapsed
        if outcome.gap is None and now - self.last < EVERY:
            return
        self.last = now
        state = f": {outcome.gap}" if outcome.gap else ""
        print(f"[{now:4.0f} s] {outcome.task.name}{state}; {left} tasks, about {seconds:.0f} s to go", file=sys.stderr, flush=True)


def parts_of(planned: list[Task]) -> tuple[list[Task], list[Task], float]:
    """What may run together, what runs alone, and the share of the time that the first may have."""
    together, alone = ([task for task in planned if task.together is which] for which in (True, False))
    return together, alone, TOGETHER_SHARE if alone else 1.0


def dry(planned: list[Task], minutes: float) -> str:
    """The plan as text: the tasks in their order, and how much of it the guessed times let fit."""
    together, alone, share = parts_of(planned)
    lines, used, left_out = [], 0.0, 0
    for part, at_once, until in ((together, MOST_WORKERS, 60 * minutes * share), (alone, 1, 60 * minutes)):
        for task in part:
            needed = task.seconds / at_once
            fits = used + needed <= until
            used, left_out = used + needed * fits, left_out + (not fits)
            lines.append(f"{used:6.0f} s  {task.kind:11} {task.name}" if fits else f"left out  {task.kind:11} {task.name}")
    lines.append(f"{len(planned)} tasks; by these guesses {left_out} of them would be left out of {minutes:g} minutes")
    return "\n".join(lines)


def run(planned: list[Task], clock: Clock, log: Path) -> tuple[list[Outcome], list[Task]]:
    """First what is not timed, several tasks at once; then the rest, alone."""
    progress = Progress(clock)
    together, alone, most = parts_of(planned)
    count = max(1, min(MOST_WORKERS, platform.device_memory_bytes() // BYTES_A_WORKER, len(together)))
    workers = [Worker(log) for _ in range(count)]
    outcomes, left_out = list[Outcome](), list[Task]()
    try:
        for part, serving, share in ((together, workers, most), (alone, workers[:1], 1.0)):
            for worker in workers[len(serving) :]:
                worker.close()
            done, skipped = work(part, serving, clock, progress, share)
            outcomes += done
            left_out += skipped
    finally:
        for worker in workers:
            worker.close()
    return outcomes, left_out


def write(folder: Path, results: Results, machine: dict[str, Any], cannot: dict[str, str], left_out: list[Task], seconds: float) -> Any:
    """gpu_suite.json, gpu_suite.md and gpu_suite.png in the folder; returns what the JSON holds."""
    content = {
        "suite": "gpu",
        "machine": machine,
        "seconds": seconds,
        "roofs": results.roofs,
        "targets": [{**vars(target), "met": target.met} for target in results.targets()],
        "outcomes": [outcome.as_json() for outcome in results.outcomes],
        "cannot": cannot,
        "left_out": [task.name for task in left_out],
    }
    runner.write_json(folder / "gpu_suite.json", content)
    (folder / "gpu_suite.md").write_text(report(results, machine, cannot, left_out, seconds), encoding="utf-8")
    draw(results, runner.sentence(machine), folder / "gpu_suite.png")
    return content


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = runner.command_line(
        "tools.bench.gpu_suite",
        "Correctness and speed of every operation, then whole models, on one GPU. Needs this checkout and torch; Triton, "
        "flash-attn, flash-linear-attention and matplotlib are used where they are installed.",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_suite"), help="folder of the report (default: runs/gpu_suite)")
    parser.add_argument("--minutes", type=float, default=8.0, help="what does not fit is left out, and named (default: 8)")
    parser.add_argument("--only", default=",".join(PARTS), metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--ops", nargs="+", metavar="OP", choices=sorted({w.op for w in WORKLOADS.values()}), help="these operations alone")
    parser.add_argument("--write-table", action="store_true", help="write what fem_attention's engines took to its table.json")
    parser.add_argument("--dry", action="store_true", help="print the plan and stop; needs no GPU")
    options = parser.parse_args(arguments)
    options.parts = tuple(options.only.split(","))
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """0: all is well; 1: a result is out of bounds; 2: no CUDA device, or a mistake in the command."""
    options = parse(arguments)
    ops = tuple(options.ops or ())
    if options.dry:
        print(dry(tasks(options.parts, ops, None)[0], options.minutes))
        return 0
    if not platform.has_cuda():
        said = "torch sees no CUDA device; --dry prints the plan, tools.bench.cpu_suite measures a CPU"
        return end("tools.bench.gpu_suite", UserError(said))
    clock = Clock(options.minutes)
    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "workers.log"
    log.write_text("", encoding="utf-8")
    machine = runner.facts()
    planned, cannot = tasks(options.parts, ops, platform.device())
    print(f"{runner.sentence(machine)}: {len(planned)} tasks, {options.minutes:g} minutes; log: {log}", file=sys.stderr, flush=True)
    began = time.monotonic()
    outcomes, left_out = run(planned, clock, log)
    results = Results(outcomes, platform.device_name())
    content = write(options.out, results, machine, cannot, left_out, time.monotonic() - began)
    runner.write_json(options.json, content)
    if options.write_table:
        write_table(platform.device_name(), results.engine_table())
    print(short(results))
    for name in [f"{finding['op']}, {finding['case']}, {finding['implementation']}, {finding['dtype']}" for finding in results.wrong]:
        print(f"OUT OF BOUNDS: {name}")
    for outcome in results.failed:
        print(f"FAILED: {outcome.task.name}: {outcome.gap}")
    unchecked = sum(task.kind == "correctness" for task in left_out)
    checked = sum(task.kind == "correctness" for task in planned) - unchecked
    print(f"{checked} cases checked, {unchecked} left out (all: --only correctness --minutes 30)")
    print(f"{len(left_out) - unchecked} other tasks left out, {len(cannot)} sides cannot run here; all in {options.out / 'gpu_suite.md'}")
    return 1 if results.wrong or results.failed else 0


if __name__ == "__main__":
    sys.exit(main())
