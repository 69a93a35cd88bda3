"""The policy after an attempt: properties over random histories. `test_policy_table` has the README's table, row by row."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from launch.supervise.policy import (
    BUSY_SECONDS,
    BUSY_TIMES,
    KEEP_SECONDS,
    OF_THE_PLACES,
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
    misplaced,
    normalised,
    repetitions,
    saves_without_progress,
    since_stop,
)
from tests.launch.ends import failed, killed

KINDS = ("exit", "signal", "hang", "node", "health", "config", "diverged", "memory", "nccl", "lost", "place")
FAILED = ("failed", "hang", "unhealthy", "lost")
NODES = ("n1", "n2", "n3", "n4")


def an_end(draw: random.Random) -> End:
    """Any end that does not settle the matter by itself."""
    outcome = draw.choice(("failed", "failed", "hang", "unhealthy", "lost", "saved", "busy", "interrupted", "misplaced"))
    failure = None
    if outcome in FAILED:
        kind = draw.choice([kind for kind in KINDS if kind not in ("config", "diverged")])
        host, code = draw.choice((None, *NODES)), draw.choice((1, 134, 137, 135))
        failure = Failure(kind, draw.choice(("a", "b", f"c {draw.random()}")), 0, host, draw.choice((None, 3, 4, 5)), code)
    return End(outcome, failure, progress=draw.random() < 0.2, time=draw.uniform(0, 1000), stepped=draw.random() < 0.7)


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
QUEUE = Situation(can_requeue=True, nodes=4)


def test_a_run_ends_and_fails_no_more_often_than_it_may() -> None:
    """Whatever happens to a run, attempt after attempt, it stops before its limits are passed."""
    for draw, _, limits in CASES[:400]:
        past: list[End] = []
        for _ in range(limits.max_attempts):
            past.append(an_end(draw))
            decision = decide(past, limits, a_situation(draw))
            if decision.action == "stop":
                break
            assert failures_since_progress(since_stop(past)) <= limits.max_failures
            last = past[-1]
            elsewhere = last.failure is not None and last.failure.kind in OF_THE_PLACES and not last.stepped
            assert not limits.same_failure or repetitions(past) < limits.same_failure or elsewhere
            assert repetitions(past, anywhere=True) < max(2, limits.max_failures)
            assert last.outcome != "saved" or saves_without_progress(past) <= max(1, limits.max_failures)
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


def test_an_interrupted_end_never_counts() -> None:
    """Neither as a failure, nor as the end of a row of them, however often: what is decided after the next failure is the same."""
    for draw, past, limits in CASES:
        patient, situation = replace(limits, max_attempts=500), a_situation(draw, checkpoints=draw.random() < 0.5)
        if past[-1].outcome in FAILED:
            place, times = draw.randrange(len(past)), draw.randrange(1, 9)
            with_them = [*past[:place], *[End("interrupted", time=draw.uniform(0, 1000))] * times, *past[place:]]
            assert decide(with_them, patient, situation) == decide(past, patient, situation)
        taken = decide([*past, End("interrupted")], patient, situation)
        if situation.can_requeue:
            assert taken == Decision("requeue", "the allocation was taken away")


def test_of_a_command_no_progress_is_seen_and_none_is_asked_for() -> None:
    past = [End("saved", time=float(number)) for number in range(20)]
    assert decide(past, Limits(), replace(QUEUE, checkpoints=False)) == Decision("requeue", "saved")


@pytest.mark.parametrize(("spread", "free"), [(1.0, BUSY_TIMES), (BUSY_SECONDS / 3, 3)])
def test_a_directory_that_stays_in_use_is_a_failure_in_the_end(spread: float, free: int) -> None:
    """Twenty times, or for half an hour, it is waited for; from then on each time counts."""
    past, told = [End("saved", progress=True)], Decision("restart", "")
    while told.action == "restart":
        past.append(End("busy", time=1000 + spread * len(past)))
        told = decide(past, Limits(), QUEUE)
    assert len(past) - 1 == free + Limits().max_failures + 1
    assert told.action == "stop" and told.gave_up and f"the run directory stays in use by another: {len(past) - 1} attempts" in told.reason


def test_a_repetition_long_ago_is_another_matter() -> None:
    """Five of the same, with progress between them: within days a loop, over weeks not."""
    for days, action in ((0.5, "stop"), (1.0, "restart")):
        past = [failed(step=n, progress=True, time=n * days * 86400.0) for n in range(5)]
        assert KEEP_SECONDS == 3 * 86400 and decide(past, Limits(), QUEUE).action == action


def test_a_file_that_one_node_misses_is_held_against_it_until_another_misses_it_too() -> None:
    def missing(host: str) -> End:
        return failed(kind="node", host=host, code=2, step=None)

    assert decide([missing("n1")], Limits(), QUEUE).action == "restart"
    assert decide([missing("n1"), missing("n1")], Limits(), QUEUE).exclude == ("n1",)
    wrong = decide([missing("n1"), missing("n2")], Limits(), QUEUE)
    assert wrong.action == "stop" and not wrong.gave_up and wrong.reason.startswith("the input is wrong")


def test_nodes_that_should_have_been_excluded_are_counted_in_a_row() -> None:
    away = End("misplaced")
    assert [misplaced(past) for past in ([], [away, failed()], [failed(), away, away], [away, replace(away, stopped=True)])] == [0, 0, 2, 0]


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
