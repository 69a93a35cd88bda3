"""Run the trial of `launch doctor`: a small job that passes through all steps of a real job.

The trial is rendered and submitted or, with a local profile, started on this machine. It checks
its nodes and starts ranks like any job. Its program is `launch.node.measure`. The result is read
from the trial's directory. A trial that waits or runs too long is cancelled.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.cluster import slurm
from launch.cluster.profile import Profile
from launch.job import (
    Item,
    Job,
    attempts,
    last_lines,
    launch_folder,
    rank_log,
    read_json,
    snapshot,
)

# limit for the ranks: their start on a cold file system, and the measurements
RUN_SECONDS = 300.0
POLL_SECONDS = 0.5
# wait for the first files of a job that has ended
END_SECONDS = 20.0
MORE_SECONDS = 5.0  # wait for more files once the first are seen
MINUTES = 20  # the job's time limit


@dataclass
class Outcome:
    """Result of the trial."""

    directory: Path
    nodes: tuple[str, ...] = ()  # nodes that the trial ran on, if known
    result: dict[str, Any] | None = None  # bandwidth.json
    trouble: str = ""  # reason for a missing result
    tail: list[str] = field(default_factory=list)  # last lines of the trial's output


def make(profile: Profile, profile_path: str, nodes: int, directory: Path) -> Job:
    """Create the trial's directory with a code snapshot, and return the trial's job.

    Its profile is the given one with one attempt, a short time limit, the node check enabled and
    notifications disabled.

    Raises:
        UserError: the packages' code is not found.
    """
    signal = min(profile.slurm.signal_seconds, 60)
    mine = replace(
        profile,
        logs=None,
        slurm=replace(
            profile.slurm, time=str(MINUTES) if profile.slurm.time else None, signal_seconds=signal
        ),
        restarts=replace(profile.restarts, max_failures=0, max_attempts=1),
        health=replace(profile.health, check=True),
        notify=replace(profile.notify, command=None),
    )
    snapshot.take(directory)
    backend = "nccl" if profile.nodes.gpus else "gloo"
    measure = ("-m", "launch.node.measure", "all-reduce", str(directory), backend)
    shared = dict.fromkeys([*profile.paths.shared, str(directory)])
    job = Job(
        name="launch-doctor",
        kind="command",
        directory=str(directory),
        working_directory=str(directory),
        code=str(snapshot.code_folder(directory)),
        python=profile.interpreters(sys.executable)[0],
        nodes=nodes,
        processes_per_node=profile.processes_per_node,
        torchrun=True,
        items=(Item(str(directory), (*measure, *shared), "launch-doctor"),),
        profile=mine.as_json(),
        profile_path=profile_path,
    )
    job.save()
    return job


def on_slurm(job: Job, wait_seconds: float, report: Callable[[str], None]) -> Outcome:
    """Submit the trial, wait for its end, and return its outcome.

    The trial is cancelled if it waits in the queue longer than ``wait_seconds``, or runs too long.

    Raises:
        SlurmError: a Slurm command fails.
    """
    outcome = Outcome(job.path)
    limit = RUN_SECONDS + float(job.profile["health"]["timeout_seconds"])
    job_id = slurm.submit(job.script)
    submitted = time.monotonic()
    started = None
    over = None
    try:
        while over is None or time.monotonic() - over < (
            MORE_SECONDS if logs(outcome) else END_SECONDS
        ):
            read_files(outcome)
            attempt = last_attempt(outcome) or {}
            state = slurm.queue([job_id]).get(job_id)
            # COMPLETING can last long, because Slurm waits for a node that hangs. Do not wait for
            # it.
            if (
                state is None
                or not state.active
                or state.state == "COMPLETING"
                or attempt.get("decision")
            ):
                over = over or time.monotonic()
                if outcome.result or attempt.get("outcome") not in (None, "finished"):
                    break
            elif state.state == "PENDING":
                report(f"job {job_id} waits in the queue ({state.reason})")
                if time.monotonic() - submitted > wait_seconds:
                    outcome.trouble = (
                        f"job {job_id} waited {wait_seconds:.0f} s in the queue ({state.reason}) "
                        "and was cancelled"
                    )
                    break
            else:
                started = started or time.monotonic()
                outcome.nodes = outcome.nodes or tuple(slurm.hosts([state.nodes]))
                report(f"job {job_id} runs on {state.nodes}")
                if time.monotonic() - started > limit:
                    silent = (
                        ""
                        if attempt or not outcome.nodes
                        else f"; {outcome.nodes[0]} did not start it"
                    )
                    outcome.trouble = (
                        f"job {job_id} had not ended after {limit:.0f} s and was cancelled{silent}"
                    )
                    break
            time.sleep(POLL_SECONDS)
    finally:
        slurm.cancel([job_id])
    return explained(outcome, f"job {job_id}")


def here(
    job: Job, command: Sequence[str], environment: Mapping[str, str], report: Callable[[str], None]
) -> Outcome:
    """Start the trial on this machine, wait for its end, and return its outcome.

    command, environment: those of the trial's supervisor.
    """
    outcome = Outcome(job.path)
    limit = RUN_SECONDS + float(job.profile["health"]["timeout_seconds"])
    report("the trial runs on this machine")
    with (launch_folder(outcome.directory) / "slurm-local.out").open("wb") as log:
        # A process that is killed at the time limit takes its ranks with it.
        try:
            subprocess.run(
                command,
                cwd=job.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=limit,
            )
        except subprocess.TimeoutExpired:
            outcome.trouble = f"the trial had not ended after {limit:.0f} s and was stopped"
    read_files(outcome)
    return explained(outcome, "the trial")


def read_files(outcome: Outcome) -> None:
    """Update the outcome from the files that the trial has written so far."""
    outcome.result = read_json(outcome.directory / "bandwidth.json")
    if attempt := last_attempt(outcome):
        outcome.nodes = tuple(attempt["nodes"]) or outcome.nodes


def last_attempt(outcome: Outcome) -> dict[str, Any] | None:
    """Return the contents of the last attempt's attempt.json, or None if it does not exist yet."""
    folders = attempts(outcome.directory)
    return read_json(folders[-1] / "attempt.json") if folders else None


def logs(outcome: Outcome) -> list[Path]:
    """Return the files with the output of Slurm and the supervisor."""
    return sorted(launch_folder(outcome.directory).glob("slurm-*.out"))


def explained(outcome: Outcome, name: str) -> Outcome:
    """Complete the outcome of a trial that has ended, and return it.

    If the trial has no result, the reason and the last lines of its logs are added. ``name`` is the
    name of the trial in the reason.
    """
    if outcome.result is not None:
        outcome.trouble = ""
        return outcome
    failure = (last_attempt(outcome) or {}).get("failure") or {}
    state = read_json(launch_folder(outcome.directory) / "state.json") or {}
    message = failure.get("message") or state.get("message")
    if not outcome.trouble and message:
        outcome.trouble = f"{name} failed: {message}"
    elif not outcome.trouble and not logs(outcome):
        where = f" on {', '.join(outcome.nodes)}" if outcome.nodes else ""
        outcome.trouble = (
            f"{name} ended without any output in {outcome.directory}: the nodes{where} do not see "
            "that folder"
        )
    elif not outcome.trouble:
        outcome.trouble = f"{name} ended before its ranks were started"
    for log in [
        *logs(outcome)[-1:],
        *(rank_log(folder, 0) for folder in attempts(outcome.directory)[-1:]),
    ]:
        outcome.tail += last_lines(log, 5)
    return outcome
