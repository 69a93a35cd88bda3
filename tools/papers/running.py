"""``run``: run the missing trials of one experiment and append them to a file of JSON lines.

    run NAME [--quick] [--mixers A,B --cases A,B --seeds N] [--workers N]
    python -m launch submit --cluster PROFILE --tasks 16 -- tools.papers run NAME

Every row is trained with the same rates and the first seed; the rate that is best on validation
data is used for the other seeds. A trial's line is written when it ends, so the same command
resumes an interrupted one. --quick: sizes that two cores train in minutes; otherwise the paper's
sizes, which need a GPU. A task of an array runs its share of the rows' cases and writes its own
file.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_prep.verbs.run import Task, task_of
from fem_common.cli import Parser
from fem_common.errors import UserError, convert_os_errors
from fem_common.exits import Exit
from fem_common.files import locked, make_folder
from fem_common.progress import Progress
from fem_common.text import counted, did_you_mean, duration
from tools.papers.catalogue import NAMES, RUNS, experiment_of
from tools.papers.experiment import (
    Outcome,
    Size,
    Trial,
    gather,
    interval,
    line_of,
)


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("name", metavar="NAME", help=f"an experiment: {', '.join(NAMES)}")
    parser.add_argument(
        "--quick", action="store_true", help="use sizes that two cores train in minutes"
    )
    parser.add_argument(
        "--mixers", metavar="A,B", help="run only these rows, with their names in the tables"
    )
    parser.add_argument("--cases", metavar="A,B", help="run only these cases")
    parser.add_argument("--seeds", type=int, metavar="N", help="number of seeds per row")
    parser.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="trials that run at the same time, with one thread each (default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=RUNS,
        metavar="FOLDER",
        help="folder of the results (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Run the missing trials and return the exit code. Raises UserError, ConfigError, StorageError,
    InUse.
    """
    if arguments.workers < 1 or (arguments.seeds is not None and arguments.seeds < 1):
        raise UserError("--workers and --seeds: expected 1 or more")
    experiment = experiment_of(arguments.name)
    kind = "quick" if arguments.quick else "full"
    if kind not in experiment.sizes:
        raise UserError(f"{arguments.name} has no {kind} form; leave --quick out")
    size = experiment.sizes[kind]
    rows = picked("--mixers", arguments.mixers, tuple(experiment.rows)) or size.rows
    cases = picked("--cases", arguments.cases, experiment.cases) or size.cases
    size = replace(size, rows=rows, cases=cases, seeds=arguments.seeds or size.seeds)
    task = task_of(None, None, os.environ)
    with convert_os_errors():
        folder = arguments.runs / f"{experiment.name}-{kind}"
        make_folder(folder)
        file = folder / (f"results-{task.index:04}.jsonl" if task else "results.jsonl")
        with locked(file.with_suffix(".lock"), f"{folder}: another process runs this experiment"):
            outcome = Outcome(experiment, kind, size, gather(folder))
            run(outcome, file, arguments.workers, task)
    print(*summary(outcome), sep="\n")
    print(f"results: {file}; python -m tools.papers report writes the page")
    return Exit.DONE


def picked(option: str, given: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """Return the comma-separated names in ``given``, in the order of ``known``.

    Returns () if ``given`` is None. Raises UserError for an unknown name.
    """
    if given is None:
        return ()
    found, rest = [], given.strip()
    while rest:
        # A name may contain commas; the longest one that fits is meant.
        fits = [name for name in known if f"{rest},".startswith(f"{name},")]
        if not fits:
            name = rest.partition(",")[0].strip()
            raise UserError(f"{option} {name!r}: unknown; {did_you_mean(name, known)}")
        found.append(max(fits, key=len))
        rest = rest[len(found[-1]) :].removeprefix(",").strip()
    return tuple(name for name in known if name in found)


def run(outcome: Outcome, file: Path, workers: int, task: Task | None = None) -> None:
    """Train the trials that have no result, write them to ``file`` and add them to ``outcome``.

    Each learning rate is tried with the first seed before other seeds are trained. ``task`` is this
    process's place in a job array, and only its share of the cases and rows is trained.
    """
    size, results = outcome.size, outcome.results
    title = f"{outcome.experiment.name} {outcome.kind}"
    mend(file)
    pairs = [(case, row) for case in size.cases for row in size.rows]
    pairs = pairs[task.index :: task.tasks] if task else pairs
    key = size.key()
    total = len(pairs) * (len(size.rates) + size.seeds - 1)

    def missing(case: str, row: str) -> list[Trial]:
        rate = outcome.best_rate(case, row)
        tried = [Trial(case, row, each, 0, key) for each in size.rates]
        if rate is not None:
            tried += [Trial(case, row, rate, seed, key) for seed in range(1, size.seeds)]
        return [trial for trial in tried if trial not in results]

    kept = sum(trial.size == key and (trial.case, trial.row) in pairs for trial in results)
    made = 0
    with (
        Progress(total - kept, "trials", title) as progress,
        file.open("a", encoding="utf-8") as stream,
    ):
        if kept:
            progress.show(f"{title}: {counted(kept, 'trial')} of {total} already done")
        for trial, record in finished(outcome.experiment.name, size, pairs, missing, workers):
            results[trial] = record
            made += 1
            stream.write(line_of(trial, record))
            stream.flush()
            value = record["validation"]
            score = "diverged" if value is None else f"{value:.3g}"
            progress.advance(note=f"{trial.case} · {trial.row} · {score}")
        took = progress.elapsed
    if made:
        print(f"{title}: {counted(made, 'trial')} in {duration(took)}")


def mend(file: Path) -> None:
    """Remove an incomplete last line."""
    content = file.read_bytes() if file.exists() else b""
    if content and not content.endswith(b"\n"):
        file.write_bytes(content[: content.rfind(b"\n") + 1])


def finished(
    name: str,
    size: Size,
    pairs: Iterable[tuple[str, str]],
    missing: Callable[[str, str], list[Trial]],
    workers: int,
) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Yield the missing trials and their records as they end. With one worker: in this process."""
    if workers == 1:
        for pair in pairs:
            while trials := missing(*pair):
                yield trials[0], train_one(name, size, trials[0])
        return
    waiting = list(pairs)
    running: dict[Future[dict[str, Any]], Trial] = {}
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            while True:
                for pair in waiting:
                    for trial in missing(*pair):
                        if trial not in running.values():
                            running[pool.submit(train_one, name, size, trial)] = trial
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                ended = [(running[future], future.result()) for future in done]
                for future in done:
                    del running[future]
                yield from ended
                # Only the pairs of the ended trials can have new trials, because their rate may now
                # be known.
                waiting = list(dict.fromkeys((trial.case, trial.row) for trial, _ in ended))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def train_one(name: str, size: Size, trial: Trial) -> dict[str, Any]:
    """Train one trial with one thread and return its record."""
    import torch

    from tools.papers.training import train

    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)
    problem = experiment_of(name).problem(trial.case, trial.row, size, trial.seed)
    return train(problem, size, trial.rate, trial.seed)


def summary(outcome: Outcome) -> list[str]:
    """Return one line per case and row: mean and interval over the seeds of the best rate."""
    lines = []
    for case, row in itertools.product(outcome.size.cases, outcome.size.rows):
        values, rate = outcome.values(case, row), outcome.best_rate(case, row)
        if values:
            mean, half = interval(values)
            lines.append(
                f"{case}: {row}: {outcome.experiment.metric} {mean:.3g} ± {half:.2g}"
                f" ({counted(len(values), 'seed')}, rate {rate:g})"
            )
        elif rate is not None:
            lines.append(f"{case}: {row}: diverged at every rate")
    return lines
