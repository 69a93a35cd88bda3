"""How an attempt ended: ranks' records of every kind, and the run's files, to an outcome."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.job import write_json
from launch.supervise.classify import Observed, classify, last_step
from launch.supervise.run_files import Sight, has_stepped, look
from tests.launch.ranks import RESET, record

BEFORE = Sight("failed", 45, 40, None, ("n1", 1, 1.0), 900, 45)
NOW = replace(BEFORE, state="running", writer=("n1", 2, 2.0))
TERM = {"told": {"SIGTERM": 1900.0}, "exit": 143, "signal": "SIGTERM"}


def seen(code: int | None = 1, **changes: Any) -> Observed:
    """What is seen of an attempt that ended with a code."""
    sight = {name: changes.pop(name) for name in ("state", "step", "said", "metrics") if name in changes}
    return Observed(code, BEFORE, replace(NOW, **sight), **changes)


@pytest.mark.parametrize("code", [0, 1, 143, None])
@pytest.mark.parametrize(("state", "outcome"), [("stopped", "saved"), ("complete", "finished")])
def test_what_the_run_says_of_its_end_decides(tmp_path: Path, code: int | None, state: str, outcome: str) -> None:
    record(tmp_path, 0, 2000.0, **TERM)
    for hang in (None, "not saved and ended before the job's end"):
        for taken in (False, True):
            assert classify("run", tmp_path, seen(code, state=state, hang=hang, taken=taken)) == (outcome, None)
    old = Observed(1, replace(BEFORE, state=state), replace(BEFORE, state=state))
    assert classify("run", tmp_path, old)[0] == "failed", "an earlier attempt's words"


def test_an_allocation_that_is_taken_away_is_no_failure(tmp_path: Path) -> None:
    record(tmp_path, 0, 2000.0, **TERM)
    for changes in (
        {},
        {"hang": "not saved and ended before the job's end"},
        {"faults": {"n1": ["x"]}},
        {"refused": "srun"},
        {"down": {"n1": "x"}},
    ):
        assert classify("run", tmp_path, seen(taken=True, **changes)) == ("interrupted", None)
    assert classify("run", tmp_path, seen(taken=True, cancelled=True))[0] == "cancelled"
    assert classify("command", tmp_path, seen(taken=True, told=True)) == ("saved", None)
    assert classify("run", tmp_path, seen())[0] == "failed"


def test_what_one_host_misses_is_its_own_fault(tmp_path: Path) -> None:
    missing = {"exit": 2, "error": "pretrain: error: x.bin not found"}
    for rank in (0, 1):
        record(tmp_path, rank, 2003.0, **TERM)
    for rank in (2, 3):
        record(tmp_path, rank, 2000.0, **missing)
    _, failure = classify("run", tmp_path, seen())
    assert failure and (failure.kind, failure.host, failure.exit) == ("node", "node1", 2) and "x.bin not found" in failure.message
    record(tmp_path, 0, 2001.0, **missing)
    assert (failure := classify("run", tmp_path, seen())[1]) and failure.kind == "config"


def test_one_host_alone_is_no_odd_one_out(tmp_path: Path) -> None:
    record(tmp_path, 0, 2000.0, exit=2, error="pretrain: error: model.mixr is unknown")
    record(tmp_path, 1, 2001.0, error=RESET)
    assert (failure := classify("run", tmp_path, seen())[1]) and failure.kind == "config"


def test_the_code_for_a_loss_that_stays_non_finite_is_a_runs(tmp_path: Path) -> None:
    record(tmp_path, 0, 2000.0, exit=3, error="pretrain: error: the loss was not finite")
    kinds = [failure.kind for kind in ("run", "command") if (failure := classify(kind, tmp_path, seen(3))[1])]
    assert kinds == ["diverged", "exit"]


def test_what_cannot_start_is_told_apart_where_there_is_a_queue(tmp_path: Path) -> None:
    kinds = [failure.kind for queue in (True, False) if (failure := classify("run", tmp_path, seen(None, refused="no", queue=queue))[1])]
    assert kinds == ["place", "exit"]


def test_lines_that_an_earlier_attempt_left_are_no_steps_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_00000040").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 45}\n')
    write_json(tmp_path / "progress.json", {"state": "failed", "step": 45, "pid": 1})
    before = look(tmp_path)
    write_json(tmp_path / "progress.json", {"state": "starting", "step": 40, "pid": 2})
    now = look(tmp_path)
    assert not has_stepped(before, now) and last_step(Observed(1, before, now)) == 40
    (tmp_path / "metrics.jsonl").write_text('{"step": 45}\n{"step": 41}\n')
    write_json(tmp_path / "progress.json", {"state": "running", "step": 41, "pid": 2})
    assert has_stepped(before, look(tmp_path))
