"""Find the harness's tasks of a suite, and check that their data sets and metrics are on this
machine.

The harness has about 14,000 YAML files and reads all of them to find one task. This module searches
the first lines of the files for the required names and passes only the folders that contain them.
Environment variables determine where the libraries store data and whether they may use the network;
``settle`` sets them before the libraries are imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fem_common.errors import ConfigError
from fem_common.files import sha256, sha256_json
from fem_common.text import did_you_mean, first_few, nearest

from .suite import Suite, SuiteTask

NAMED = re.compile(rb"^(?:task|group):[ \t]*[\"']?([\w:.-]+)", re.MULTILINE)
LOCAL_FORMATS = ("json", "csv", "parquet", "arrow", "text", "pandas", "xml")
NO_HARNESS = "lm-evaluation-harness is not installed: pip install -e '.[eval]'"


@dataclass(frozen=True)
class DataSet:
    """Data set of a task.

    path: its name on the Hugging Face Hub, or a format of local files such as ``json``. config:
    name of its configuration. options: further arguments of ``load_dataset`` as JSON.
    """

    path: str
    config: str | None
    options: str

    def __str__(self) -> str:
        return self.path if self.config is None else f"{self.path} ({self.config})"


@dataclass(frozen=True)
class Leaf:
    """One task of the harness that is not a group.

    config: content of its YAML file, with functions as paths. folder: the folder of that file.
    """

    name: str
    config: dict[str, Any]
    folder: Path

    @property
    def data(self) -> DataSet | None:
        """The data set of the task; None if a function of the task creates the data."""
        path = self.config.get("dataset_path")
        if path is None or self.config.get("custom_dataset") is not None or "class" in self.config:
            return None
        name = self.config.get("dataset_name")
        return DataSet(
            path,
            None if name is None else str(name),
            json.dumps(self.config.get("dataset_kwargs") or {}, sort_keys=True),
        )

    @property
    def fewshot(self) -> int:
        """Default number of examples in the prompt."""
        return int(self.config.get("num_fewshot") or 0)

    @property
    def metrics(self) -> dict[str, bool | None]:
        """Name of each metric -> True if higher is better, False if lower; None if not defined."""
        listed = self.config.get("metric_list") or []
        return {
            str(entry["metric"]).rsplit(".", 1)[-1]: entry.get("higher_is_better")
            for entry in listed
        }


@dataclass(frozen=True)
class Tasks:
    """The harness's tasks of a suite.

    manager: the harness's task manager. leaves: task of the suite -> itself, or the members of the
    group. folder: the folder of the harness's YAML files.
    """

    manager: Any
    leaves: dict[str, tuple[Leaf, ...]]
    folder: Path

    def digest(self, name: str) -> str:
        """Return a hash of everything that defines the task ``name`` of the suite.

        The YAML files are included and, for tasks outside the harness, all files in their folders.
        """
        content = []
        for leaf in self.leaves[name]:
            config = json.dumps(leaf.config, sort_keys=True, default=str)
            for folder in (leaf.folder, self.folder):
                config = config.replace(str(folder), "")
            content.append([leaf.name, config])
            if leaf.folder.is_relative_to(self.folder):
                continue
            for file in sorted(leaf.folder.iterdir()):
                if file.is_file() and not file.name.startswith("."):
                    content.append([file.name, sha256(file)])
        return sha256_json(content, sort_keys=False)[:16]


def harness_version() -> str:
    """Return the installed version of the harness. Raises ConfigError if it is not installed."""
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(NO_HARNESS) from None


def harness_folder() -> Path:
    """Return the folder of the harness's YAML files, without importing the harness.

    Raises ConfigError if it is not installed.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(NO_HARNESS)
    return Path(found.submodule_search_locations[0]).resolve() / "tasks"


def find_tasks(suite: Suite) -> Tasks:
    """Find the harness tasks of a suite and check that each metric and few-shot count exists.

    Raises:
        ConfigError: a task does not exist or differs from its description in the suite.
    """
    wanted = list(dict.fromkeys(task.task for task in suite.tasks if task.kind == "harness"))
    own, theirs = [Path(folder) for folder in suite.task_paths], harness_folder()
    places = {name: file for folder in own for name, file in named_in(folder)}
    if not set(wanted) <= set(places):
        places = {**dict(named_in(theirs)), **places}
    for name in wanted:
        if name not in places:
            raise ConfigError(
                f"the suite {suite.name} contains {name}, which is not a"
                f" task{_meant(name, sorted(places))}"
            )
    of_harness = {
        theirs / places[name].relative_to(theirs).parts[0]
        for name in wanted
        if places[name].is_relative_to(theirs)
    }
    manager = manager_of([*sorted(of_harness), *own])
    index = manager.task_index
    if not all(child in index for name in wanted for child in children(index, name)):
        manager = manager_of([theirs, *own])
    leaves = {name: tuple(_leaves(manager.task_index, name)) for name in wanted}
    tasks = Tasks(manager, leaves, theirs)
    for task in suite.tasks:
        if task.kind == "harness":
            _check(task, tasks)
    return tasks


def named_in(folder: Path) -> Iterable[tuple[str, Path]]:
    """Yield (name, YAML file) for every task or group that a file below ``folder`` defines."""
    for file in sorted(folder.rglob("*.yaml")):
        yield from ((name.decode(), file) for name in NAMED.findall(file.read_bytes()))


def manager_of(folders: Sequence[Path]) -> Any:
    """Return a task manager of the harness that reads only these folders.

    If two folders define a task with the same name, the later one is used.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)


def children(index: dict[str, Any], name: str) -> list[str]:
    """Return the names of all tasks in the group ``name``, including those of nested groups.

    If ``name`` is a task or unknown, the list contains only ``name``. index: the harness's index of
    tasks.
    """
    config = getattr(index.get(name), "cfg", None) or {}
    if "group" not in config:
        return [name]
    members = config["task"] if isinstance(config["task"], list) else [config["task"]]
    found = []
    for member in members:
        child = member if isinstance(member, str) else member.get("task", member.get("group"))
        if isinstance(child, str):
            found += children(index, child)
    return found


def _leaves(index: dict[str, Any], name: str) -> list[Leaf]:
    found = []
    for child in children(index, name):
        entry = index.get(child)
        if entry is None or entry.yaml_path is None or entry.cfg is None:
            raise ConfigError(f"{name}: its part {child} is not a task with a separate YAML file")
        found.append(Leaf(child, entry.cfg, Path(entry.yaml_path).resolve().parent))
    return found


def _check(task: SuiteTask, tasks: Tasks) -> None:
    """Raise ConfigError if the suite describes a task differently from the harness.

    The metric and its direction, the names of sub-tasks and the few-shot count are compared. The
    harness would silently ignore another few-shot count for a task that fixes it at 0.
    """
    leaves, metric = tasks.leaves[task.task], task.metric.split(",")[0]
    group = leaves[0].name != task.task
    entry = tasks.manager.task_index[task.task]
    known: dict[str, bool | None] = {}
    for leaf in leaves:
        known |= leaf.metrics
    listed = list(known)
    if group:
        aggregated = entry.cfg.get("aggregate_metric_list") or []
        listed = [str(item["metric"]) for item in aggregated]
    if listed and metric not in listed:
        raise ConfigError(
            f"{task.name}: {task.task} has no metric {metric};"
            f" {did_you_mean(metric, listed, 'it has')}"
        )
    if group and not listed:
        raise ConfigError(
            f"{task.name}: the group {task.task} has no aggregate score: list its tasks separately"
        )
    if known.get(metric) is not None and known[metric] != task.higher_is_better:
        raise ConfigError(
            f"{task.name}: {metric} of {task.task} has higher_is_better:"
            f" {str(known[metric]).lower()}"
        )
    unknown = sorted(set(task.subtask_chance) - {leaf.name for leaf in leaves})
    if unknown:
        meant = _meant(unknown[0], [leaf.name for leaf in leaves])
        raise ConfigError(
            f"{task.name}: subtask_chance.{unknown[0]} is not a part of {task.task}{meant}"
        )
    fixed = [leaf.name for leaf in leaves if leaf.config.get("num_fewshot") == 0]
    if task.fewshot and fixed:
        raise ConfigError(
            f"{task.name}: fewshot = {task.fewshot}, but {fixed[0]} accepts no examples"
            " (num_fewshot: 0 in its YAML)"
        )


def _meant(word: str, known: Sequence[str]) -> str:
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


GATED = {
    "Idavidrein/gpqa": (
        "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa, then `hf auth login`"
        " or HF_TOKEN"
    )
}
PUNKT, PUNKT_NAME = "tokenizers/punkt_tab", "punkt_tab"


def settle(online: bool, cache: Path | None) -> None:
    """Set the environment variables of the libraries that load data.

    Call it before they are imported. online: the libraries may use the network. cache: a folder
    with datasets/, hub/ and nltk_data/, as written by ``--download --cache``; None: the libraries'
    default folders.
    """
    os.environ["TQDM_DISABLE"] = "1"
    # lm-eval's bootstrap forks a process that has threads, and ends its workers with SIGTERM. If
    # SIGTERM has a handler, as in every command of this project, Python drops a signal that reaches
    # a child before its first instruction, and the pool waits indefinitely.
    os.environ["DISABLE_MULTIPROC"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        os.environ[name] = "0" if online else "1"
    if cache is not None:
        os.environ["HF_DATASETS_CACHE"] = str(cache.absolute() / "datasets")
        os.environ["HF_HUB_CACHE"] = str(cache.absolute() / "hub")
        os.environ["NLTK_DATA"] = str(cache.absolute() / "nltk_data")


def cache_folder() -> Path:
    """Return the folder of prepared data sets."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


def require(tasks: Tasks, command: str, stream: TextIO) -> None:
    """Raise ConfigError if a data set of the tasks is missing, after printing one line for each.

    command: the command that downloads the data, without ``--cache``, for the message.
    """
    absent = missing(tasks, stream)
    if not absent:
        return
    width = max(len(what) for what, *_ in absent)
    for what, names, why in absent:
        wanted_by = first_few(list(names), 3) + (f": {why}" if why else "")
        stream.write(f"missing  {what:<{width}}  for {wanted_by}\n")
    gated = [
        f" ({path} is gated: {how})"
        for path, how in GATED.items()
        if any(what.startswith(path) for what, *_ in absent)
    ]
    if os.environ["HF_HUB_OFFLINE"] == "0":
        raise ConfigError(
            f"{len(absent)} data sets or files of the suite could not be downloaded: see the list"
            f" above{''.join(gated)}"
        )
    raise ConfigError(
        f"{len(absent)} data sets or files of the suite are not on this machine (folder of data"
        f" sets: {cache_folder()}); on a machine with a network: {command} --cache"
        f" DIR{''.join(gated)}; then copy DIR to this machine and give --cache DIR"
    )


@dataclass(frozen=True)
class _Lost:
    """Data that cannot be loaded, for one task that needs it.

    why: the reason; empty if the data is simply absent. configuration: that of the data set.
    """

    what: str
    why: str
    configuration: str | None
    task: str


def missing(tasks: Tasks, stream: TextIO) -> list[tuple[str, list[str], str]]:
    """Return the data sets that cannot be loaded, in the order of the suite.

    Each entry is (data set, names of the tasks that need it, reason). The reason is empty if the
    data is simply absent. Configurations of one data set that have the same reason share an entry.

    With the network, data sets are downloaded, with one line of progress each; the result then
    lists those that could not be downloaded.

    Raises:
        ConfigError: the network may be used but does not respond.
    """
    wanted: dict[DataSet, dict[str, None]] = {}
    for name, leaves in tasks.leaves.items():
        for leaf in leaves:
            if leaf.data is not None:
                wanted.setdefault(leaf.data, {})[name] = None
    lost: list[_Lost] = []
    with quiet():
        for data, names in wanted.items():
            if data.path in LOCAL_FORMATS:
                gone = [file for file in local_files(data) if not Path(file).is_file()]
                if gone:
                    why = "a relative path is relative to the working directory"
                    lost += [_Lost(f"the file {gone[0]}", why, None, name) for name in names]
                continue
            reason = why_not_loaded(data, stream)
            if reason is not None:
                lost += [_Lost(data.path, reason, data.config, name) for name in names]
        counting = [
            name
            for name, leaves in tasks.leaves.items()
            if any(leaf.folder.name == "ifeval" for leaf in leaves)
        ]
        if counting and not sentences_counted():
            lost += [_Lost(f"nltk's {PUNKT_NAME}", "", None, name) for name in counting]
    entries = []
    for what, why in dict.fromkeys((entry.what, entry.why) for entry in lost):
        own = [entry for entry in lost if (entry.what, entry.why) == (what, why)]
        configurations = [entry.configuration for entry in own if entry.configuration]
        suffix = ""
        if len(configurations) == len(own):
            suffix = f" ({first_few(list(dict.fromkeys(configurations)), 3)})"
        entries.append((what + suffix, list(dict.fromkeys(entry.task for entry in own)), why))
    return entries


def why_not_loaded(data: DataSet, stream: TextIO) -> str | None:
    """Return the reason why a data set cannot be loaded, or None if it can.

    The reason is empty if the data set is not in the cache. Raises ConfigError as ``missing`` does.
    """
    import datasets

    online = os.environ["HF_HUB_OFFLINE"] == "0"
    if online:
        stream.write(f"fetching {data}\n")
        stream.flush()
    try:
        datasets.load_dataset(path=data.path, name=data.config, **json.loads(data.options))
    except ConnectionError as error:
        if online:
            raise ConfigError(f"{data}: the network does not respond: {error}") from None
        return ""
    except (FileNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
        return "no access" if "gated" in str(error) else ""
    # The library raises errors of any class; the task would fail with the same error later.
    except Exception as error:
        text = " ".join(str(error).split())
        return "" if text.startswith("Couldn't find cache") else text[:160]
    return None


def local_files(data: DataSet) -> list[str]:
    """Return the paths of the files that a data set of local files lists, without patterns."""
    files = json.loads(data.options).get("data_files") or []
    entries = list(files.values()) if isinstance(files, dict) else [files]
    paths = []
    for entry in entries:
        paths += entry if isinstance(entry, list) else [entry]
    return [str(path) for path in paths if "*" not in str(path)]


def sentences_counted() -> bool:
    """Return True if nltk has the data to count sentences, which the task IFEval needs.

    If the network may be used, missing data is downloaded.
    """
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        online = os.environ["HF_HUB_OFFLINE"] == "0"
        return online and bool(
            nltk.download(PUNKT_NAME, download_dir=os.environ.get("NLTK_DATA"), quiet=True)
        )
    return True


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager that discards output and log messages of libraries.

    Errors are still raised.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with (
            open(os.devnull, "w", encoding="utf-8") as nowhere,
            contextlib.redirect_stdout(nowhere),
        ):
            yield
    finally:
        logging.disable(before)
        sys.stdout.flush()
