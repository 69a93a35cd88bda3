"""Tests of command lines and existing directories. pretrain resolves the runs; no job is
submitted.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fem_common.errors import InUse, UserError
from launch.__main__ import main
from launch.cluster import slurm
from launch.cluster.profile import load_profile
from launch.cluster.slurm import clean_environment
from launch.job import item_state, load_job, read_json_lines, write_json
from launch.job.item_state import Standing, find_job, standings
from launch.job.plan import first_difference, locked, settle, write
from launch.job.request import Request, command_name, wanted
from launch.job.snapshot import code_folder
from launch.verbs.requeue import restart
from launch.verbs.submit import array_words, dependency, prepare, send
from launch.verbs.sweep import grid, named, read_list, run_name, split_values, wanted_sweep
from tests.launch.folders import DEMO, LOCAL, SLURM, begin, command, config_of, finish, launch, run
from tests.launch.hostile import program
from tests.launch.supervised import Case, start, wait_for
from tests.wording import Wording


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's working directory, with two profiles: local.yaml and slurm.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    (tmp_path / "local.yaml").write_text(LOCAL)
    (tmp_path / "slurm.yaml").write_text(SLURM)


def test_a_run_is_resolved_by_pretrain_and_is_stored_where_requested(tmp_path: Path) -> None:
    job = prepare(run(DEMO, "train.seed=7", "run_dir='a run/with $(touch x)'"))
    assert (
        job.directory == str(tmp_path / "a run/with $(touch x)") and list(tmp_path.rglob("x")) == []
    )
    config = config_of(job.directory)
    assert (config["train"]["seed"], config["parallel"]["world_size"]) == (7, 2)
    assert str(config["run_dir"]) == "a run/with $(touch x)"
    assert job.items[0].arguments == ("-m", "pretrain", f"{job.directory}/launch/config.yaml")
    assert (job.kind, job.world_size, job.torchrun, job.array) == ("run", 2, True, False)
    assert job.working_directory == str(tmp_path)
    assert (
        load_job(job.path) == job and (code_folder(job.path) / "pretrain" / "__main__.py").is_file()
    )
    odd = prepare(run(DEMO, directory='here: # "it\'s" ünï'))
    assert (
        odd.directory
        == str(tmp_path / 'here: # "it\'s" ünï')
        == str(config_of(odd.directory)["run_dir"])
    )


def test_commands_are_ours_and_arrays_the_same_to_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = wanted(command("data_prep", "merge", "a b")).job
    assert (
        job.items[0].arguments == ("-m", "data_prep", "merge", "a b")
        and job.path.parent == tmp_path / "runs" / "jobs"
    )
    assert (job.kind, job.world_size, job.torchrun) == ("command", 1, False)
    for module in ("", *"os tools launch tools.nothing pretrain.run ../x tools..hf -c".split()):
        with pytest.raises(UserError, match="command"):
            wanted(command(module))
    names = {
        command_name(words)
        for words in (
            ["data_prep", "run", "a b"],
            ["data_prep", "run", "a", "b"],
            ["tools.hf", "../etc"],
            ["x"],
        )
    }
    assert (
        len(names) == 4 and not any("/" in name for name in names) and command_name(["x"]) in names
    )
    job = wanted(command("data_prep", "run", "--out", "x", tasks=3)).job
    assert [item.path for item in job.items] == [job.path / f"tasks/000{i}" for i in range(3)]
    given = [sorted(item.environment.items()) for item in job.items]
    keys = [f"SLURM_ARRAY_TASK_{name}" for name in ("COUNT", "ID", "MAX", "MIN", "STEP")]
    assert given == [
        list(zip(keys, ("3", task, "2", "0", "1"), strict=True)) for task in ("0", "1", "2")
    ]
    # Other hosts may see a folder only under its link.
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    request = Request(("data_prep",), True, load_profile("../local.yaml"), "../local.yaml")
    for pwd, place in (("link", "link"), ("", "real")):
        monkeypatch.setenv("PWD", str(tmp_path / pwd))
        assert wanted(request).job.working_directory == str(tmp_path / place)


def test_no_secret_becomes_a_word_of_a_job_or_a_line_of_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_'0123456789")
    monkeypatch.setenv("CREDENTIALS", str(tmp_path))  # a path is no secret
    for request in (
        command("data_prep", "status", "--token=hf_'0123456789"),
        run(DEMO, "name=hf_'0123456789"),
    ):
        with pytest.raises(
            UserError, match=r"^a word of the command contains the value of \$HF_TOKEN, "
        ):
            wanted(request)
    program(tmp_path / "sbatch", "#!/bin/sh\necho 12\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    words = "launch submit --name 'a b' --set \"x=hf_'0123456789\" 'no secret'"
    monkeypatch.setattr(sys, "argv", shlex.split(words))
    request = command("data_prep", "status", str(tmp_path), profile="slurm.yaml")
    send(prepare(request), [0], at_once=None, exclude=[])
    (line,) = read_json_lines(next(tmp_path.glob("runs/jobs/*")) / "launch" / "submissions.jsonl")
    assert line["command"] == "launch submit --name 'a b' --set 'x=***' 'no secret'"


def test_the_same_again_keeps_the_snapshot_and_other_settings_are_refused_by_name(
    tmp_path: Path,
) -> None:
    # A run that never began, for example because Slurm refused it, sets no requirements.
    prepare(run(DEMO, "train.steps=401"))
    job = begin(run(DEMO))
    assert config_of(job.directory)["train"]["steps"] != 401
    marker = code_folder(job.path) / "pretrain" / "marker.py"
    marker.write_text("")
    for words, report in (
        (("train.seed=8", "train.steps=401"), r"train\.steps is \d+, not 401"),
        (("optimizer.lr=1e-9", "optimizer.min_lr=1e-9"), r"optimizer\.lr is .*, not 1e-09"),
        (("data.train.0.prefix=other",), r"data\.train\.0\.prefix is .*, not other"),
    ):
        with pytest.raises(UserError, match=report + ".*--update"):
            prepare(run(DEMO, *words))
    with pytest.raises(UserError, match="processes_per_node is 2, not 1"):
        prepare(Request((DEMO,), False, load_profile("local.yaml"), "local.yaml", processes=1))
    # A profile is not part of the settings of a run.
    (tmp_path / "local.yaml").write_text(LOCAL + "restarts: {max_failures: 9}\n")
    assert (
        "the profile's restarts.max_failures was 5, is 9"
        in settle(wanted(run(DEMO)), update=False).notes
    )
    assert prepare(run(DEMO)).profile["restarts"]["max_failures"] == 9 and marker.exists()
    prepare(run(DEMO, "train.steps=401", update=True))
    assert config_of(job.directory)["train"]["steps"] == 401 and not marker.exists()


def test_an_older_code_reads_the_settings_of_its_run() -> None:
    """A setting that newer code adds or changes does not make a resubmitted run another run."""
    job = begin(run(DEMO))
    file = code_folder(job.path) / "pretrain" / "config.py"
    file.chmod(0o644)
    field = "    interval: int = setting(\n        10,"
    assert field in file.read_text()
    file.write_text(
        file.read_text().replace(field, f"    old_name: int = setting(3, 'Old.')\n{field}")
    )
    config = job.launch / "config.yaml"
    config.write_text(config.read_text().replace("log:\n", "log:\n  old_name: 3\n"))
    prepare(run(DEMO))
    assert "old_name: 3" in config.read_text()
    with pytest.raises(UserError, match=r"train\.seed is 42, not 43"):
        prepare(run(DEMO, "train.seed=43"))


def test_commands_are_compared_and_an_array_starts_what_is_left() -> None:
    begin(command("data_prep", "status", "a", directory="d"))
    begin(command("data_prep", "run", directory="e", tasks=5))
    for request, report in (
        (
            command("data_prep", "status", "b", directory="d"),
            "has the job `data_prep status a`, not `data_prep status b`",
        ),
        (command("data_prep", "status", "a", directory="d", tasks=2), "array is False, not True"),
        (command("data_prep", "run", directory="e", tasks=3), "5 tasks, not 3"),
    ):
        with pytest.raises(UserError, match=report):
            prepare(request)
    job, _ = find_job("e")
    finish(job, 0, 3)
    write_json(job.items[4].launch / "stop.json", {"why": "cancelled"})
    draft = settle(wanted(command("data_prep", "run", directory="e", tasks=5)), update=False)
    assert draft.ready == (1, 2)
    kinds = [standing.kind for standing in draft.standings]
    assert kinds == "finished idle idle finished stopped".split()
    assert find_job("e/tasks/0001") == (job, [1])
    for path, report in (("e/tasks", "no launch/job.json"), ("nowhere", "no such directory")):
        with pytest.raises(UserError, match=report):
            find_job(path)


def test_finished_and_stopped() -> None:
    request = command("data_prep", "status", "a")
    again = command("data_prep", "status", "a", update=True)
    job = prepare(request)
    finish(job, 0)
    assert settle(wanted(request), update=False).ready == ()
    prepare(again)
    assert settle(wanted(request), update=False).ready == (0,)
    write_json(
        job.launch / "stop.json",
        {"why": "gave up", "message": "3 failures: out of luck"},
    )
    with pytest.raises(
        UserError, match=r"gave up: 3 failures: out of luck; to continue: python -m launch requeue"
    ):
        prepare(request)
    prepare(again)
    with locked(job.path), pytest.raises(InUse, match="another launch command"):
        prepare(request)


def test_a_supervisor_on_this_machine_is_seen_while_it_is_that_very_process() -> None:
    request = command("data_prep", "status", "a")
    job = prepare(request)
    before = time.time()
    child = subprocess.Popen(["sleep", "60"])
    state = {"state": "running", "pid": child.pid, "host": os.uname().nodename, "time": time.time()}
    path = job.launch / "state.json"
    try:
        started = item_state.start_time(child.pid)
        assert started is not None and before - 0.1 <= started <= time.time() + 0.1
        write_json(path, state)
        assert standings(job)[0].pid == child.pid
        with pytest.raises(
            UserError, match=f"has process {child.pid}; see: python -m launch status"
        ):
            prepare(request)
        with pytest.raises(UserError, match="has the old settings; first: python -m launch cancel"):
            prepare(command("data_prep", "status", "a", update=True))
        # The process number belonged to another process then.
        for changed in ({"time": time.time() - 100}, {"state": "requeued"}):
            write_json(path, {**state, **changed})
            assert standings(job)[0].kind == "idle"
        write_json(path, {**state, "host": "elsewhere"})
        assert "host elsewhere" in standings(job)[0].where
    finally:
        child.kill()
    write_json(path, state)
    wait_for(lambda: standings(job)[0].kind == "idle")  # also if the process is a zombie
    child.wait()


def test_a_sweeps_runs_are_resolved_one_by_one_and_keep_their_places(tmp_path: Path) -> None:
    """The number of a task is its position: queued tasks must keep their meaning."""
    words = grid(["train.seed=1,2", "optimizer.lr=1e-3"])
    requested = wanted_sweep(run(DEMO, "train.steps=300", directory="s"), named(words))
    assert [item.name for item in requested.job.items] == [
        "train.seed=1,optimizer.lr=1e-3",
        "train.seed=2,optimizer.lr=1e-3",
    ]
    for seed, (item, text) in enumerate(
        zip(requested.job.items, requested.configs.values(), strict=True), 1
    ):
        config = yaml.safe_load(text)
        assert (config["train"]["seed"], config["train"]["steps"]) == (seed, 300)
        assert config["optimizer"]["lr"] == 1e-3
        assert config["run_dir"] == item.directory == str(tmp_path / "s" / item.name)
    first = write(settle(requested, update=False))
    finish(first.job, 0)
    others = named([("train.seed=3",), *reversed(words)])
    longer = settle(wanted_sweep(run(DEMO, "train.steps=300", directory="s"), others), update=False)
    assert [item.name for item in longer.job.items] == [
        *(item.name for item in first.job.items),
        "train.seed=3",
    ]
    assert longer.ready == (1, 2)
    write(longer)
    shorter = settle(
        wanted_sweep(run(DEMO, "train.steps=300", directory="s"), named(words[1:])), update=False
    )
    assert len(shorter.job.items) == 3 and shorter.ready == (1,)
    changed = wanted_sweep(run(DEMO, "train.steps=301", directory="s"), named(words[:1]))
    with pytest.raises(UserError, match=r"train\.steps is 300, not 301"):
        settle(changed, update=False)
    # The settings are the same, so finished work stays finished.
    assert settle(requested, update=True).reopened == ()
    updated = settle(changed, update=True)
    assert updated.reopened == updated.ready == (0,)
    with pytest.raises(UserError, match=r"^train\.seed=x: .*whole number"):
        wanted_sweep(run(DEMO, directory="s"), named([("train.seed=x",)]))
    with pytest.raises(
        UserError,
        match=r"^checkpoint\.mirror = m is the same for several runs; write \{name\} in it",
    ):
        wanted_sweep(run(DEMO, "checkpoint.mirror=m", directory="s"), named(words))


def test_lists_and_grids(tmp_path: Path, wording: Wording) -> None:
    path = Path("runs.txt")
    path.write_text(
        "# runs\n\ntrain.seed=1 optimizer.lr=1e-4  # low\ndata.tokenizer='a b'\nsmall-w64:"
        " model.hidden_size=64\nplain:\n"
    )
    runs = read_list(path)
    assert list(runs.values()) == [
        ("train.seed=1", "optimizer.lr=1e-4"),
        ("data.tokenizer=a b",),
        ("model.hidden_size=64",),
        (),
    ]
    assert list(runs)[2:] == ["small-w64", "plain"]
    bad = [
        "a=1\nb='2\n",
        "a=1\n--plan\n",
        "a=1\n\na=1\n",
        "# none\n",
        "a: x=1\nb: x=1\n",
        "a: x=1\n\na: x=2\n",
        "a/b: x=1\n",
        "..: x=1\n",
    ]
    for text in bad:
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            read_list(path)
        wording(caught.value)
    assert grid(["a=1,2", "b.c=x,y"]) == [
        ("a=1", "b.c=x"),
        ("a=1", "b.c=y"),
        ("a=2", "b.c=x"),
        ("a=2", "b.c=y"),
    ]
    assert split_values('[a,b],{c: 1, d: 2},"x,y",z') == ["[a,b]", "{c: 1, d: 2}", '"x,y"', "z"]
    for words in (["a"], ["a=1,"], ["a=1,1"], ["a=1", "a=2"], ["--x=1"], ["=1"], ["a="]):
        with pytest.raises(UserError, match="--grid"):
            grid(words)


def test_names_of_runs_differ_and_are_folders_and_array_words_state_the_items() -> None:
    dice, seen = random.Random(0), dict[str, tuple[str, ...]]()
    for _ in range(1000):
        words = tuple(
            "k=" + "".join(dice.choices("ab=,./ 'ü\"\n$-", k=dice.randint(0, 4)))
            for _ in range(dice.randint(1, 2))
        )
        name = run_name(words)
        assert seen.setdefault(name, words) == words
        assert not set(name) & set("/ '\"\n$") and len(name.encode()) < 200
    assert len(run_name(["a=" + "x" * 500])) < 200 and array_words([0, 1, 2, 7], 2) == "0-2,7%2"
    one: dict[str, Any]
    for one, other, key in (
        ({"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1, 3]}}, "b.c.1"),
        ({"a": 1}, {"a": 1, "b": 2}, "b"),
        ({"a": 1, "b": 2}, {"a": 1}, "b"),
        ({"a": [1]}, {"a": [1, 2]}, "a"),
        ({"a": 1}, {"a": True}, "a"),
    ):
        assert first_difference(one, other)[0] == key
    assert first_difference({"a": 1}, {"a": True})[1:] == (1, True)


MISTAKES = """\
submit --cluster slurm.yaml -- data_prep status a
submit DEMO --cluster slurm.yaml
local DEMO --cluster local.yaml
submit DEMO --cluster local.yaml
submit --cluster slurm.yaml
submit DEMO --cluster slurm.yaml -- data_prep
submit DEMO --cluster slurm.yaml --tasks 2
submit DEMO --cluster slurm.yaml --at-once 2
submit DEMO --cluster slurm.yaml --nodes 0
submit --cluster slurm.yaml -- os x
submit --cluster slurm.yaml --tasks 0 -- data_prep
submit DEMO --cluster nowhere.yaml
submit DEMO --cluster slurm.yaml --time 5
sweep DEMO --cluster local.yaml --list nowhere.txt
local DEMO --cluster slurm.yaml
local DEMO --cluster local.yaml --nodes 2
local DEMO --cluster local.yaml --processes 3
local DEMO --cluster local.yaml --processes 0
local DEMO --cluster local.yaml --set watchdog.step_minute=1
local DEMO --cluster local.yaml train.stepz=1
"""


def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/nowhere")
    for line in MISTAKES.splitlines():
        assert main(shlex.split(line.replace("DEMO", shlex.quote(DEMO)))) == 2, line
        output = capsys.readouterr().err
        assert output.count("\n") == 1, line
        wording(output)
    assert not list(tmp_path.rglob("submissions.jsonl"))


def test_a_dry_run_shows_all_and_writes_nothing(tmp_path: Path) -> None:
    away = {"node": "n7", "reason": "ECC", "time": 0, "run": "x", "until": None}
    (tmp_path / "cordon.jsonl").write_text(json.dumps(away) + "\n")
    before = sorted(tmp_path.rglob("*"))
    words = "--cluster slurm.yaml train.global_batch_size=8 --nodes 2 --exclude n8 --dependency 12"
    cordon = f"--set=paths.cordon={tmp_path}/cordon.jsonl"
    done = launch("submit", DEMO, *words.split(), cordon, "--dry-run")
    assert sorted(tmp_path.rglob("*")) == before
    for report in (
        "2 nodes x 2 processes = 4",
        "n9, n8, n7",
        "afterok:12",
        "144 GPU hours",
        "#SBATCH --exclude=n9,n8,n7",
        "#SBATCH --nodes=2",
        "sbatch --parsable",
        "#!/bin/bash\n",
        "pretrain's plan is not known yet: data.train.0.prefix",
    ):
        assert report in done.stdout, done.stdout
    words = "--cluster local.yaml --grid train.seed=1,2 --directory s --at-once 2 --dry-run"
    assert launch("sweep", DEMO, *words.split()).stdout.count("idle") == 2
    assert sorted(tmp_path.rglob("*")) == before


def test_dependencies_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dependency([]) is None and dependency(["singleton"]) == "singleton"
    assert dependency(["12", "afterok:3:4", "12"], ask=False) == "afterok:12,afterok:3:4"
    for word in ("afterok", "after:x", "x", "12;rm", "afterok:1,$(x)"):
        with pytest.raises(UserError, match="neither a job's id"):
            dependency([word])
    job = prepare(command("data_prep", "status", "a", directory="d"))
    with pytest.raises(UserError, match=r"is not under way; .*submit it first"):
        dependency(["d"])
    stop = job.items[0].launch / "stop.json"
    write_json(stop, {"why": "cancelled"})
    with pytest.raises(UserError, match="is stopped .*continue it first: python -m launch requeue"):
        dependency(["d"])
    stop.unlink()
    finish(job, 0)
    assert dependency(["d"]) is None
    # A dependent task starts if the corresponding task of the array ended well.
    ended = {
        "12_0": slurm.QueueState("COMPLETED"),
        "12_1": slurm.QueueState("FAILED"),
        "12": slurm.QueueState("FAILED"),
    }

    def queue(ids: list[str]) -> dict[str, slurm.QueueState]:
        prefix = f"{ids[0]}_"
        return {
            job: state for job, state in ended.items() if job == ids[0] or job.startswith(prefix)
        }

    monkeypatch.setattr(slurm, "queue", queue)
    assert dependency(["aftercorr:12"]) == "aftercorr:12"
    for word in ("afterok:12", "aftercorr:12_1"):
        with pytest.raises(
            UserError, match=f"{word}: that job is FAILED; a job after it would never start"
        ):
            dependency([word])
    report = (
        "SBATCH_PARTITION SLURM_ARRAY_TASK_ID SQUEUE_FORMAT SLURM_JOB_ID SRUN_CPUS_PER_TASK".split()
    )
    kept = dict.fromkeys("SLURM_CONF SLURM_CONF_SERVER PATH HF_TOKEN MY_SLURM_".split(), "x")
    assert clean_environment({**dict.fromkeys(report, "1"), **kept}) == kept


def test_a_requeue_reports_what_becomes_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    job = prepare(command("data_prep", "status", "a", profile="slurm.yaml"))
    folder = job.launch
    for state, supervisor in (
        ("COMPLETING", "cancelled"),
        ("COMPLETING", "requeued"),
        ("RUNNING", "cancelled"),
    ):
        write_json(folder / "state.json", {"state": supervisor, "job_id": "12"})
        write_json(folder / "stop.json", {"why": "cancelled"})
        restart(job, [Standing(0, "active", "12", state)])
        assert (
            f"job 12 ({state}) is just ending; if it does not come back" in capsys.readouterr().out
        )
        assert not (folder / "stop.json").exists()


def test_a_run_that_saves_in_order_to_end_continues_when_it_is_requeued(tmp_path: Path) -> None:
    """Its ranks have not saved before the requeue."""
    case = Case(tmp_path / "run", [{"to": 3, "end": "held"}, {}])
    with case.start() as supervisor:
        try:
            case.ready()
            assert "saves, then ends" in launch("cancel", "--save", str(case.directory)).stdout
            wait_for(lambda: case.state["state"] == "saving")
            assert "saves and starts again" in launch("requeue", str(case.directory)).stdout
            (case.directory / "go").touch()
            assert supervisor.wait(90) == 0
        finally:
            supervisor.kill()
    assert (case.state["state"], len(case.attempts)) == ("finished", 2)


WAITING = (
    "local --cluster local.yaml --name t --directory d --tasks 3 --at-once 2 -- pretrain"
    " config.yaml --plan"
)


def tasks() -> subprocess.Popen[str]:
    """Start three tasks, two at once, all waiting: their configuration is a pipe."""
    if not Path("config.yaml").exists():
        os.mkfifo("config.yaml")
    return start("launch", *WAITING.split())


def started(*expected: int) -> None:
    """Wait until the tasks have started these numbers of ranks."""

    def ranks(task: int) -> int:
        return len(list(Path(f"d/tasks/{task:04}").glob("attempts/*/ranks/*.json")))

    wait_for(lambda: tuple(map(ranks, range(3))) == expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_tasks_on_this_machine_end_together(number: signal.Signals) -> None:
    """One task restarts, then the command ends: two tasks end, the third never starts."""
    with tasks() as process:
        try:
            started(1, 1, 0)
            assert "saves and starts again" in launch("requeue", "d/tasks/0001").stdout
            started(1, 2, 0)
            os.kill(process.pid, number)
            process.communicate(timeout=180)
            job, _ = find_job("d")
            wait_for(lambda: all(standing.kind == "idle" for standing in standings(job)))
        finally:
            process.kill()
    started(1, 2, 0)
