"""Command of the GPU suite.

It plans and performs the tasks, records each outcome immediately, writes a page (Markdown) and a
picture of the results, and prints a table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fem_common.cli import run
from fem_common.errors import UserError
from fem_common.files import make_folder, write_atomically
from fem_megatron.megatron import platform
from kernels.check import suites
from kernels.fem_attention.table import write as write_table
from tools.bench import runner
from tools.bench.gpu_suite.plan import PARTS, TOOLS, Phase, Task, phases, tasks
from tools.bench.gpu_suite.pool import Clock, Work, Worker
from tools.bench.gpu_suite.report import draw, report, short
from tools.bench.gpu_suite.results import FILE, Outcome, Record, Results
from tools.bench.gpu_suite.trainer import VOCABULARY
from tools.bench.training import write_data
from tools.bench.workloads import WORKLOADS

PROGRAM = "tools.bench.gpu_suite"
PAGE, PICTURE, TABLE, LOG = "gpu_suite.md", "gpu_suite.png", "engines_table.json", "workers.log"
EVERY = 10.0  # seconds between lines of progress
BYTES_A_WORKER = 4 * 10**9  # GPU memory for a CUDA context and most cases at their real size
KEPT = "all outcomes so far are recorded; --resume continues"


@dataclass
class Progress:
    """Callback that records outcomes, and prints gaps (missing results) and the progress."""

    clock: Clock
    record: Record
    last: float = -EVERY

    def __call__(self, outcome: Outcome, left: int, seconds: float) -> None:
        """Record one outcome, and print it if it is bad or if a progress line is due.

        left: number of remaining tasks of the phase.
        seconds: their expected time.
        """
        self.record.add(outcome)
        now = self.clock.elapsed
        bad = outcome.gap or ("out of bounds" if outcome.wrong else "")
        if (not bad or outcome.refused) and now - self.last < EVERY:
            return
        self.last = now
        state = f": {bad}" if bad else ""
        print(
            f"[{now:4.0f} s] {outcome.task.name}{state}; {left} tasks, about {seconds:.0f} s to go",
            file=sys.stderr,
            flush=True,
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = runner.command_line(
        PROGRAM,
        "Test a GPU: correctness of every operation, the trainer, then speed, the most important "
        "tasks first. Requires this checkout and torch; other packages are used if they are "
        "installed, and missing ones are reported.",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gpu_suite"),
        help="folder of the results (default: runs/gpu_suite)",
    )
    where.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="perform the tasks that are missing in this folder, then those that failed",
    )
    where.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="only write the page and the picture of this folder's results",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="time limit; tasks that do not fit are left out and listed (default: 8)",
    )
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        metavar="PARTS",
        help=f"comma-separated parts of {','.join(PARTS)} (default: all)",
    )
    ops = sorted({*suites(), *(workload.op for workload in WORKLOADS.values())})
    parser.add_argument("--ops", nargs="+", metavar="OP", choices=ops, help="only these operations")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--workers",
        type=int,
        default=cores,
        help=f"processes at a time for tasks that are not timed (default: {cores})",
    )
    parser.add_argument(
        "--table",
        type=Path,
        metavar="PATH",
        help=f"file for the table of FEM's attention engines (default: {TABLE} next to the page)",
    )
    parser.add_argument(
        "--dry", action="store_true", help="few tasks of each kind at small sizes; needs no GPU"
    )
    options = parser.parse_args(arguments)
    options.parts = tuple(options.only.split(","))
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"--only: {', '.join(unknown)} is not one of {', '.join(PARTS)}")
    if options.workers < 1 or options.minutes <= 0:
        parser.error("--workers and --minutes: more than 0")
    return options


def perform(options: argparse.Namespace) -> int:
    """Perform the selected tasks and report them.

    Return 0, or 1 if a check failed or is out of bounds. Raises UserError.
    """
    folder: Path = options.resume or options.out
    clock = Clock(options.minutes)
    if not options.dry and not platform.has_cuda():
        raise UserError(
            "torch sees no CUDA device; --dry shows the suite without one, "
            "tools.bench.cpu_suite measures a CPU"
        )
    make_folder(folder)
    record = _record(folder, resumed=options.resume is not None)
    machine = runner.facts()
    _check_same(record, machine["device"], options)
    planned, cannot = tasks(
        options.parts, tuple(options.ops or ()), platform.device(), dry=options.dry
    )
    todo = record.missing(planned)
    names = [task.name for task in planned]
    record.begin(
        {
            "machine": machine,
            "minutes": options.minutes,
            "dry": options.dry,
            "planned": names,
            "cannot": cannot,
        }
    )
    print(
        f"{runner.sentence(machine)}: {len(todo)} of {len(planned)} tasks, "
        f"{options.minutes:g} minutes; log: {folder / LOG}",
        file=sys.stderr,
        flush=True,
    )
    try:
        _work(todo, options.workers, clock, record)
    finally:
        code = publish(record, options)
    return code


def _record(folder: Path, *, resumed: bool) -> Record:
    """Return the record in the folder.

    A new run renames an existing record and returns an empty one. Raises UserError if a resumed
    folder contains no record.
    """
    record = Record.read(folder)
    if resumed:
        if not record.sessions:
            raise UserError(f"--resume: {folder} has no {FILE}; start with --out {folder}")
        return record
    if record.sessions or record.outcomes:
        number = next(
            number for number in range(1, 10**6) if not (folder / f"{FILE}.{number}").exists()
        )
        (folder / FILE).rename(folder / f"{FILE}.{number}")
        print(
            f"{folder / FILE} of an earlier run is now {FILE}.{number}; "
            "--resume would have continued it",
            file=sys.stderr,
            flush=True,
        )
    return Record(folder)


def _check_same(record: Record, device: str, options: argparse.Namespace) -> None:
    """Raise UserError if the record cannot be resumed.

    It must be from the same device, and both runs must be dry runs or none. A dry run uses small
    sizes, and can run without a GPU.
    """
    for session in record.sessions:
        if session["machine"]["device"] != device:
            raise UserError(
                f"--resume: {options.resume} is of {session['machine']['device']}, "
                f"this machine has {device}; use --out"
            )
        if session["dry"] and not options.dry:
            raise UserError(f"--resume: {options.resume} is of a dry run; add --dry, or use --out")
        if options.dry and not session["dry"]:
            raise UserError(
                f"--resume: {options.resume} is not of a dry run; leave out --dry, or use --out"
            )


def _work(todo: list[Task], count: int, clock: Clock, record: Record) -> None:
    """Perform the tasks of ``todo`` phase by phase in a temporary working folder.

    count: maximum number of workers at once for tasks that are not timed.
    """
    progress, log = Progress(clock, record), record.folder / LOG
    # A run that was ended may still write to the folder.
    with tempfile.TemporaryDirectory(prefix="gpu_suite-", ignore_cleanup_errors=True) as name:
        if any(task.kind == "train" for task in todo):
            write_data(Path(name) / "data", VOCABULARY)
        environment = {"GPU_SUITE_WORK": name, "GPU_SUITE_OUT": str(record.folder.absolute())}
        for phase in phases(todo, clock.budget):
            at_once = count if phase.together else 1
            threads = os.environ.get(
                "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // at_once))
            )
            workers = _workers(phase, count, log, {**environment, "OMP_NUM_THREADS": threads})
            try:
                Work(phase, clock, progress).run(workers)
            finally:
                for worker in workers:
                    worker.close()


def _workers(phase: Phase, count: int, log: Path, environment: dict[str, str]) -> list[Worker]:
    """Return the workers of a phase.

    Timed tasks get one worker. Other tasks get up to ``count`` workers, and one more for each tool
    of compute-sanitizer.

    A task that runs out of GPU memory next to other processes is performed again alone.
    """
    device = platform.device_name()
    if not phase.together:
        return [Worker(log, device, environment)]
    tools = [tool for tool in TOOLS if any(task.tool == tool for task in phase.tasks)]
    units = {task.unit or task.name for task in phase.tasks if not task.tool}
    most = max(1, min(count, len(units), platform.device_memory_bytes() // BYTES_A_WORKER))
    plain = [Worker(log, device, environment) for _ in range(most)]
    return [*plain, *(Worker(log, device, environment, tool) for tool in tools)]


def publish(record: Record, options: argparse.Namespace) -> int:
    """Write the page, the picture and the table of fastest engines, and print the short table.

    Return the exit code: 1 if a check failed or is out of bounds, else 0.
    """
    folder, session = record.folder, record.sessions[-1]
    device = session["machine"]["device"]
    results = Results(record.outcomes.values(), device)
    write_atomically(folder / PAGE, report(record, results), synced=False)
    draw(results, runner.sentence(session["machine"]), folder / PICTURE)
    table = results.engine_table()
    if table and not session["dry"]:
        write_table(device, table, options.table or folder / TABLE)
    runner.write_json(options.json, summary(record, results))
    print(short(results, dry=session["dry"]))
    for outcome in results.wrong:
        print(f"OUT OF BOUNDS: {outcome.task.name}")
    for outcome in results.failed:
        print(f"FAILED: {outcome.task.name}: {outcome.gap}")
    print(
        f"{len(record.outcomes)} outcomes, {len(record.left_out)} tasks without one, "
        f"{len(record.cannot)} sides cannot run on this machine"
    )
    print(f"complete results: {folder / PAGE}")
    return 1 if results.wrong or results.failed else 0


def summary(record: Record, results: Results) -> dict[str, object]:
    """Return the contents of the ``--json`` file."""
    return {
        "suite": "gpu",
        "sessions": record.sessions,
        "roofs": results.roofs,
        "targets": [{**vars(target), "met": target.met} for target in results.targets()],
        "outcomes": [outcome.as_json() for outcome in record.outcomes.values()],
        "left_out": record.left_out,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite and return the exit code.

    0: success; 1: a check failed or is out of bounds; 2: no CUDA device, or a mistake in the
    command.
    """
    options = parse(arguments)
    if options.report is None:
        return run(PROGRAM, lambda: perform(options), kept=KEPT)
    record = Record.read(options.report)

    def publish_it() -> int:
        if not record.sessions:
            raise UserError(f"--report: {options.report} has no {FILE}")
        return publish(record, options)

    return run(PROGRAM, publish_it)


if __name__ == "__main__":
    sys.exit(main())
