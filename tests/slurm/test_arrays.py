"""An array against a real Slurm, of data_prep, with a task killed and one cancelled; what is done is not done again."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from launch.job import attempts, launch_folder, read_json, read_json_lines
from tests.launch.supervised import wait_for
from tests.slurm.mini import MiniSlurm
from tests.slurm.training import call, prepare_data, profile


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder; corpus.parquet and tokenizer/ are beside it."""
    return prepare_data(tmp_path_factory.mktemp("data"))


def attempt_records(item: Path) -> list[dict[str, Any]]:
    return [read_json(folder / "attempt.json") for folder in attempts(item)]


def state(item: Path) -> str | None:
    return (read_json(launch_folder(item) / "state.json") or {}).get("state")


def submissions(directory: Path) -> list[dict[str, Any]]:
    return read_json_lines(launch_folder(directory) / "submissions.jsonl")


def child_of(item: Path) -> int:
    """The process of an item's command in its first attempt; 0 before it starts."""
    return int((read_json(item / "attempts" / "0001" / "ranks" / "rank_00000.json") or {}).get("child") or 0)


def test_a_data_prep_array_with_a_task_killed(cluster: MiniSlurm, data: Path, tmp_path: Path) -> None:
    out, directory, alone = tmp_path / "out", tmp_path / "array", tmp_path / "alone"
    corpus, tokenizer = data.parent / "corpus.parquet", data.parent / "tokenizer"
    many = tmp_path / "many.parquet"  # in small row groups, so that it makes many units
    pq.write_table(pq.read_table(corpus), many, row_group_size=10)
    plan: list[str | Path] = ["--tokenizer", tokenizer, "--valid-percent", "10", "--test-percent", "5", "--unit-mb", "0.02"]
    call("data_prep", "plan", many, *plan, "--out", out)
    units = len(read_json(out / "plan.json")["units"])
    assert units >= 8
    words: list[str | Path] = [
        "submit",
        "--cluster",
        profile(tmp_path, "slurm", {"health": {"check": False}}),
        "--directory",
        directory,
        "--tasks",
        "4",
        "--at-once",
        "2",
        "--parsable",
    ]
    command: list[str | Path] = ["--", "data_prep", "run", "--out", out, "--workers", "1"]

    job = call("launch", *words, *command, env=cluster.environment).strip()
    items = [directory / "tasks" / f"{index:04}" for index in range(4)]
    wait_for(lambda: child_of(items[0]), 500)
    os.kill(child_of(items[0]), signal.SIGKILL)  # the supervisor starts it again
    wait_for(lambda: child_of(items[1]), 500)
    cluster.run("scancel", f"{job}_1")  # nothing starts it again
    wait_for(lambda: all(state(items[index]) == "finished" for index in (0, 2, 3)), 500)
    cluster.wait(f"{job}_1")
    assert [len(attempt_records(item)) for item in items] == [2, 1, 1, 1]
    assert state(items[1]) == "cancelled"
    assert "are not done" in call("data_prep", "merge", out, code=2)

    second = call("launch", *words, *command, env=cluster.environment).strip()
    assert [line["items"] for line in submissions(directory)] == [[0, 1, 2, 3], [1]]
    assert cluster.wait(f"{second}_1") == "COMPLETED"
    assert [len(attempt_records(item)) for item in items] == [2, 2, 1, 1]
    assert call("launch", *words, *command, env=cluster.environment) == ""
    call("data_prep", "merge", out)

    call("data_prep", "run", many, *plan, "--out", alone, "--workers", "1")
    names = [f"{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")]
    assert [name for name in names if (out / name).read_bytes() != (alone / name).read_bytes()] == []
    assert all((alone / name).stat().st_size > 0 for name in names)
