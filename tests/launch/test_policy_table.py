"""The policy after an attempt: the table of the README, row by row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launch.supervise.policy import Decision, End, Failure, Limits, Situation, decide
from tests.launch.ends import failed, killed

QUEUE = Situation(can_requeue=True, nodes=4)
HERE = Situation()
TABLE: list[tuple[str, list[End], Situation, dict[str, Any], Decision]] = [
    ("a first crash", [failed()], QUEUE, {}, Decision("restart", "boom (rank 0, on n1, after step 7)", 30)),
    ("a second one, another", [failed(), failed("bang")], QUEUE, {}, Decision("restart", "bang (rank 0, on n1, after step 7)", 60)),
    (
        "the same twice",
        [failed("at 0x7f00 of /a/b: 3"), failed("at 0x1e of /c: 12")],
        QUEUE,
        {},
        Decision(
            "stop", "the same failure 2 times in a row, at the same step: at 0x1e of /c: 12 (rank 0, on n1, after step 7)", gave_up=True
        ),
    ),
    ("the same at another step", [failed(), failed(step=8)], HERE, {}, Decision("restart", "boom (rank 0, on n1, after step 8)", 60)),
    (
        "the same after progress",
        [failed(step=6, progress=True), failed(step=7, progress=True)],
        HERE,
        {},
        Decision("restart", "boom (rank 0, on n1, after step 7)", 30),
    ),
    (
        "killed twice, two nodes",
        [killed("n1"), killed("n2")],
        QUEUE,
        {},
        Decision("restart", "killed by SIGKILL (rank 0, on n2, after step 7)", 60),
    ),
    (
        "killed twice on a node",
        [killed("n2"), failed("x"), killed("n2")],
        QUEUE,
        {},
        Decision(
            "requeue",
            "killed by SIGKILL (rank 0, on n2, after step 7); from now on without n2",
            exclude=("n2",),
            cordon={"n2": "2 failures; the last: killed by SIGKILL (rank 0, on n2, after step 7)"},
        ),
    ),
    (
        "... days apart",
        [killed("n2", time=0), killed("n2", time=4e5)],
        QUEUE,
        {},
        Decision("restart", "killed by SIGKILL (rank 0, on n2, after step 7)", 60),
    ),
    (
        "... without a queue",
        [killed("n2"), killed("n2")],
        HERE,
        {},
        Decision("restart", "killed by SIGKILL (rank 0, on n2, after step 7)", 60),
    ),
    (
        "a node that is down",
        [failed("n3 is down: DOWN", kind="node", host="n3")],
        replace(QUEUE, down={"n3": "DOWN"}),
        {},
        Decision("requeue", "n3 is down: DOWN (rank 0, on n3, after step 7)"),
    ),
    (
        "an unhealthy node",
        [End("unhealthy", Failure("health", "n2: ECC", host="n2"))],
        replace(QUEUE, unhealthy={"n2": "ECC"}),
        {},
        Decision("requeue", "n2: ECC (on n2); from now on without n2", exclude=("n2",), cordon={"n2": "ECC"}),
    ),
    (
        "all of several unhealthy",
        [End("unhealthy", Failure("health", "n1: no GPU", host="n1"))],
        replace(QUEUE, nodes=2, unhealthy={"n1": "no GPU", "n2": "no GPU"}),
        {},
        Decision("restart", "n1: no GPU (on n1)", 30),
    ),
    (
        "this machine is unhealthy",
        [End("unhealthy", Failure("health", "here: no GPU", host="here"))],
        replace(HERE, unhealthy={"here": "no GPU"}),
        {},
        Decision("stop", "this machine fails its check: here: no GPU (on here)", gave_up=True),
    ),
    ("saved at the time limit", [End("saved")], replace(QUEUE, ending=True), {}, Decision("requeue", "saved")),
    ("saved at Ctrl-C", [End("saved")], replace(HERE, ending=True), {}, Decision("stop", "saved; the same command continues")),
    ("saved to start again", [End("saved")], replace(HERE, ending=True, restart=True), {}, Decision("restart", "saved")),
    ("crashed at the time limit", [failed()], replace(QUEUE, ending=True), {}, Decision("requeue", "boom (rank 0, on n1, after step 7)")),
    (
        "the same at five steps, with progress",
        [failed(f"loss {n}", step=n, progress=True) for n in range(5)],
        QUEUE,
        {},
        Decision("stop", "the same failure 5 times in a row: loss 4 (rank 0, on n1, after step 4)", gave_up=True),
    ),
    (
        "the same twice, with progress, of one that is allowed",
        [failed(step=1, progress=True)],
        QUEUE,
        {"max_failures": 1},
        Decision("restart", "boom (rank 0, on n1, after step 1)", 30),
    ),
    (
        "the loss stayed non-finite",
        [failed("nan", kind="diverged", code=3, progress=True)],
        QUEUE,
        {},
        Decision(
            "stop",
            "the loss stayed non-finite, and another attempt would compute the same: nan (rank 0, on n1, after step 7)",
            gave_up=True,
        ),
    ),
    (
        "a bus error twice on a node",
        [failed("killed by SIGBUS", kind="signal", host="n2", code=135)] * 2,
        QUEUE,
        {},
        Decision(
            "requeue",
            "killed by SIGBUS (rank 0, on n2, after step 7); from now on without n2",
            exclude=("n2",),
            cordon={"n2": "2 failures; the last: killed by SIGBUS (rank 0, on n2, after step 7)"},
        ),
    ),
    (
        "NCCL twice before the first step",
        [failed("Watchdog", kind="nccl", stepped=False)] * 2,
        QUEUE,
        {},
        Decision("requeue", "Watchdog (rank 0, on n1, after step 7); 2 times before the first step: other nodes may do better"),
    ),
    (
        "... without a queue",
        [failed("Watchdog", kind="nccl", stepped=False)] * 2,
        HERE,
        {},
        Decision("stop", "the same failure 2 times in a row, at the same step: Watchdog (rank 0, on n1, after step 7)", gave_up=True),
    ),
    (
        "... again and again",
        [failed("Watchdog", kind="nccl", stepped=False)] * 5,
        QUEUE,
        {},
        Decision("stop", "the same failure 5 times in a row: Watchdog (rank 0, on n1, after step 7)", gave_up=True),
    ),
    (
        "Slurm does not answer, twice",
        [failed("srun", kind="place", step=None, host=None)] * 2,
        QUEUE,
        {},
        Decision("restart", "srun (rank 0)", 60),
    ),
    ("taken away twice", [End("interrupted")] * 2, replace(QUEUE, ending=True), {}, Decision("requeue", "the allocation was taken away")),
    ("an excluded node", [End("misplaced")], QUEUE, {}, Decision("requeue", "an excluded node was allocated")),
    ("saved five times in vain", [End("saved", time=1.0)] * 5, replace(QUEUE, ending=True), {}, Decision("requeue", "saved")),
    (
        "... six times",
        [End("saved", progress=True), *[End("saved", time=1.0)] * 3, End("interrupted"), *[End("saved", time=1.0)] * 3],
        replace(QUEUE, ending=True),
        {},
        Decision(
            "stop",
            "saved 6 times in a row without a new checkpoint (restarts.max_failures: 5): the time limit is too short to reach one",
            gave_up=True,
        ),
    ),
    ("cancelled", [End("cancelled")], QUEUE, {}, Decision("stop", "cancelled")),
    ("busy", [End("busy")], QUEUE, {}, Decision("restart", "the run directory is in use by another process", 30)),
    (
        "too many",
        [failed(), failed("a"), failed("b")],
        QUEUE,
        {"max_failures": 2},
        Decision(
            "stop",
            "3 failures without a new checkpoint (restarts.max_failures: 2); the last: b (rank 0, on n1, after step 7)",
            gave_up=True,
        ),
    ),
    (
        "not one is allowed",
        [failed(progress=True)],
        QUEUE,
        {"max_failures": 0},
        Decision(
            "stop",
            "1 failure without a new checkpoint (restarts.max_failures: 0); the last: boom (rank 0, on n1, after step 7)",
            gave_up=True,
        ),
    ),
    (
        "progress in between",
        [failed(), failed("a"), failed("b", progress=True), failed("c")],
        QUEUE,
        {"max_failures": 2},
        Decision("restart", "c (rank 0, on n1, after step 7)", 60),
    ),
    (
        "too many attempts",
        [End("saved", progress=True)] * 3,
        QUEUE,
        {"max_attempts": 3},
        Decision("stop", "3 attempts, as many as restarts.max_attempts allows; no failure is known", gave_up=True),
    ),
    ("its supervisor was killed", [End("lost", Failure("lost", "gone"))] * 2, QUEUE, {}, Decision("restart", "gone", 60)),
]


@pytest.mark.parametrize(("history", "situation", "limits", "decision"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_table(history: list[End], situation: Situation, limits: dict[str, Any], decision: Decision) -> None:
    assert decide(history, Limits(**limits), situation) == decision
