"""``submit``: submit a training run, or another command, to Slurm.

    submit CONFIG.yaml [section.key=value ...] --cluster PROFILE --nodes 8
    submit --cluster PROFILE --tasks 16 --at-once 8 -- data_prep run --out DIR
    submit --cluster PROFILE --dependency RUN -- tools.hf export RUN OUT

The run continues automatically after time limits, preemption, node failures and crashes. Its code
is copied at submission. The same command again continues a run that ended early, with the code that
it began with, and has no effect if everything is finished.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from fem_common import secrets
from fem_common.errors import UserError
from fem_common.files import write_atomically
from fem_common.text import ranges
from launch.cluster import slurm
from launch.cluster.profile import load_profile
from launch.job import Job, append_json, plan
from launch.job.item_state import counted, find_job, standings
from launch.job.plan import Draft, locked, settle, write
from launch.job.rehearsal import rehearse
from launch.job.render import render
from launch.job.request import Request, Wanted, data_fault, wanted
from launch.supervise.journal import cordon_file, cordoned
from launch.verbs import options

# A dependency in sbatch's own form, which is passed on unchanged.
SBATCH_DEPENDENCY = re.compile(
    r"(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer)(:[0-9_+]+)+|singleton"
)


def dependency(words: Sequence[str], *, ask: bool = True) -> str | None:
    """Translate the words of --dependency to sbatch's form, such as ``afterok:12:13``.

    A word is a job id, a condition such as ``afterok:ID``, or a directory of a job. Return None if
    no job must be waited for.

    ask: False leaves out the query of Slurm's queue.

    Raises:
        UserError: a word has another form; the job of a directory is neither finished nor in the
            queue; or a job has ended in a way after which a dependent job would never start.
    """
    conditions: list[str] = []
    for word in words:
        if re.fullmatch(r"\d+(_\d+)?", word):
            if ask:
                _check("afterok", word, word)
            conditions.append(f"afterok:{word}")
        elif all(SBATCH_DEPENDENCY.fullmatch(part) for part in word.split(",")):
            for kind, *ids in (part.split(":") for part in word.split(",")):
                for job_id in ids if ask and kind in _BLOCKING else ():
                    _check(kind, job_id.partition("+")[0], f"{kind}:{job_id}")
            conditions.append(word)
        elif Path(word).is_dir():
            conditions += _of_directory(word, ask)
        else:
            raise UserError(
                f"--dependency {word}: neither a job's id, nor afterok:ID, nor a directory"
            )
    return ",".join(dict.fromkeys(conditions)) or None


# Condition -> outcome of the awaited job after which the dependent job would never start.
_BLOCKING = {"afterok": "failure", "aftercorr": "failure", "afternotok": "success"}


def _check(kind: str, job_id: str, word: str) -> None:
    """Raise UserError if a job that depends on ``job_id`` would never start.

    This is the case if Slurm does not list the job, or if the job ended in a way that contradicts
    the condition ``kind`` (such as afterok). word: the user's word, for the error text.
    """
    found = slurm.queue([job_id])
    state = found.get(job_id)
    if state is None:
        raise UserError(
            f"--dependency {word}: Slurm knows no such job, or has forgotten it; name the job by "
            "its directory"
        )
    if kind == "aftercorr" and any(
        task.active or task.state == "COMPLETED" for task in found.values()
    ):
        # The dependent tasks that correspond to these start.
        return
    outcome = "success" if state.state == "COMPLETED" else "failure"
    if not state.active and outcome == _BLOCKING[kind]:
        raise UserError(
            f"--dependency {word}: that job is {state.state}; a job after it would never start"
        )


def _of_directory(directory: str, ask: bool) -> list[str]:
    """Return the dependencies on the jobs that run a directory's items, one per job.

    Return an empty list if all items are finished.
    """
    job, items = find_job(directory)
    chosen = [
        item for item in standings(job, ask=ask) if item.index in items and item.kind != "finished"
    ]
    for item in chosen:
        if item.kind != "active" or item.job_id is None:
            where = job.items[item.index].directory
            if item.kind == "active":
                state = f"runs as {item.where}, which Slurm does not manage"
                remedy = "submit this job after its end"
            elif item.kind == "stopped":
                state = f"is stopped ({item.message})"
                remedy = f"continue it first: python -m launch requeue {shlex.quote(where)}"
            else:
                state = "is not under way" + (f" ({item.message})" if item.message else "")
                remedy = "submit it first"
            raise UserError(
                f"--dependency {directory}: {where} {state}; a job after it would never start: "
                f"{remedy}"
            )
    ids = [
        str(item.job_id) if len(items) < len(job.items) else str(item.job_id).partition("_")[0]
        for item in chosen
    ]
    return [f"afterok:{job_id}" for job_id in dict.fromkeys(ids)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.set_defaults(rest=[])  # the words after --
    options.add(parser, "words", "--cluster", *options.PLACE, *options.SLURM, "--tasks")


def request_of(arguments: argparse.Namespace) -> Request:
    """Return the request of a command line, with the profile loaded, including --set and --time.

    Raises:
        UserError: both a run and a command are given, or the profile is invalid.
    """
    given = vars(arguments)
    limit = [f'slurm.time="{given["time"]}"'] if given.get("time") else []
    rest = given.get("rest")  # a sweep has none
    if rest and arguments.words:
        raise UserError(
            f"both a run ({arguments.words[0]}) and a command after -- ({rest[0]}); give one"
        )
    known = {field.name: given[field.name] for field in fields(Request) if field.name in given}
    return Request(
        **{
            **known,
            "words": tuple(rest or arguments.words),
            "is_command": bool(rest),
            "profile": load_profile(arguments.cluster, [*arguments.set, *limit]),
            "profile_path": arguments.cluster,
        }
    )


def prepare(request: Request, *, data: bool = False) -> Job:
    """Write a job's directory (snapshot, configuration, job.json) and return the job.

    The job is not started. data: also check the runs' data.

    Raises:
        UserError: the job is active or was stopped, or data is missing or does not fit the runs.
    """
    requested = wanted(request)
    with locked(requested.job.path):
        draft = settle(requested, update=request.update)
        if draft.ready or all(item.kind == "finished" for item in draft.chosen):
            if data:
                refuse_without_data(draft)
            return write(draft).job
        raise UserError(_why_not(draft))


def refuse_without_data(draft: Draft, hint: str = "") -> None:
    """Raise UserError if data of a run that would start is missing or does not fit the run.

    Otherwise the run would fail only after waiting in the queue. hint: text to add to the error.
    """
    fault = data_fault(draft.starting, draft.job.world_size)
    if fault is not None:
        raise UserError(fault + hint)


def main(arguments: argparse.Namespace) -> int:
    """Submit the unfinished items. Return 0.

    Raises:
        UserError: the job cannot be submitted.
    """
    request = request_of(arguments)
    return submit(wanted(request), request)


def submit(requested: Wanted, request: Request) -> int:
    """Submit the items of a job that are not finished, active or stopped. Return 0.

    With --dry-run, only print the plan.

    Raises:
        UserError: the job cannot be submitted.
    """
    if request.profile.scheduler != "slurm":
        raise UserError(
            f"{request.profile_path} is no profile for Slurm; on this machine: python -m launch "
            "local"
        )
    if request.at_once is not None and not (requested.job.array and request.at_once > 0):
        raise UserError(
            f"--at-once {request.at_once}: it is for an array (--tasks, sweep), and must be at "
            "least 1"
        )
    if request.dry_run:
        return _dry_run(requested, request)
    after = dependency(request.dependency)
    with locked(requested.job.path):
        draft = settle(requested, update=request.update)
        if not draft.ready:
            return _report_no_start(draft, parsable=request.parsable)
        if after is None:  # else another job may still create the data
            refuse_without_data(draft, "; if another job creates it: --dependency JOB")
        exclude = excluded(draft.job, request.exclude)
        # Render once before any file is written, so that an invalid job leaves nothing behind.
        array = "0" if draft.job.array else None
        render(draft.job, dependency=after, array=array, exclude=exclude)
        if not request.no_rehearse:
            log = (lambda _: None) if request.parsable else print
            rehearse(draft, log, data=after is None)
        draft = write(draft)
        job_id = send(draft.job, draft.ready, at_once=request.at_once, after=after, exclude=exclude)
    if request.parsable:
        print(job_id)
    else:
        _report(draft, job_id, after)
    return 0


def send(
    job: Job,
    items: Sequence[int],
    *,
    at_once: int | None,
    after: str | None = None,
    exclude: Sequence[str],
) -> str:
    """Write DIR/launch/job.sh, submit it, record the submission, and return the Slurm job's id.

    items: indices of the items to start. at_once: tasks that may run at a time; None: no limit.
    after: sbatch's --dependency, or None. exclude: nodes to exclude. The caller must hold the
    directory's lock.

    Raises:
        UserError: the script cannot be rendered, or sbatch refuses it.
    """
    array = array_words(items, at_once) if job.array else None
    script = render(job, dependency=after, array=array, exclude=exclude)
    write_atomically(job.script, script, synced=False)
    if logs := job.profile.get("logs"):
        Path(logs).mkdir(parents=True, exist_ok=True)
    try:
        job_id = slurm.submit(job.script)
    except slurm.SlurmError as error:
        if not exclude:
            raise
        where = cordon_file(job.profile, job.working_directory)
        raise UserError(
            f"{error} (excluded: {', '.join(exclude)}, by {where}, --exclude)"
        ) from None
    hidden = secrets.values(os.environ)
    line = {
        "time": round(time.time(), 3),
        "job_id": job_id,
        "items": list(items),
        "command": shlex.join(["launch", *(secrets.hide(word, hidden) for word in sys.argv[1:])]),
    }
    append_json(job.launch / "submissions.jsonl", line)
    return job_id


def array_words(items: Sequence[int], at_once: int | None) -> str:
    """Format item indices for Slurm: ``0-3,7%2``."""
    return ranges(items, ",") + (f"%{at_once}" if at_once else "")


def excluded(job: Job, named: Sequence[str], *, ask: bool = True) -> list[str]:
    """Return the nodes to exclude in addition to the profile's excluded nodes.

    These are the nodes in ``named`` and the nodes of this cluster that the cordon file lists. All
    of the cordon file's nodes are returned if Slurm lists no nodes (PrivateData) or is not queried.

    ask: False leaves out the query of Slurm.
    """
    away = cordoned(cordon_file(job.profile, job.working_directory))
    known = {node.name for node in slurm.all_nodes()} if away and ask else set[str]()
    return list(dict.fromkeys([*named, *sorted(set(away) & known if known else away)]))


def _dry_run(requested: Wanted, request: Request) -> int:
    """Print the plan and the batch script without writing files. Return 0.

    If Slurm does not answer, the plan omits the queue's part and gives the reason.
    """
    try:
        words = _plan(requested, request, ask=True)
    except slurm.SlurmError as error:
        note = f"\nnote       the queue is not known: {error}\n"
        words = _plan(requested, request, ask=False) + note
    print(words, end="")
    return 0


def _plan(requested: Wanted, request: Request, *, ask: bool) -> str:
    draft = settle(requested, update=request.update, ask=ask)
    after = dependency(request.dependency, ask=ask)
    exclude = excluded(draft.job, request.exclude, ask=ask)
    array = array_words(draft.ready or draft.asked, request.at_once) if draft.job.array else None
    script = render(draft.job, dependency=after, array=array, exclude=exclude)
    return f"{plan.describe(draft, request, exclude, after)}\n--- {draft.job.script}\n{script}"


def _report_no_start(draft: Draft, *, parsable: bool) -> int:
    """Print why no item starts. Return 0 if all requested items are finished or active.

    Raises:
        UserError: the only item is active, or an item was stopped.
    """
    kinds = {item.kind for item in draft.chosen}
    if "stopped" in kinds or (not draft.job.array and "active" in kinds):
        raise UserError(_why_not(draft))
    if not parsable:
        print(f"{draft.job.name}: nothing to do: {counted(draft.chosen)} ({draft.job.directory})")
    return 0


def _why_not(draft: Draft) -> str:
    """Return one line: the reason why no item may start, and the commands that help."""
    first = {item.kind: item for item in reversed(draft.chosen)}
    item = first.get("stopped") or first["active"]
    where = draft.job.items[item.index].directory
    quoted = shlex.quote(where)
    if item.kind == "stopped":
        return f"{where}: {item.message}; to continue: python -m launch requeue {quoted}"
    return (
        f"{where} has {item.where}; see: python -m launch status {quoted}, or end it: python -m "
        f"launch cancel {quoted}"
    )


def _report(draft: Draft, job_id: str, after: str | None) -> None:
    """Print a report of the submission and the next command."""
    job = draft.job
    what = f"{len(draft.ready)} of {len(job.items)} items" if job.array else job.kind
    print(
        f"submitted {job.name} as job {job_id}: {what}, {plan.shape(job)}"
        + (f", after {after}" if after else "")
    )
    for note in draft.notes:
        print(f"  {note}")
    for standing in draft.chosen:
        if standing.kind == "stopped":
            item = job.items[standing.index]
            print(
                f"  left out: {item.name}: {standing.message}; python -m launch requeue "
                f"{shlex.quote(item.directory)}"
            )
    print(
        f"  directory {job.directory}\n  follow it: python -m launch logs -f "
        f"{shlex.quote(job.directory)}"
    )
