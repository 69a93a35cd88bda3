"""Sweeps, and the small functions of the submitting side."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml

from fem_common.errors import UserError
from launch.cluster.slurm import clean_environment
from launch.job.plan import first_difference, settle, write
from launch.verbs.submit import array_words, dependency, prepare
from launch.verbs.sweep import grid, named, read_list, run_name, split_values, wanted_sweep
from tests.launch.requests import DEMO, command, finish, run

pytestmark = pytest.mark.usefixtures("here")


def test_a_sweeps_runs_are_resolved_one_by_one(tmp_path: Path) -> None:
    runs = named(grid(["train.seed=1,2", "optimizer.lr=1e-3"]))
    asked = wanted_sweep(run(DEMO, "train.steps=300", directory="s"), runs)
    assert [item.name for item in asked.job.items] == ["train.seed=1,optimizer.lr=1e-3", "train.seed=2,optimizer.lr=1e-3"]
    for seed, (item, text) in enumerate(zip(asked.job.items, asked.configs.values(), strict=True), 1):
        config = yaml.safe_load(text)
        assert (config["train"]["seed"], config["train"]["steps"], config["optimizer"]["lr"]) == (seed, 300, 1e-3)
        assert config["run_dir"] == item.directory == str(tmp_path / "s" / item.name)
        assert item.arguments[-1] == f"{item.directory}/launch/config.yaml"
    with pytest.raises(UserError, match=r"^train\.seed=x: .*whole number"):
        wanted_sweep(run(DEMO, directory="s"), named([("train.seed=1",), ("train.seed=x",)]))


def test_a_longer_sweep_keeps_its_runs_places() -> None:
    """A task's number is its place: what is in the queue must stay what it was."""
    first = write(settle(wanted_sweep(run(DEMO, directory="s"), named([("train.seed=1",), ("train.seed=2",)])), update=False))
    finish(first.job, 0)
    longer = settle(wanted_sweep(run(DEMO, directory="s"), named([("train.seed=3",), ("train.seed=2",), ("train.seed=1",)])), update=False)
    assert [item.name for item in longer.job.items] == ["train.seed=1", "train.seed=2", "train.seed=3"]
    assert longer.ready == (1, 2)
    write(longer)
    shorter = settle(wanted_sweep(run(DEMO, directory="s"), named([("train.seed=2",)])), update=False)
    assert len(shorter.job.items) == 3
    assert shorter.ready == (1,)
    with pytest.raises(UserError, match=r"train\.steps is 400, not 300"):
        settle(wanted_sweep(run(DEMO, "train.steps=300", directory="s"), named([("train.seed=2",)])), update=False)
    updated = settle(wanted_sweep(run(DEMO, directory="s"), named([("train.seed=1",), ("train.seed=2",)])), update=True)
    assert updated.reopened == ()  # the settings are the same: what is done stays done
    changed = settle(wanted_sweep(run(DEMO, "train.steps=300", directory="s"), named([("train.seed=1",)])), update=True)
    assert changed.reopened == changed.ready == (0,)


def test_lists(tmp_path: Path) -> None:
    path = tmp_path / "runs.txt"
    path.write_text("# two runs\n\ntrain.seed=1 optimizer.lr=1e-4  # low\ndata.tokenizer='a b'\n")
    assert list(read_list(path).values()) == [("train.seed=1", "optimizer.lr=1e-4"), ("data.tokenizer=a b",)]
    path.write_text("train.seed=1\nsmall-w64: model.hidden_size=64 # narrow\nplain:\n")
    assert read_list(path) == {"train.seed=1": ("train.seed=1",), "small-w64": ("model.hidden_size=64",), "plain": ()}
    for text, told in (
        ("a=1\nb='2\n", ":2: no closing quotation"),
        ("a=1\n--plan\n", ":2: '--plan' is not of the form"),
        ("a=1\n\na=1\n", ":3: the same run"),
        ("# none\n", "no run in it"),
        ("a: x=1\nb: x=1\n", ":2: the same run"),
        ("a: x=1\n\na: x=2\n", ":3: a line before has the name a"),
        ("a/b: x=1\n", ":1: 'a/b' cannot name a folder"),
        ("..: x=1\n", ":1: '..' cannot name a folder"),
        (": x=1\n", ":1: '' cannot name a folder"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=told):
            read_list(path)


def test_grids() -> None:
    assert grid(["a=1,2", "b.c=x,y"]) == [("a=1", "b.c=x"), ("a=1", "b.c=y"), ("a=2", "b.c=x"), ("a=2", "b.c=y")]
    assert split_values('[a,b],{c: 1, d: 2},"x,y",z') == ["[a,b]", "{c: 1, d: 2}", '"x,y"', "z"]
    for words in (["a"], ["a=1,"], ["a=1,1"], ["a=1", "a=2"], ["--x=1"], ["=1"], ["a="]):
        with pytest.raises(UserError, match="--grid"):
            grid(words)


def test_names_of_runs_differ_and_are_folders() -> None:
    dice = random.Random(0)
    letters = "ab=,./ 'ü\"\n$-"
    seen: dict[str, tuple[str, ...]] = {}
    for _ in range(3000):
        words = tuple("k=" + "".join(dice.choices(letters, k=dice.randint(0, 4))) for _ in range(dice.randint(1, 2)))
        name = run_name(words)
        assert seen.setdefault(name, words) == words
        assert not set(name) & set("/ '\"\n$") and len(name.encode()) < 200
    assert len(run_name(["a=" + "x" * 500])) < 200


def test_array_words_say_the_items() -> None:
    dice = random.Random(0)
    for _ in range(200):
        items = sorted(dice.sample(range(40), dice.randint(1, 40)))
        parts = [[int(end) for end in part.split("-")] for part in array_words(items, None).split(",")]
        assert [number for part in parts for number in range(part[0], part[-1] + 1)] == items
    assert array_words([0, 1, 2, 7], 2) == "0-2,7%2"


def test_first_difference() -> None:
    assert first_difference({"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1, 3]}}) == ("b.c.1", 2, 3)
    assert first_difference({"a": 1}, {"a": 1, "b": 2})[0] == "b"
    assert first_difference({"a": 1, "b": 2}, {"a": 1})[0] == "b"
    assert first_difference({"a": [1]}, {"a": [1, 2]}) == ("a", [1], [1, 2])
    assert first_difference({"a": 1}, {"a": True}) == ("a", 1, True)


def test_what_a_shell_says_to_slurm_is_left_out() -> None:
    told = {"SBATCH_PARTITION": "x", "SLURM_ARRAY_TASK_ID": "3", "SQUEUE_FORMAT": "%i", "SLURM_JOB_ID": "1", "SRUN_CPUS_PER_TASK": "1"}
    kept = {"SLURM_CONF": "/etc/x", "PATH": "/bin", "HF_TOKEN": "secret", "MY_SLURM_": "a"}
    assert clean_environment({**told, **kept}) == kept


def test_dependencies_in_words() -> None:
    assert dependency([]) is None
    assert dependency(["12", "afterok:3:4", "12"], ask=False) == "afterok:12,afterok:3:4"
    assert dependency(["singleton"]) == "singleton"
    for word in ("afterok", "after:x", "x", "12;rm", "afterok:1,$(x)"):
        with pytest.raises(UserError, match="neither a job's id"):
            dependency([word])
    job = prepare(command("data_prep", "status", "a", directory="d"))
    with pytest.raises(UserError, match=r"is not under way; .*submit it first"):
        dependency(["d"])
    finish(job, 0)
    assert dependency(["d"]) is None
