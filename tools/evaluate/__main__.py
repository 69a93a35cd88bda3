"""``python -m tools.evaluate MODEL... --suite paper|quick|FILE``: evaluate models and write their
scores and a table into one folder.

Exit codes: those of every command (``fem_common/README.md``). 1: a task failed, the others have
results; 2: invalid input or missing data, and no task was evaluated.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fem_common import cli
from fem_common.errors import ConfigError
from fem_common.exits import Exit
from fem_common.text import aligned
from tools.hf.paths import check_model, is_folder

from . import catalogue
from .catalogue import find_tasks, harness_version
from .suite import SUITES, Suite, load_suite

DTYPES = ("bfloat16", "float16", "float32")
DEFAULT_OUT = Path("runs") / "evaluation"


def main(arguments: list[str] | None = None) -> int:
    """Run the evaluation and return the exit code."""
    given = _parser().parse_intermixed_args(arguments)
    return cli.run("tools.evaluate", lambda: _command(given))


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m tools.evaluate",
        description="Evaluate models on a suite of tasks and write their scores into one table.",
    )
    model = (
        "a run directory, a checkpoint, an exported folder or another Hugging Face folder;"
        " NAME=MODEL sets its name in the table"
    )
    suites = ", ".join(sorted(path.stem for path in SUITES.glob("*.yaml")))
    parser.add_argument("models", nargs="*", metavar="MODEL", help=model)
    parser.add_argument(
        "--suite",
        default="quick",
        metavar="NAME|FILE",
        help=f"one of {suites}, or the path of a YAML file (default: quick)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the results (default: runs/evaluation/SUITE)",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="type of weights and computation (default: as stored)"
    )
    parser.add_argument(
        "--batch-size",
        type=_positive,
        metavar="N",
        help="requests per call of the model (default: 8 on a CPU, else as many as fit)",
    )
    parser.add_argument(
        "--max-length",
        type=_positive,
        metavar="N",
        help="longest prompt in tokens (default: the context length of the training)",
    )
    parser.add_argument(
        "--limit",
        type=_positive,
        metavar="N",
        help="evaluate only the first N examples of each task, for a quick trial",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="folder of the tokenizer (default: the tokenizer of the model)",
    )
    parser.add_argument(
        "--seed",
        type=_seed,
        metavar="N",
        help="seed of the order of choices and examples (default: the seeds of the harness)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="folder of data sets (default: the folders of the libraries)",
    )
    network = parser.add_mutually_exclusive_group()
    network.add_argument(
        "--online", action="store_true", help="download data sets that are not in the cache"
    )
    network.add_argument(
        "--offline", action="store_false", dest="online", help="use no network (default)"
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="download the data sets of the suite into the cache, and stop",
    )
    parser.add_argument(
        "--retry",
        action="store_true",
        help="evaluate again where a result belongs to another model, suite or setting",
    )
    parser.add_argument(
        "--merge",
        type=_positive,
        metavar="N",
        help="also evaluate the average of the newest N checkpoints of the run, up to MODEL",
    )
    parser.add_argument("--list", action="store_true", help="list the tasks of the suite, and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check data and existing results, list the tasks to be evaluated, and stop",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _seed(text: str) -> int:
    """Return a command-line text as a seed that numpy and torch accept."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0 to {2**32 - 1}")
    return int(text)


def _command(given: argparse.Namespace) -> int:
    suite = load_suite(given.suite)
    if given.list:
        print(listing(suite), end="")
        return 0
    models = [] if given.download else named(given.models)
    for _, path in models:
        check_model(path, given.tokenizer)
    catalogue.settle(given.online or given.download, given.cache)
    tasks = find_tasks(suite) if any(task.kind == "harness" for task in suite.tasks) else None
    download = f"python -m tools.evaluate --download --suite {given.suite}"
    if given.download:
        if tasks is not None:
            catalogue.require(tasks, download, sys.stderr)
            print(f"{given.suite}: all data sets are in {catalogue.cache_folder()}")
        return 0

    if tasks is not None:
        catalogue.require(tasks, download, sys.stderr)

    # torch and transformers take seconds to import: missing data is reported before.
    from tools.hf.open_model import device_named, weights_at

    device_named(given.device)
    # Fix the checkpoints now: a run that is still training writes newer ones in the meantime.
    models = [(name, weights_at(path)) for name, path in models]
    out = given.out or DEFAULT_OUT / suite.name
    with _with_averages(models, given.merge, out) as all_models:
        return _ask(all_models, suite, tasks, out, given)


@contextmanager
def _with_averages(
    models: list[tuple[str, Path]], count: int | None, out: Path
) -> Iterator[list[tuple[str, Path]]]:
    """Context manager: yield the models to evaluate as (name, path).

    With a ``count``, each model is followed by the average of the ``count`` newest checkpoints of
    its run. The averages are in a temporary folder in ``out``.
    """
    if count is None:
        yield models
        return
    from tools.checkpoint.merge import average, newest

    folder = out / ".averages"
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed process
    try:
        found = []
        for name, path in models:
            merged = average(newest(path.parent, count, path), folder / name)
            found += [(name, path), (f"{name}-last_{count}", merged)]
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ask(
    models: list[tuple[str, Path]], suite: Suite, tasks: Any, out: Path, given: argparse.Namespace
) -> int:
    """Plan, evaluate and report; return the exit code."""
    from tools.hf.open_model import fingerprint

    from . import run
    from .report import report
    from .results import Settings

    harness = harness_version() if tasks is not None else ""
    settings = Settings(given.limit, given.seed, given.dtype, given.max_length, harness)
    keyed = [run.Model(name, path, fingerprint(path, given.tokenizer)) for name, path in models]
    plan = run.plan(suite, keyed, out, settings, tasks, given.retry)
    total = plan.done + len(plan.jobs)
    _log(f"{suite.name}: {plan.done} of {total} tasks have results in {out}")
    if given.dry_run:
        print("".join(f"{job.model.name}: {job.columns[0].task}\n" for job in plan.jobs), end="")
        return 0
    if given.limit is not None:
        _log(f"--limit {given.limit}: scores of a part of the examples, not of the complete tasks")
    runner = run.Runner(
        out, tasks, settings, given.device, given.tokenizer, given.batch_size, sys.stderr
    )
    runner.run(plan)
    for line in runner.skipped:
        _log(f"skipped: {line}")
    if any(out.glob("*/*.json")):
        report(out, suite)
    for line in runner.failed:
        _log(f"failed: {line}")
    if not runner.failed:
        return 0
    _log("tools.evaluate: some tasks failed; the same command evaluates them again")
    return Exit.FAULT


def _log(line: str) -> None:
    print(line, file=sys.stderr)


def named(words: list[str]) -> list[tuple[str, Path]]:
    """Return (name in the table, path) for each command-line argument MODEL or NAME=MODEL.

    The default name is the last part of the path, extended by earlier parts if two names are equal.

    Raises:
        ConfigError: no model, a duplicate, or a name that is not a valid file name.
    """
    if not words:
        raise ConfigError("no MODEL: give run directories, checkpoints or Hugging Face folders")
    words = [model for word in words for model in _runs(word) or [word]]
    found: list[tuple[str, Path]] = []
    for word in words:
        name, equals, after = word.partition("=")
        given = equals and "/" not in name and not Path(word).exists()
        if given and not name:
            raise ConfigError(f"{word}: expected NAME=MODEL")
        found.append((name, Path(after)) if given else ("", Path(word)))
    parts = []
    for _, path in found:
        parts.append([part for part in path.resolve().parts if part not in ("/", "checkpoints")])
    names: list[str] = []
    for (name, path), own in zip(found, parts, strict=True):
        rivals = [other for other in parts if other is not own]
        if own in rivals:
            raise ConfigError(f"{path} is given twice")
        length = 2 if own[-1].startswith("step_") else 1
        while length < len(own) and any(other[-length:] == own[-length:] for other in rivals):
            length += 1
        names.append(name or "-".join(own[-length:]))
    for name in names:
        if not name or name.startswith(".") or "/" in name or names.count(name) > 1:
            raise ConfigError(
                f"{name!r} is not a valid name of a folder, or two models have it: give NAME=MODEL"
            )
    return [(name, path) for name, (_, path) in zip(names, found, strict=True)]


def _runs(word: str) -> list[str]:
    """Return the run directories in a folder that is no model itself; empty for other arguments."""
    folder = Path(word)
    found = sorted({str(step.parents[1]) for step in folder.glob("*/checkpoints/step_*")})
    if not found or is_folder(folder) or (folder / "checkpoints").exists():
        return []
    _log(f"{word} contains runs, which are evaluated: {', '.join(found)}")
    return found


def listing(suite: Suite) -> str:
    """Return a description of the suite's columns as a text table."""
    rows = [("column", "task", "examples", "metric", "chance", "rescaled")]
    for task in suite.tasks:
        shots = "set by the task" if task.fewshot is None else str(task.fewshot)
        shots = "" if task.kind == "heldout" else shots
        chance = "" if task.chance is None else f"{task.chance:g}"
        chance = "per sub-task" if task.subtask_chance else chance
        rows.append((task.label, task.task, shots, task.metric, chance, task.rescale))
    title = f"{suite.name}: {suite.title}\n" if suite.title else f"{suite.name}\n"
    return title + "".join(f"{line}\n" for line in aligned(rows))


if __name__ == "__main__":
    sys.exit(main())
