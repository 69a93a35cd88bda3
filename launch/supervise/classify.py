"""Classify how an attempt ended: its outcome and, if it failed, the cause.

The sources are the ranks' records, the run's own files, and Slurm's report of the job. Agents are
the processes that start ranks: torchrun on each node, and srun. Their output is in
logs/agents*.log. Uses only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fem_common.exits import Exit
from launch.job import TAIL_BYTES, last_bytes, last_lines
from launch.node.failures import (
    OUT_OF_MEMORY,
    all_signalled,
    first_failure,
    killed_for_memory,
    wrong_on,
)
from launch.node.failures import Failure as RankFailure
from launch.supervise.policy import Failure
from launch.supervise.run_files import RunState, has_stepped

_SIGNALS: dict[int, str] = {Exit.KILLED: "SIGKILL", Exit.TERMINATED: "SIGTERM"}
_AGENT_LINES = 400
# Bytes at the end of an agent's log that are searched for Slurm's message, because torchrun's
# output may follow it.
_OOM_BYTES = 16 * TAIL_BYTES
# "Exceeded job memory limit at some point" does not match: that limit includes the page cache, and
# no process was killed.
_OOM = re.compile(
    rb"Detected \d+ oom[_-]kill event|: tasks? [\d,-]+: Out Of Memory|OOM Killed"
    rb"|[Ee]xceeded [\w. ]*memory limit(?! at some point)"
)
# Output of an agent (srun, slurmstepd, torchrun, bash) that explains an end if no rank does.
_TELLING = re.compile(
    r"\berror: |command not found|No such file|Permission denied|[Oo]ut.of.memory|oom.kill"
    r"|Error\b.*:"
)


@dataclass(frozen=True)
class Observed:
    """Facts about an ended attempt that the supervisor collected."""

    code: int | None  # exit code of the launcher; None: it could not be started
    before: RunState  # the run's files when the attempt started
    after: RunState  # the run's files after its end
    signalled: bool = False  # a signal requested the run to save and end
    hang: str | None = None  # the watchdog's reason for killing the ranks
    refused: str | None = None  # the reason if the ranks could not be started
    # Node -> faults found by the pre-flight check. Only nodes with faults.
    faults: Mapping[str, list[str]] = field(default_factory=dict)
    # Nodes of the attempt that are down -> reason.
    down: Mapping[str, str] = field(default_factory=dict)
    cancelled: bool = False  # a user stopped the item
    taken: bool = False  # the job loses its nodes: preempted, requeued, or a node was lost
    queue: bool = False  # a requeue can get other nodes
    # the kernel's OOM killer killed a process in the supervisor's own memory cgroup
    oom_kill: bool = False
    limit: str | None = None  # text of `memory_limit`


def classify(kind: str, folder: Path, seen: Observed) -> tuple[str, Failure | None]:
    """Return (outcome, failure) of an attempt. The failure is None if the attempt did not fail.

    kind: kind of the job, "run" or "command".
    folder: folder of the attempt.

    The outcomes are listed at `launch.supervise.policy.End`.
    """
    step = last_step(seen)
    state = seen.after.state if fresh(seen) else None
    # The run's own state counts, whatever happened to its processes afterwards.
    if kind == "run" and state in ("complete", "stopped"):
        return ("finished" if state == "complete" else "saved"), None
    if seen.taken and not seen.cancelled and seen.code != 0:
        return ("saved" if kind == "command" and seen.signalled else "interrupted"), None
    if seen.faults:
        node, faults = next(iter(seen.faults.items()))
        return "unhealthy", Failure("health", f"{node}: {faults[0]}", host=node)
    if seen.refused is not None:
        return "cancelled" if seen.cancelled else "failed", Failure(
            "place" if seen.queue else "exit", seen.refused
        )
    if kind == "command" and seen.signalled and seen.code != 0:
        # The results of a command remain, and the same command continues from them.
        return ("cancelled" if seen.cancelled else "saved"), None
    if seen.hang is not None:
        return "cancelled" if seen.cancelled else "hang", Failure("hang", seen.hang, step=step)
    if seen.code == 0 and (kind == "command" or seen.signalled):
        return ("finished" if kind == "command" else "saved"), None
    if seen.cancelled:
        return "cancelled", None
    if seen.code == 0:
        words = (
            f"the state in progress.json is {state}"
            if state
            else "progress.json has no state of it"
        )
        return "failed", Failure(
            "exit", f"it ended with 0 before its last step: {words}", step=step, exit=0
        )
    first = first_failure(folder)
    if first is not None and first.kind == "busy":
        return "busy", None
    # Divergence has a special exit code only in runs; a command may use the code for another error.
    if kind == "command" and first is not None and first.kind == "diverged":
        first = replace(first, kind="exit")
    return "failed", _failure(seen, folder, first, step)


def fresh(seen: Observed) -> bool:
    """Return True if this attempt wrote progress.json."""
    return seen.after.writer != seen.before.writer


def last_step(seen: Observed) -> int | None:
    """Return the last complete step of the attempt, or None if unknown.

    If the attempt made no step, return the step from which it would have continued.
    """
    if has_stepped(seen.before, seen.after):
        return seen.after.step
    return (
        seen.before.checkpoint
        if not fresh(seen) or seen.after.recorded_step is None
        else seen.after.recorded_step
    )


def _failure(seen: Observed, folder: Path, first: RankFailure | None, step: int | None) -> Failure:
    """Return the failure of an attempt, from the first of these sources that explains it.

    1. an out-of-memory kill
    2. a node that is down
    3. the first rank that failed (``first``)
    4. the agents' output
    """
    end: dict[str, Any] = {"step": step, "exit": seen.code}
    of_rank = end
    if first is not None:
        of_rank = {"step": step, "exit": first.exit, "rank": first.rank, "host": first.host}
    if (words := _out_of_memory(seen, folder, first)) is not None:
        return Failure("memory", f"{words}; {seen.limit}" if seen.limit else words, **of_rank)
    if seen.down and (
        first is None or first.host in seen.down or first.lost_peer or first.kind == "lost"
    ):
        node, why = next(iter(seen.down.items()))
        return Failure("node", f"{node} is down: {why}", host=node, **end)
    if first is None:
        signal = _SIGNALS.get(seen.code or 0)
        agent_text = agents_words(folder)
        message = (
            f"no rank reports a cause; the launcher ended with {signal or f'code {seen.code}'}"
        )
        return Failure(
            "lost" if signal else "exit",
            f"{message}: {agent_text}" if agent_text else message,
            **end,
        )
    if first.kind == "config" and len(hosts := wrong_on(folder)) == 1:
        message = (
            f"the input is wrong on {hosts[0]} alone (is a file system missing on that node?): "
            f"{first.message}"
        )
        return Failure("node", message, **{**of_rank, "host": hosts[0]})
    return Failure(first.kind, first.message, **of_rank)


def _out_of_memory(seen: Observed, folder: Path, first: RankFailure | None) -> str | None:
    """Return the error message if an out-of-memory kill ended the attempt, otherwise None.

    first: failure of the first rank, or None. The evidence is the kernel's counter of such kills,
    or Slurm's message in an agent's log.
    """
    # True if the rank's keeper survived. Its count of kills is then more reliable than the
    # supervisor's, because its cgroup is that of the rank.
    kept = first is not None and first.kind != "lost"
    if first is None:
        words = killed_for_memory(None, Exit.KILLED) if seen.code else None
    elif OUT_OF_MEMORY in first.message:  # found by the rank's keeper
        return first.message
    elif first.kind in ("config", "diverged", "busy") or all_signalled(folder):
        return None
    else:
        words = killed_for_memory(
            first.message, Exit.KILLED if first.kind == "lost" else first.exit
        )
    if not words:
        return None
    counted = seen.oom_kill and not kept
    logs = (folder / "logs").glob("agents*.log")
    if counted or any(_OOM.search(last_bytes(log, _OOM_BYTES)) for log in logs):
        return words
    return None


def memory_limit(profile: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return a text with the memory limit of a node's ranks and the way to raise it.

    The limit is read from the job's environment if set, otherwise from the profile.
    """
    nodes = profile.get("nodes") or {}
    counts = {
        "NODE": 1,
        "CPU": environ.get("SLURM_CPUS_ON_NODE") or nodes.get("cpus"),
        "GPU": environ.get("SLURM_GPUS_ON_NODE") or nodes.get("gpus"),
    }
    mib = 0
    for name, count in counts.items():
        size = environ.get(f"SLURM_MEM_PER_{name}", "")
        if size.isdecimal() and int(size):
            mib = int(size) * int(count or 1)
            break
    requested, slurm = nodes.get("memory"), profile.get("scheduler") == "slurm"
    number, unit = str(requested or "").rstrip("KMGT"), str(requested or "")[-1:]
    if slurm and requested is not None and not int(number):
        return "the job may use all memory of a node (nodes.memory): use less, or nodes with more"
    if mib:
        size = f"{mib / 1024:g} GiB" if mib >= 1024 else f"{mib} MiB"
    elif not slurm:
        return "the limit is the memory of this machine, or of its container"
    elif requested is None:
        return (
            "the limit is the partition's default, or all memory of a node: nodes.memory of the "
            "profile is null"
        )
    else:
        size = f"{number} {unit if unit in 'KMGT' else 'M'}iB"
    return f"the job's limit is {size} a node: raise nodes.memory of the profile"


def agents_words(folder: Path) -> str | None:
    """Return the first line of the agents' output that reports an error.

    If no line reports an error, return the last line. If the agents wrote no output, return None.
    """
    lines = [
        line.strip()
        for path in sorted((folder / "logs").glob("agents*.log"))
        for line in last_lines(path, _AGENT_LINES)
    ]
    return next((line for line in lines if _TELLING.search(line)), lines[-1] if lines else None)


_AWAY = re.compile(
    r"Unable to contact slurm controller|gave no answer|[Cc]onnection (?:refused|timed out)"
    r"|connect failure|Zero Bytes|Unexpected message"
    r"|[Cc]ommunication connection failure|[Ss]ocket timed out|backup controller|Slurm backup"
    r"|temporarily unable"
)
# Faults reported by `launch.node.checks` that remain until the hardware is repaired or reset.
_LASTING = re.compile(
    r"\bECC\b|row of its memory|\bXid\b|GPU is lost|fallen off the bus|its driver asks for|entries "
    r"of a product are wrong"
    r"|^(?!0 )\d+ GPUs are visible, the profile says"
)


def cancelled(fields: Mapping[str, str], restarts: int) -> bool:
    """Return True if a user cancelled the Slurm job.

    fields: the fields of scontrol for the job.
    restarts: Slurm's restart count when this supervisor started.

    The job's state is then CANCELLED, or it is COMPLETING without a reason and with exit code 0:0.
    Jobs that were preempted or requeued do not count.
    """
    if _preempted(fields) or fields.get("Restarts", "0") != str(restarts):
        return False
    over = (
        fields.get("JobState") == "COMPLETING"
        and fields.get("Reason") == "None"
        and fields.get("ExitCode") == "0:0"
    )
    return over or fields.get("JobState") == "CANCELLED"


def taken(fields: Mapping[str, str], restarts: int) -> bool | None:
    """Return True if the Slurm job loses its nodes.

    It was preempted or requeued, or a node was lost. Return False if the job ends at its time limit
    or was cancelled by a user. Return None if the job runs and no reason for an end is known.

    fields: the fields of scontrol for the job.
    restarts: Slurm's restart count when this supervisor started.
    """
    if _preempted(fields) or fields.get("Restarts", "0") != str(restarts):
        return True
    if (
        fields.get("Reason") == "TimeLimit"
        or fields.get("JobState") == "TIMEOUT"
        or cancelled(fields, restarts)
    ):
        return False
    return None if fields.get("JobState", "RUNNING") == "RUNNING" else True


def _preempted(fields: Mapping[str, str]) -> bool:
    return fields.get("JobState") == "PREEMPTED" or fields.get("PreemptTime", "None") not in (
        "None",
        "N/A",
        "Unknown",
        "",
    )


def is_away(refusal: str) -> bool:
    """Return True if a Slurm error means that the controller does not answer, which is temporary.

    refusal: text of the error.
    """
    return bool(_AWAY.search(refusal))


def is_lasting(fault: str) -> bool:
    """Return True if the text of a node's fault names a hardware fault.

    Other faults, such as a full disk, a busy GPU or a missing mount, may disappear within hours.
    """
    return bool(_LASTING.search(fault))
