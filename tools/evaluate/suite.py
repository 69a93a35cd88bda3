"""Which tasks are asked and which number of each is reported: the dataclasses, and the strict reading of a suite's YAML.

No torch, no harness.
"""

from __future__ import annotations

import re
import typing
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from fem_common.config import describe
from fem_common.errors import ConfigError, told
from fem_common.settings import setting, spec
from fem_common.text import nearest

SUITES = Path(__file__).parent / "suites"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class SuiteTask:
    """One column of the table: a task, and the one of its numbers that stands there.

    Two columns may share a task (IFEval's two accuracies): it is asked once, and each column has its own ``name`` and result file.
    """

    task: str = setting("", "Name of a task or group of the harness, or of an own YAML under task_paths; held-out data: any name.")
    label: str = setting("", "The column's heading; empty: the name.")
    metric: str = setting(
        "acc", "The harness's name of the number; METRIC,FILTER where its filter is not none. Held-out data: nats_per_token."
    )
    name: str = setting("", "Name of the result's file; empty: the task's. Must differ where two columns share a task.")
    kind: str = setting(
        "harness", "harness: a task of lm-evaluation-harness; heldout: perplexity on a .bin/.idx pair.", choices=("harness", "heldout")
    )
    group: str = setting("", "Heading over neighbouring columns.")
    fewshot: int | None = setting(None, "Examples in the prompt; null: as the task's own YAML says.")
    rescale: str = setting(
        "none",
        "leaderboard: the report also gives (value - chance) / (1 - chance), sub-tasks first where they have chances of their own.",
        choices=("none", "leaderboard"),
    )
    higher_is_better: bool = setting(True, "False for perplexities.")
    chance: float | None = setting(None, "What guessing scores, in [0, 1]; null: of multiple choice the mean of 1/choices, else unknown.")
    subtask_chance: dict[str, float] = field(
        default_factory=dict, metadata={"doc": "What guessing scores in each sub-task of a group, by the harness's names."}
    )
    data: str | None = setting(None, "Held-out data: path of the .bin/.idx pair without its suffix; null: the run's own validation data.")
    context_lengths: tuple[int, ...] = setting((), "Held-out data: tokens a window; empty: the training's context length.")
    stride: int | None = setting(None, "Held-out data: tokens a window moves on; null: a whole window, as in training.")
    max_tokens: int | None = setting(None, "Held-out data: read the first so many tokens; null: all.")


@dataclass(frozen=True)
class Suite:
    """Columns in the table's order."""

    name: str = setting("", "Name of the suite; empty: the file's.")
    title: str = setting("", "One line above the table.")
    task_paths: tuple[str, ...] = setting((), "Folders of own task YAMLs of the harness; relative ones start at this file's folder.")
    tasks: tuple[SuiteTask, ...] = setting((), "The columns.")


def load_suite(word: str) -> Suite:
    """The suite of that name in suites/, or in the file of that path (with a slash, or ending in .yaml or .yml).

    Raises:
        ConfigError: no such suite, or a key, type or value in it is wrong. StorageError: the file system failed.
    """
    known = sorted(path.stem for path in SUITES.glob("*.yaml"))
    by_path = "/" in word or word.endswith((".yaml", ".yml"))
    path = Path(word) if by_path else SUITES / f"{word}.yaml"
    if not by_path and word not in known:
        near = nearest(word, known)
        hint = f"did you mean {near}?" if near else f"suites are {', '.join(known)}, and paths of .yaml files"
        raise ConfigError(f"--suite {word}: no such suite; {hint}")
    raw = _read(path)
    suite: Suite = _build(Suite, raw, str(path), "")
    tasks = tuple(_named(task, index, str(path)) for index, task in enumerate(suite.tasks))
    if not tasks:
        raise ConfigError(f"{path}: tasks: expected at least one task")
    names = [task.name for task in tasks]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{path}: two tasks have the name {name}: give one of them another with name:")
    folders = tuple(str((path.parent / folder).resolve()) for folder in suite.task_paths)
    for folder in folders:
        if not Path(folder).is_dir():
            raise ConfigError(f"{path}: task_paths: {folder} is not a folder")
    return Suite(suite.name or path.stem, suite.title, folders, tasks)


def _named(task: SuiteTask, index: int, where: str) -> SuiteTask:
    """The task with its defaults filled in, its values checked."""
    at = f"{where}: tasks.{index}"
    if not task.task:
        raise ConfigError(f"{at}.task: expected the name of a task")
    name = task.name or task.task
    if not NAME.fullmatch(name):
        raise ConfigError(f"{at}: {name!r} names a file: letters, digits, ., - and _ alone; give one with name:")
    chances = {"chance": task.chance, **{f"subtask_chance.{key}": value for key, value in task.subtask_chance.items()}}
    for key, value in chances.items():
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{at}.{key} = {value}: expected a share in [0, 1)")
    counts = {"fewshot": (task.fewshot, 0), "stride": (task.stride, 1), "max_tokens": (task.max_tokens, 2)}
    counts |= {f"context_lengths.{i}": (value, 2) for i, value in enumerate(task.context_lengths)}
    for key, (count, least) in counts.items():
        if count is not None and count < least:
            raise ConfigError(f"{at}.{key} = {count}: expected at least {least}")
    held = [key for key in ("data", "context_lengths", "stride", "max_tokens") if getattr(task, key)]
    if held and task.kind != "heldout":
        raise ConfigError(f"{at}.{held[0]}: only of a task with kind: heldout")
    values = {item.name: getattr(task, item.name) for item in fields(SuiteTask)}
    return SuiteTask(**{**values, "name": name, "label": task.label or name})


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise told(error) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None


def _build(cls: Any, raw: Any, where: str, path: str) -> Any:
    """``raw`` as the dataclass ``cls``; unknown keys and wrong types are told with their place."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: {path.rstrip('.') or 'the file'}: expected a mapping")
    hints, known = typing.get_type_hints(cls), {item.name: item for item in fields(cls)}
    values = {}
    for key, value in raw.items():
        if key not in known:
            near = nearest(str(key), list(known))
            hint = f"did you mean {path}{near}?" if near else f"valid keys: {', '.join(known)}"
            raise ConfigError(f"{where}: unknown key {path}{key}; {hint}")
        values[key] = _convert(hints[key], value, where, f"{path}{key}")
        choices = spec(known[key]).choices
        if choices and values[key] not in choices:
            raise ConfigError(f"{where}: {path}{key} = {value!r} is not a choice; choose one of {', '.join(choices)}")
    assert all(item.default is not MISSING or item.default_factory is not MISSING for item in fields(cls))
    return cls(**values)


def _convert(kind: Any, value: Any, where: str, path: str) -> Any:
    inner = typing.get_args(kind)[0] if type(None) in typing.get_args(kind) else kind
    if value is None and inner is not kind:
        return None
    if inner == tuple[SuiteTask, ...] and isinstance(value, list):
        return tuple(_build(SuiteTask, entry, where, f"{path}.{index}.") for index, entry in enumerate(value))
    if typing.get_origin(inner) is tuple and isinstance(value, list):
        return tuple(_convert(typing.get_args(inner)[0], entry, where, f"{path}.{index}") for index, entry in enumerate(value))
    if typing.get_origin(inner) is dict and isinstance(value, dict):
        return {str(key): _convert(float, entry, where, f"{path}.{key}") for key, entry in value.items()}
    if inner is float and type(value) is int:
        return float(value)
    if inner in (str, bool, int, float) and type(value) is inner:
        return value
    raise ConfigError(f"{where}: {path} = {value!r}: expected {describe(kind)}")
