"""Verb ``run``: encode text into train/valid/test .bin/.idx in parallel, and resume after kills.

    plan, encode and merge:
        python -m data_prep run INPUT... --tokenizer DIR --out OUT
    continue with the plan in OUT:
        python -m data_prep run --out OUT
    encode the units with number % 8 == 3, to be merged afterwards:
        python -m data_prep run --out OUT --task-id 3 --tasks 8

The default number of processes is the number of cores. Bad rows are dropped and reported. In a
Slurm job array (SLURM_ARRAY_TASK_ID), each task takes its share automatically. Finished units are
not encoded again.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from data_prep.encode.documents import Settings
from data_prep.encode.encoders import chat, choose
from data_prep.encode.tokenizer import CHAT_TEMPLATE, find_tokenizer, load_folder
from data_prep.encode.workers import run_units
from data_prep.options import add_encoder_argument, check_least, worker_count
from data_prep.prepared.entries import add_max_bad_argument, parse_max_bad, sound_entry
from data_prep.prepared.layout import (
    SHARDS,
    TOKENIZER,
    Plan,
    Unit,
    entry_path,
    read_plan,
    shard_prefix,
)
from data_prep.prepared.manifest import UnitEntry
from data_prep.prepared.staging import UNFINISHED, lock
from data_prep.report.progress import Board
from data_prep.sources import unchanged
from data_prep.verbs.merge import is_merged, merge_folder
from data_prep.verbs.plan import (
    UNIT_MB,
    Request,
    add_plan_arguments,
    disk_bytes,
    identity,
    make_plan,
    notes,
    option_of,
    request_of,
    same_file,
    settle,
    unmasked,
)
from fem_common.errors import UserError
from fem_common.files import remove_leftovers
from fem_common.text import counted, size

SAMPLE_DOCUMENTS = 64
SAMPLE_BYTES = 1_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_plan_arguments(parser, required=False)
    add_max_bad_argument(parser)
    parser.add_argument(
        "--workers", type=int, metavar="W", help="processes (default: one per core)"
    )
    add_encoder_argument(parser)
    parser.add_argument(
        "--task-id", type=int, metavar="N", help="number of this task among --tasks, from 0"
    )
    parser.add_argument(
        "--tasks",
        type=int,
        metavar="M",
        help="number of tasks that share the work; their commands differ only in --task-id",
    )


@dataclass(frozen=True)
class Task:
    """Task of a job array whose tasks share the units of a plan.

    The fields are the number of the task, from 0; the number of tasks; and, for messages, the
    option or variable that set the number of the task.
    """

    index: int
    tasks: int
    source_of_index: str

    def has(self, unit: Unit) -> bool:
        """Return True if a unit belongs to this task."""
        return unit.number % self.tasks == self.index


def task_of(index: int | None, tasks: int | None, environment: Mapping[str, str]) -> Task | None:
    """Return the task that the options or Slurm's environment define, or None to encode all units.

    ``index`` and ``tasks`` are the options --task-id and --tasks. Both together define the task.
    Under Slurm, SLURM_ARRAY_TASK_ID defines the number of the task if --task-id is missing, and the
    array defines the number of tasks if --tasks is missing. Raises UserError for an invalid
    combination.
    """
    slurm = environment.get("SLURM_ARRAY_TASK_ID")
    if index is not None or (tasks is not None and not slurm):
        if index is None or tasks is None:
            raise UserError("--task-id and --tasks go together; give both")
        return _checked(index, tasks, "--task-id")
    if not slurm:
        return None
    try:
        number = int(slurm)
        if tasks is not None:
            return _checked(number, tasks, "SLURM_ARRAY_TASK_ID")
        first, step = (
            int(environment.get(f"SLURM_ARRAY_TASK_{name}") or default)
            for name, default in (("MIN", 0), ("STEP", 1))
        )
        full = int(environment["SLURM_ARRAY_TASK_COUNT"])
    except (KeyError, ValueError):
        raise UserError(
            "SLURM_ARRAY_TASK_ID is set and SLURM_ARRAY_TASK_COUNT is not; give --task-id "
            "and --tasks"
        ) from None
    index, rest = divmod(number - first, max(step, 1))
    if rest or not 0 <= index < full:
        raise UserError(
            f"SLURM_ARRAY_TASK_ID is {number}, not one of {full} tasks from {first} in "
            f"steps of {step}: for an array with gaps, give --tasks"
        )
    return Task(index, full, "SLURM_ARRAY_TASK_ID")


def _checked(index: int, tasks: int, source_of_index: str) -> Task:
    check_least("tasks", tasks)
    if not 0 <= index < tasks:
        raise UserError(
            f"{source_of_index} is {index}; of {tasks} tasks it must be 0 to {tasks - 1}"
        )
    return Task(index, tasks, source_of_index)


def main(arguments: argparse.Namespace) -> int:
    """Encode the units that are not done, and merge unless this is one task of several.

    Return 0, or 1 if too many rows are bad. Raises UserError.
    """
    task = task_of(arguments.task_id, arguments.tasks, os.environ)
    workers = worker_count(arguments.workers)
    parse_max_bad(arguments.max_bad)
    if task and arguments.overwrite:
        raise UserError(
            "--overwrite cannot be used for one task of several; plan with --overwrite "
            "first, then start the tasks without it"
        )
    request = request_of(arguments)
    out, made = request.out, make_plan(request) if request.inputs else None
    plan = made[0] if made else _continued(request)
    with lock(out, shared=task is not None):
        if made:
            settle(out, *made, overwrite=request.overwrite)
            for line in notes(plan):
                print(line)
        merged, cut_short = is_merged(out, plan), (out / UNFINISHED).exists()
        if merged and not cut_short:
            print(
                f"{out}: unchanged; made from the same inputs, tokenizer and settings (check "
                f"it with: python -m data_prep verify {out})"
            )
            return 0
        if not merged:
            encode(out, plan, task, workers, arguments.encoder, checked=made is not None)
    if task:
        print(f"merge when all {task.tasks} tasks are done: python -m data_prep merge {out}")
        return 0
    return merge_folder(out, max_bad=arguments.max_bad)


def _continued(request: Request) -> Plan:
    """Return the plan in OUT. Raises UserError if the request contradicts the plan."""
    plan, default = read_plan(request.out), Settings().deciding()
    planned = plan.settings.deciding()
    other = [
        name
        for name, value in request.settings.deciding().items()
        if value not in (planned.get(name), default.get(name))
    ]
    unit_bytes = round(request.unit_mb * 1e6)
    kinds = {file.kind for file in plan.files}
    differing = {
        "subset": request.subset,
        "overwrite": request.overwrite,
        "paragraphs": request.paragraphs and "paragraphs" not in kinds,
        "unit_mb": unit_bytes not in (plan.unit_bytes, round(UNIT_MB * 1e6)),
        "tokenizer": request.tokenizer
        and identity(load_folder(find_tokenizer(request.tokenizer))) != plan.tokenizer,
        "chat_template": request.chat_template
        and not same_file(request.chat_template, request.out / TOKENIZER / CHAT_TEMPLATE),
    }
    other += [name for name, differs in differing.items() if differs]
    if other:
        raise UserError(
            f"--{option_of(other[0])} differs from the plan in {request.out}; name the inputs "
            "too, or omit it to continue with the plan"
        )
    return plan


def encode(
    out: Path, plan: Plan, task: Task | None, workers: int, encoder: str, *, checked: bool
) -> None:
    """Encode the units that are not done: all of them, or those of ``task``.

    ``encoder`` is the option of encoders.choose. ``checked`` is True if the same command has
    already checked that the inputs have not changed. Raises UserError.
    """
    mine = [unit for unit in plan.units if task is None or task.has(unit)]
    whose = f"task {task.index} of {task.tasks} ({task.source_of_index}), " if task else ""
    (out / SHARDS).mkdir(exist_ok=True)
    for folder in (out, out / SHARDS):
        remove_leftovers(folder)
    done = {unit: entry for unit in mine if (entry := finished(out, plan, unit))}
    waiting = [unit for unit in mine if unit not in done]
    if not waiting:
        why = (
            f"already done: {counted(len(mine), 'unit')}"
            if mine
            else "all units belong to other tasks"
        )
        print(f"{out}: {whose}nothing to do: {why}")
        return
    if not checked:
        check_inputs(plan, waiting)
    tokenizer = load_folder(out / TOKENIZER)
    if plan.settings.messages:
        choice = chat(tokenizer, encoder, plan.settings.template_sha256)
    else:
        choice = choose(tokenizer, encoder, samples(plan, waiting[0]) if encoder != "hf" else [])
    print(f"encoder: {choice.name} ({choice.why})")
    workers = min(workers, len(waiting))
    print(
        f"{out}: {whose}{len(waiting):,} of {counted(len(mine), 'unit')} to do, "
        f"{counted(workers, 'worker')}",
        flush=True,
    )
    # A run without tasks also merges, which needs space for all units once more.
    written = waiting if task else [*waiting, *mine]
    needed = disk_bytes(plan, sum(unit.text_bytes for unit in written))
    free = shutil.disk_usage(out).free
    if needed > free:
        print(
            f"{out}: about {size(needed)} of disk are needed and {size(free)} are free", flush=True
        )
    board = Board(done, mine)
    try:
        run_units(out, plan, choice.kind, waiting, workers, board)
    finally:
        board.line.close()
    print(board.result())


def finished(out: Path, plan: Plan, unit: Unit) -> UnitEntry | None:
    """Return the entry of a unit, or None if the unit is not done.

    An entry that is damaged, belongs to another plan or lacks its files is removed, so that the
    unit is encoded again.
    """
    path = entry_path(out, unit)
    try:
        entry = sound_entry(out, plan, unit)
        sound = all(
            shard_prefix(out, unit, f"{name}.{kind}").stat().st_size == size
            for name, split in entry.splits.items()
            for kind, size in split.sizes.items()
        )
    except (FileNotFoundError, UserError):
        sound = False
    if sound:
        return entry
    path.unlink(missing_ok=True)
    return None


def check_inputs(plan: Plan, units: Iterable[Unit]) -> None:
    """Raise UserError if a local input of these units has changed since it was planned.

    Inputs on the Hub are fixed by their commit.
    """
    columns = plan.settings.columns
    for number in sorted({unit.file for unit in units}):
        file = plan.files[number]
        if not unchanged(file, columns):
            raise UserError(
                f"{file.path} has changed since it was planned; plan again with --overwrite"
            )


def samples(plan: Plan, unit: Unit) -> list[str]:
    """Return the first documents of a unit for the self-check of the encoders.

    At most 64 documents with about 1 MB in total are returned. The list is empty if the unit has no
    documents. The mask is not applied.
    """
    texts = next(
        (
            documents.texts.slice(0, SAMPLE_DOCUMENTS)
            for documents in unmasked(plan, unit)
            if len(documents.texts)
        ),
        None,
    )
    if texts is None:
        return []
    ends = np.cumsum(pc.binary_length(texts).to_numpy())
    found: list[str] = texts.slice(0, max(1, int(np.searchsorted(ends, SAMPLE_BYTES)))).to_pylist()
    return found
