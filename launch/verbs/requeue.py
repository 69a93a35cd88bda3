"""``requeue``: continue a run that ended, or save and restart one that runs.

A run that was cancelled, gave up or was lost continues with the code that it began with.

requeue DIR...                               as it was submitted
requeue DIR --cluster PROFILE --exclude n7   with the profile's present settings, without node n7
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fem_common.errors import UserError
from launch.cluster import slurm
from launch.cluster.profile import load_profile
from launch.job import Job
from launch.job.item_state import Standing, counted, find_job, standings, state_of
from launch.job.plan import locked
from launch.job.request import absolute
from launch.job.snapshot import read_code
from launch.supervise.journal import cordon_file
from launch.verbs import options
from launch.verbs.local import run_items
from launch.verbs.submit import excluded, send


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    options.add(parser, "directories")
    reads_again = "a profile to read again (default: as it was submitted)"
    options.add(parser, "--cluster", required=False, help=reads_again)
    options.add(parser, "--set", "--exclude", "--at-once")


def main(arguments: argparse.Namespace) -> int:
    """Requeue each directory's unfinished items. Return 0, or a local run's exit code.

    Raises:
        UserError: an item cannot be requeued.
    """
    if arguments.set and not arguments.cluster:
        raise UserError("--set changes a profile that is read again; give --cluster, too")
    changes = {}
    if arguments.cluster:
        profile = load_profile(arguments.cluster, arguments.set)
        changes = {"profile": profile.as_json(), "profile_path": absolute(arguments.cluster)}
    again = Again(changes, arguments.exclude, arguments.at_once)
    worst = 0
    for directory in arguments.directories:
        job, items = find_job(directory)
        with locked(job.path):
            begin = _requeue(job, items, again)
        if begin is not None:
            worst = max(worst, run_items(*begin, at_once=again.at_once or 1))
    return worst


@dataclass(frozen=True)
class Again:
    """Settings of a requeue."""

    changes: dict[str, Any]  # fields of the job to replace, for a profile that is read again
    exclude: Sequence[str]  # nodes not to use, in addition to the profile's
    at_once: int | None  # array tasks that may run at a time; None: no limit


def _requeue(job: Job, items: Sequence[int], again: Again) -> tuple[Job, list[int]] | None:
    """Restart the items that are active, and submit the stopped and idle items to Slurm.

    A job for this machine has no queue: return (job, indices of the items to start), which the
    caller starts after releasing the directory's lock. Otherwise return None.

    Raises:
        UserError: the code snapshot is missing, or an item cannot be requeued.
    """
    chosen = [standing for standing in standings(job) if standing.index in items]
    begin = [standing.index for standing in chosen if standing.kind in ("stopped", "idle")]
    restart(job, [standing for standing in chosen if standing.kind == "active"], again.exclude)
    if not begin:
        if not any(standing.kind == "active" for standing in chosen):
            print(
                f"{job.name}: nothing to do: {counted(chosen)}; to run it again: submit it with "
                "--update"
            )
        return None
    if read_code(job.path) is None:
        raise UserError(
            f"{job.directory}: its code snapshot is missing; submit it again to take a new one"
        )
    if again.changes:
        job = replace(job, **again.changes)
        job.save()
    for index in begin:
        _allow(job, index)
    if not job.on_slurm:
        return job, begin
    exclude = excluded(job, again.exclude)
    job_id = send(job, begin, at_once=again.at_once, exclude=exclude)
    what = f"{len(begin)} of {len(job.items)} items" if job.array else job.directory
    print(f"requeued {job.name} as job {job_id}: {what}")
    return None


def _allow(job: Job, index: int) -> None:
    """Remove stop.json, which prevents an item's start."""
    (job.items[index].launch / "stop.json").unlink(missing_ok=True)


def restart(job: Job, active: Sequence[Standing], named: Sequence[str] = ()) -> None:
    """Signal running items to save and restart, and release held jobs.

    Items that are saving in order to end are restarted too. Waiting jobs then exclude exactly these
    nodes: those in the cordon file, the profile's excluded nodes, and ``named``.

    Raises:
        UserError: an item runs on a machine that this host cannot reach.
    """
    for standing in active:
        if standing.pid is None and standing.job_id is None:
            raise UserError(f"{job.directory}: {standing.message}; requeue it on that host")
        _allow(job, standing.index)
        if standing.pid is not None:
            os.kill(standing.pid, signal.SIGUSR1)
            effect = "saves and starts again"
        else:
            effect = _restart_on_slurm(job, standing, str(standing.job_id), named)
        print(f"{job.items[standing.index].name}: {standing.where} {effect}")


def _restart_on_slurm(job: Job, standing: Standing, job_id: str, named: Sequence[str]) -> str:
    """Restart one job or array task according to its state in Slurm.

    Return a text that describes the action. named: nodes to exclude.
    """
    state = state_of(job.items[standing.index].directory)
    over = state.get("job_id") == job_id and state.get("state") in ("cancelled", "stopped")
    if standing.state == "COMPLETING" or (standing.state == "RUNNING" and over):
        return "is just ending; if it does not come back to the queue, give this command again"
    if standing.state == "RUNNING":
        slurm.signal_batch([job_id], "USR1")
        return "saves and is requeued"
    if "held" in standing.message.lower() or standing.state == "REQUEUE_HOLD":
        slurm.call("scontrol", "release", job_id)
        return "was held, and is released"
    away = list(
        dict.fromkeys([*(job.section("slurm").get("exclude") or ()), *excluded(job, named)])
    )
    slurm.call("scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(away)}")
    reason = f" ({standing.message})" if standing.message else ""
    text = (
        f"already waits in the queue{reason}, now for any "
        f"node{' except ' + ', '.join(away) if away else ''}"
    )
    with suppress(slurm.SlurmError):  # the update is already made
        nodes = slurm.all_nodes() if away else []
        if nodes and not slurm.enough_nodes(nodes, slurm.job_fields(job_id), slurm.hosts(away)):
            where = cordon_file(job.profile, job.working_directory)
            text += (
                f"; too few nodes are left, so it cannot start: see {where}, slurm.exclude, "
                "--exclude"
            )
    return text
