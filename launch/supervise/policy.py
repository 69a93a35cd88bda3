"""Decide what to do after an attempt: a pure function of the ends of all attempts.

Standard library alone: it runs inside jobs. The rules, in order of precedence:

    a user stopped the item             stop
    finished                            finish
    wrong input                         stop: another attempt would fail the same way. Exceptions:
                                        an attempt made progress with this input, so a folder may be
                                        missing on a node (an ordinary failure); only one of several
                                        hosts reports it (a failure of that node, unless another
                                        host reports it later)
    the loss stayed non-finite          stop with the diagnosis: another attempt computes the same
    too many attempts                   stop
    the allocation was taken away       requeue; not counted as a failure
    an excluded node was allocated      requeue without it
    saved at a signal                   requeue; without a queue: stop, or restart if the signal
                                        requested only that; more than max_failures times in a row
                                        without progress (of a run): stop with the diagnosis
    the run directory is in use         wait and restart; not counted up to `BUSY_TIMES` in a row
                                        and `BUSY_SECONDS`, then a failure
    repeated failure                    stop with the diagnosis, if one of these holds:
                                        - the same failure same_failure times in a row at the same
                                          step (except a hang or an NCCL error before an attempt's
                                          first step, which a requeue may cure)
                                        - the same failure at any step max_failures times in a row
                                          within `KEEP_SECONDS`
                                        - more than max_failures failures without progress
    any other failure                   restart after a back-off that doubles until progress is
                                        made; on other nodes if one is down, unhealthy, or failed
                                        node_failures times

A failure that is attributed to a node is not a failure of the program and does not count as
"the same failure".
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from fem_common.exits import Exit
from fem_common.settings import setting

KEEP_SECONDS = 3 * 86400.0  # how long a failure counts against its node
# Kinds of failure that concern the program: the same one twice in a row will occur again.
OF_THE_PROGRAM = ("exit", "signal", "hang", "memory", "nccl", "config")
OF_THE_NODE = ("node", "health", "lost")
OF_THE_PLACES = ("hang", "nccl")  # before the first step, other nodes may avoid it
FAILED = ("failed", "hang", "unhealthy", "lost")  # outcomes that count as failures
BUSY_TIMES, BUSY_SECONDS = 20, 1800.0  # limits for a run directory in use
MISPLACED_TIMES = 3  # after this many in a row, the nodes are accepted


@dataclass(frozen=True)
class Limits:
    """Configuration keys of the section ``restarts``: limits on restarts after failures."""

    max_failures: int = setting(
        5, "Failures without a new checkpoint in between before giving up.", least=0
    )
    max_attempts: int = setting(
        500, "Attempts of a run, including those that a signal stopped.", least=1
    )
    same_failure: int = setting(
        2,
        (
            "Give up with a diagnosis after the same failure at the same step this many times in a "
            "row; 0: never."
        ),
        least=0,
    )
    node_failures: int = setting(
        2, "Failures of the same node after which runs no longer use it; 0: never.", least=0
    )
    back_off_seconds: float = setting(
        30.0, "Wait before the first restart; doubles with every failure without progress.", least=0
    )
    back_off_max_seconds: float = setting(900.0, "Longest wait before a restart.", least=0)


@dataclass(frozen=True)
class Failure:
    """Cause of an attempt's failure: the first rank that failed, or a node's fault."""

    # exit | signal | hang | node | health | config | diverged | memory | nccl | lost | busy | place
    kind: str
    message: str  # one line
    rank: int | None = None
    host: str | None = None
    step: int | None = None  # last complete step
    exit: int | None = None  # 128 + n for a signal


@dataclass(frozen=True)
class End:
    """End of an attempt: its outcome, its failure if any, and its progress."""

    # finished | saved | interrupted | misplaced | failed | hang | unhealthy | lost | cancelled |
    # busy
    outcome: str
    failure: Failure | None = None
    progress: bool = False  # the attempt left a later checkpoint than it started from
    time: float = 0.0  # unix time of the end
    # the decision after the attempt was to stop; when a user starts the item again, all attempts up
    # to this one are ignored
    stopped: bool = False
    stepped: bool = True  # the attempt made a step


@dataclass(frozen=True)
class Situation:
    """Facts about the item, its allocation and received signals that a decision depends on."""

    stop: str | None = None  # why a user stopped the item
    ending: bool = False  # a signal announced the end of the allocation or of this process
    restart: bool = False  # the signal requested only to save and restart
    can_requeue: bool = False
    # Nodes of the allocation that cannot be used -> reason.
    down: Mapping[str, str] = field(default_factory=dict)
    # Nodes that failed the pre-flight check -> first fault.
    unhealthy: Mapping[str, str] = field(default_factory=dict)
    nodes: int = 1  # number of the attempt's nodes
    checkpoints: bool = True  # the job has checkpoints that show progress; commands have none


@dataclass(frozen=True)
class Decision:
    """Action to take after an attempt."""

    action: str  # finish | restart | requeue | stop
    reason: str  # one line
    delay_seconds: float = 0.0
    exclude: tuple[str, ...] = ()  # nodes not to be used again
    # Nodes of `exclude` that no run should use -> reason.
    cordon: Mapping[str, str] = field(default_factory=dict)
    # the item must not restart until a user has intervened
    gave_up: bool = False


def decide(history: Sequence[End], limits: Limits, situation: Situation) -> Decision:
    """Return the decision after the attempts of ``history`` (not empty; oldest first)."""
    recent = since_stop(history)
    last = recent[-1]
    if last.outcome == "finished":
        return Decision("finish", "finished")
    if situation.stop is not None:
        return Decision("stop", situation.stop)
    if last.outcome == "cancelled":
        return Decision("stop", "cancelled")
    if last.failure is not None and _is_wrong_input(recent):
        # No mark that only `requeue` removes: after correcting the input, a user gives the same
        # command again.
        return Decision("stop", f"the input is wrong, and stays so: {describe(last.failure)}")
    if last.failure is not None and last.failure.kind == "diverged":
        return _give_up(
            "the loss stayed non-finite, and another attempt would compute the same: "
            f"{describe(last.failure)}"
        )
    if len(recent) >= limits.max_attempts:
        return _give_up(
            f"{len(recent)} attempts, as many as restarts.max_attempts allows; "
            f"{describe(last.failure)}"
        )
    if last.outcome == "interrupted":
        return _leave(situation, "the allocation was taken away")
    if last.outcome == "misplaced":
        why = "an excluded node was allocated"
        return Decision("requeue", why) if situation.can_requeue else _leave(situation, why)
    if last.outcome == "saved":
        return _after_save(recent, limits, situation)
    if last.outcome == "busy":
        if situation.ending:
            return _leave(situation, "the run directory is in use")
        return Decision(
            "restart",
            "the run directory is in use by another process",
            max(1.0, limits.back_off_seconds),
        )
    return _after_failure(recent, limits, situation)


def _is_wrong_input(recent: Sequence[End]) -> bool:
    """Return True if the last attempt shows that the item's input is wrong.

    The attempt ended for wrong input, and no attempt made progress with this input. If only some of
    the hosts report wrong input, at least two different hosts must have reported it.
    """
    last = recent[-1].failure
    if last is None or any(end.progress for end in recent):
        return False
    of_nodes = [
        end.failure
        for end in recent
        if end.failure and end.failure.kind == "node" and end.failure.exit == Exit.WRONG_INPUT
    ]
    return last.kind == "config" or (
        last in of_nodes and len({failure.host for failure in of_nodes}) > 1
    )


def _give_up(reason: str) -> Decision:
    return Decision("stop", reason, gave_up=True)


def _after_save(recent: Sequence[End], limits: Limits, situation: Situation) -> Decision:
    """Return the decision after an attempt that was saved at a signal."""
    idle = saves_without_progress(recent)
    if situation.checkpoints and idle > limits.max_failures and idle > 1:
        return _give_up(
            f"saved {idle} times in a row without a new checkpoint (restarts.max_failures: "
            f"{limits.max_failures}): the time limit is too"
            " short to reach one"
        )
    if situation.can_requeue:
        return Decision("requeue", "saved")
    return (
        Decision("restart", "saved")
        if situation.restart
        else Decision("stop", "saved; the same command continues")
    )


def _leave(situation: Situation, why: str) -> Decision:
    """Return the decision if no new attempt is possible.

    The allocation or this process ends, for the reason in ``why``.
    """
    if situation.can_requeue:
        return Decision("requeue", why)
    return (
        Decision("restart", why)
        if situation.restart
        else Decision("stop", f"{why}; the same command continues")
    )


def _after_failure(recent: Sequence[End], limits: Limits, situation: Situation) -> Decision:
    """Return the decision after a failed attempt."""
    failure, count = recent[-1].failure, failures_since_progress(recent)
    description = describe(failure)
    again, anywhere = repetitions(recent), repetitions(recent, anywhere=True)
    elsewhere = (
        failure is not None
        and failure.kind in OF_THE_PLACES
        and not recent[-1].stepped
        and situation.can_requeue
    )
    if limits.same_failure and again >= limits.same_failure and not elsewhere:
        return _give_up(f"the same failure {again} times in a row, at the same step: {description}")
    if count > limits.max_failures:
        allowed = f"(restarts.max_failures: {limits.max_failures})"
        return _give_up(
            f"{count} failure{'s' * (count > 1)} without a new checkpoint {allowed}; the last: "
            f"{description}"
        )
    if anywhere >= max(2, limits.max_failures):
        return _give_up(f"the same failure {anywhere} times in a row: {description}")
    leave = _nodes_to_leave(recent, limits, situation)
    if not situation.can_requeue and leave.keys() & situation.unhealthy.keys():
        return _give_up(f"this machine fails its check: {description}")
    if leave and situation.can_requeue:
        return Decision(
            "requeue",
            f"{description}; from now on without {', '.join(leave)}",
            exclude=tuple(leave),
            cordon=leave,
        )
    if situation.down and situation.can_requeue:
        return Decision("requeue", description)
    if elsewhere and limits.same_failure and again >= limits.same_failure:
        return Decision(
            "requeue",
            f"{description}; {again} times before the first step: other nodes may do better",
        )
    return (
        _leave(situation, description)
        if situation.ending
        else Decision("restart", description, back_off(count, limits))
    )


def _nodes_to_leave(recent: Sequence[End], limits: Limits, situation: Situation) -> dict[str, str]:
    """Return node -> reason of the nodes that this item must not get again.

    These are nodes that failed the pre-flight check, and nodes with too many failures. If all of
    several nodes fail the check, the check is considered wrong and excludes no node. A node that is
    down is not included, because Slurm does not allocate it until it is back.
    """
    leave: dict[str, str] = {}
    if situation.nodes == 1 or len(situation.unhealthy) < situation.nodes:
        leave.update(situation.unhealthy)
    if limits.node_failures:
        for node, ends in _failures_of_nodes(recent).items():
            if len(ends) >= limits.node_failures:
                leave.setdefault(
                    node, f"{len(ends)} failures; the last: {describe(ends[-1].failure)}"
                )
    return leave


def _failures_of_nodes(recent: Sequence[End]) -> dict[str, list[End]]:
    """Return node -> its recent failures, only for the node that the last failure is attributed to.

    The result is {} if the last failure is attributed to no node.
    """
    now = recent[-1].time
    against: dict[str, list[End]] = {}
    for end in recent:
        node = blamed(end.failure)
        if node is not None and now - end.time <= KEEP_SECONDS:
            against.setdefault(node, []).append(end)
    # Only the node of the last failure is considered. A node with older failures is left to the
    # cordon file.
    last = blamed(recent[-1].failure)
    return {node: ends for node, ends in against.items() if node == last}


def blamed(failure: Failure | None) -> str | None:
    """Return the node that a failure is attributed to, or None.

    A crash of the program is not evidence against the node on which it was first seen.
    """
    if failure is None or failure.host is None:
        return None
    killed = failure.kind == "signal" and failure.exit in (Exit.KILLED, 128 + signal.SIGBUS)
    return failure.host if killed or failure.kind in OF_THE_NODE else None


def since_stop(history: Sequence[End]) -> Sequence[End]:
    """Return the ends of the attempts since a user last started the item.

    Attempts that found the run directory in use for too long are changed to failures.
    """
    start = next(
        (index + 1 for index in range(len(history) - 2, -1, -1) if history[index].stopped), 0
    )
    recent, row = list(history[start:]), list[End]()
    for index, end in enumerate(recent):
        row = [*row, end] if end.outcome == "busy" else []
        seconds = end.time - row[0].time if row else 0.0
        if len(row) > BUSY_TIMES or seconds >= BUSY_SECONDS:
            waited = f"{len(row)} attempts, {seconds / 60:.0f} minutes: which process holds it?"
            recent[index] = replace(
                end,
                outcome="failed",
                failure=Failure("busy", f"the run directory stays in use by another: {waited}"),
            )
    return recent


def failures_since_progress(recent: Sequence[End]) -> int:
    """Return the number of failed attempts since the last attempt that made progress.

    Progress means a later checkpoint. The attempt that made progress is counted if it failed.
    """
    count = 0
    for end in reversed(recent):
        count += end.outcome in FAILED
        if end.progress:
            break
    return count


def saves_without_progress(recent: Sequence[End]) -> int:
    """Return the number of latest attempts that were saved at a signal without a later checkpoint.

    Counting ends at the last attempt that failed or made progress.
    """
    idle = takewhile(lambda end: not end.progress and end.outcome not in FAILED, reversed(recent))
    return sum(end.outcome == "saved" for end in idle)


def misplaced(history: Sequence[End]) -> int:
    """Return the number of latest attempts in a row to which an excluded node was allocated."""
    return len(
        list(
            takewhile(lambda end: end.outcome == "misplaced" and not end.stopped, reversed(history))
        )
    )


def repetitions(recent: Sequence[End], *, anywhere: bool = False) -> int:
    """Return how many times in a row, up to the last attempt, the program failed in the same way.

    Attempts whose end is no evidence about the program are skipped.

    anywhere: the step may differ, but only failures of the last `KEEP_SECONDS` count.
    """
    count, last = 0, _signature(recent[-1], anywhere)
    if last is None:
        return 0
    for end in reversed(recent):
        signature = _signature(end, anywhere)
        if (signature is not None and signature != last) or (
            anywhere and recent[-1].time - end.time > KEEP_SECONDS
        ):
            break
        count += signature is not None
    return count


def _signature(end: End, anywhere: bool) -> tuple[str, str, int | None] | None:
    """Return (kind, normalised message, step) of a failure of the program, or None for other ends.

    anywhere: set the step to None, so that failures at different steps are equal.
    """
    failure = end.failure
    if (
        end.outcome not in ("failed", "hang")
        or failure is None
        or failure.kind not in OF_THE_PROGRAM
        or blamed(failure)
    ):
        return None
    if failure.kind == "signal" and failure.exit == Exit.KILLED:
        # The kernel, a user or the node's end killed it, which need not happen again.
        return None
    return failure.kind, normalised(failure.message), None if anywhere else failure.step


def back_off(failures: int, limits: Limits) -> float:
    """Return the seconds to wait before the next attempt.

    failures: number of failures without progress, at least 1. The time doubles with each of them.
    """
    doubled = limits.back_off_seconds * 2.0 ** min(failures - 1, 60)
    return min(doubled, max(limits.back_off_max_seconds, 0.0))


def normalised(message: str) -> str:
    """Replace the addresses, paths and numbers in a message by fixed words.

    These parts may differ between two occurrences of one failure.
    """
    for pattern, stand_in in (
        (r"0x[0-9a-fA-F]+", "ADDRESS"),
        (r"(?:/[\w.+@~-]+)+/?", "PATH"),
        (r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N"),
    ):
        message = re.sub(pattern, stand_in, message)
    return " ".join(message.split())


def describe(failure: Failure | None) -> str:
    """Return a failure in one line."""
    if failure is None:
        return "no failure is known"
    places = {"rank": failure.rank, "on": failure.host or None, "after step": failure.step}
    where = ", ".join(f"{word} {value}" for word, value in places.items() if value is not None)
    return f"{failure.message} ({where})" if where else failure.message


def limits_of(restarts: Mapping[str, Any]) -> Limits:
    """Return the limits in a profile's ``restarts``, with defaults for missing keys."""
    return Limits(
        **{name: restarts[name] for name in Limits.__dataclass_fields__ if name in restarts}
    )
