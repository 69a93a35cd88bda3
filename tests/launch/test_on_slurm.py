"""The Slurm place without a Slurm: ports, containers, what the guard concludes. tests/slurm has the rest."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.job import Item, Job
from launch.supervise import guard
from launch.supervise.on_slurm import PORTS, SlurmPlace, container_parts, rendezvous_port
from launch.supervise.place import Attempt, PlaceError

ITEM = Item("/shared/runs/a", ("-m", "pretrain", "/shared/runs/a/launch/config.yaml"), "a")
JOB = Job("a", "run", "/shared/runs/a", "/project/work", "/shared/runs/a/launch/code", "/env/python", 2, 8, True, (ITEM,), {}, "p.yaml")

ENVIRONMENT = {"PYTHONPATH": JOB.code, "NCCL_DEBUG": "WARN", "WANDB_API_KEY": "canary"}
INSIDE = ["env", f"PYTHONPATH={JOB.code}", "NCCL_DEBUG=WARN"]


def attempt(**profile: Any) -> Attempt:
    return Attempt(1, Path("/shared/runs/a/attempts/0001"), replace(JOB, profile=profile), ITEM, ("n1", "n2"), ENVIRONMENT)


def test_outside_a_job_there_is_no_place() -> None:
    with pytest.raises(PlaceError, match="SLURM_JOB_ID"):
        SlurmPlace({})


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        ({"SLURM_JOB_ID": "12"}, "12"),
        # The last task of array 12 has the array's own number: a bare 12 would be all of its tasks.
        ({"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "0"}, "12_0"),
        ({"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_RESTART_COUNT": "2"}, "12_3"),
    ],
)
def test_a_task_of_an_array_is_named_as_such(environ: dict[str, str], job: str) -> None:
    place = SlurmPlace(environ)
    assert place.job_id == job and place.restart_count == int(environ.get("SLURM_RESTART_COUNT", 0)) and place.can_requeue


def test_a_port_that_is_taken_is_passed_over() -> None:
    first = rendezvous_port(4711)
    assert first in PORTS
    with socket.socket() as taken:
        taken.bind(("", first))
        taken.listen()
        assert rendezvous_port(4711) not in (first, rendezvous_port(4712))


def test_without_a_container_nothing_is_added() -> None:
    assert container_parts(attempt(container={"runtime": "none", "image": None})) == ([], [])


def test_pyxis_takes_options_of_srun() -> None:
    container = {"runtime": "pyxis", "image": "/images/a b.sqsh", "mounts": ["/data:/data:ro"], "options": ["--container-writable"]}
    options, words = container_parts(attempt(container=container, paths={"shared": ["/shared"]}, environment={"NCCL_DEBUG": "WARN"}))
    mounts = "--container-mounts=/data:/data:ro,/project/work:/project/work,/shared:/shared"
    assert options == ["--container-image=/images/a b.sqsh", mounts, "--container-workdir=/project/work", "--container-writable"]
    assert words == INSIDE


@pytest.mark.parametrize("gpus", [0, 8])
def test_apptainer_goes_before_the_command(gpus: int) -> None:
    container = {"runtime": "apptainer", "image": "a.sif", "mounts": ["/data:/data:ro"], "options": ["--cleanenv"]}
    options, words = container_parts(attempt(container=container, nodes={"gpus": gpus}, environment={"NCCL_DEBUG": "WARN"}))
    assert options == [] and words[:2] == ["apptainer", "exec"] and words[-5:] == ["--cleanenv", "a.sif", *INSIDE]
    assert ("--nv" in words) == bool(gpus)
    binds = [after for word, after in zip(words, words[1:], strict=False) if word == "--bind"]
    assert binds == ["/data:/data:ro", "/shared/runs/a:/shared/runs/a", "/project/work:/project/work"]


RUNNING = {"JobState": "RUNNING", "Reason": "None", "Restarts": "1", "ExitCode": "0:0"}


@pytest.mark.parametrize(
    ("job", "killed"),
    [
        ({}, True),
        ({"JobState": "COMPLETING", "Reason": "JobLaunchFailure", "ExitCode": "0:9"}, True),
        ({"JobState": "FAILED", "Reason": "NonZeroExitCode", "ExitCode": "0:9"}, True),
        ({"JobState": "COMPLETING", "Reason": "TimeLimit"}, True),
        ({"JobState": "COMPLETING", "ExitCode": "1:0"}, False),  # it ended by itself, and badly
        ({"JobState": "COMPLETING"}, False),  # scancel
        ({"JobState": "CANCELLED", "ExitCode": "0:15"}, False),
        ({"JobState": "COMPLETING", "Restarts": "2"}, False),  # requeued by someone else
    ],
)
def test_the_guard_tells_a_kill_from_other_ends(job: dict[str, str], killed: bool) -> None:
    assert guard.killed({**RUNNING, **job}, "1") == killed


@pytest.mark.parametrize(("name", "content", "own"), [("state.json", {"state": "running"}, False), ("stop.json", {}, True)])
def test_the_guard_heeds_what_the_item_says(tmp_path: Path, name: str, content: dict[str, str], own: bool) -> None:
    assert not guard.of_its_own_will(tmp_path)
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / name).write_text(json.dumps(content))
    assert guard.of_its_own_will(tmp_path) == own


def test_the_guard_waits_for_the_end_of_a_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = time.monotonic()
        killer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"])
        guard.wait_for_end(process.pid)
        assert time.monotonic() - started > 0.4 and process.wait() == -9
        killer.wait()
    guard.wait_for_end(process.pid)


def test_the_guard_does_nothing_about_a_process_that_is_no_supervisor(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()", "launch.supervise"], stdin=subprocess.PIPE) as process:
        assert guard.visible(process.pid) and not guard.visible(1)
        process.kill()
    command = [sys.executable, "-m", "launch.supervise.guard", str(tmp_path), "1", "0", str(process.pid)]
    assert "no guard" in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
