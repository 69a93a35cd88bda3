"""Run directories that were moved, and records in them that are odd: what a start does with them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pretrain.__main__ import main
from tests.pretrain.conftest import DEMO, SMALL, Command


@pytest.fixture(scope="module")
def trained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a run of two steps."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    data = [f"data.train.0.prefix={tiny_data / 'train'}", f"data.valid.0.prefix={tiny_data / 'valid'}", "data.test=[]"]
    words = [*data, *SMALL, "train.steps=2", "optimizer.warmup_steps=1", "log.diagnostics_interval=0"]
    assert main([DEMO, f"run_dir={folder}", *words]) == 0
    return folder


@pytest.fixture
def moved(trained: Path, tmp_path: Path) -> Path:
    """A copy of it in another place, where it was moved to."""
    return Path(shutil.copytree(trained, tmp_path / "moved"))


def test_a_moved_run_continues_where_it_is(pretrain: Command, moved: Path, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config.yaml by itself is refused, however it is started; the folder is a run."""
    before = sorted(trained.rglob("*"))
    for words in ([], ["train.steps=4"], ["--check"], ["--resolve"], ["--fork", str(moved.parent / "fork")]):
        assert pretrain(*words, config=str(moved / "config.yaml")) == 2
        (line,) = pretrain.err.splitlines()
        assert str(moved) in line and str(trained) in line and f"pretrain {moved};" in line
    monkeypatch.chdir(moved)
    assert pretrain(config="config.yaml") == 2
    assert pretrain("train.steps=3", config=".") == 0 and "resumed from checkpoints/step_00000002" in pretrain.out, pretrain.err
    monkeypatch.chdir(moved.parent)
    assert pretrain("train.steps=4", config="moved") == 0 and "resumed from moved/checkpoints/step_00000003" in pretrain.out
    assert pretrain("train.steps=4", config="moved/config.yaml") == 0 and "is complete at step 4" in pretrain.out  # by now its own
    monkeypatch.chdir(moved)
    assert pretrain(config="config.yaml") == 2 and str(moved / "moved") in pretrain.err  # run_dir is relative
    assert pretrain("run_dir=elsewhere", config=".") == 2 and "are two run directories" in pretrain.err
    assert pretrain("run_dir=elsewhere", "--check", config="config.yaml") == 0  # asked for
    assert pretrain(config=str(trained / "checkpoints")) == 2 and "it has no config.yaml" in pretrain.err
    assert sorted(trained.rglob("*")) == before
