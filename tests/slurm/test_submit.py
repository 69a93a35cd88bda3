"""Tests of submit, cancel and requeue with a real Slurm. A command whose configuration is a named
pipe waits until the test continues.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from fem_common.exits import Exit
from launch.cluster import slurm
from launch.job import attempts, launch_folder, rank_log, read_json, read_json_lines
from tests.launch.supervised import wait_for
from tests.slurm.mini import MiniSlurm

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "configs" / "run" / "demo.yaml")
HELP = ("--", "data_prep", "stdlib", "--help")
SUBMIT = "submit --cluster mini.yaml --directory job".split()
HELD = ("--set", "slurm.options=[--hold]")
PROFILE = """
scheduler: slurm
nodes: {gpus: 1, cpus: 1, exclusive: false, memory: 300M}
slurm: {partition: main, time: "30"}
restarts: {back_off_seconds: 0.2, back_off_max_seconds: 1}
health: {check: false}
"""


class Login:
    """A user's shell on a login node."""

    def __init__(self, cluster: MiniSlurm, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "mini.yaml").write_text(PROFILE)

    def launch(
        self,
        *words: str | Path,
        code: int = 0,
        env: Mapping[str, str] | None = None,
        root: Path = ROOT,
    ) -> str:
        """Run ``python -m launch WORDS``; return its standard output, or the one line of a
        refusal.
        """
        command = [sys.executable, "-m", "launch", *words]
        environment = {"PYTHONPATH": str(root), "PWD": str(self.folder), **(env or {})}
        done = self.cluster.run(*command, env=environment, cwd=self.folder, check=False)
        assert done.returncode == code, (command, done)
        if code == 0:
            return done.stdout
        assert done.stderr.startswith("launch: error: ") and done.stderr.count("\n") == 1, done
        return done.stderr

    def submit(self, *words: str, **options: Any) -> str:
        """Submit a command to the directory `job`, and return the job's id."""
        return self.launch(*SUBMIT, "--parsable", *words, **options).strip()

    def again(self, *options: str, code: int = 0, **more: Any) -> str:
        """Submit the help command to the directory `job`, and return the output."""
        return self.launch(*SUBMIT, *options, *HELP, code=code, **more)

    @property
    def job(self) -> Path:
        """Directory of the submitted job."""
        return self.folder / "job"

    def file(self, name: str) -> Any:
        """Return the content of one of the launcher's files in it."""
        return read_json(launch_folder(self.job) / name)

    def submissions(self) -> list[str]:
        """Return the ids of its jobs so far."""
        return [
            line["job_id"]
            for line in read_json_lines(launch_folder(self.job) / "submissions.jsonl")
        ]

    def waiting_command(self) -> tuple[str, ...]:
        """Return a command that waits until `feed` is called."""
        if not (self.folder / "config.yaml").exists():
            os.mkfifo(self.folder / "config.yaml")
        return ("--", "pretrain", "config.yaml", "--plan")

    def job_that_is_over(self) -> str:
        """Return a finished job as a dependency, so that a run is not refused for its missing
        data.
        """
        job = self.cluster.sbatch("--mem=10", "--output=/dev/null", "--wrap=true")
        self.cluster.wait(job, "COMPLETED")
        return str(job)

    def feed(self) -> None:
        """Send the configuration to the waiting command: the plan of the demo with a vocabulary,
        which needs no data.
        """
        demo = (ROOT / "configs" / "run" / "demo.yaml").read_text()
        for section in ("model", "data", "train", "optimizer", "checkpoint"):
            name = "fem_sm_demo" if section == "model" else "demo"
            demo = demo.replace(
                f"{section}: {name}\n", f"{section}: {ROOT}/configs/{section}/{name}.yaml\n"
            )
        text = demo.replace(
            f"{ROOT}/configs/model/fem_sm_demo.yaml",
            f"{{base: {ROOT}/configs/model/fem_sm_demo.yaml, vocab_size: 1000}}",
        )
        with (self.folder / "config.yaml").open("w") as pipe:
            pipe.write(text)

    def reached(self, attempt: int) -> Path:
        """Wait until the command of an attempt runs; return its folder."""
        folder = self.job / "attempts" / f"{attempt:04}"
        wait_for(
            lambda: (read_json(folder / "ranks" / "rank_00000.json") or {}).get("child") is not None
        )
        return folder


@pytest.fixture
def login(cluster: MiniSlurm, tmp_path: Path) -> Login:
    return Login(cluster, tmp_path)


def test_a_change_of_the_code_does_not_reach_a_job(login: Login) -> None:
    """The checkout is broken between submission and start; a resubmission runs the first
    snapshot.
    """
    checkout = login.folder / "checkout"
    for subfolder in ("fem_common", "launch", "data_prep"):
        shutil.copytree(ROOT / subfolder, checkout / subfolder)
    job = login.submit(*HELD, *HELP, root=checkout)
    (checkout / "data_prep" / "__main__.py").write_text("raise SystemExit(1)\n")
    login.cluster.run("scontrol", "release", job)
    assert login.cluster.wait(job) == "COMPLETED"
    (launch_folder(login.job) / "state.json").unlink()
    again = login.submit(*HELP, root=checkout)
    assert login.cluster.wait(again) == "COMPLETED"
    assert "nothing to do: finished" in login.again() and login.again("--parsable") == ""
    updated = login.submit("--update", *HELP, root=checkout)
    assert login.cluster.wait(updated) == "FAILED"
    (attempt, *_) = attempts(login.job)
    assert "usage: python -m data_prep stdlib" in rank_log(attempt, 0).read_text()


def test_one_job_a_directory(login: Login) -> None:
    job = login.submit(*HELD, *HELP)
    assert f"has job {job} (PENDING); see: python -m launch status" in login.again(code=2)
    assert f"job {job} (PENDING) has the old settings" in login.again("--update", code=2)
    # The job is found by its batch script although no id is recorded: the submitting process was
    # killed before it could record it.
    (launch_folder(login.job) / "submissions.jsonl").unlink()
    assert f"has job {job} (PENDING)" in login.again(code=2)
    assert f"requeue {login.job}" in login.launch("cancel", "job")
    wait_for(lambda: login.cluster.state(job) == "CANCELLED")
    assert login.file("state.json")["state"] == "cancelled"
    assert "to continue: python -m launch requeue" in login.again(code=2)
    requeued = login.launch("requeue", "job", "--cluster", "mini.yaml")
    assert "requeued data_prep-stdlib-" in requeued
    assert login.cluster.wait(login.submissions()[-1]) == "COMPLETED"
    assert "nothing to do: finished" in login.launch("requeue", "job")


def test_many_submit_the_same_at_once(login: Login) -> None:
    words = [sys.executable, "-m", "launch", *SUBMIT, *HELD, *HELP]
    environment = {**login.cluster.environment, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            words, cwd=login.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(3)
    ]
    ends = [(process.communicate()[1].decode(), process.returncode) for process in started]
    assert sorted(code for _, code in ends)[0] == 0
    assert all(code in (Exit.WRONG_INPUT, Exit.IN_USE) for _, code in ends[1:] if code)
    assert all(
        "another launch command" in output or "has job" in output for output, code in ends if code
    )
    assert (
        len(login.submissions())
        == len(login.cluster.run("squeue", "--noheader", "--format=%o").stdout.split())
        == 1
    )


def test_requeue_and_cancel_of_one_that_runs(login: Login) -> None:
    job = login.submit(*login.waiting_command())
    login.reached(1)
    assert f"job {job} (RUNNING) saves and is requeued" in login.launch("requeue", "job")
    login.reached(2)
    assert login.cluster.job(job)["Restarts"] == "1"
    assert login.submissions() == [job]
    assert f"job {job} (RUNNING) saves, then ends" in login.launch("cancel", "--save", "job")
    assert login.cluster.wait(job) == "FAILED"
    assert login.file("state.json")["state"] == "cancelled"
    assert login.cluster.job(job)["Restarts"] == "1"
    login.launch("requeue", "job")
    login.reached(3)
    second = login.submissions()[-1]
    login.launch("cancel", "job")
    assert login.cluster.wait(second) == "CANCELLED"
    assert login.file("stop.json")["why"] == "cancelled"
    login.launch("requeue", "job")
    login.reached(4)
    login.feed()
    assert login.cluster.wait(login.submissions()[-1]) == "COMPLETED"
    assert login.file("state.json")["state"] == "finished"


def test_an_array_starts_what_is_left(login: Login) -> None:
    """Three tasks, two at once: a killed one is restarted by its supervisor, a cancelled one is
    not.
    """
    three = ("--tasks", "3", "--at-once", "2")
    job = login.submit(*three, *login.waiting_command())
    tasks = [login.job / "tasks" / f"000{index}" for index in range(3)]

    def child(task: int, attempt: int) -> int:
        path = tasks[task] / f"attempts/000{attempt}/ranks/rank_00000.json"
        return int(wait_for(lambda: (read_json(path) or {}).get("child")))

    os.kill(child(0, 1), signal.SIGKILL)
    child(1, 1)
    assert attempts(tasks[2]) == []
    login.cluster.run("scancel", f"{job}_1")
    child(0, 2)
    child(2, 1)
    (login.folder / "config.yaml").unlink()
    login.feed()  # writes a regular file: the pipe is removed
    for pid in (child(0, 2), child(2, 1)):
        with suppress(ProcessLookupError):  # the process may only now have begun to read
            os.kill(pid, signal.SIGINT)
    assert [login.cluster.wait(f"{job}_{task}", timeout=120) for task in range(3)] == [
        "COMPLETED",
        "CANCELLED",
        "COMPLETED",
    ]
    assert read_json(tasks[1] / "launch" / "state.json")["state"] == "cancelled"
    second = login.submit(*three, "--", "pretrain", "config.yaml", "--plan")
    assert login.cluster.wait(f"{second}_1") == "COMPLETED"
    assert len(attempts(tasks[0])) >= 2 and len(attempts(tasks[1])) == 2
    sent = read_json_lines(launch_folder(login.job) / "submissions.jsonl")
    assert [line["items"] for line in sent] == [[0, 1, 2], [1]]


def test_a_chain_continues_while_all_ends_well(login: Login) -> None:
    """An array, a job that follows its directory, and a run without data, which is accepted because
    another job may create it.
    """
    first = login.submit(*HELD, "--tasks", "2", *HELP)
    second = login.submit("--directory", "second", "--dependency", "job", *HELP)
    third = login.submit(DEMO, "--directory", "run", "--dependency", second)
    fourth = login.submit("--directory", "fourth", "--dependency", "run", *HELP)
    waiting = dict(
        line.split("|")
        for line in login.cluster.run("squeue", "--noheader", "--format=%A|%r").stdout.splitlines()
    )
    assert [waiting[job] for job in (first, second, third, fourth)] == [
        "JobHeldUser",
        *["Dependency"] * 3,
    ]
    login.cluster.run("scontrol", "release", first)
    assert [login.cluster.wait(job, timeout=200) for job in (second, third, fourth)] == [
        "COMPLETED",
        "FAILED",
        "CANCELLED",
    ]
    assert attempts(login.folder / "fourth") == []
    assert read_json(login.folder / "run" / "launch" / "stop.json") is None, (
        "whoever mends the input gives the same command again"
    )
    for named, report in (
        ("run", "is not under way (the input is wrong, and stays so: "),
        (third, "that job is FAILED"),
        (f"afterok:{second}:{third}", f"afterok:{third}: that job is FAILED"),
        (f"afterany:{third},afternotok:{second}", f"afternotok:{second}: that job is COMPLETED"),
        ("99999", "knows no such"),
        ("aftercorr:99999", "knows no such"),
    ):
        assert report in login.again("--directory", "fourth", "--dependency", named, code=2)
    dry = login.again("--directory", "fifth", "--dependency", "second", "--dry-run")
    assert "--dependency" not in dry and "after      nothing" in dry


def test_the_users_variables_change_no_job(login: Login) -> None:
    words = (
        "SBATCH_PARTITION=urgent SBATCH_ARRAY_INX=0-3 SBATCH_TIMELIMIT=1 SBATCH_EXPORT=NONE"
        " SQUEUE_STATES=CD SLURM_ARRAY_TASK_ID=7 SLURM_ARRAY_TASK_COUNT=9 SLURM_JOB_ID=1"
        " SQUEUE_FORMAT=%u SLURM_NNODES=2"
    )
    strange = dict(word.split("=") for word in words.split())
    job = login.submit(*HELD, *HELP, env={**strange, "CANARY": "sings"})
    shown = login.cluster.job(job)
    assert (shown["Partition"], shown["TimeLimit"]) == ("main", "00:30:00")
    assert "ArrayTaskId" not in shown
    assert "has job" in login.again(env=strange, code=2)
    kept = login.folder / "job.environment"
    login.launch("cancel", "job", env=strange)
    setup = f"setup.lines=['env > {kept}']"
    requeue = ("requeue", "job", "--cluster", "mini.yaml", "--set", setup)
    login.launch(*requeue, env={**strange, "CANARY": "sings"})
    assert login.cluster.wait(login.submissions()[-1]) == "COMPLETED"
    report = dict(line.split("=", 1) for line in kept.read_text().splitlines() if "=" in line)
    assert report["CANARY"] == "sings"
    assert [name for name in strange if name in report and report[name] == strange[name]] == []


def test_a_waiting_job_heeds_the_cordon_file_anew_when_it_is_requeued(login: Login) -> None:
    cordon = login.folder / "runs" / "cordon.jsonl"
    cordon.parent.mkdir()
    cordon.write_text(
        "".join(json.dumps({"node": name}) + "\n" for name in ("node1", "of-another-cluster"))
    )
    before = login.cluster.sbatch("--hold", "-o", os.devnull, "--wrap", "true")
    job = login.submit("--dependency", str(before), *HELP)
    assert login.cluster.job(job)["ExcNodeList"] == "node1"
    cordon.unlink()
    assert "already waits in the queue (Dependency), now for any node\n" in login.launch(
        "requeue", "job"
    )
    assert login.cluster.job(job)["ExcNodeList"] in ("", "(null)")
    assert "for any node except node2" in login.launch("requeue", "job", "--exclude", "node2")
    assert login.cluster.job(job)["ExcNodeList"] == "node2"
    assert "too few nodes are left, so it cannot start" in login.launch(
        "requeue", "job", "--exclude", "node[1-2]"
    )
    assert login.launch("requeue", "job", "--exclude", "node2").endswith(
        "for any node except node2\n"
    )
    login.cluster.run("scontrol", "release", str(before))
    login.cluster.run("scontrol", "hold", job)
    assert "was held, and is released" in login.launch("requeue", "job", "--exclude", "node2")
    assert login.cluster.wait(job) == "COMPLETED" and login.cluster.job(job)["NodeList"] == "node1"


def test_a_run_leaves_a_node_on_which_its_supervisor_cannot_start(login: Login) -> None:
    """node1, which is first, fails after three ordinary requeues; on node2 the run starts pretrain,
    which reports its missing data.
    """
    bad = "'[ $SLURMD_NODENAME != node1 ] || hash -p /gone/python python3'"
    lines = f"setup.lines=['[ ${{SLURM_RESTART_COUNT:-0}} -ge 3 ] || sleep 600', {bad}]"
    settings = [lines, "host_python=python3", "slurm.options=[--comment=a grant]"]
    after = ("--dependency", login.job_that_is_over())
    job = login.submit(DEMO, *after, *(f"--set={setting}" for setting in settings))
    for restarts in range(3):
        wait_for(
            lambda: (
                login.cluster.job(job).get("Restarts") == str(restarts)  # noqa: B023
                and login.cluster.state(job) == "RUNNING"
            )
        )
        login.cluster.batch_pid(job)
        login.cluster.run("scontrol", "requeue", job)
    assert login.cluster.wait(job) == "FAILED"
    shown = login.cluster.job(job)
    assert (shown["Restarts"], shown["ExcNodeList"], shown["NodeList"]) == ("4", "node1", "node2")
    assert shown["Comment"] == "a grant not-started:4:1"
    assert [read_json(attempt / "attempt.json")["nodes"] for attempt in attempts(login.job)] == [
        ["node2"]
    ]
    report = (
        "[slurm] launch: the supervisor did not start on node1: back to the queue, without that"
        " node"
    )
    assert report in login.launch("logs", "job")


# Run in a mount namespace in which munge's socket is at the place where a client without slurm.conf
# expects it.
CONFIGLESS = (
    'mount -t tmpfs none /run && mkdir /run/munge && ln -s "$0" /run/munge/munge.socket.2 && exec'
    ' "$@"'
)


def test_a_site_without_configuration_files_is_reached(login: Login) -> None:
    job = login.submit(*HELD, *HELP)
    socket = login.cluster.root / "run" / "munge.socket"
    port = slurm.fields((login.cluster.root / "etc" / "slurm.conf").read_text(), "\n")
    inside = ["unshare", "--mount", "--propagation", "private", "sh", "-c", CONFIGLESS, str(socket)]
    server = f"env -u SLURM_CONF SLURM_CONF_SERVER=127.0.0.1:{port['SlurmctldPort']}"
    words = [*inside, *server.split(), sys.executable, "-m", "launch", "status", "job"]
    board = login.cluster.run(*words, env={"PYTHONPATH": str(ROOT)}, cwd=login.folder).stdout
    assert f"queued  {job}" in board and "JobHeldUser" in board, board


def test_the_queue_in_words(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", login.cluster.environment["SLURM_CONF"])
    monkeypatch.setenv("SQUEUE_STATES", "CD")
    script = login.folder / "a script.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --array=0-2%1 --mem=10M\n[ $SLURM_ARRAY_TASK_ID = 0 ] && exit"
        " 3\nsleep 100\n"
    )
    script.chmod(0o755)
    array = slurm.submit(script, "--output=/dev/null")
    held = slurm.submit(script, "--array=5", "--hold", "--output=/dev/null")
    wait_for(
        lambda: slurm.queue([array]).get(f"{array}_1", slurm.QueueState("")).state == "RUNNING"
    )
    # The scheduler reports this a moment later.
    wait_for(lambda: slurm.queue([array])[f"{array}_2"].reason == "JobArrayTaskLimit")
    states = slurm.queue([array, held, "99999"])
    assert (states[f"{array}_0"].state, states[f"{array}_0"].active) == ("FAILED", False)
    assert (states[f"{array}_1"].nodes, states[f"{array}_1"].active) == ("node1", True)
    assert (states[f"{array}_2"].state, states[f"{array}_2"].reason) == (
        "PENDING",
        "JobArrayTaskLimit",
    )
    assert (states[array].state, states[held].state, states[held].reason) == (
        "RUNNING",
        "PENDING",
        "JobHeldUser",
    )
    assert "99999" not in states and slurm.queue(["99999"]) == {} == slurm.queue([])
    assert set(slurm.jobs_of(script)) == {f"{array}_1", f"{array}_2", f"{held}_5"}
    nodes = {
        node.name: (node.gpus, node.cpus, node.memory, node.partitions)
        for node in slurm.all_nodes()
    }
    assert nodes == dict.fromkeys(("node1", "node2"), (8, 8, 16000, ("main", "urgent")))
    requested = slurm.job_fields(held)
    assert (
        requested["MinMemoryNode"],
        slurm.number(requested["NumNodes"]),
        requested["Partition"],
    ) == (
        "10M",
        1,
        "main",
    )
    slurm.cancel([array, held, "99999"])
    wait_for(lambda: slurm.jobs_of(script) == {})
    slurm.signal_batch([f"{array}_1"], "USR1")
    assert not any(state.active for state in slurm.queue([array, held]).values())
