"""The data that tasks load: whether this machine has all of it, told before anything starts, and downloading it where a network is.

The environment decides where the libraries look and whether they may ask a network; ``settle`` sets it, before they are imported.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from fem_common.errors import ConfigError

from .harness_tasks import LOCAL_FORMATS, DataSet, Leaf, Tasks

GATED = {"Idavidrein/gpqa": "accept its terms at https://huggingface.co/datasets/Idavidrein/gpqa, then `hf auth login` or HF_TOKEN"}
PUNKT, PUNKT_NAME = "tokenizers/punkt_tab", "punkt_tab"


@dataclass(frozen=True)
class Missing:
    """Something that tasks need and this machine has not. why: empty where it is simply not there."""

    what: str
    tasks: tuple[str, ...]
    why: str


def settle(online: bool, cache: Path | None) -> None:
    """Sets the environment of the libraries that load data; call it before they are imported.

    cache: a folder with datasets/, hub/ and nltk_data/ in it, as ``--download --cache`` fills it; None: the libraries' own places.
    """
    os.environ["TQDM_DISABLE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        os.environ[name] = "0" if online else "1"
    if cache is not None:
        os.environ["HF_DATASETS_CACHE"] = str(cache.absolute() / "datasets")
        os.environ["HF_HUB_CACHE"] = str(cache.absolute() / "hub")
        os.environ["NLTK_DATA"] = str(cache.absolute() / "nltk_data")


def cache_folder() -> Path:
    """Where prepared data sets are looked for."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE)


def require(tasks: Tasks, command: str, stream: TextIO) -> None:
    """Lists what of the tasks' data is not there, a line a data set.

    command: what downloads it, ``--cache`` left out. Raises ConfigError where something is missing.
    """
    absent = missing(tasks, stream)
    if not absent:
        return
    width = max(len(item.what) for item in absent)
    for item in absent:
        stream.write(f"missing  {item.what:<{width}}  for {listed(item.tasks)}{f': {item.why}' if item.why else ''}\n")
    gated = [f" ({path} is gated: {how})" for path, how in GATED.items() if any(item.what.startswith(path) for item in absent)]
    if os.environ["HF_HUB_OFFLINE"] == "0":
        raise ConfigError(f"{len(absent)} of what the suite needs could not be downloaded: the list above says what{''.join(gated)}")
    raise ConfigError(
        f"{len(absent)} of what the suite needs are not on this machine (data sets are looked for in {cache_folder()}); on a machine with "
        f"a network: {command} --cache DIR{''.join(gated)}; then bring DIR here and give --cache DIR"
    )


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first few names and how many more there are."""
    given = list(names)
    return ", ".join(given[:most]) + (f" and {len(given) - most} more" if len(given) > most else "")


def missing(tasks: Tasks, stream: TextIO) -> list[Missing]:
    """What cannot be loaded, in the suite's order, one entry a data set; online, what could not be downloaded, with a line a data set.

    Raises:
        ConfigError: online, and the network does not answer.
    """
    import datasets

    found, online = [], os.environ["HF_HUB_OFFLINE"] == "0"
    with quiet():
        for data, names in data_sets(tasks).items():
            if data.path in LOCAL_FORMATS:
                gone = [file for file in local_files(data) if not Path(file).is_file()]
                if gone:
                    found.append(Missing(f"the file {gone[0]}", names, "a relative path starts at the working directory"))
                continue
            if online:
                stream.write(f"fetching {data}\n")
                stream.flush()
            try:
                load(data)
            except ConnectionError as error:
                if online:
                    raise ConfigError(f"{data}: the network does not answer: {error}") from None
                found.append(Missing(str(data), names, ""))
            except (FileNotFoundError, datasets.exceptions.DatasetNotFoundError) as error:
                gated = "gated" in str(error)
                found.append(Missing(str(data), names, "no access" if gated else ""))
            except Exception as error:  # the library raises what it likes; the task would fail on it later
                text = " ".join(str(error).split())
                found.append(Missing(str(data), names, "" if text.startswith("Couldn't find cache") else text[:160]))
        found += missing_sentences(tasks)
    return merged(found)


def merged(found: list[Missing]) -> list[Missing]:
    """One entry for all configurations of a data set that are missing for the same reason."""
    entries: dict[tuple[str, str], list[Missing]] = {}
    for item in found:
        entries.setdefault((item.what.split(" (")[0], item.why), []).append(item)
    result = []
    for (what, why), items in entries.items():
        configurations = [item.what.partition(" (")[2].rstrip(")") for item in items]
        suffix = f" ({listed(configurations)})" if all(configurations) else ""
        result.append(Missing(what + suffix, tuple(dict.fromkeys(name for item in items for name in item.tasks)), why))
    return result


def data_sets(tasks: Tasks) -> dict[DataSet, tuple[str, ...]]:
    """Data set -> the suite's tasks that load it."""
    wanted: dict[DataSet, dict[str, None]] = {}
    for name, leaves in tasks.leaves.items():
        for leaf in leaves:
            if leaf.data is not None:
                wanted.setdefault(leaf.data, {})[name] = None
    return {data: tuple(names) for data, names in wanted.items()}


def load(data: DataSet) -> Any:
    """The data set as the harness loads it."""
    import datasets

    return datasets.load_dataset(path=data.path, name=data.config, **json.loads(data.options))


def local_files(data: DataSet) -> list[str]:
    """The files that a data set of local files names."""
    files = json.loads(data.options).get("data_files") or []
    named = list(files.values()) if isinstance(files, dict) else [files]
    return [str(file) for entry in named for file in (entry if isinstance(entry, list) else [entry]) if "*" not in str(file)]


def missing_sentences(tasks: Tasks) -> list[Missing]:
    """What nltk needs to count sentences, which IFEval's checks do; their module downloads it at import, so it is looked for before."""
    names = tuple(name for name, leaves in tasks.leaves.items() if any(counts_sentences(leaf) for leaf in leaves))
    if not names:
        return []
    import nltk

    try:
        nltk.data.find(PUNKT)
    except LookupError:
        if os.environ["HF_HUB_OFFLINE"] == "1" or not nltk.download(PUNKT_NAME, download_dir=os.environ.get("NLTK_DATA"), quiet=True):
            return [Missing(f"nltk's {PUNKT_NAME}", names, "")]
    return []


def counts_sentences(leaf: Leaf) -> bool:
    """Whether a task's code uses IFEval's checks."""
    return leaf.folder.name == "ifeval"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What the libraries print and log inside goes nowhere; errors are raised all the same."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(before)
        sys.stdout.flush()
