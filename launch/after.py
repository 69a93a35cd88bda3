"""launch: ``--dependency``: a job that starts after others ended well, named by their ids or their directories."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from fem_common.errors import UserError
from launch import slurm
from launch.standing import find_job, standings

WRITTEN = re.compile(r"(after|afterany|afterok|afternotok|aftercorr|afterburstbuffer)(:[0-9_+]+)+|singleton")


def dependency(words: Sequence[str], *, ask: bool = True) -> str | None:
    """What sbatch's --dependency says for some words: ids, ``afterok:ID``, directories of jobs; None where nothing has to be waited for.

    ``ask`` False: without asking the queue.

    Raises:
        UserError: a word is none of these, or the job of a directory is neither finished nor in the queue.
    """
    told: list[str] = []
    for word in words:
        if re.fullmatch(r"\d+(_\d+)?", word):
            told.append(f"afterok:{_known(word) if ask else word}")
        elif all(WRITTEN.fullmatch(part) for part in word.split(",")):
            told.append(word)
        elif Path(word).is_dir():
            told += _of_directory(word, ask)
        else:
            raise UserError(f"--dependency {word}: neither a job's id, nor afterok:ID, nor a directory")
    return ",".join(dict.fromkeys(told)) or None


def _known(job_id: str) -> str:
    """A job's id. Raises UserError where it ended badly, or Slurm has forgotten it: a job after it would never, or at once, start."""
    state = slurm.queue([job_id]).get(job_id)
    if state is None:
        raise UserError(f"--dependency {job_id}: Slurm knows no such job, or has forgotten it; name the job by its directory")
    if not state.active and state.state != "COMPLETED":
        raise UserError(f"--dependency {job_id}: that job is {state.state}; a job after it would never start")
    return job_id


def _of_directory(directory: str, ask: bool) -> list[str]:
    """One dependency for every job that works at a directory's items; none where all are finished."""
    job, items = find_job(directory)
    chosen = [item for item in standings(job, ask=ask) if item.index in items and item.kind != "finished"]
    for item in chosen:
        if item.kind != "active" or item.job_id is None:
            kind = "not under way" if item.kind == "idle" else item.kind
            told = f"runs as {item.where}, which Slurm knows nothing of" if item.kind == "active" else f"is {kind} ({item.message})"
            where = job.items[item.index].directory
            raise UserError(
                f"--dependency {directory}: {where} {told.removesuffix(' ()')}; a job after it would wait for ever: submit it first"
            )
    ids = [str(item.job_id) if len(items) < len(job.items) else str(item.job_id).partition("_")[0] for item in chosen]
    return [f"afterok:{job_id}" for job_id in dict.fromkeys(ids)]
