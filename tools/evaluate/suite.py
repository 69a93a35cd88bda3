"""Suites: the tasks to evaluate and the metric to report for each; dataclasses and the strict
reader of their YAML files.

The module imports neither torch nor the harness.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from fem_common.config import load
from fem_common.errors import ConfigError
from fem_common.settings import setting
from fem_common.text import did_you_mean

SUITES = Path(__file__).parent / "suites"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def _names_a_file(name: str) -> str | None:
    if not name or NAME.fullmatch(name):
        return None
    return "is not a valid file name: use only letters, digits, ., - and _"


@dataclass(frozen=True)
class SuiteTask:
    """One column of the table: a task, and the metric to report.

    Two columns may share a task (IFEval's two accuracies): it runs once, and each column has its
    own ``name`` and result file.
    """

    task: str = setting(
        "",
        "Name of a task or group of the harness, or of a YAML file in task_paths; held-out data:"
        " any name.",
    )
    label: str = setting("", "Heading of the column; empty: the name.")
    metric: str = setting(
        "acc",
        "Name of the metric in the harness; METRIC,FILTER if its filter is not none. Held-out data:"
        " nats_per_token.",
    )
    name: str = setting(
        "",
        "Name of the result file; empty: the name of the task. Must differ if two columns share a"
        " task.",
        check=_names_a_file,
    )
    kind: str = setting(
        "harness",
        "harness: a task of lm-evaluation-harness; heldout: perplexity on a .bin/.idx pair.",
        choices=("harness", "heldout"),
    )
    group: str = setting("", "Common heading of adjacent columns.")
    fewshot: int | None = setting(
        None, "Examples in the prompt; null: the number in the YAML file of the task.", least=0
    )
    rescale: str = setting(
        "none",
        "leaderboard: the report also gives (value - chance) / (1 - chance), per sub-task if"
        " subtask_chance is given.",
        choices=("none", "leaderboard"),
    )
    higher_is_better: bool = setting(True, "False for perplexities.")
    chance: float | None = setting(
        None,
        "Score of guessing; null: for multiple choice the mean of 1/choices, else unknown.",
        least=0,
        below=1,
    )
    subtask_chance: dict[str, float] = setting(
        dict,
        "Score of guessing in each sub-task of a group, with the names of the harness.",
        least=0,
        below=1,
    )
    data: str | None = setting(
        None,
        "Held-out data: path of the .bin/.idx pair without its suffix; null: the validation data of"
        " the run.",
        path=True,
    )
    context_lengths: tuple[int, ...] = setting(
        (),
        "Held-out data: window lengths in tokens; empty: the context length of the training.",
        least=2,
    )
    stride: int | None = setting(
        None,
        "Held-out data: tokens between the starts of two windows; null: the window length, as in"
        " training.",
        least=1,
    )
    max_tokens: int | None = setting(
        None, "Held-out data: tokens in a sample of its documents; null: all.", least=2
    )


@dataclass(frozen=True)
class Suite:
    """Suite of tasks. Its columns have the order of the table."""

    name: str = setting("", "Name of the suite; empty: the name of the file.")
    title: str = setting("", "Title line above the table.")
    task_paths: tuple[str, ...] = setting(
        (),
        "Folders with task YAML files for the harness; relative paths are relative to the folder of"
        " this file.",
        path=True,
    )
    tasks: tuple[SuiteTask, ...] = setting((), "The columns.")
    published: str | None = setting(
        None,
        "JSON file with a paper's scores, which table.md shows below its own; relative to the "
        "folder of this file.",
        path=True,
    )


def load_suite(word: str) -> Suite:
    """Return the suite ``word``: the name of a file in suites/, or a path to a file.

    A path contains a slash or ends in .yaml or .yml.

    Raises:
        ConfigError: the suite does not exist, or a key, type or value in it is invalid.
        StorageError: the file system failed.
    """
    known = sorted(path.stem for path in SUITES.glob("*.yaml"))
    by_path = "/" in word or word.endswith((".yaml", ".yml"))
    path = Path(word) if by_path else SUITES / f"{word}.yaml"
    if not by_path and word not in known:
        raise ConfigError(f"--suite {word}: no such suite; {did_you_mean(word, known)}")
    suite = load(Suite, path)
    tasks = tuple(_named(task, f"{path}: tasks.{index}") for index, task in enumerate(suite.tasks))
    if not tasks:
        raise ConfigError(f"{path}: tasks: expected at least one task")
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"{path}: two tasks have the name {name}: give one of them another name with name:"
            )
    folders = tuple(str((path.parent / folder).resolve()) for folder in suite.task_paths)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{path}: task_paths: {folder} is not a folder")
    published = str(path.parent / suite.published) if suite.published else None
    if published is not None and not Path(published).is_file():
        raise ConfigError(f"{path}: published: {published} is not a file")
    return Suite(suite.name or path.stem, suite.title, folders, tasks, published)


def _named(task: SuiteTask, at: str) -> SuiteTask:
    """Return the task with defaults for its name and label, after checking its keys.

    at: position of the task in the file, for messages. Raises ConfigError for an invalid key.
    """
    if not task.task:
        raise ConfigError(f"{at}.task: expected the name of a task")
    name = task.name or task.task
    wrong = _names_a_file(name)
    if wrong:
        raise ConfigError(f"{at}: {name!r} {wrong}; set a valid one with name:")
    held = [
        key for key in ("data", "context_lengths", "stride", "max_tokens") if getattr(task, key)
    ]
    if held and task.kind != "heldout":
        raise ConfigError(f"{at}.{held[0]}: valid only for a task with kind: heldout")
    return replace(task, name=name, label=task.label or name)
