"""The harness's tasks and their data: locate their YAML files, read data sets and metrics, check
whether the data is on this machine.

The harness has about 14,000 YAML files and reads all of them to find one. This module searches
their first lines for the required names and passes only the folders that contain them. Environment
variables decide where the libraries store data and whether they may use the network; ``settle``
sets them before the libraries are imported.
"""

from __future__ import annotations

import contextlib
import hashlib
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
from fem_common.text import did_you_mean, first_few, nearest

from .suite import Suite, SuiteTask

NAMED = re.compile(rb"^(?:task|group):[ \t]*[\"']?([\w:.-]+)", re.MULTILINE)
LOCAL_FORMATS = ("json", "csv", "parquet", "arrow", "text", "pandas", "xml")
NO_HARNESS = "lm-evaluation-harness is not installed: pip install -e '.[eval]'"


@dataclass(frozen=True)
class DataSet:
    """Data set of a task: its name on the Hub (or a format of local files), configuration, and
    further arguments as JSON.
    """

    path: str
    config: str | None
    options: str

    def __str__(self) -> str:
        return self.path if self.config is None else f"{self.path} ({self.config})"


@dataclass(frozen=True)
class Leaf:
    """One task of the harness that is not a group: its name, its parsed YAML (functions as paths),
    the folder of the YAML.
    """

    name: str
    config: dict[str, Any]
    folder: Path

    @property
    def data(self) -> DataSet | None:
        """Data set of the task; None if a function of the task creates the data."""
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
        """Names of the metrics, and True if higher is better, None if the YAML does not define
        it.
        """
        listed = self.config.get("metric_list") or []
        return {
            str(entry["metric"]).rsplit(".", 1)[-1]: entry.get("higher_is_better")
            for entry in listed
        }


@dataclass(frozen=True)
class Tasks:
    """The harness's task manager for the tasks of a suite, and the leaves of each task. folder: the
    harness's own YAML files.
    """

    manager: Any
    leaves: dict[str, tuple[Leaf, ...]]
    folder: Path

    def digest(self, name: str) -> str:
        """Return a hash of everything that defines a task: its YAML files and, for tasks outside
        the harness, the files in the same folder.
        """
        content: list[Any] = []
        for leaf in self.leaves[name]:
            own = not leaf.folder.is_relative_to(self.folder)
            content.append(
                [
                    leaf.name,
                    json.dumps(leaf.config, sort_keys=True, default=str)
                    .replace(str(leaf.folder), "")
                    .replace(str(self.folder), ""),
                ]
            )
            beside = (
                sorted(
                    file
                    for file in leaf.folder.iterdir()
                    if file.is_file() and not file.name.startswith(".")
                )
                if own
                else []
            )
            content += [
                [file.name, hashlib.sha256(file.read_bytes()).hexdigest()] for file in beside
            ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def harness_version() -> str:
    """Return the installed version of the harness. Raises ConfigError if it is not installed."""
    try:
        return importlib.metadata.version("lm-eval")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(NO_HARNESS) from None


def harness_folder() -> Path:
    """Return the folder of the harness's YAML files without importing it. Raises ConfigError if it
    is not installed.
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
    if any(
        child not in manager.task_index
        for name in wanted
        for child in children(manager.task_index, name)
    ):
        manager = manager_of([theirs, *own])
    tasks = Tasks(
        manager, {name: tuple(_leaves(manager.task_index, name)) for name in wanted}, theirs
    )
    for task in suite.tasks:
        if task.kind == "harness":
            _check(task, tasks)
    return tasks


def named_in(folder: Path) -> Iterable[tuple[str, Path]]:
    """Yield (name of a task or group, its YAML file) for all files below a folder."""
    for file in sorted(folder.rglob("*.yaml")):
        yield from ((name.decode(), file) for name in NAMED.findall(file.read_bytes()))


def manager_of(folders: Sequence[Path]) -> Any:
    """Return a task manager of the harness for these folders only; if two tasks have one name, the
    later folder is used.
    """
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)


def children(index: dict[str, Any], name: str) -> list[str]:
    """Return the names of a group's members, including those of nested groups; the name itself if
    it is a task or unknown.
    """
    config = getattr(index.get(name), "cfg", None) or {}
    if "group" not in config:
        return [name]
    members = config["task"] if isinstance(config["task"], list) else [config["task"]]
    names = [
        member if isinstance(member, str) else member.get("task", member.get("group"))
        for member in members
    ]
    return [below for child in names if isinstance(child, str) for below in children(index, child)]


def _leaves(index: dict[str, Any], name: str) -> list[Leaf]:
    found = []
    for child in children(index, name):
        entry = index.get(child)
        if entry is None or entry.yaml_path is None or entry.cfg is None:
            raise ConfigError(f"{name}: its part {child} is not a task with a separate YAML file")
        found.append(Leaf(child, entry.cfg, Path(entry.yaml_path).resolve().parent))
    return found


def _check(task: SuiteTask, tasks: Tasks) -> None:
    """Check that the metric belongs to the task, and that a few-shot count fixed at 0 is not
    overridden, which the harness would ignore.
    """
    leaves, metric = tasks.leaves[task.task], task.metric.split(",")[0]
    group = leaves[0].name != task.task
    entry = tasks.manager.task_index[task.task]
    known: dict[str, bool | None] = {}
    for leaf in leaves:
        known |= leaf.metrics
    listed = (
        [str(item["metric"]) for item in entry.cfg.get("aggregate_metric_list") or []]
        if group
        else list(known)
    )
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
    """Set the environment of the libraries that load data; call it before they are imported.

    cache: a folder with datasets/, hub/ and nltk_data/, as written by ``--download --cache``; None:
    the libraries' default folders.
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
    """Print one line for each missing data set of the tasks.

    command: the command that downloads it, without ``--cache``. Raises ConfigError if data is
    missing.
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


def missing(tasks: Tasks, stream: TextIO) -> list[tuple[str, list[str], str]]:
    """Return (data set that cannot be loaded, tasks that need it, reason) in the order of the
    suite. The reason is empty if it is simply absent.

    All configurations of a data set with one reason share one entry. Online: data that could not be
    downloaded, with one line of progress per data set.

    Raises:
        ConfigError: online, and the network does not respond.
    """
    wanted: dict[DataSet, dict[str, None]] = {}
    for name, leaves in tasks.leaves.items():
        for leaf in leaves:
            if leaf.data is not None:
                wanted.setdefault(leaf.data, {})[name] = None
    found: dict[tuple[str, str], dict[str | None, dict[str, None]]] = {}
    with quiet():
        for data, names in wanted.items():
            if data.path in LOCAL_FORMATS:
                gone = [file for file in local_files(data) if not Path(file).is_file()]
                if gone:
                    key = (
                        f"the file {gone[0]}",
                        "a relative path is relative to the working directory",
                    )
                    found.setdefault(key, {}).setdefault(None, {}).update(names)
            elif (why := why_not_loaded(data, stream)) is not None:
                found.setdefault((data.path, why), {}).setdefault(data.config, {}).update(names)
        sentences = {
            name: None
            for name, leaves in tasks.leaves.items()
            if any(leaf.folder.name == "ifeval" for leaf in leaves)
        }
        if sentences and not sentences_counted():
            found[f"nltk's {PUNKT_NAME}", ""] = {None: sentences}
    entries = []
    for (what, why), configurations in found.items():
        named = [name for name in configurations if name is not None]
        suffix = f" ({first_few(list(named), 3)})" if len(named) == len(configurations) else ""
        entries.append(
            (
                what + suffix,
                list({name: None for names in configurations.values() for name in names}),
                why,
            )
        )
    return entries


def why_not_loaded(data: DataSet, stream: TextIO) -> str | None:
    """Return the reason why a data set cannot be loaded (empty: not in the cache), or None if it
    can. Raises ConfigError as ``missing``.
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
    """Return the paths that a data set of local files lists."""
    files = json.loads(data.options).get("data_files") or []
    named = list(files.values()) if isinstance(files, dict) else [files]
    return [
        str(file)
        for entry in named
        for file in (entry if isinstance(entry, list) else [entry])
        if "*" not in str(file)
    ]


def sentences_counted() -> bool:
    """Return True if nltk has the data for counting sentences, which IFEval needs; online, download
    it.
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
    """Discard output and logs of libraries within the context; errors are still raised."""
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
