"""Missing data is reported before any work starts; cached data is found without a network; no task
is evaluated in part.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import datasets
import nltk
import pytest
from datasets.arrow_writer import ArrowWriter

from fem_common.errors import ConfigError
from tests.tools.evaluate.tiny import CHOICES, llama_folder, suite_file
from tests.wording import Wording
from tools.evaluate import catalogue
from tools.evaluate.__main__ import main
from tools.evaluate.suite import load_suite

ROOT = Path(__file__).resolve().parents[3]
HUB_YAML = """task: tiny_hub
dataset_path: someone/tiny_set
dataset_name: plain
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache, with the network disabled in this process, which has already
    imported the libraries.
    """
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/datasets")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for name in (
        "HF_HUB_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "TQDM_DISABLE",
        "DISABLE_MULTIPROC",
        "TOKENIZERS_PARALLELISM",
    ):
        monkeypatch.setenv(name, "1")
    return tmp_path / "cache"


def fill(folder: Path, config: str) -> Path:
    """Write a data set as the library stores a downloaded and prepared one; return its
    description.
    """
    place = folder / "datasets/someone___tiny_set" / config / "0.0.0/0123456789abcdef"
    place.mkdir(parents=True)
    features = datasets.Dataset.from_list(CHOICES).features
    with ArrowWriter(path=str(place / "tiny_set-test.arrow"), features=features) as writer:
        for row in CHOICES:
            writer.write(row)
        writer.finalize()
    split = {
        "name": "test",
        "num_bytes": 1,
        "num_examples": len(CHOICES),
        "dataset_name": "tiny_set",
    }
    version = {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0}
    named = {
        "builder_name": "parquet",
        "dataset_name": "tiny_set",
        "config_name": config,
        "version": version,
    }
    (place / "dataset_info.json").write_text(
        json.dumps({**named, "features": features.to_dict(), "splits": {"test": split}})
    )
    return place / "dataset_info.json"


def missing(suite: str | Path) -> str:
    """Return the list of missing data, then the error line; empty if no data is missing."""
    stream = io.StringIO()
    try:
        catalogue.require(catalogue.find_tasks(load_suite(str(suite))), "COMMAND", stream)
    except ConfigError as error:
        return f"{stream.getvalue()}{error}"
    return stream.getvalue()


def test_a_data_set_is_in_the_cache_or_reported(
    tmp_path: Path, offline: Path, wording: Wording
) -> None:
    """Cases: absent, another configuration, damaged; a missing file."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/hub.yaml").write_text(HUB_YAML)
    suite = suite_file(tmp_path / "s.yaml", "task: tiny_hub")
    wording(missing(suite))
    assert main([str(tmp_path), "--suite", str(suite), "--out", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    fill(offline, "other")
    assert "missing  someone/tiny_set (plain)" in missing(suite)
    described = fill(offline, "plain")
    assert missing(suite) == ""
    described.write_text("{")
    assert "missing  someone/tiny_set (plain)  for tiny_hub: " in missing(suite)
    text = HUB_YAML.replace("plain", "null").replace("someone/tiny_set", "json")
    (tmp_path / "tasks/hub.yaml").write_text(
        f"{text}dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
    )
    wording(missing(suite))
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert missing(suite) == ""


def test_all_that_the_papers_suite_needs(offline: Path, wording: Wording) -> None:
    wording(missing("paper"))


@pytest.mark.slow
def test_the_papers_suite_on_a_machine_without_data(tmp_path: Path, offline: Path) -> None:
    """The command reports all missing data and one error line, without a traceback, and writes no
    file.
    """
    model = llama_folder(tmp_path / "model")
    command = [
        sys.executable,
        "-m",
        "tools.evaluate",
        str(model),
        "--suite",
        "paper",
        "--cache",
        str(tmp_path / "cache"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [*command, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stdout) == (2, ""), found.stderr
    lines = found.stderr.splitlines()
    assert lines[:-1] == missing("paper").splitlines()[:-1]
    assert lines[-1].startswith("tools.evaluate: error: 14 data sets or files of the suite")
    assert not (tmp_path / "out").exists()
