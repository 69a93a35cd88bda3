"""launch: what Slurm's own fields of a job, its refusals and a node's faults mean for a run. Pure; standard library alone.

``fields`` are those of ``scontrol show job``, by name; ``restarts`` is SLURM_RESTART_COUNT of whoever asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_AWAY = re.compile(
    r"Unable to contact slurm controller|gave no answer|[Cc]onnection (?:refused|timed out)|connect failure|Zero Bytes|Unexpected message"
    r"|[Cc]ommunication connection failure|[Ss]ocket timed out|backup controller|Slurm backup|temporarily unable"
)
# Faults by the words of `launch.node_check`: these stay until someone mends or resets the hardware.
_LASTING = re.compile(
    r"\bECC\b|row of its memory|\bXid\b|GPU is lost|fallen off the bus|its driver asks for|entries of a product are wrong"
    r"|^(?!0 )\d+ GPUs are visible, the profile says"
)


def cancelled(fields: Mapping[str, str], restarts: int) -> bool:
    """Whether a person cancelled the job: Slurm ends it, for none of its own reasons, and has not put it back into the queue."""
    if _preempted(fields) or fields.get("Restarts", "0") != str(restarts):
        return False
    over = fields.get("JobState") == "COMPLETING" and fields.get("Reason") == "None" and fields.get("ExitCode") == "0:0"
    return over or fields.get("JobState") == "CANCELLED"


def taken(fields: Mapping[str, str], restarts: int) -> bool | None:
    """Whether the job's nodes are being taken away: preempted, requeued by someone, a node lost.

    False: the job ends for a reason of its own (its time limit, a person's cancel); None: it runs, and nothing is known against it.
    """
    if _preempted(fields) or fields.get("Restarts", "0") != str(restarts):
        return True
    if fields.get("Reason") == "TimeLimit" or fields.get("JobState") == "TIMEOUT" or cancelled(fields, restarts):
        return False
    return None if fields.get("JobState", "RUNNING") == "RUNNING" else True


def _preempted(fields: Mapping[str, str]) -> bool:
    return fields.get("JobState") == "PREEMPTED" or fields.get("PreemptTime", "None") not in ("None", "N/A", "Unknown", "")


def is_away(refusal: str) -> bool:
    """Whether a command of Slurm's failed because the controller does not answer, which passes."""
    return bool(_AWAY.search(refusal))


def is_lasting(fault: str) -> bool:
    """Whether a node's fault is one of its hardware: a full disk, a busy GPU or a mount that is missing may be gone in hours."""
    return bool(_LASTING.search(fault))


def has_features(available: str, wanted: str) -> bool:
    """Whether a node with these features (``a,b``) may take a job that asks for ``wanted``; true where that is more than ``a&b``."""
    if wanted in ("", "(null)") or not re.fullmatch(r"[\w.-]+(?:[&,][\w.-]+)*", wanted):
        return True
    return set(re.split("[&,]", wanted)) <= set(available.split(","))
