"""The cordon file: what holds, what is added, what people may write into it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.job import Item, Job
from launch.supervise.journal import cordon, cordon_file, cordoned


def test_a_node_is_cordoned_once_until_its_line_is_deleted(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cordon.jsonl"
    assert cordoned(path) == {}
    assert cordon(path, ["n1", "n2", "n1"], "ECC errors", tmp_path / "run") == ["n1", "n2"]
    assert cordon(path, ["n2", "n3"], "again", "other") == ["n3"]
    assert {node: entry.reason for node, entry in cordoned(path).items()} == {"n1": "ECC errors", "n2": "ECC errors", "n3": "again"}
    lines = path.read_text().splitlines()
    assert json.loads(lines[0])["run"] == str(tmp_path / "run") and json.loads(lines[0])["until"] is None
    path.write_text("\n".join(lines[1:]) + "\n")
    assert list(cordoned(path)) == ["n2", "n3"]


def test_an_entry_ends_and_a_later_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "cordon.jsonl"
    cordon(path, ["n1"], "first", "run", until=1.0)
    assert cordoned(path) == {} and list(cordoned(path, now=0.5)) == ["n1"]
    assert cordon(path, ["n1"], "second", "run") == ["n1"]
    assert cordoned(path)["n1"].reason == "second"


@pytest.mark.parametrize("line", ["", "n1", "[]", "{}", '{"node": 3}', '{"node": ""}', '{"node": "n1"', "\x00"])
def test_what_is_no_entry_is_passed_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cordon.jsonl"
    path.write_text(f'{line}\n{{"node": "n2", "until": "soon", "time": null}}\n{line}\n')
    assert list(cordoned(path)) == ["n2"]


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=tmp_path.name):
        cordoned(tmp_path)


def test_the_file_is_the_profiles_or_the_working_directorys() -> None:
    item = Item("/runs/a", ("-m", "pretrain"), "a")
    job = Job(
        "a",
        "run",
        "/project/runs/a",
        "/project",
        "/project/runs/a/launch/code",
        "python",
        1,
        1,
        True,
        (item,),
        {"paths": {"cordon": None}},
        "p.yaml",
    )
    assert cordon_file(job) == Path("/project/runs/cordon.jsonl")
    for directory in ("/project/runs/jobs/b", "/project/runs/sweeps/c/d", "/elsewhere/e"):
        assert cordon_file(replace(job, directory=directory)) == cordon_file(job)
    assert cordon_file(replace(job, profile={"paths": {"cordon": "/shared/cordon"}})) == Path("/shared/cordon")
