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
from pathlib import Path

from fem_common import secrets
from fem_common.errors import UserError
from fem_common.files import write_whole
from launch.cluster import slurm
from launch.cluster.profile import Profile, load_profile
from launch.job import Job, append_json, plan
from launch.job.item_state import counted, find_job, standings
from launch.job.plan import Draft, locked, settle, write
from launch.job.rehearsal import rehearse
from launch.job.render import render
from launch.job.request import Request, Wanted, data_fault, wanted
from launch.supervise.journal import cordon_file, cordoned

WRITTEN = re.compile(
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
    told: list[str] = []
    for word in words:
        if re.fullmatch(r"\d+(_\d+)?", word):
            if ask:
                _check("afterok", word, word)
            told.append(f"afterok:{word}")
        elif all(WRITTEN.fullmatch(part) for part in word.split(",")):
            for kind, *ids in (part.split(":") for part in word.split(",")):
                for job_id in ids if ask and kind in _NEVER else ():
                    _check(kind, job_id.partition("+")[0], f"{kind}:{job_id}")
            told.append(word)
        elif Path(word).is_dir():
            told += _of_directory(word, ask)
        else:
            raise UserError(
                f"--dependency {word}: neither a job's id, nor afterok:ID, nor a directory"
            )
    return ",".join(dict.fromkeys(told)) or None


# Kind of a dependency -> the end of the first job after which the dependent job would never start.
_NEVER = {"afterok": "badly", "aftercorr": "badly", "afternotok": "well"}


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
    if not state.active and ("well" if state.state == "COMPLETED" else "badly") == _NEVER[kind]:
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
            kind = "not under way" if item.kind == "idle" else item.kind
            told = (
                f"runs as {item.where}, which Slurm does not manage"
                if item.kind == "active"
                else f"is {kind} ({item.message})"
            )
            where = job.items[item.index].directory
            raise UserError(
                f"--dependency {directory}: {where} {told.removesuffix(' ()')}; a job after it "
                "would never start: submit it first"
            )
    ids = [
        str(item.job_id) if len(items) < len(job.items) else str(item.job_id).partition("_")[0]
        for item in chosen
    ]
    return [f"afterok:{job_id}" for job_id in dict.fromkeys(ids)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml section.key=value",
        help="a run and settings that replace the file's",
    )
    parser.set_defaults(rest=[])  # the words after --
    add_place_arguments(parser)
    add_submit_arguments(parser)
    parser.add_argument(
        "--tasks", type=int, metavar="N", help="for a command: a job array of N tasks"
    )


def add_place_arguments(parser: argparse.ArgumentParser, *, cluster_required: bool = True) -> None:
    """Add the arguments about resources and directory, shared by all verbs that start a run."""
    parser.add_argument(
        "--cluster",
        required=cluster_required,
        metavar="PROFILE.yaml",
        help="the cluster's profile, in configs/cluster",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes (default: 1)")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="processes per node (default: the profile's; for a command: 1)",
    )
    parser.add_argument("--name", help="name in the queue (default: the run's, or the command's)")
    parser.add_argument(
        "--directory",
        metavar="DIR",
        help="folder for its files (default: the run's run_dir, or runs/jobs/NAME)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the profile, as slurm.partition=x",
    )
    parser.add_argument(
        "--update",
        action="store_true",
        help="replace the settings and the code of an existing job",
    )


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that only apply to Slurm."""
    parser.add_argument(
        "--time",
        metavar="LIMIT",
        help=(
            "time limit of one submission; a run continues in the next one (default: the profile's)"
        ),
    )
    parser.add_argument(
        "--at-once", type=int, metavar="K", help="for an array: the number of tasks at a time"
    )
    after = "start after a job ended well: its directory, its id, or afterok:ID"
    parser.add_argument("--dependency", action="append", default=[], metavar="JOB", help=after)
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="NODES",
        help="nodes not to use, in addition to the profile's",
    )
    parser.add_argument(
        "--no-rehearse",
        action="store_true",
        help="submit runs on GPUs without a rehearsal of new layouts",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the batch script without writing or submitting them",
    )
    parser.add_argument("--parsable", action="store_true", help="print only the job's id")


def request_of(arguments: argparse.Namespace) -> Request:
    """Return the request of a command line, with the profile loaded, including --set and --time.

    Raises:
        UserError: both a run and a command are given, or the profile is invalid.
    """
    limit = [f'slurm.time="{arguments.time}"'] if getattr(arguments, "time", None) else []
    rest = getattr(arguments, "rest", [])  # a sweep has none
    if rest and arguments.words:
        raise UserError(
            f"both a run ({arguments.words[0]}) and a command after -- ({rest[0]}); give one"
        )
    return Request(
        words=tuple(rest or arguments.words),
        is_command=bool(rest),
        profile=load_profile(arguments.cluster, [*arguments.set, *limit]),
        profile_path=arguments.cluster,
        nodes=arguments.nodes,
        processes=arguments.processes,
        name=arguments.name,
        directory=arguments.directory,
        tasks=getattr(arguments, "tasks", None),
        update=arguments.update,
    )


def prepare(request: Request, *, data: bool = False) -> Job:
    """Write a job's directory (snapshot, configuration, job.json) and return the job.

    The job is not started. data: raise an error if the runs' data does not exist.

    Raises:
        UserError: the job is active or was stopped, or data is missing.
    """
    asked = wanted(request)
    directory = asked.job.path
    with locked(directory):
        draft = settle(asked, update=request.update)
        if draft.ready or all(draft.standings[index].kind == "finished" for index in draft.asked):
            if data:
                refuse_without_data(draft)
            return write(draft).job
        raise UserError(_why_not(draft))


def refuse_without_data(draft: Draft, else_do: str = "") -> None:
    """Raise UserError if data of a run that would start is missing or does not fit the run.

    Otherwise the run would fail only after waiting in the queue. else_do: text to add to the error.
    """
    fault = data_fault(draft.starting, draft.job.world_size)
    if fault is not None:
        raise UserError(fault + else_do)


def main(arguments: argparse.Namespace) -> int:
    """Submit the unfinished items. Return 0.

    Raises:
        UserError: the job cannot be submitted.
    """
    request = request_of(arguments)
    return submit(wanted(request), arguments, request.profile)


def submit(asked: Wanted, arguments: argparse.Namespace, profile: Profile) -> int:
    """Submit the items of a job that are neither finished nor active. Return 0.

    With --dry-run, only print the plan.

    Raises:
        UserError: the job cannot be submitted.
    """
    if profile.scheduler != "slurm":
        raise UserError(
            f"{arguments.cluster} is no profile for Slurm; on this machine: python -m launch local"
        )
    if arguments.at_once is not None and not (asked.job.array and arguments.at_once > 0):
        raise UserError(
            f"--at-once {arguments.at_once}: it is for an array (--tasks, sweep), and must be at "
            "least 1"
        )
    if arguments.dry_run:
        return _dry_run(asked, arguments, profile)
    after = dependency(arguments.dependency)
    directory = asked.job.path
    with locked(directory):
        draft = settle(asked, update=arguments.update)
        if not draft.ready:
            return _nothing_to_do(draft, parsable=arguments.parsable)
        if after is None:
            refuse_without_data(draft, "; if another job creates it: --dependency JOB")
        exclude = excluded(draft.job, arguments.exclude)
        # Refuse a job that cannot be rendered before any file is written.
        render(
            draft.job,
            profile,
            dependency=after,
            array="0" if draft.job.array else None,
            exclude=exclude,
        )
        if not arguments.no_rehearse:
            rehearse(
                draft,
                profile,
                (lambda _: None) if arguments.parsable else print,
                data=after is None,
            )
        draft = write(draft)
        job_id = send(
            draft.job, profile, draft.ready, at_once=arguments.at_once, after=after, exclude=exclude
        )
    _tell(draft, job_id, after, arguments)
    return 0


def send(
    job: Job,
    profile: Profile,
    items: Sequence[int],
    *,
    at_once: int | None,
    after: str | None,
    exclude: Sequence[str],
) -> str:
    """Write DIR/launch/job.sh, submit it, record the submission, and return the Slurm job's id.

    items: indices of the items to start. at_once: tasks that may run at a time; None: no limit.
    after: sbatch's --dependency, or None. exclude: nodes to exclude. The caller must hold the
    directory's lock.

    Raises:
        UserError: the script cannot be rendered, or sbatch refuses it.
    """
    script = job.script
    array = array_words(items, at_once) if job.array else None
    write_whole(
        script, render(job, profile, dependency=after, array=array, exclude=exclude), synced=False
    )
    if profile.logs:
        Path(profile.logs).mkdir(parents=True, exist_ok=True)
    try:
        job_id = slurm.submit(script)
    except slurm.SlurmError as error:
        kept = (
            (
                f" (excluded: {', '.join(exclude)}, by "
                f"{cordon_file(job.profile, job.working_directory)}, --exclude)"
            )
            if exclude
            else ""
        )
        raise UserError(f"{error}{kept}") from None
    hidden = secrets.values(os.environ)
    command = shlex.join(["launch", *(secrets.hide(word, hidden) for word in sys.argv[1:])])
    line = {
        "time": round(time.time(), 3),
        "job_id": job_id,
        "items": list(items),
        "command": command,
    }
    append_json(job.launch / "submissions.jsonl", line)
    return job_id


def array_words(items: Sequence[int], at_once: int | None) -> str:
    """Format item indices for Slurm: ``0-3,7%2``."""
    runs: list[list[int]] = []
    for number in sorted(items):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs) + (f"%{at_once}" if at_once else "")


def excluded(job: Job, named: Sequence[str], *, ask: bool = True) -> list[str]:
    """Return the nodes to exclude in addition to the profile's excluded nodes.

    These are the nodes in ``named`` and the nodes of this cluster that the cordon file lists. All
    of the cordon file's nodes are returned if Slurm lists no nodes (PrivateData) or is not queried.

    ask: False leaves out the query of Slurm.
    """
    away = cordoned(cordon_file(job.profile, job.working_directory))
    known = {node.name for node in slurm.all_nodes()} if away and ask else set[str]()
    return list(dict.fromkeys([*named, *sorted(set(away) & known if known else away)]))


def _dry_run(asked: Wanted, arguments: argparse.Namespace, profile: Profile) -> int:
    """Print the plan and the batch script without writing files. Return 0.

    If Slurm does not answer, the plan omits the queue's part and gives the reason.
    """
    try:
        words = _plan(asked, arguments, profile, ask=True)
    except slurm.SlurmError as error:
        words = (
            _plan(asked, arguments, profile, ask=False)
            + f"\nnote       the queue is not known: {error}\n"
        )
    print(words, end="")
    return 0


def _plan(asked: Wanted, arguments: argparse.Namespace, profile: Profile, *, ask: bool) -> str:
    draft = settle(asked, update=arguments.update, ask=ask)
    after = dependency(arguments.dependency, ask=ask)
    exclude = excluded(draft.job, arguments.exclude, ask=ask)
    array = array_words(draft.ready or draft.asked, arguments.at_once) if draft.job.array else None
    script = render(draft.job, profile, dependency=after, array=array, exclude=exclude)
    told = plan.describe(draft, profile, arguments.words, exclude, after, arguments.at_once)
    return f"{told}\n--- {draft.job.script}\n{script}"


def _nothing_to_do(draft: Draft, *, parsable: bool) -> int:
    """Print why no item starts. Return 0 if all requested items are finished or active.

    Raises:
        UserError: the only item is active, or an item was stopped.
    """
    chosen = [draft.standings[index] for index in draft.asked]
    if any(item.kind == "stopped" for item in chosen) or (
        not draft.job.array and chosen[0].kind == "active"
    ):
        raise UserError(_why_not(draft))
    if not parsable:
        print(f"{draft.job.name}: nothing to do: {counted(chosen)} ({draft.job.directory})")
    return 0


def _why_not(draft: Draft) -> str:
    """Return one line with the reason why no item may start and, for a stopped one, the remedy."""
    chosen = [draft.standings[index] for index in draft.asked]
    stopped = next((item for item in chosen if item.kind == "stopped"), None)
    if stopped is not None:
        where = draft.job.items[stopped.index].directory
        return (
            f"{where}: {stopped.message}; to continue: python -m launch requeue "
            f"{shlex.quote(where)}"
        )
    active = next(item for item in chosen if item.kind == "active")
    where = draft.job.items[active.index].directory
    quoted = shlex.quote(where)
    return (
        f"{where} has {active.where}; see: python -m launch status {quoted}, or end it: python -m "
        f"launch cancel {quoted}"
    )


def _tell(draft: Draft, job_id: str, after: str | None, arguments: argparse.Namespace) -> None:
    """Print a report of the submission and the next command."""
    if arguments.parsable:
        print(job_id)
        return
    job = draft.job
    what = f"{len(draft.ready)} of {len(job.items)} items" if job.array else job.kind
    print(
        f"submitted {job.name} as job {job_id}: {what}, {plan.shape(job)}"
        + (f", after {after}" if after else "")
    )
    for note in draft.notes:
        print(f"  {note}")
    stopped = [
        draft.standings[index] for index in draft.asked if draft.standings[index].kind == "stopped"
    ]
    for item in stopped:
        where = shlex.quote(job.items[item.index].directory)
        print(
            f"  left out: {draft.job.items[item.index].name}: {item.message}; python -m launch "
            f"requeue {where}"
        )
    print(
        f"  directory {job.directory}\n  follow it: python -m launch logs -f "
        f"{shlex.quote(job.directory)}"
    )
