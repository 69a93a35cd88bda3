"""Tests of the policy after an attempt: the README's table row by row, and properties of every
history, exit code and limit.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from launch.supervise import policy
from launch.supervise.classify import memory_limit
from launch.supervise.policy import (
    FAILED,
    Decision,
    End,
    Failure,
    Limits,
    Situation,
    blamed,
    decide,
    repetitions,
)
from tests.wording import Wording

KINDS = "exit signal hang node health config diverged memory nccl lost place".split()
NODES = ("n1", "n2", "n3", "n4")
DAY = 86400.0


def failed(
    message: str = "boom",
    *,
    kind: str = "exit",
    step: int | None = 7,
    host: str | None = "n1",
    code: int = 1,
    **end: Any,
) -> End:
    """Return an attempt that failed."""
    return End("failed", Failure(kind, message, rank=0, host=host, step=step, exit=code), **end)


def killed(host: str, code: int = 137, **end: Any) -> End:
    """Return an attempt in which a rank was killed."""
    return failed("killed by SIGKILL", kind="signal", host=host, code=code, **end)


def missing(host: str) -> End:
    """Return an attempt with a missing file on one node."""
    return failed(kind="node", host=host, code=2, step=None)


def unhealthy(*nodes: str) -> End:
    """Return an attempt with nodes that fail their check."""
    return End("unhealthy", Failure("health", f"{nodes[0]}: ECC", host=nodes[0]))


def oom(host: str, step: int = 7, limit: str = "300 MiB", **end: Any) -> End:
    """Return an attempt in which the kernel's OOM killer killed a rank."""
    return failed(
        f"killed by SIGKILL: out of memory (OOM kill); the job's limit is {limit}",
        kind="memory",
        host=host,
        step=step,
        code=137,
        **end,
    )


NCCL = failed("Watchdog", kind="nccl", stepped=False)
SAVED = End("saved", time=1.0)
KEPT = End("saved", progress=True)
BUSY = End("busy")
QUEUE, HERE = Situation(can_requeue=True, nodes=4), Situation()
ENDING, HERE_ENDING = replace(QUEUE, ending=True), replace(HERE, ending=True)
PLACE = failed("srun", kind="place", step=None, host=None)
STALE = failed("OSError: [Errno 116] Stale file handle", kind="place")
WRONG, NAN = failed(kind="config", code=2), failed("nan", kind="diverged", code=3, progress=True)
# Failures, place, limits -> action, followed by "!" if it gave up; seconds to wait; nodes to
# exclude.
TABLE: list[tuple[str, list[End], Situation, dict[str, Any], str]] = [
    ("a first crash", [failed()], QUEUE, {}, "restart 30"),
    ("a second one, another", [failed(), failed("bang")], QUEUE, {}, "restart 60"),
    ("the same twice", [failed("at 0x7f00 of /a/b: 3"), failed("at 0x1e of /c: 12")], QUEUE, {},
        "stop!"),
    ("the same at another step", [failed(), failed(step=8)], HERE, {}, "restart 60"),
    ("the same after progress", [failed(step=6, progress=True), failed(step=7, progress=True)],
        HERE, {}, "restart 30"),
    ("killed twice, two nodes", [killed("n1"), killed("n2")], QUEUE, {}, "restart 60"),
    ("killed twice on a node", [killed("n2"), failed("x"), killed("n2")], QUEUE, {}, "requeue -n2"),
    ("... by a bus error", [killed("n2", 135)] * 2, QUEUE, {}, "requeue -n2"),
    ("... days apart", [killed("n2", time=0), killed("n2", time=4e5)], QUEUE, {}, "restart 60"),
    ("... without a queue", [killed("n2")] * 2, HERE, {}, "restart 60"),
    ("out of memory", [oom("n1")], QUEUE, {}, "restart 30"),
    ("... twice", [oom("n1"), oom("n2", limit="400 MiB")], QUEUE, {}, "stop!"),
    ("... twice on a node, with progress", [oom("n1", 6, progress=True), oom("n1", progress=True)],
        QUEUE, {}, "restart 30"),
    ("... with progress, five times", [oom(f"n{n % 2}", n, progress=True) for n in range(5)],
        QUEUE, {}, "stop!"),
    ("a node that is down", [failed("down", kind="node", host="n3")],
        replace(QUEUE, down={"n3": "DOWN"}), {}, "requeue"),
    ("an unhealthy node", [unhealthy("n2")], replace(QUEUE, unhealthy={"n2": "ECC"}), {},
        "requeue -n2"),
    ("all of several", [unhealthy("n1", "n2")], replace(QUEUE, nodes=2,
        unhealthy=dict.fromkeys(("n1", "n2"), "ECC")), {}, "restart 30"),
    ("this machine is unhealthy", [unhealthy("here")], replace(HERE, unhealthy={"here": "ECC"}),
        {}, "stop!"),
    ("saved at the time limit", [SAVED], ENDING, {}, "requeue"),
    ("saved at Ctrl-C", [SAVED], HERE_ENDING, {}, "stop"),
    ("saved to start again", [SAVED], replace(HERE_ENDING, restart=True), {}, "restart"),
    ("crashed at the time limit", [failed()], ENDING, {}, "requeue"),
    ("the same at five steps", [failed(f"{n}", step=n, progress=True,
        time=n * DAY / 2) for n in range(5)], QUEUE, {}, "stop!"),
    ("... over four days", [failed(f"{n}", step=n, progress=True, time=n * DAY) for n in range(5)],
        QUEUE, {}, "restart 30"),
    ("one of one that is allowed", [failed(step=1, progress=True)], QUEUE, {"max_failures": 1},
        "restart 30"),
    ("the loss stayed non-finite", [NAN], QUEUE, {}, "stop!"),
    ("NCCL twice before the first step", [NCCL] * 2, QUEUE, {}, "requeue"),
    ("... without a queue", [NCCL] * 2, HERE, {}, "stop!"),
    ("... again and again", [NCCL] * 5, QUEUE, {}, "stop!"),
    ("Slurm does not answer, twice", [PLACE] * 2, QUEUE, {}, "restart 60"),
    ("a stale file handle twice at a step", [STALE] * 2, QUEUE, {}, "restart 60"),
    ("... for each of the failures allowed", [STALE] * 5, QUEUE, {}, "restart 480"),
    ("... once more", [STALE] * 6, QUEUE, {}, "stop!"),
    ("taken away twice", [End("interrupted")] * 2, ENDING, {}, "requeue"),
    ("an excluded node", [End("misplaced")], QUEUE, {}, "requeue"),
    ("saved five times in vain", [SAVED] * 5, ENDING, {}, "requeue"),
    ("... six times", [KEPT, *[SAVED] * 3, End("interrupted"), *[SAVED] * 3], ENDING, {}, "stop!"),
    ("... of a command", [SAVED] * 20, replace(QUEUE, checkpoints=False), {}, "requeue"),
    ("cancelled", [End("cancelled")], QUEUE, {}, "stop"),
    ("busy", [BUSY], QUEUE, {}, "restart 30"),
    ("too many", [failed(), failed("a"), failed("b")], QUEUE, {"max_failures": 2}, "stop!"),
    ("not one is allowed", [failed(progress=True)], QUEUE, {"max_failures": 0}, "stop!"),
    ("progress between", [failed(), failed("a"), failed("b", progress=True), failed("c")], QUEUE,
        {"max_failures": 2}, "restart 60"),
    ("too many attempts", [KEPT] * 3, QUEUE, {"max_attempts": 3}, "stop!"),
    ("its supervisor was killed", [End("lost", Failure("lost", "gone"))] * 2, QUEUE, {},
        "restart 60"),
    ("wrong input", [WRONG], QUEUE, {}, "stop"),
    ("wrong input that was right before", [KEPT, WRONG], HERE, {}, "restart 30"),
    ("... twice", [KEPT, WRONG, WRONG], HERE, {}, "stop!"),
    ("a file is missing on a node", [missing("n1")], QUEUE, {}, "restart 30"),
    ("... twice", [missing("n1")] * 2, QUEUE, {}, "requeue -n1"),
    ("... and on another", [missing("n1"), missing("n2")], QUEUE, {}, "stop"),
]  # fmt: skip


def short(decision: Decision) -> str:
    """Return a decision in the format of the table."""
    wait = f" {decision.delay_seconds:g}" if decision.delay_seconds else ""
    excluded = "".join(f" -{node}" for node in decision.exclude)
    return f"{decision.action}{'!' * decision.gave_up}{wait}{excluded}"


def test_the_table(wording: Wording) -> None:
    for name, history, situation, limits, expected in TABLE:
        decision = decide(history, Limits(**limits), situation)
        assert short(decision) == expected and tuple(decision.cordon) == decision.exclude, name
        wording(
            f"{name}: {decision.reason}"
            + "".join(f"; {node}: {why}" for node, why in decision.cordon.items())
        )


def an_end(draw: random.Random) -> End:
    """Draw any end that does not decide by itself."""
    outcome = draw.choice(
        "failed failed hang unhealthy lost saved busy interrupted misplaced".split()
    )
    failure = None
    if outcome in FAILED:
        kind = draw.choice([kind for kind in KINDS if kind not in ("config", "diverged")])
        message = draw.choice(("a", "b", f"c {draw.random()}"))
        host = draw.choice((None, *NODES))
        step = draw.choice((None, 3, 4))
        failure = Failure(
            kind, message, 0, host, step, draw.choice((1, 2, 75, 130, *range(126, 160)))
        )
    return End(
        outcome,
        failure,
        progress=draw.random() < 0.2,
        time=draw.uniform(0, 1000),
        stepped=draw.random() < 0.7,
    )


def a_situation(draw: random.Random) -> Situation:
    """Draw any situation."""
    some: dict[str, Any] = {
        name: {node: "ECC" for node in NODES if draw.random() < 0.1}
        for name in ("down", "unhealthy")
    }
    flags = {
        "ending": draw.random() < 0.2,
        "restart": draw.random() < 0.5,
        "can_requeue": draw.random() < 0.5,
    }
    return Situation(
        **{**some, **flags}, nodes=draw.choice((1, 2, 4)), checkpoints=draw.random() < 0.8
    )


def holds_of(decision: Decision, past: list[End], limits: Limits, situation: Situation) -> None:
    """Check the properties of every decision."""
    assert 0 <= decision.delay_seconds <= max(1.0, limits.back_off_max_seconds)
    for node in decision.exclude:  # each exclusion needs a reason, because it costs a requeue
        against = sum(blamed(end.failure) == node for end in past)
        assert node in situation.unhealthy or (
            limits.node_failures and against >= limits.node_failures
        )
        assert decision.action == "requeue" and decision.cordon[node]
    assert decide([*past, End("finished")], limits, situation).action == "finish"
    assert decide(past, limits, replace(situation, stop="cancelled: by someone")) == Decision(
        "stop", "cancelled: by someone"
    )
    wrong = decide([*(replace(end, progress=False) for end in past), WRONG], limits, situation)
    assert wrong.action == "stop" and not wrong.gave_up, (
        "the same command goes on, once the input is mended"
    )
    here = decide(past, limits, replace(situation, can_requeue=False))
    assert here.action in ("restart", "stop") and not here.exclude and not here.cordon
    near = decide(past, limits, replace(situation, ending=True, can_requeue=True))
    assert near.action in ("requeue", "stop") and near.delay_seconds == 0
    assert (
        decide(
            past, limits, replace(situation, ending=True, restart=False, can_requeue=False)
        ).action
        == "stop"
    )


def what_changes_nothing(
    draw: random.Random, past: list[End], limits: Limits, situation: Situation
) -> None:
    """Check that an end without failure, a wait for the directory, and attempts before a manual
    restart do not change the next decision.
    """
    patient = replace(limits, max_attempts=500)
    expected, place = decide(past, patient, situation), draw.randrange(len(past))
    if past[-1].outcome in FAILED:
        for idle in (
            [End("interrupted", time=draw.uniform(0, 1000))] * draw.randrange(1, 9),
            [BUSY],
        ):
            assert decide([*past[:place], *idle, *past[place:]], patient, situation) == expected
    if situation.can_requeue:
        assert decide([*past, End("interrupted")], patient, situation) == Decision(
            "requeue", "the allocation was taken away"
        )
    before = [*past[:-1], replace(past[-1], stopped=True)]
    assert decide([*before, *past], limits, situation) == decide(past, limits, situation)


def test_whatever_happens_a_run_ends_within_its_limits() -> None:
    for seed in range(300):
        draw, past = random.Random(seed), list[End]()
        numbers = (
            draw.randrange(6),
            draw.randrange(1, 40),
            draw.choice((0, 2, 3)),
            draw.choice((0, 2, 3)),
            draw.uniform(0, 60),
        )
        limits = Limits(*numbers, 600.0)
        decision = Decision("restart", "")
        while decision.action != "stop":
            past.append(an_end(draw))
            situation = a_situation(draw)
            decision = decide(past, limits, situation)
            holds_of(decision, past, limits, situation)
            what_changes_nothing(draw, past, limits, situation)
            if decision.action != "stop":
                assert (
                    len(past) < limits.max_attempts
                    and policy.failures_since_progress(policy.since_stop(past))
                    <= limits.max_failures
                )
        assert decision.reason and "\n" not in decision.reason


@pytest.mark.parametrize(
    ("spread", "free"), [(1.0, policy.BUSY_TIMES), (policy.BUSY_SECONDS / 3, 3)]
)
def test_a_directory_that_stays_in_use_is_a_failure_in_the_end(spread: float, free: int) -> None:
    """It is waited for twenty times or half an hour; from then on each time counts as a failure."""
    past, report = [KEPT], Decision("restart", "")
    while report.action == "restart":
        past.append(End("busy", time=1000 + spread * len(past)))
        report = decide(past, Limits(), QUEUE)
    assert (
        len(past) - 1 == free + Limits().max_failures + 1
        and report.action == "stop"
        and report.gave_up
    )


def test_what_is_counted() -> None:
    again = failed("same")
    other = failed("other")
    away = End("misplaced")
    assert (
        repetitions([again, End("saved"), BUSY, again]) == 2
        and repetitions([again, other, again]) == 1
    )
    # A kill from outside does not count against the program.
    assert repetitions([again, End("saved")]) == repetitions([killed("n1")] * 2) == 0
    assert policy.misplaced([failed(), away, away]) == 2
    for past in ([], [away, failed()], [away, replace(away, stopped=True)]):
        assert policy.misplaced(past) == 0
    for one, two in (
        ("RuntimeError: at 0x7ffe12 of /opt/a/b.py:12", "RuntimeError: at 0x55 of /tmp/c:7"),
        ("Connection closed by peer [127.0.0.1]:43210", "Connection closed by peer [0.0.0.0]:1"),
        ("loss 1.5e-3 at step 12", "loss 7 at step 4"),
    ):
        assert (
            policy.normalised(one) == policy.normalised(two) != policy.normalised("another " + one)
        )
    blame = {kind for kind in KINDS if blamed(Failure(kind, "m", host="n1", exit=1))}
    assert (
        blame == {"node", "health", "lost"}
        and blamed(Failure("node", "m")) is None
        and blamed(None) is None
    )
    signals = (Failure("signal", "m", host="n1", exit=code) for code in range(129, 160))
    assert [one.exit for one in signals if blamed(one)] == [135, 137]  # SIGBUS, SIGKILL
    waits = [policy.back_off(count, Limits()) for count in (1, 2, 5, 6, 99)]
    assert waits == [30, 60, 480, 900, 900]


NODE, CPU, GPU = (f"SLURM_MEM_PER_{name}" for name in ("NODE", "CPU", "GPU"))
LIMITS: list[tuple[str, str | None, dict[str, str], str]] = [
    ("slurm", "1G", {NODE: "300"}, "300 MiB a node: raise nodes.memory"),
    ("slurm", None, {CPU: "2048", "SLURM_CPUS_ON_NODE": "8"}, "16 GiB a node: raise nodes.memory"),
    ("slurm", None, {GPU: "2048"}, "4 GiB a node: raise nodes.memory"),
    ("slurm", "1800G", {}, "1800 GiB a node: raise nodes.memory"),
    ("slurm", "16000", {}, "16000 MiB a node: raise nodes.memory"),
    ("slurm", "0", {NODE: "2000000"}, "may use all memory of a node"),
    ("slurm", None, {NODE: "0"}, "the partition's default, or all memory of a node"),
    ("local", "4G", {}, "of its container"),
]


def test_the_limit_is_that_of_the_allocation_and_none_is_made_up() -> None:
    for scheduler, memory, environment, expected in LIMITS:
        profile = {"scheduler": scheduler, "nodes": {"cpus": 4, "gpus": 2, "memory": memory}}
        assert expected in memory_limit(profile, environment), (profile, environment)
