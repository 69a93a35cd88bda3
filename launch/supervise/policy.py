"""launch: what to do after an attempt, as a pure function of how the attempts ended. Standard library alone: it runs inside jobs.

The rules, in the order in which they hold:

    someone asked the item to stop        stop
    finished                              finish
    wrong input                           stop: another attempt says the same; unless one made progress with it: then a folder may be
                                          missing on a node, and it is a failure as any other
    too many attempts                     stop
    saved at a signal                     requeue; without a queue: stop, or go on here if only a restart was asked for
    the run directory is in use           wait and restart; nobody's fault, not counted
    the same failure same_failure times in a row; more failures without progress than max_failures        stop with the diagnosis
    any other failure                     restart after a back-off that doubles until there is progress;
                                          on other nodes where one is down, unhealthy, or failed node_failures times
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KEEP_SECONDS = 3 * 86400.0  # a node's failures are held against it for so long
# Kinds of failure that say something of the program, so that the same one twice in a row will come again.
OF_THE_PROGRAM = ("exit", "signal", "hang", "memory", "nccl", "config")
OF_THE_NODE = ("node", "health", "lost")
_KILLED = 137  # SIGKILL by nobody we know of: the kernel, a person, the node's end; nothing that is sure to come again


@dataclass(frozen=True)
class Limits:
    """The profile's ``restarts``."""

    max_failures: int = 5
    max_attempts: int = 500
    same_failure: int = 2  # 0: never stops for this
    node_failures: int = 2  # 0: never leaves a node for this
    back_off_seconds: float = 30.0
    back_off_max_seconds: float = 900.0


@dataclass(frozen=True)
class Failure:
    """Why an attempt failed: the first of its ranks that did, or its node."""

    kind: str  # exit | signal | hang | node | health | config | memory | nccl | lost
    message: str  # one line
    rank: int | None = None
    host: str | None = None
    step: int | None = None  # the last whole step
    exit: int | None = None  # 128 + n for a signal


@dataclass(frozen=True)
class End:
    """How an attempt ended."""

    outcome: str  # finished | saved | failed | hang | unhealthy | lost | cancelled | busy
    failure: Failure | None = None
    progress: bool = False  # a later checkpoint than it started from
    time: float = 0.0  # unix time of the end
    stopped: bool = False  # the decision after it was to stop: what came before is forgiven to whoever starts it again


@dataclass(frozen=True)
class Situation:
    """What holds at the time of the decision."""

    stop: str | None = None  # someone asked the item to stop: why
    ending: bool = False  # a signal said that the allocation, or this process, ends soon
    restart: bool = False  # ... and was only to save and start again
    can_requeue: bool = False
    down: Mapping[str, str] = field(default_factory=dict)  # nodes of the allocation that cannot be used -> why
    unhealthy: Mapping[str, str] = field(default_factory=dict)  # nodes that failed the pre-flight check -> the first fault
    nodes: int = 1  # of the attempt


@dataclass(frozen=True)
class Decision:
    """What to do now."""

    action: str  # finish | restart | requeue | stop
    reason: str  # one line
    delay_seconds: float = 0.0
    exclude: tuple[str, ...] = ()  # nodes not to be used again
    cordon: Mapping[str, str] = field(default_factory=dict)  # of these, the nodes that no run of ours should get -> why
    gave_up: bool = False  # a stop that holds until a person has looked: the item is not to be started again by itself


def decide(history: Sequence[End], limits: Limits, situation: Situation) -> Decision:
    """What to do after the attempts of ``history`` (not empty; oldest first)."""
    recent = since_stop(history)
    last = recent[-1]
    if last.outcome == "finished":
        return Decision("finish", "finished")
    if situation.stop is not None:
        return Decision("stop", situation.stop)
    if last.outcome == "cancelled":
        return Decision("stop", "cancelled")
    if last.failure is not None and last.failure.kind == "config" and not any(end.progress for end in recent):
        # No mark that only `requeue` removes: who has mended the input gives the same command again.
        return Decision("stop", f"the input is wrong, and stays so: {describe(last.failure)}")
    if len(recent) >= limits.max_attempts:
        return _give_up(f"{len(recent)} attempts, as many as restarts.max_attempts allows; {describe(last.failure)}")
    if last.outcome == "saved":
        return _after_save(situation)
    if last.outcome == "busy":
        if situation.ending:
            return _leave(situation, "the run directory is in use")
        return Decision("restart", "the run directory is in use by another process", max(1.0, limits.back_off_seconds))
    return _after_failure(recent, limits, situation)


def _give_up(reason: str) -> Decision:
    return Decision("stop", reason, gave_up=True)


def _after_save(situation: Situation) -> Decision:
    if situation.can_requeue:
        return Decision("requeue", "saved")
    return Decision("restart", "saved") if situation.restart else Decision("stop", "saved; the same command continues")


def _leave(situation: Situation, why: str) -> Decision:
    """The end of the allocation, or of this process, is near: no new attempt here."""
    if situation.can_requeue:
        return Decision("requeue", why)
    return Decision("restart", why) if situation.restart else Decision("stop", f"{why}; the same command continues")


def _after_failure(recent: Sequence[End], limits: Limits, situation: Situation) -> Decision:
    failure, count = recent[-1].failure, failures_since_progress(recent)
    told = describe(failure)
    again = repetitions(recent)
    if limits.same_failure and again >= limits.same_failure:
        return _give_up(f"the same failure {again} times in a row, at the same step: {told}")
    if count > limits.max_failures:
        allowed = f"(restarts.max_failures: {limits.max_failures})"
        return _give_up(f"{count} failure{'s' * (count > 1)} without a new checkpoint {allowed}; the last: {told}")
    leave = _nodes_to_leave(recent, limits, situation)
    if not situation.can_requeue and leave.keys() & situation.unhealthy.keys():
        return _give_up(f"this machine fails its check: {told}")
    if leave and situation.can_requeue:
        return Decision("requeue", f"{told}; from now on without {', '.join(leave)}", exclude=tuple(leave), cordon=leave)
    if situation.down and situation.can_requeue:
        return Decision("requeue", told)
    return _leave(situation, told) if situation.ending else Decision("restart", told, back_off(count, limits))


def _nodes_to_leave(recent: Sequence[End], limits: Limits, situation: Situation) -> dict[str, str]:
    """Nodes that this item is not to get again -> why. Where every one of several nodes is unhealthy, the check is to blame.

    A node that is down is left to Slurm, which gives it to nobody until it is back.
    """
    leave: dict[str, str] = {}
    if situation.nodes == 1 or len(situation.unhealthy) < situation.nodes:
        leave.update(situation.unhealthy)
    if limits.node_failures:
        for node, ends in _failures_of_nodes(recent).items():
            if len(ends) >= limits.node_failures:
                leave.setdefault(node, f"{len(ends)} failures; the last: {describe(ends[-1].failure)}")
    return leave


def _failures_of_nodes(recent: Sequence[End]) -> dict[str, list[End]]:
    """The failures held against each node, of late."""
    now = recent[-1].time
    against: dict[str, list[End]] = {}
    for end in recent:
        node = blamed(end.failure)
        if node is not None and now - end.time <= KEEP_SECONDS:
            against.setdefault(node, []).append(end)
    # A node with an old record that had no part in this end is left to the cordon file.
    last = blamed(recent[-1].failure)
    return {node: ends for node, ends in against.items() if node == last}


def blamed(failure: Failure | None) -> str | None:
    """The node that a failure is held against, or None: a crash of the program says nothing of the node that it was seen on first."""
    if failure is None or failure.host is None:
        return None
    killed = failure.kind == "signal" and failure.exit in (_KILLED, 135)  # 135: SIGBUS
    return failure.host if killed or failure.kind in OF_THE_NODE else None


def since_stop(history: Sequence[End]) -> Sequence[End]:
    """The attempts since a person last started the item."""
    for index in range(len(history) - 2, -1, -1):
        if history[index].stopped:
            return history[index + 1 :]
    return history


def failures_since_progress(recent: Sequence[End]) -> int:
    """Failed attempts since the last one that left a later checkpoint; that one, if it failed, counts as the first."""
    count = 0
    for end in reversed(recent):
        count += end.outcome in ("failed", "hang", "unhealthy", "lost")
        if end.progress:
            break
    return count


def repetitions(recent: Sequence[End]) -> int:
    """How often in a row the program failed in the same way, the last time included; what says nothing of the program is passed over."""
    count, last = 0, _signature(recent[-1])
    if last is None:
        return 0
    for end in reversed(recent):
        signature = _signature(end)
        if signature is not None and signature != last:
            break
        count += signature is not None
    return count


def _signature(end: End) -> tuple[str, str, int | None] | None:
    failure = end.failure
    if end.outcome not in ("failed", "hang") or failure is None or failure.kind not in OF_THE_PROGRAM:
        return None
    if failure.kind == "signal" and failure.exit == _KILLED:
        return None
    return failure.kind, normalised(failure.message), failure.step


def back_off(failures: int, limits: Limits) -> float:
    """Seconds to wait after so many failures without progress (1 or more)."""
    doubled = limits.back_off_seconds * 2.0 ** min(failures - 1, 60)
    return min(doubled, max(limits.back_off_max_seconds, 0.0))


def normalised(message: str) -> str:
    """A message without what differs between two occurrences of one failure: addresses, paths, numbers."""
    for pattern, stand_in in ((r"0x[0-9a-fA-F]+", "ADDRESS"), (r"(?:/[\w.+@~-]+)+/?", "PATH"), (r"\d+(?:\.\d+)?(?:e[+-]?\d+)?", "N")):
        message = re.sub(pattern, stand_in, message)
    return " ".join(message.split())


def describe(failure: Failure | None) -> str:
    """A failure in one line."""
    if failure is None:
        return "no failure is known"
    where = ", ".join(
        text
        for text in (
            f"rank {failure.rank}" if failure.rank is not None else "",
            f"on {failure.host}" if failure.host else "",
            f"after step {failure.step}" if failure.step is not None else "",
        )
        if text
    )
    return f"{failure.message} ({where})" if where else failure.message


def limits_of(restarts: Mapping[str, Any]) -> Limits:
    """The limits in a profile's ``restarts``; what it does not name has its default."""
    return Limits(**{name: restarts[name] for name in Limits.__dataclass_fields__ if name in restarts})
