"""``launch local`` with real training: a killed run has the losses of an uninterrupted one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.verbs import local
from tests.launch.hostile import program
from tests.launch.supervised import clean_up, wait_for
from tests.launch.training import STEPS, Training, finish
from tests.pretrain.conftest import tiny_data
from tests.ranks import finished

__all__ = ["tiny_data"]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    clean_up(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_leaves_no_trace_in_the_losses(
    tmp_path: Path, tiny_data: Path, ranks: int
) -> None:
    reference = Training(tmp_path / "reference", tiny_data)
    run = Training(tmp_path / "here", tiny_data)
    finished(ranks, reference.words, tmp_path / "ranks")
    assert sorted(reference.losses) == list(range(1, STEPS + 1))
    process = run.local(processes=ranks)
    wait_for(lambda: run.is_at(15, attempt=1), 300)
    os.kill(run.child(ranks - 1, attempt=1), signal.SIGKILL)
    output = finish(process)
    assert run.outcomes == ["failed", "finished"], output
    assert f"step {STEPS}/{STEPS}" in output  # live lines of rank 0
    failure, start = (run.attempts[0]["failure"], run.attempts[1]["checkpoint_start"])
    assert (failure["kind"], failure["rank"], failure["exit"]) == ("signal", ranks - 1, 137)
    assert start >= 15 and f"from step {start}" in output and run.losses == reference.losses
    output = finish(run.local("train.seed=7", processes=ranks), code=2)
    assert output.startswith("launch: error: ") and "train.seed" in output and "--update" in output


def test_the_profile_is_that_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    listed = {
        "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'": "local_gpu",
        "echo No devices were found": "local_cpu",
        "exit 9": "local_cpu",
    }
    for script, name in listed.items():
        program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{script}\n")
        assert Path(local.default_profile()).stem == name
