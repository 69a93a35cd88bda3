"""launch: what a submission would do, in words: ``submit --dry-run``. Standard library alone; the model's part is pretrain's own plan."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from fem_common.errors import UserError
from launch import profile_values, snapshot
from launch.draft import Draft
from launch.job import Job
from launch.layout import launch_folder
from launch.profile import Profile
from launch.request import data_fault, pretrain
from launch.standing import counted


def shape(job: Job) -> str:
    """Nodes and processes, in words."""
    nodes, processes = job.nodes, job.processes_per_node
    whole = f" = {nodes * processes}" if nodes > 1 else ""
    return f"{nodes} node{'s' if nodes > 1 else ''} x {processes} process{'es' if processes > 1 else ''}{whole}"


def hours(limit: str | None) -> float | None:
    """A time limit of Slurm's (``24:00:00``, ``3-00:00:00``, ``90`` minutes) in hours; None where it is none."""
    found = profile_values.seconds(limit or "") / 3600
    return found if math.isfinite(found) else None


def describe(draft: Draft, profile: Profile, words: Sequence[str], exclude: Sequence[str], after: str | None, at_once: int | None) -> str:
    """The plan as text: what, where, how much, and the command. ``words``: CONFIG.yaml and overrides of a run, else empty."""
    job = draft.job
    code = draft.code
    rows = [
        ("job", f"{job.name}, {what(draft, at_once)}"),
        ("directory", job.directory + (", which has this job already" if code else "")),
        ("resources", f"{shape(job)}, {profile.nodes.gpus or 0} GPUs and {profile.nodes.cpus} CPUs a node"),
        ("partition", profile.slurm.partition or "the cluster's default"),
        ("time", _time(draft, profile)),
        ("code", f"the snapshot of its first submission ({code.label})" if code else _fresh_code()),
        ("python", job.python),
        ("excluded", ", ".join([*profile.slurm.exclude, *exclude]) or "no node"),
        ("after", after or "nothing"),
        ("starts", " ".join(["python", *job.items[0].arguments])),
        ("command", f"sbatch --parsable {shlex.quote(str(launch_folder(Path(job.directory)) / 'job.sh'))}"),
    ]
    if draft.starting:
        rows.append(("data", data_fault(draft.starting, job.world_size) or "is there"))
    lines = [f"{name:<11}{text}" for name, text in rows]
    lines += [f"{'note':<11}{note}" for note in draft.notes]
    if job.array:
        lines += ["", *(f"{draft.standings[index].kind:<9}{job.items[index].directory}" for index in draft.asked)]
    elif words:
        lines += ["", _plan_of_run(job, words)]
    return "\n".join(lines) + "\n"


def _plan_of_run(job: Job, words: Sequence[str]) -> str:
    """pretrain's own plan, or why there is none yet: the data may be what an earlier job of a chain makes."""
    try:
        return pretrain(words, job.nodes * job.processes_per_node, "--plan").rstrip()
    except UserError as error:
        return f"pretrain's plan is not known yet: {error}"


def what(draft: Draft, at_once: int | None) -> str:
    """The items that would start, in words."""
    if not draft.job.array:
        return "a training run" if draft.job.kind == "run" else "a command"
    limit = f", {at_once} at once" if at_once else ""
    return f"{len(draft.ready)} of {len(draft.asked)} items{limit} ({counted([draft.standings[index] for index in draft.asked])})"


def _fresh_code() -> str:
    names, left_out = snapshot.source_files(snapshot.ROOT)
    return f"{snapshot.ROOT} as it is now: {len(names)} files, {left_out} left out that are no sources"


def _time(draft: Draft, profile: Profile) -> str:
    """The time limit, and what it may cost at most."""
    limit = hours(profile.slurm.time)
    if limit is None:
        return profile.slurm.time or "the partition's limit"
    nodes = draft.job.nodes * len(draft.ready)
    devices = nodes * (profile.nodes.gpus or 0)
    cost = f"{limit * devices:,.0f} GPU hours" if devices else f"{limit * nodes:,.0f} node hours"
    return f"{profile.slurm.time} a submission: at most {cost} before it is requeued"
