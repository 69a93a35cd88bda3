"""A chain of jobs against a real Slurm: data, merge, training, export, each submitted before the one before it has begun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launch.job import attempts, launch_folder, read_json, read_json_lines
from tests.slurm.mini import MiniSlurm
from tests.slurm.training import DEMO, call, losses, overrides, profile

TEXTS = [f"Number {number} is {'even' if number % 2 == 0 else 'odd'}, and its square is {number * number}." for number in range(1500)]


class Chain:
    """Jobs of one folder, each named after its own."""

    def __init__(self, cluster: MiniSlurm, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.profile = profile(folder, "slurm", {"health": {"check": False}})

    def submit(self, name: str, *words: str | Path, after: str | Path | None = None, options: tuple[str, ...] = (), code: int = 0) -> str:
        """Submit a job: its id. ``words`` are a command after ``--``, or a run."""
        more = ["--cluster", self.profile, "--parsable", *options, *(("--dependency", after) if after else ())]
        run = words[0] == DEMO
        own: list[str | Path] = [*words, *more] if run else [*more, "--directory", self.folder / name, "--", *words]
        return call("launch", "submit", *own, env=self.cluster.environment, code=code).strip()

    def record(self, name: str) -> dict[str, Any]:
        """The only attempt of a job, or of its first task."""
        directory = self.folder / name
        job = read_json(launch_folder(directory) / "job.json")
        (folder,) = attempts(Path(job["items"][0]["directory"]))
        return dict(read_json(folder / "attempt.json"))


@pytest.fixture
def chain(cluster: MiniSlurm, tmp_path: Path) -> Chain:
    return Chain(cluster, tmp_path)


def test_data_then_training_then_export(chain: Chain, cluster: MiniSlurm, tmp_path: Path) -> None:
    corpus, tokenizer, data, run = (tmp_path / name for name in ("corpus.parquet", "tokenizer", "data", "run"))
    pq.write_table(pa.table({"text": TEXTS, "id": [f"doc-{number}" for number in range(len(TEXTS))]}), corpus, row_group_size=300)
    call("data_prep", "train-tokenizer", corpus, "--vocab-size", "300", "--out", tokenizer)
    plan = ("--tokenizer", tokenizer, "--valid-percent", "10", "--test-percent", "0", "--unit-mb", "0.02")
    call("data_prep", "plan", corpus, *plan, "--out", data)

    held = ("--set", "slurm.options=[--hold]")
    first = chain.submit("prepare", "data_prep", "run", "--out", data, "--workers", "1", options=("--tasks", "2", *held))
    ids = [first]
    ids.append(chain.submit("merge", "data_prep", "merge", data, after=tmp_path / "prepare"))
    training = [word for word in overrides(data, run) if "train.steps" not in word]
    ids.append(chain.submit("run", DEMO, *training, "train.steps=4", after=ids[-1]))
    ids.append(chain.submit("export", "tools.hf", "export", run, tmp_path / "hf", after=run))
    assert not (data / "manifest.json").exists()  # the run was accepted before there was data
    waiting = dict(line.split("|") for line in cluster.run("squeue", "--noheader", "--format=%A|%r").stdout.splitlines())
    assert [waiting[job] for job in ids] == ["JobHeldUser", *["Dependency"] * 3]

    cluster.run("scontrol", "release", first)
    for job in ids[1:]:
        assert cluster.wait(job, timeout=500) == "COMPLETED", (launch_folder(tmp_path / "export") / f"slurm-{job}.out").read_text()
    records = [chain.record(name) for name in ("prepare", "merge", "run", "export")]
    assert [record["outcome"] for record in records] == ["finished"] * 4
    assert all(before["ended"] <= after["started"] for before, after in zip(records[:-1], records[1:], strict=True))
    assert len(losses(run)[0]) == 4
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "hf").iterdir()}
    # After a chain that is done nothing is waited for.
    dry = chain.submit("again", "data_prep", "verify", data, after=run, options=("--dry-run",))
    assert "--dependency" not in dry and "after      nothing" in dry


def test_a_broken_chain(chain: Chain, cluster: MiniSlurm, tmp_path: Path) -> None:
    """What follows a job that stopped is cancelled by Slurm, and cannot be submitted before that one is mended."""
    broken = chain.submit("broken", "data_prep", "merge", tmp_path / "nowhere", options=("--set", "slurm.options=[--hold]"))
    after = chain.submit("after", "data_prep", "stdlib", "--help", after=broken)
    cluster.run("scontrol", "release", broken)
    assert cluster.wait(broken) == "FAILED"
    assert cluster.wait(after) == "CANCELLED"
    assert attempts(tmp_path / "after") == []
    assert read_json(launch_folder(tmp_path / "broken") / "stop.json") is None, "whoever mends the input gives the same command again"
    for named, told in (
        (tmp_path / "broken", "is not under way (the input is wrong, and stays so: "),
        (broken, "that job is FAILED"),
        ("99999", "knows no such job"),
    ):
        assert told in chain.submit("after", "data_prep", "stdlib", "--help", after=named, code=2)
    assert len(read_json_lines(launch_folder(tmp_path / "after") / "submissions.jsonl")) == 1
    again = chain.submit("after", "data_prep", "stdlib", "--help")
    assert cluster.wait(again) == "COMPLETED"
    assert json.loads((launch_folder(tmp_path / "after") / "state.json").read_text())["state"] == "finished"
