"""Supervise one item: start attempts until the item is finished or must stop.

An attempt is one start of the item's ranks. Uses only the standard library.
"""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fem_common.errors import reason
from fem_common.exits import Exit
from fem_common.text import counted
from launch.job import Job, launch_folder, write_json
from launch.supervise import policy, run_files
from launch.supervise.classify import Observed, classify, fresh, is_lasting, last_step
from launch.supervise.journal import Journal, cordon, cordon_file, cordoned
from launch.supervise.place import Attempt, Place, PlaceError, Unreachable
from launch.supervise.policy import (
    KEEP_SECONDS,
    MISPLACED_TIMES,
    Decision,
    Situation,
    decide,
    describe,
)
from launch.supervise.run_files import Record, RunState, has_stepped, read, read_state
from launch.supervise.watch import POLL_SECONDS, Signals, Watch, taken_away

REQUEUE_TRIES = 30
REQUEUE_SECONDS = 10.0  # first pause between two tries
REQUEUE_MAX_SECONDS = 60.0  # longest pause, while Slurm's controller cannot be reached
# How long a node is cordoned for a fault that may disappear: a full disk, a busy GPU, a missing
# mount.
PASSING_SECONDS = 6 * 3600.0
# Time for the user's notify command to finish before a requeue, which would kill it.
HOOK_SECONDS = 5.0
# Outcomes of an attempt that are not reported to the user's notify command.
WITHOUT_EVENT = {"finished", "cancelled", "interrupted", "misplaced"}


class Supervisor:
    """Supervisor of one item of a job: makes attempts and carries out the policy's decisions."""

    def __init__(
        self, job: Job, index: int, place: Place, signals: Signals, journal: Journal, *, show: bool
    ) -> None:
        self.job = job
        self.item = job.items[index]
        self.place = place
        self.signals = signals
        self.journal = journal
        self.show = show
        self.directory = self.item.path
        self.limits = policy.limits_of(job.section("restarts"))
        self.records: list[Record] = []

    def run(self) -> int:
        """Make attempts until the item ends, and return the exit code.

        0: the item is finished, or was saved and can continue. 1: it stopped. 2: its input is
        wrong. If this job is requeued, Slurm ends the process and the method does not return.

        Raises:
            OSError: the item's directory cannot be written, even after several tries.
        """
        trouble = None
        for number in range(1, self.limits.max_failures + 2):
            try:
                return self._run(trouble)
            except OSError as error:
                trouble = f"the item's directory: {reason(error)}"
                if number > self.limits.max_failures or self.signals.any:
                    self.journal.state("stopped", trouble)
                    raise
                self.journal.log(trouble)
                self._wait(policy.back_off(number, self.limits), trouble)
        raise AssertionError("unreachable")

    def _run(self, trouble: str | None) -> int:
        """Make attempts until the item ends, and return the exit code.

        trouble: the error that interrupted the previous call, or None.
        """
        found = run_files.records(self.directory)
        lost = bool(found) and found[-1].ended is None
        self.records = run_files.close_lost(self.directory, found, trouble)
        if lost:
            self.journal.log(
                f"attempt {found[-1].attempt} is lost: {describe(self.records[-1].failure)}"
            )
            code = self._decide(None, wait=False)
            if code is not None:
                return code
        while True:
            code = self._leave_early()
            if code is None:
                code = self._decide(self._attempt())
            if code is not None:
                return code

    def _attempt(self) -> Observed:
        """Make an attempt, wait for its end, and return the observations.

        The attempt's record is closed and appended to ``records``.
        """
        number, folder = run_files.new_folder(self.directory)
        before = read_state(self.directory)
        record = Record(
            attempt=number,
            started=time.time(),
            job_id=self.place.job_id,
            restart_count=self.place.restart_count,
            nodes=(),
            world_size=self.job.world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            step_start=before.checkpoint,
            checkpoint_start=before.checkpoint,
            folder=folder,
        )
        record.save()
        self.records = run_files.prune(self.records, self.journal.log)
        environment = run_files.ranks_environment(
            self.job, self.item, folder, os.environ, local=self.place.job_id is None
        )
        run_files.keep_inputs(self.job, self.item, folder, environment)
        self.journal.attempt = number
        try:
            nodes = self.place.nodes()
            record = replace(record, nodes=nodes)
            record.save()
            self.journal.nodes = nodes
            if unwanted := self._unwanted(nodes):
                self.journal.log(f"{', '.join(unwanted)} of this allocation: cordoned or excluded")
                return self._close(record, Observed(None, before, before), outcome="misplaced")
            attempt = Attempt(number, folder, self.job, self.item, nodes, environment)
            if faults := self._check(attempt):
                return self._not_begun(record, before, faults=faults)
            if self.signals.any:  # received during the check
                outcome = "cancelled" if self._stop_wish() else "saved"
                return self._close(
                    record, Observed(0, before, before, signalled=True), outcome=outcome
                )
            self._report_start(attempt, before)
            seen = Watch(attempt, self.place, self.signals, self.journal, self._stop_wish).run(
                before, show=self.show
            )
        except PlaceError as error:
            return self._not_begun(record, before, refused=str(error), queue=self.place.can_requeue)
        return self._close(record, seen)

    def _not_begun(self, record: Record, before: RunState, **seen: Any) -> Observed:
        """Close an attempt whose ranks were not started, and return the observations.

        seen: further fields of `Observed`.
        """
        cancelled = self._stop_wish() is not None
        taken = not cancelled and taken_away(self.place, self.signals)
        return self._close(
            record, Observed(None, before, before, cancelled=cancelled, taken=taken, **seen)
        )

    def _unwanted(self, nodes: tuple[str, ...]) -> list[str]:
        """Return the allocated nodes that this item must not use and that a requeue can replace.

        Return an empty list if excluded nodes were allocated `MISPLACED_TIMES` times in a row: then
        the nodes are accepted.
        """
        if (
            not self.place.can_requeue
            or policy.misplaced([record.end for record in self.records]) >= MISPLACED_TIMES
        ):
            return []
        excluded = self._excluded()
        unwanted = [node for node in nodes if node in excluded]
        return unwanted if unwanted and self.place.enough_without(excluded) else []

    def _check(self, attempt: Attempt) -> dict[str, list[str]]:
        """Run the pre-flight check and return node -> faults for each node that fails it."""
        if not self.job.section("health").get("check", True):
            return {}
        self.journal.state("checking")
        faults = {node: found for node, found in self.place.check_nodes(attempt).items() if found}
        for node, found in faults.items():
            self.journal.log(f"{node} fails its check: {'; '.join(found)}")
        return faults

    def _report_start(self, attempt: Attempt, before: RunState) -> None:
        """Report the start of an attempt."""
        ranks = counted(self.job.world_size, "rank")
        where = f"on {', '.join(attempt.nodes)}" + (
            f" (job {self.place.job_id})" if self.place.job_id else ""
        )
        since = f", from step {before.checkpoint}" if before.checkpoint is not None else ""
        self.journal.log(f"attempt {attempt.number}: {ranks} {where}{since}")
        self.journal.state("running")
        self.journal.event(
            "started", f"attempt {attempt.number} {where}{since}", step=before.checkpoint
        )

    def _close(self, record: Record, seen: Observed, outcome: str | None = None) -> Observed:
        """Classify an attempt, save its closed record, report the end, and return ``seen``.

        outcome: outcome to record without a failure; None: the classification's.
        """
        kind, failure = classify(self.job.kind, record.folder, seen)
        if outcome is not None:
            kind, failure = outcome, None
        run = self.job.kind == "run"
        record = replace(
            record,
            ended=time.time(),
            outcome=kind,
            failure=failure,
            step_end=last_step(seen) if run else None,
            checkpoint_end=read_state(self.directory).checkpoint if run else None,
        )
        record.save()
        self.records.append(record)
        self._report_end(record, seen)
        return seen

    def _report_end(self, record: Record, seen: Observed) -> None:
        """Report the end of an attempt."""
        text = (
            seen.after.message if fresh(seen) and record.outcome in ("finished", "saved") else None
        )
        about = describe(record.failure) if record.failure else text
        at = (
            f" at step {record.step_end}"
            if record.step_end is not None and not record.failure
            else ""
        )
        ended = f"{record.outcome}{at}"
        if record.outcome == "saved" and self.job.kind == "run" and not record.progress:
            ended = (
                f"ended{at}, nothing new saved"
                if has_stepped(seen.before, seen.after)
                else "ended before its first step"
            )
        self.journal.log(f"attempt {record.attempt} {ended}" + (f": {about}" if about else ""))
        if record.outcome not in WITHOUT_EVENT:
            event = record.outcome if record.outcome in ("saved", "hang") else "failed"
            self.journal.event(event, about or ended, step=record.step_end)

    def _decide(self, seen: Observed | None, *, wait: bool = True) -> int | None:
        """Decide after an attempt and carry out the decision.

        Return the exit code, or None if another attempt is to be made.

        seen: observations of the attempt; None if an earlier process lost it.
        """
        stop = self._stop_wish()
        faults = seen.faults.items() if seen and self.records[-1].outcome == "unhealthy" else ()
        unhealthy = {node: next(filter(is_lasting, found), found[0]) for node, found in faults}
        situation = Situation(
            stop=stop,
            ending=self.signals.any,
            restart=self.signals.any and not self.signals.ends,
            can_requeue=self.place.can_requeue,
            down=seen.down if seen else {},
            unhealthy=unhealthy,
            nodes=max(1, len(self.records[-1].nodes)),
            checkpoints=self.job.kind == "run",
        )
        history = [record.end for record in self.records]
        decision = decide(history, self.limits, situation)
        self.records[-1] = self.records[-1].decided(decision)
        self.journal.failures = policy.failures_since_progress(policy.since_stop(history))
        self._cordon(decision, unhealthy)
        if decision.action == "finish":
            self.journal.state("finished")
            self.journal.event("finished", decision.reason, step=self.records[-1].step_end)
            return Exit.DONE
        if decision.action == "stop":
            return self._stopped(decision, cancelled=stop is not None)
        if decision.action == "requeue":
            return self._requeue(decision.reason)
        self._wait(decision.delay_seconds if wait else 0.0, decision.reason)
        return None

    def _stopped(self, decision: Decision, *, cancelled: bool) -> int:
        """End an item that is not finished: report the reason and return the exit code.

        Write stop.json if the supervisor gave up. The item then does not restart until a user
        requeues it.
        """
        last = self.records[-1]
        if decision.gave_up:
            why = {
                "why": "gave up",
                "message": decision.reason,
                "time": time.time(),
                "by": f"attempt {last.attempt}",
            }
            write_json(launch_folder(self.directory) / "stop.json", why)
        cancelled = cancelled or last.outcome == "cancelled"
        self.journal.state("cancelled" if cancelled else "stopped", decision.reason)
        word = "cancelled" if cancelled else "stopped"
        self.journal.log(
            decision.reason
            if decision.reason.startswith(f"{word}: ")
            else f"{word}: {decision.reason}"
        )
        if decision.gave_up:
            self.journal.log(
                "what failed first: python -m launch logs --errors "
                f"{shlex.quote(str(self.directory))}"
            )
            self.journal.log(
                "again, with the same code and settings: python -m launch requeue "
                f"{shlex.quote(str(self.directory))}"
            )
            self.journal.log(
                "with corrected code or settings: the command that started it, with --update"
            )
        self.journal.event("stopped", decision.reason, step=last.step_end)
        if last.outcome == "saved" and not cancelled:
            return Exit.DONE
        return (
            Exit.WRONG_INPUT
            if last.failure is not None and last.failure.kind == "config"
            else Exit.FAULT
        )

    def _requeue(self, reason: str) -> int:
        """Requeue the job. Return an exit code if that fails or a user stopped the item.

        If the requeue succeeds, Slurm ends this process and the method does not return.
        """
        message = f"back to the queue: {reason}"
        number = 0
        pause = REQUEUE_SECONDS
        while number < REQUEUE_TRIES:
            if (stop := self._stop_wish(ask=True)) is not None:
                return self._end_without_attempt(stop)
            self.journal.state("requeued", reason)
            self.journal.log(message)
            self.journal.settle(0.0 if self.signals.ends else HOOK_SECONDS)
            try:
                self.place.requeue(self._excluded())
                number += 1
                message = "Slurm accepted the requeue, but this process still runs"
            except Unreachable as error:
                # Tried without limit, unless the job is about to end.
                message = f"the requeue must wait: {error}"
                number += bool(self.signals.ends)
                pause = min(1.5 * pause, REQUEUE_MAX_SECONDS)
            except PlaceError as error:
                number += 1
                message = f"the requeue failed ({number} of {REQUEUE_TRIES}): {error}"
            time.sleep(REQUEUE_SECONDS if self.signals.ends else pause)
        self.journal.log(message)
        self.journal.state("stopped", message)
        self.journal.event("stopped", message)
        return Exit.FAULT

    def _excluded(self) -> list[str]:
        """Return the nodes that this item must not get again.

        These are the nodes in the cordon file, and the nodes that decisions have excluded since a
        user last started the item.
        """
        stops = [index for index, record in enumerate(self.records[:-1]) if record.end.stopped]
        recent = self.records[stops[-1] + 1 :] if stops else self.records
        decided = list[str]()
        for record in recent:
            decided += (record.decision or {}).get("exclude") or ()
        try:
            away = list(cordoned(cordon_file(self.job.profile, self.job.working_directory)))
        except OSError as error:
            self.journal.log(f"the cordon file cannot be read: {error}")
            away = []
        return list(dict.fromkeys([*decided, *away]))

    def _cordon(self, decision: Decision, unhealthy: Mapping[str, str]) -> None:
        """Add the nodes in ``decision.cordon`` to the cordon file, which all runs read.

        unhealthy: node -> fault for the nodes that failed the pre-flight check.

        An entry is permanent for a hardware fault. It lasts `PASSING_SECONDS` for a fault that may
        disappear (another fault of the check, or input that is wrong on this node alone), and
        `KEEP_SECONDS` for other failures.
        """
        path = cordon_file(self.job.profile, self.job.working_directory)
        failure = self.records[-1].failure
        for node, why in decision.cordon.items():
            passing = node in unhealthy or (
                failure is not None and failure.exit == Exit.WRONG_INPUT
            )
            if node in unhealthy and is_lasting(why):
                until = None
            elif passing:
                until = time.time() + PASSING_SECONDS
            else:
                until = time.time() + KEEP_SECONDS
            try:
                added = cordon(path, [node], why, self.directory, until)
            except OSError as error:
                self.journal.log(f"{node} cannot be cordoned: {error}")
                continue
            if added:
                self.journal.log(f"{node} is cordoned in {path}: {why}")
                self.journal.event("cordoned", f"{node}: {why}", node=node)

    def _wait(self, seconds: float, reason: str) -> None:
        """Wait ``seconds`` before the next attempt. A signal ends the wait.

        Without a queue, earlier signals that requested only a save and a restart are discarded
        before the wait.
        """
        if self.signals.any and not self.signals.ends and not self.place.can_requeue:
            self.signals.forget()
        self.journal.state("waiting", f"{reason}; again in {seconds:g} s")
        self.journal.log(f"again in {seconds:g} s")
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.signals.any:
            time.sleep(POLL_SECONDS)

    def _leave_early(self) -> int | None:
        """End or requeue the item if a stop or a signal requires it, and return the exit code.

        Return None if another attempt may be made.
        """
        if (stop := self._stop_wish()) is not None:
            return self._end_without_attempt(stop)
        if not self.signals.any:
            return None
        if self.place.can_requeue:
            return self._requeue(f"{self.signals.describe()} arrived between two attempts")
        if not self.signals.ends:
            self.signals.forget()
            return None
        message = (
            f"{self.signals.describe()} arrived between two attempts; the same command continues"
        )
        self.journal.log(message)
        self.journal.state("stopped", message)
        return Exit.DONE

    def _end_without_attempt(self, message: str) -> int:
        """Record that a user stopped the item before an attempt, and return the exit code."""
        self.journal.log(f"not started: {message}")
        self.journal.state("cancelled", message)
        return Exit.FAULT

    def _stop_wish(self, *, ask: bool = False) -> str | None:
        """Return the reason for which a user stopped this item, or None.

        The sources are stop.json and Slurm's queue. The queue is queried after SIGTERM, or if
        ``ask`` is True.
        """
        stop = read(launch_folder(self.directory) / "stop.json")
        if stop is not None:
            return f"{stop.get('why') or 'stopped'}: {stop.get('message') or 'no reason given'}"
        if self.place.can_requeue and (ask or self.signals.ends) and self.place.cancelled():
            return "cancelled in the queue"
        return None
