"""The policy after an attempt: properties over random histories, then the table of the README, row by row."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from launch.supervise.policy import (
    Decision,
    End,
    Failure,
    Limits,
    Situation,
    back_off,
    blamed,
    decide,
    describe,
    failures_since_progress,
    limits_of,
    normalised,
    repetitions,
)

KINDS = ("exit", "signal", "hang", "node", "health", "config", "memory", "nccl", "lost")
FAILED = ("failed", "hang", "unhealthy", "lost")
NODES = ("n1", "n2", "n3", "n4")


def failed(message: str = "boom", *, kind: str = "exit", step: int | None = 7, host: str | None = "n1", code: int = 1, **end: Any) -> End:
    """An attempt that failed."""
    return End("failed", Failure(kind, message, rank=0, host=host, step=step, exit=code), **end)


def killed(host: str, **end: Any) -> End:
    """An attempt one of whose ranks somebody killed."""
    return failed("killed by SIGKILL", kind="signal", host=host, code=137, **end)


def an_end(draw: random.Random) -> End:
    """Any end that does not settle the matter by itself."""
    outcome = draw.choice(("failed", "failed", "hang", "unhealthy", "lost", "saved", "busy"))
    failure = None
    if outcome in FAILED:
        kind = draw.choice([kind for kind in KINDS if kind != "config"])
        host, code = draw.choice((None, *NODES)), draw.choice((1, 134, 137, 135))
        failure = Failure(kind, draw.choice(("a", "b", f"c {draw.random()}")), 0, host, draw.choice((None, 3, 4, 5)), code)
    return End(outcome, failure, progress=draw.random() < 0.2, time=draw.uniform(0, 1000))


def a_situation(draw: random.Random, **fixed: Any) -> Situation:
    """Any situation."""
    drawn: dict[str, Any] = {
        "ending": draw.random() < 0.2,
        "restart": draw.random() < 0.5,
        "can_requeue": draw.random() < 0.5,
        "down": {node: "DOWN" for node in NODES if draw.random() < 0.1},
        "unhealthy": {node: "ECC" for node in NODES if draw.random() < 0.1},
        "nodes": draw.choice((1, 2, 4)),
    }
    return Situation(**{**drawn, **fixed})


def some_limits(draw: random.Random) -> Limits:
    """Any limits that are not large."""
    return Limits(draw.randrange(6), draw.randrange(1, 40), draw.choice((0, 2, 3)), draw.choice((0, 2, 3)), draw.uniform(0, 60), 600.0)


def histories(count: int) -> list[tuple[random.Random, list[End], Limits]]:
    """Random histories, each with its limits and a generator to draw more from."""
    made = []
    for seed in range(count):
        draw = random.Random(seed)
        made.append((draw, [an_end(draw) for _ in range(draw.randrange(1, 12))], some_limits(draw)))
    return made


CASES = histories(1500)


def test_a_run_ends_and_fails_no_more_often_than_it_may() -> None:
    """Whatever happens to a run, attempt after attempt, it stops before its limits are passed."""
    for draw, _, limits in CASES[:400]:
        past: list[End] = []
        for _ in range(limits.max_attempts):
            past.append(an_end(draw))
            decision = decide(past, limits, a_situation(draw))
            if decision.action == "stop":
                break
            assert failures_since_progress(past) <= limits.max_failures
            assert not limits.same_failure or repetitions(past) < limits.same_failure
        assert decision.action == "stop"
        assert decision.reason and "\n" not in decision.reason


def test_what_is_done_or_hopeless_or_unwanted_is_settled_by_the_last_attempt_alone() -> None:
    for draw, past, limits in CASES:
        situation = a_situation(draw)
        assert decide([*past, End("finished")], limits, situation).action == "finish"
        wrong = decide([*(replace(end, progress=False) for end in past), failed(kind="config")], limits, situation)
        assert wrong.action == "stop" and not wrong.gave_up, "the same command goes on, once the input is mended"
        assert decide(past, limits, replace(situation, stop="cancelled: by someone")) == Decision("stop", "cancelled: by someone")


def test_input_that_was_right_before_gets_a_second_look() -> None:
    right, wrong, limits = End("saved", progress=True), failed(kind="config"), Limits(same_failure=2)
    assert decide([right, wrong], limits, Situation()).action == "restart"
    twice = decide([right, wrong, wrong], limits, Situation())
    assert twice.action == "stop" and twice.gave_up
    assert decide([wrong], limits, Situation()).action == "stop"


def test_without_a_queue_nothing_is_requeued_and_no_node_is_left() -> None:
    for draw, past, limits in CASES:
        decision = decide(past, limits, a_situation(draw, can_requeue=False))
        assert decision.action in ("restart", "stop") and not decision.exclude and not decision.cordon


def test_where_the_end_is_near_no_attempt_is_begun() -> None:
    for draw, past, limits in CASES:
        queue = decide(past, limits, a_situation(draw, ending=True, can_requeue=True))
        assert queue.action in ("requeue", "stop") and queue.delay_seconds == 0
        assert decide(past, limits, a_situation(draw, ending=True, restart=False, can_requeue=False)).action == "stop"


def test_a_node_is_left_for_a_reason_only() -> None:
    """An excluded node failed its check, or is held responsible for as many failures as may be; this costs a requeue."""
    for draw, past, limits in CASES:
        situation = a_situation(draw, can_requeue=True)
        decision = decide(past, limits, situation)
        for node in decision.exclude:
            against = sum(blamed(end.failure) == node for end in past)
            assert node in situation.unhealthy or (limits.node_failures and against >= limits.node_failures)
            assert decision.action == "requeue" and decision.cordon[node]


def test_back_off_doubles_up_to_its_limit() -> None:
    for draw, past, limits in CASES:
        waits = [back_off(number, limits) for number in range(1, 80)]
        assert waits == sorted(waits) and waits[0] == min(limits.back_off_seconds, limits.back_off_max_seconds)
        assert max(waits) <= limits.back_off_max_seconds
        decision = decide(past, limits, a_situation(draw))
        assert 0 <= decision.delay_seconds <= max(1.0, limits.back_off_max_seconds)
    assert [back_off(number, Limits()) for number in range(1, 8)] == [30, 60, 120, 240, 480, 900, 900]


def test_what_was_before_a_stop_is_forgiven() -> None:
    for draw, past, limits in CASES:
        again = [an_end(draw) for _ in range(draw.randrange(1, 6))]
        situation = a_situation(draw)
        stopped = [*past[:-1], replace(past[-1], stopped=True), *again]
        assert decide(stopped, limits, situation) == decide(again, limits, situation)


def test_waiting_for_the_directory_counts_for_nothing() -> None:
    for draw, past, limits in CASES:
        if past[-1].outcome in FAILED:
            place = draw.randrange(len(past))
            with_wait = [*past[:place], End("busy"), *past[place:]]
            patient, situation = replace(limits, max_attempts=500), a_situation(draw)
            assert decide(with_wait, patient, situation) == decide(past, patient, situation)


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
        [End("saved")] * 3,
        QUEUE,
        {"max_attempts": 3},
        Decision("stop", "3 attempts, as many as restarts.max_attempts allows; no failure is known", gave_up=True),
    ),
    ("its supervisor was killed", [End("lost", Failure("lost", "gone"))] * 2, QUEUE, {}, Decision("restart", "gone", 60)),
]


@pytest.mark.parametrize(("history", "situation", "limits", "decision"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_the_table(history: list[End], situation: Situation, limits: dict[str, Any], decision: Decision) -> None:
    assert decide(history, Limits(**limits), situation) == decision


def test_a_repetition_is_seen_through_preemption_and_broken_by_another_failure() -> None:
    again, other = failed("same"), failed("other")
    assert repetitions([again, End("saved"), End("busy"), again]) == 2
    assert repetitions([again, other, again]) == 1
    assert repetitions([again, End("saved")]) == 0
    assert repetitions([killed("n1"), killed("n1")]) == 0  # somebody's kill says nothing of the program


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("RuntimeError: at 0x7ffe12 of /opt/a/b.py:12", "RuntimeError: at 0x55 of /tmp/c:7"),
        ("Connection closed by peer [127.0.0.1]:43210", "Connection closed by peer [0.0.0.0]:1"),
        ("loss 1.5e-3 at step 12", "loss 7 at step 4"),
    ],
)
def test_messages_are_compared_without_what_changes(one: str, other: str) -> None:
    assert normalised(one) == normalised(other)
    assert normalised(one) != normalised("another " + one)


def test_a_node_is_blamed_for_what_a_program_cannot_do() -> None:
    kinds = {kind: blamed(Failure(kind, "m", host="n1", exit=1)) for kind in KINDS}
    assert {kind for kind, node in kinds.items() if node} == {"node", "health", "lost"}
    codes = [code for code in range(129, 160) if blamed(Failure("signal", "m", host="n1", exit=code))]
    assert codes == [135, 137]  # SIGBUS, SIGKILL
    assert blamed(Failure("node", "m")) is None and blamed(None) is None


def test_limits_come_from_a_profile_and_a_failure_is_told_in_a_line() -> None:
    assert limits_of({"max_failures": 1, "other": 3}) == Limits(max_failures=1)
    assert describe(Failure("exit", "boom")) == "boom"
    assert describe(None) == "no failure is known"
