"""launch: where ranks run, as the supervisor's loop sees it: this machine (`local`) or the nodes of a Slurm allocation (`on_slurm`).

Standard library alone: it runs inside jobs, from the snapshot. The loop decides; a place starts, signals, ends, and says what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launch.job import Item, Job


@dataclass(frozen=True)
class Attempt:
    """One start of an item's ranks."""

    number: int  # from 1, over all submissions of the item
    folder: Path  # attempts/NNNN of the item; it exists, with logs/ in it
    job: Job
    item: Item
    nodes: tuple[str, ...]  # the nodes of this attempt; the first is the head node
    environment: Mapping[str, str]  # the ranks' whole environment, LAUNCH_ATTEMPT=FOLDER among it, and secrets: never written anywhere


class PlaceError(Exception):
    """The place could not do what it was asked (no allocation, Slurm refused): one line. The loop treats it as a failure of the attempt."""


class Unreachable(PlaceError):
    """The queue does not answer: this passes."""


class Running(Protocol):
    """The ranks of an attempt, between their start and their end."""

    def poll(self) -> int | None:
        """The exit code of the whole (torchrun's, srun's; 128 + n for a signal), once no process is left; None before. Does not wait."""

    def signal(self, number: int) -> None:
        """Send a signal to every rank's `launch.rank` (USR1: save and end; USR2: dump stacks; TERM). Never raises: ranks may be gone."""

    def kill(self) -> None:
        """End every process with SIGKILL, on all nodes, and return once they are gone, or after a minute if a node does not answer."""


class Place(Protocol):
    """Where an item runs."""

    @property
    def job_id(self) -> str | None:
        """Slurm's job id (of an array's task: its own), or None."""

    @property
    def restart_count(self) -> int:
        """How often Slurm requeued this job; 0 elsewhere."""

    @property
    def can_requeue(self) -> bool:
        """Whether `requeue` can get other nodes and another time limit."""

    def nodes(self) -> tuple[str, ...]:
        """The nodes to run on, the head node first. Raises PlaceError."""

    def check_nodes(self, attempt: Attempt) -> dict[str, list[str]]:
        """Run the pre-flight check (`launch.node_check`) on every node; node -> its faults, empty for a sound one.

        A node that does not answer within health.timeout_seconds has that as its fault. The reports are in ATTEMPT/health/NODE.json.
        """

    def start(self, attempt: Attempt) -> Running:
        """Start the ranks (`launch.supervise.command.agent_command`). Raises PlaceError.

        The agents' own output goes to ATTEMPT/logs/agents.log, or a file a node, agents_NODE.log.
        """

    def down_nodes(self) -> dict[str, str]:
        """Nodes of the allocation that are down, failing or draining now -> the reason. Empty when nothing is known. Never raises."""

    def cancelled(self) -> bool:
        """Whether the queue says that a person cancelled this job; asked after SIGTERM. Never raises; False where nothing is known."""

    def taken(self) -> bool | None:
        """Whether the queue takes the allocation away (preemption, a requeue, a lost node); asked once after a bad end. Never raises.

        False: the job ends for a reason of its own, such as its time limit; None: nothing is known of an end.
        """

    def enough_without(self, exclude: Sequence[str]) -> bool:
        """Whether the job could still get its nodes if it were never given those. Never raises; False where nothing is known."""

    def requeue(self, exclude: Sequence[str]) -> None:
        """Put this job back into the queue, never again on the nodes `exclude`, if enough are left. Raises PlaceError, Unreachable.

        Ends this process (Slurm kills it): it returns, or raises, only where that failed.
        """
