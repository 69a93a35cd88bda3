"""Data that is not there is told before anything starts; data in a cache is found without a network; no half of a task is asked."""

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
from tools.evaluate import catalogue as cache
from tools.evaluate.catalogue import find_tasks
from tools.evaluate.suite import load_suite

ROOT = Path(__file__).resolve().parents[3]
HUB_YAML = """task: tiny_hub
dataset_path: someone/tiny_set
dataset_name: {config}
test_split: test
output_type: multiple_choice
doc_to_text: text
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No network and an empty cache, in this process, which has imported the libraries already; the cache's folder."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache/datasets")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    return tmp_path / "cache"


def hub_task(folder: Path, config: str = "plain") -> Path:
    (folder / "tasks").mkdir()
    (folder / "tasks/hub.yaml").write_text(HUB_YAML.format(config=config))
    return suite_file(folder / "s.yaml", "task: tiny_hub")


def fill(folder: Path, config: str = "plain") -> None:
    """A data set as the library leaves one that it has downloaded and prepared."""
    place = folder / "datasets/someone___tiny_set" / config / "0.0.0/0123456789abcdef"
    place.mkdir(parents=True)
    rows = datasets.Dataset.from_list(CHOICES)
    with ArrowWriter(path=str(place / "tiny_set-test.arrow"), features=rows.features) as writer:
        for row in CHOICES:
            writer.write(row)
        writer.finalize()
    split = {"name": "test", "num_bytes": 1, "num_examples": len(CHOICES), "dataset_name": "tiny_set"}
    info = {
        "builder_name": "parquet",
        "dataset_name": "tiny_set",
        "config_name": config,
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "features": rows.features.to_dict(),
        "splits": {"test": split},
    }
    (place / "dataset_info.json").write_text(json.dumps(info))


def told(suite: Path) -> tuple[str, str]:
    """(list of what is missing, the line of the error), both empty where nothing is."""
    stream = io.StringIO()
    try:
        cache.require(find_tasks(load_suite(str(suite))), "COMMAND", stream)
    except ConfigError as error:
        return stream.getvalue(), str(error)
    return stream.getvalue(), ""


def test_a_data_set_in_the_cache_is_enough(tmp_path: Path, offline: Path) -> None:
    suite = hub_task(tmp_path)
    listed, error = told(suite)
    assert listed.splitlines() == ["missing  someone/tiny_set (plain)  for tiny_hub"]
    assert str(offline / "datasets") in error and "COMMAND --cache DIR" in error and "\n" not in error
    fill(offline)
    assert told(suite) == ("", "")


def test_another_configuration_is_not_enough(tmp_path: Path, offline: Path) -> None:
    fill(offline, "other")
    assert "missing  someone/tiny_set (plain)" in told(hub_task(tmp_path))[0]


def test_a_damaged_data_set_is_told(tmp_path: Path, offline: Path) -> None:
    fill(offline)
    next(offline.rglob("dataset_info.json")).write_text("{")
    assert "missing  someone/tiny_set (plain)  for tiny_hub: " in told(hub_task(tmp_path))[0]


def test_a_file_that_is_not_there_is_told(tmp_path: Path, offline: Path) -> None:
    text = HUB_YAML.format(config="null").replace("someone/tiny_set", "json")
    suite = hub_task(tmp_path)
    (tmp_path / "tasks/hub.yaml").write_text(f"{text}dataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n")
    assert f"the file {tmp_path}/rows.jsonl" in told(suite)[0]
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert told(suite) == ("", "")


NEEDED = ("MMLU-Pro", "SaylorTwift/bbh (boolean_expressions, causal_judgement, date_understanding and 21 more)", "punkt_tab", "sciq")


def test_all_that_the_papers_suite_needs(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(offline)])
    stream = io.StringIO()
    with pytest.raises(ConfigError, match="14 of what the suite needs"):
        cache.require(find_tasks(load_suite("paper")), "COMMAND", stream)
    assert all(what in stream.getvalue() for what in NEEDED)
    assert len(stream.getvalue().splitlines()) == 14


@pytest.mark.slow
def test_the_papers_suite_on_a_machine_without_data(tmp_path: Path) -> None:
    """The command itself: all that is missing, one error line, no traceback, nothing written."""
    model = llama_folder(tmp_path / "model")
    command = [sys.executable, "-m", "tools.evaluate", str(model), "--suite", "paper", "--cache", str(tmp_path / "cache")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*command, "--out", str(tmp_path / "out")], cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = found.stderr.splitlines()
    assert (found.returncode, found.stdout) == (2, ""), found.stderr
    assert [line for line in lines[:-1] if not line.startswith("missing  ")] == []
    assert lines[-1].startswith("tools.evaluate: error: 14 of what the suite needs")
    assert "python -m tools.evaluate --download --suite paper --cache DIR" in lines[-1]
    assert "Idavidrein/gpqa is gated" in lines[-1]
    for what in NEEDED:
        assert any(what in line for line in lines), what
    assert not (tmp_path / "out").exists()
