"""Plan a submission: compare the requested job with the job that its directory already contains.

A request with the same settings continues the existing job with its code snapshot. A request with
other settings is refused without ``--update``. Before the comparison, the snapshot's code resolves
a run's settings, so a setting that newer code adds does not change an old run. The plan is also
printed by ``submit --dry-run``, where pretrain writes the part about the model.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fem_common import files
from fem_common.errors import UserError
from fem_common.nested import differences
from fem_common.text import counted as number_of
from launch.cluster import profile_values
from launch.cluster.profile import Profile
from launch.job import snapshot
from launch.job.item_state import Standing, counted, standings
from launch.job.job import Item, Job, attempts, launch_folder, load_job
from launch.job.request import Request, Wanted, data_fault, pretrain, read_config

ABSENT = "<absent>"
OVER = ("state.json", "stop.json")


@dataclass(frozen=True)
class Draft:
    """Plan of a job: its new description and the items to start, before any file is written."""

    job: Job
    configs: Mapping[str, str]  # an item's directory -> its run's configuration
    code: snapshot.Code | None  # the snapshot to keep; None: take a new one
    asked: tuple[int, ...]  # items requested by this command
    standings: tuple[Standing, ...]  # states of all items
    # items that `--update` starts again: the records of their end are removed
    reopened: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()  # notes to print

    @property
    def chosen(self) -> list[Standing]:
        """States of the requested items."""
        return [self.standings[index] for index in self.asked]

    @property
    def ready(self) -> tuple[int, ...]:
        """Indices of the requested items that may start."""
        return tuple(sorted(item.index for item in self.chosen if item.kind == "idle"))

    @property
    def starting(self) -> tuple[str, ...]:
        """Configurations of the runs that may start, as YAML texts. Empty for commands."""
        found = (self.configs.get(self.job.items[index].directory) for index in self.ready)
        return tuple(text for text in found if text is not None)


def settle(wanted: Wanted, *, update: bool, ask: bool = True) -> Draft:
    """Compare a requested job with the job in its directory, and return the resulting draft.

    update: replace the settings and the code of an existing job.
    ask: False leaves out the query of Slurm's queue.

    Raises:
        UserError: without ``update``, the directory has a job with other settings; with ``update``,
            an item of the existing job is active.
    """
    job, directory = wanted.job, wanted.job.path
    before = load_job(directory)
    known = standings(before, ask=ask) if before else []
    # A job that Slurm refused at once is only a description: its settings may change freely.
    begun = before is not None and (
        (launch_folder(directory) / "submissions.jsonl").exists()
        or any(item.kind != "idle" for item in known)
        or any(attempts(item.path) for item in before.items)
    )
    if before is None or not begun:
        every = tuple(range(len(job.items)))
        return Draft(
            job, wanted.configs, None, every, tuple(Standing(index, "idle") for index in every)
        )
    merged = replace(job, items=_merged_items(before, job))
    was = {item.directory: standing for item, standing in zip(before.items, known, strict=True)}
    now = [
        replace(was.get(item.directory, Standing(0, "idle")), index=index)
        for index, item in enumerate(merged.items)
    ]
    place = {item.directory: index for index, item in enumerate(merged.items)}
    requested = tuple(place[item.directory] for item in job.items)
    notes = []  # about the cluster, which is no setting of a run
    if before.profile != job.profile:
        key, old, new = first_difference(before.profile, job.profile)
        notes.append(f"the profile's {key} was {old}, is {new}")
    if before.python != job.python:
        notes.append(f"the interpreter was {before.python}, is {job.python}")
    if not update:
        code = snapshot.read_code(directory)
        configs = _same(before, merged, wanted, code)
        notes.append(
            f"continues with the code of its snapshot ({code.label})"
            if code
            else "its snapshot is missing: a new one is taken"
        )
        return Draft(merged, configs, code, requested, tuple(now), notes=tuple(notes))
    busy = next((standing for standing in known if standing.kind == "active"), None)
    if busy is not None:
        raise UserError(
            f"{directory}: {busy.where} has the old settings; first: python -m launch cancel "
            f"--save {shlex.quote(str(directory))}"
        )
    sweep = job.array and job.kind == "run"
    reopened = (
        _changed_items(before, merged, wanted.configs) if sweep else list(range(len(merged.items)))
    )
    now = [Standing(item.index, "idle") if item.index in reopened else item for item in now]
    return Draft(merged, wanted.configs, None, requested, tuple(now), tuple(reopened), tuple(notes))


def _merged_items(before: Job, job: Job) -> tuple[Item, ...]:
    """Return the items of the existing array, followed by the requested items that are new.

    Existing items keep their indices, which are their task ids in Slurm's queue. If one of the jobs
    is no array, or the job is a command, return the requested items.
    """
    if not (before.array and job.array) or job.kind == "command":
        return job.items
    new = {item.directory: item for item in job.items}
    kept = tuple(new.pop(item.directory, item) for item in before.items)
    return (*kept, *new.values())


def _same(
    before: Job, merged: Job, wanted: Wanted, code: snapshot.Code | None
) -> Mapping[str, str]:
    """Check that the settings equal those in the directory, and return the runs' configurations.

    before: the job in the directory. merged: the requested job with the existing items included.
    code: the directory's snapshot, whose code resolves the configurations again if they differ.
    The result maps an item's directory to its configuration; it is empty for commands.

    Raises:
        UserError: the settings in the directory differ from the requested ones.
    """
    where = before.directory
    how = "--update takes the new settings and the present code; or use another directory"
    for key in ("kind", "array", "working_directory", "nodes", "processes_per_node", "torchrun"):
        old, new = getattr(before, key), getattr(merged, key)
        if old != new:
            raise UserError(f"{where} has a job whose {key} is {old}, not {new}; {how}")
    if merged.kind == "command":
        if len(before.items) != len(merged.items):
            raise UserError(
                f"{where} has a job of {len(before.items)} tasks, not {len(merged.items)}; {how}"
            )
        old_words, words = (" ".join(job.items[0].arguments[1:]) for job in (before, merged))
        if old_words != words:
            raise UserError(f"{where} has the job `{old_words}`, not `{words}`; {how}")
        return {}
    configs = wanted.configs
    if code is not None and any(
        written(place) not in (text, None) for place, text in configs.items()
    ):
        try:
            configs = wanted.resolve_with(snapshot.code_folder(Path(where)))
        except UserError as error:
            raise UserError(
                f"{where} has a job with the code of {code.label}, which reports: {error}; {how}"
            ) from None
    for place, text in configs.items():
        old_text = written(place)
        if old_text is not None and old_text != text:
            key, was, now = first_difference(read_config(old_text), read_config(text))
            raise UserError(f"{place} has a run whose {key} is {was}, not {now}; {how}")
    return configs


def _changed_items(before: Job, merged: Job, configs: Mapping[str, str]) -> list[int]:
    """Return the indices of items that are new, or whose settings differ from the stored ones."""
    places = {place for place, text in configs.items() if written(place) != text}
    return [
        index
        for index, item in enumerate(merged.items)
        if item not in before.items or item.directory in places
    ]


def written(directory: str) -> str | None:
    """Return the configuration (YAML text) stored in a run's directory, or None if it has none."""
    try:
        return (launch_folder(Path(directory)) / "config.yaml").read_text(encoding="utf-8")
    except OSError:
        return None


def first_difference(old: Any, new: Any) -> tuple[str, Any, Any]:
    """Return (dotted key, old value, new value) of the first setting that differs.

    Settings are compared in the order of the new settings. The key is "text" if none differs.
    """
    return next(differences(old, new, ABSENT), ("text", old, new))


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a job's directory, so that no other command submits, cancels or requeues it.

    Raises:
        InUse: another command holds the lock.
    """
    launch_folder(directory).mkdir(parents=True, exist_ok=True)
    with files.locked(
        launch_folder(directory) / "submit.lock",
        f"{directory}: another launch command is using it; wait for it to end",
    ):
        yield


def write(draft: Draft) -> Draft:
    """Write the draft into the job's directory: snapshot, configurations, job.json.

    Return the draft with the snapshot that was taken. The caller must hold the directory's lock.
    """
    directory = draft.job.path
    code = draft.code or snapshot.take(directory)
    for index in draft.reopened:
        for name in OVER:
            (draft.job.items[index].launch / name).unlink(missing_ok=True)
    for place, text in draft.configs.items():
        launch_folder(Path(place)).mkdir(parents=True, exist_ok=True)
        files.write_atomically(launch_folder(Path(place)) / "config.yaml", text, synced=False)
    for item in draft.job.items:
        item.launch.mkdir(parents=True, exist_ok=True)
    draft.job.save()
    return replace(draft, code=code)


def shape(job: Job) -> str:
    """Return the job's numbers of nodes and processes as text, as "2 nodes x 8 processes = 16"."""
    full = f" = {job.world_size}" if job.nodes > 1 else ""
    processes = number_of(job.processes_per_node, "process")
    return f"{number_of(job.nodes, 'node')} x {processes}{full}"


def describe(draft: Draft, request: Request, exclude: Sequence[str], after: str | None) -> str:
    """Return the plan as text: items, directory, resources, and the command.

    exclude: nodes to exclude. after: sbatch's --dependency, or None.
    """
    job = draft.job
    code = draft.code
    profile = request.profile
    names, left_out = snapshot.source_files(snapshot.ROOT) if code is None else ((), 0)
    fresh = (
        f"{snapshot.ROOT} in its present state: {len(names)} files, without {left_out} that are no "
        "sources"
    )
    rows = [
        ("job", f"{job.name}, {what(draft, request.at_once)}"),
        ("directory", job.directory + (", which has this job already" if code else "")),
        (
            "resources",
            f"{shape(job)}, {profile.nodes.gpus or 0} GPUs and {profile.nodes.cpus} CPUs a node",
        ),
        ("partition", profile.slurm.partition or "the cluster's default"),
        ("time", _time(draft, profile)),
        ("code", f"the snapshot of its first submission ({code.label})" if code else fresh),
        ("python", job.python),
        ("excluded", ", ".join([*profile.slurm.exclude, *exclude]) or "no node"),
        ("after", after or "nothing"),
        ("starts", " ".join(["python", *job.items[0].arguments])),
        ("command", f"sbatch --parsable {shlex.quote(str(job.script))}"),
    ]
    if draft.starting:
        rows.append(("data", data_fault(draft.starting, job.world_size) or "exists and fits"))
    lines = [f"{name:<11}{text}" for name, text in rows]
    lines += [f"{'note':<11}{note}" for note in draft.notes]
    if job.array:
        lines += ["", *item_lines(draft)]
    elif not request.is_command:
        try:
            plan_text = pretrain(request.words, job.world_size, "--plan").rstrip()
        except UserError as error:  # the data may be made by an earlier job of a chain
            plan_text = f"pretrain's plan is not known yet: {error}"
        lines += ["", plan_text]
    return "\n".join(lines) + "\n"


def item_lines(draft: Draft) -> list[str]:
    """Return a line with the state and the directory of each requested item."""
    return [f"{item.kind:<9}{draft.job.items[item.index].directory}" for item in draft.chosen]


def what(draft: Draft, at_once: int | None) -> str:
    """Return a text that describes the items that would start."""
    if not draft.job.array:
        return "a training run" if draft.job.kind == "run" else "a command"
    limit = f", {at_once} at once" if at_once else ""
    return f"{len(draft.ready)} of {len(draft.asked)} items{limit} ({counted(draft.chosen)})"


def _time(draft: Draft, profile: Profile) -> str:
    """Return a text with the time limit of one submission and its largest cost.

    The cost is in GPU hours, or in node hours without GPUs.
    """
    limit = profile_values.seconds(profile.slurm.time or "") / 3600
    if not math.isfinite(limit):
        return profile.slurm.time or "the partition's limit"
    nodes = draft.job.nodes * len(draft.ready)
    devices = nodes * (profile.nodes.gpus or 0)
    cost = f"{limit * devices:,.0f} GPU hours" if devices else f"{limit * nodes:,.0f} node hours"
    return f"{profile.slurm.time} a submission: at most {cost} before it is requeued"
