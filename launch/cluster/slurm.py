"""Slurm's commands as the submitting side calls them: one question a function, every refusal in one line. Standard library alone.

What the user's own SBATCH_*, SQUEUE_* and SLURM_* variables would change of a command's meaning is left out of its environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fem_common.errors import UserError

TIMEOUT = 60.0  # seconds for an answer: slurmctld's own message time-out is 10
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # say which Slurm, and who asks
OURS = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SQUEUE|SCANCEL|SCONTROL|SALLOC|SACCT|SINFO|PET)_")
# Not over: the job holds, or will hold, nodes.
ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"}
ACTIVE |= {"REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
CHUNK = 200  # job ids a question: a command line has an end


class SlurmError(UserError):
    """Slurm is not there, does not answer, or refuses: one line with its own words."""


@dataclass(frozen=True)
class QueueState:
    """How a job, or a task of a job array, stands in Slurm's eyes."""

    state: str  # PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, NODE_FAIL, ...
    reason: str = ""  # why it waits: Resources, Priority, Dependency, BeginTime, ...; "" where it does not
    nodes: str = ""  # as Slurm writes them: node[1-4]

    @property
    def active(self) -> bool:
        """Whether it is in the queue or on nodes."""
        return self.state in ACTIVE


def clean_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment without what a surrounding job or the user's shell says to Slurm's commands, and so to a job that inherits it."""
    environ = os.environ if environ is None else environ
    return {name: value for name, value in environ.items() if name in KEPT or not OURS.match(name)}


def call(*command: str, timeout: float = TIMEOUT) -> str:
    """What a command of Slurm's answers. Raises SlurmError: not installed, no answer in time, refused."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout, env=clean_environment()
        )
    except FileNotFoundError:
        raise SlurmError(
            f"{command[0]}: not installed here; submit on a login node of the cluster, or start it with: python -m launch local"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{command[0]}: Slurm gave no answer in {timeout:g} seconds; is slurmctld up? (scontrol ping)") from None
    if done.returncode:
        raise SlurmError(f"{command[0]}: {_words(done.stderr or done.stdout) or f'failed with {done.returncode}'}")
    return done.stdout


def _words(text: str) -> str:
    """Slurm's message as one line, without its prefixes."""
    lines = [re.sub(r"^(\w+: )?(fatal|error): ", "", line.strip()) for line in text.splitlines()]
    words = "; ".join(dict.fromkeys(line for line in lines if line))
    if re.search(r"Unable to contact slurm controller|Connection refused|Zero Bytes|Connection timed out", words):
        words += " (is this a login node, and slurmctld up? scontrol ping)"
    if "Invalid job array" in words:
        words += " (more tasks than the cluster's MaxArraySize? scontrol show config)"
    return words


def submit(script: Path, *options: str) -> str:
    """Submit a batch script: the job's id. The job inherits this process's environment. Raises SlurmError."""
    answer = call("sbatch", "--parsable", *options, str(script))
    job_id = answer.strip().splitlines()[-1].split(";")[0] if answer.strip() else ""
    if not job_id.isdigit():
        raise SlurmError(f"sbatch: answered {answer.strip()!r} instead of a job id")
    return job_id


def queue(job_ids: Iterable[str], *, past: bool = True) -> dict[str, QueueState]:
    """How jobs stand. Keys: the ids that were asked for; of an array's id also ``ID_TASK`` of every task.

    An array's own id has the state of a task at work, else of one that waits, else of one that did not end well, else of the last. An id
    that Slurm has forgotten (minutes after the end; with accounting never, where ``past`` asks for it) is missing. Raises SlurmError.
    """
    wanted = list(dict.fromkeys(job_ids))
    found: dict[str, QueueState] = {}
    for start in range(0, len(wanted), CHUNK):
        found |= _squeue(wanted[start : start + CHUNK])
    if past:
        arrays = {name.partition("_")[0] for name in found}
        found |= _sacct([job for job in wanted if job not in found and job not in arrays])
    # An array as one job.
    ways = (lambda task: task.active and task.state != "PENDING", lambda task: task.active, lambda task: task.state != "COMPLETED")
    for job in wanted:
        tasks = [state for name, state in found.items() if name.startswith(f"{job}_")]
        if tasks and job not in found:
            found[job] = next((task for way in ways for task in tasks if way(task)), tasks[-1])
    return found


def _squeue(job_ids: Sequence[str]) -> dict[str, QueueState]:
    """The jobs that the controller still knows, over or not."""
    try:
        answer = call("squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(job_ids)}", "--format=%i|%T|%r|%N")
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        return {}  # the only one of a question is unknown; of several, the unknown are passed over
    return dict(_parse(line) for line in answer.splitlines() if line.count("|") >= 3)


def _parse(line: str) -> tuple[str, QueueState]:
    name, state, reason, nodes = (field.strip() for field in line.split("|")[:4])
    return name, QueueState(state, "" if reason in ("None", "(null)") else reason, nodes)


def _sacct(job_ids: Sequence[str]) -> dict[str, QueueState]:
    """The jobs that accounting knows, where there is accounting."""
    if not job_ids or shutil.which("sacct") is None:
        return {}
    try:
        answer = call("sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(job_ids)}", "--format=JobID,State,NodeList")
    except SlurmError:
        return {}
    found = {}
    for line in answer.splitlines():
        name, state, nodes = line.split("|")
        found[name] = QueueState(state.split(" ")[0], "", "" if nodes == "None assigned" else nodes)
    return found


def jobs_of(script: Path) -> dict[str, QueueState]:
    """The jobs and array tasks in the queue that run this batch script, whoever noted their ids. Raises SlurmError."""
    answer = call("squeue", "--noheader", "--array", "--format=%i|%T|%r|%N|%o")
    rows = [line for line in answer.splitlines() if line.count("|") >= 4 and line.split("|", 4)[4].strip() == str(script)]
    return dict(map(_parse, rows))


def cancel(job_ids: Sequence[str]) -> None:
    """End jobs; one that is over is passed over. Raises SlurmError."""
    for start in range(0, len(job_ids), CHUNK):
        try:
            call("scancel", *job_ids[start : start + CHUNK])
        except SlurmError as error:
            if not re.search(r"Invalid job id|already completing|already completed|already finished", str(error)):
                raise


def signal_batch(job_ids: Sequence[str], name: str) -> None:
    """Send a signal (``USR1``) to the batch scripts of running jobs alone, and not to their steps; one that ended meanwhile is passed over.

    Not for a task of an array that waits: Slurm 22.05 may give its signal to another task. Raises SlurmError.
    """
    for job in job_ids:
        try:
            call("scancel", "--batch", f"--signal={name}", job)
        except SlurmError:
            state = queue([job], past=False).get(job)
            if state is not None and state.state == "RUNNING":
                raise


def node_names() -> set[str]:
    """The cluster's nodes. Raises SlurmError."""
    return set(call("sinfo", "--noheader", "--Node", "--format=%N").split())
