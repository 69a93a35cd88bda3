"""What a command line becomes, and what is in a directory already. pretrain itself resolves; nothing is submitted here."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from fem_common.errors import UserError
from launch.cluster.profile import load_profile
from launch.job import item_state as alive
from launch.job import launch_folder, load_job, write_json
from launch.job.item_state import find_job, standings
from launch.job.plan import locked, settle
from launch.job.request import Request, command_name, wanted
from launch.job.snapshot import code_folder
from launch.verbs.submit import prepare
from tests.launch.requests import DEMO, LOCAL, begin, command, finish, run

pytestmark = pytest.mark.usefixtures("here")


# --- requests --------------------------------------------------------------------------------------------------------------------


def test_a_run_is_resolved_by_pretrain(tmp_path: Path) -> None:
    job = prepare(run(DEMO, "train.seed=7", "run_dir='a run/with $(touch x)'"))
    assert job.directory == str(tmp_path / "a run/with $(touch x)")
    config = yaml.safe_load((launch_folder(Path(job.directory)) / "config.yaml").read_text())
    assert (config["train"]["seed"], config["parallel"]["world_size"], config["run_dir"]) == (7, 2, "a run/with $(touch x)")
    assert job.items[0].arguments == ("-m", "pretrain", f"{job.directory}/launch/config.yaml")
    assert (job.kind, job.world_size, job.torchrun, job.array, job.working_directory) == ("run", 2, True, False, str(tmp_path))
    assert load_job(Path(job.directory)) == job
    assert (code_folder(Path(job.directory)) / "pretrain" / "__main__.py").is_file()
    assert list(tmp_path.rglob("x")) == []


def test_a_run_goes_where_it_is_told(tmp_path: Path) -> None:
    job = prepare(run(DEMO, directory='here: # "it\'s" ünï'))
    assert job.directory == str(tmp_path / 'here: # "it\'s" ünï')
    assert yaml.safe_load((launch_folder(Path(job.directory)) / "config.yaml").read_text())["run_dir"] == job.directory


def test_pretrain_refuses_in_its_own_words() -> None:
    with pytest.raises(UserError, match=r"unknown key train\.stepz; did you mean train\.steps\?$"):
        wanted(run(DEMO, "train.stepz=3"))
    with pytest.raises(UserError, match="multiple of"):
        wanted(Request((DEMO,), False, load_profile("local.yaml"), "local.yaml", processes=3))


def test_commands_are_ours(tmp_path: Path) -> None:
    job = wanted(command("data_prep", "merge", "a b")).job
    assert job.items[0].arguments == ("-m", "data_prep", "merge", "a b")
    assert (job.kind, job.world_size, job.torchrun) == ("command", 1, False)
    assert Path(job.directory).parent == tmp_path / "runs" / "jobs"
    for module in ("os", "tools", "launch", "tools.nothing", "pretrain.run", "../x", "tools..hf", "", "-c"):
        with pytest.raises(UserError, match="command"):
            wanted(command(module))
    assert wanted(command("tools.hf", "export", "a", "b")).job.name.startswith("hf-export-")


def test_no_secret_becomes_a_word_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    monkeypatch.setenv("CREDENTIALS", str(tmp_path))  # a place is no secret
    for request in (command("data_prep", "status", "--token=hf_0123456789"), run(DEMO, "name=hf_0123456789")):
        with pytest.raises(UserError, match=r"^a word of the command is what \$HF_TOKEN holds, and would be written to files; jobs have"):
            wanted(request)
    wanted(command("data_prep", "status", str(tmp_path)))


def test_a_commands_name_is_its_own() -> None:
    names = {
        command_name(words)
        for words in (["data_prep", "run", "a b"], ["data_prep", "run", "a", "b"], ["data_prep", "merge", "a"], ["data_prep"])
    }
    assert len(names) == 4
    assert command_name(["data_prep", "run", "a"]) == command_name(["data_prep", "run", "a"])
    assert "/" not in command_name(["data_prep", "../../etc"])


def test_an_array_is_the_same_to_every_part_of_it() -> None:
    job = wanted(command("data_prep", "run", "--out", "x", tasks=3)).job
    assert [Path(item.directory).relative_to(job.directory).as_posix() for item in job.items] == ["tasks/0000", "tasks/0001", "tasks/0002"]
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    told = [[item.environment[f"SLURM_ARRAY_TASK_{name}"] for name in names] for item in job.items]
    assert told == [["0", "3", "0", "2", "1"], ["1", "3", "0", "2", "1"], ["2", "3", "0", "2", "1"]]
    with pytest.raises(UserError, match="at least 1"):
        wanted(command("data_prep", tasks=0))


def test_the_working_directory_keeps_the_users_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other hosts may know a folder by the link alone."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    request = Request(("data_prep",), True, load_profile("../local.yaml"), "../local.yaml")
    monkeypatch.setenv("PWD", str(tmp_path / "link"))
    assert wanted(request).job.working_directory == str(tmp_path / "link")
    monkeypatch.setenv("PWD", str(tmp_path))
    assert wanted(request).job.working_directory == str(tmp_path / "real")


# --- what is in the directory already --------------------------------------------------------------------------------------------


def test_the_same_again_keeps_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    job = begin(run(DEMO))
    marker = code_folder(Path(job.directory)) / "pretrain" / "marker.py"
    marker.write_text("")
    assert prepare(run(DEMO)) == job
    assert marker.exists()
    prepare(run(DEMO, update=True))
    assert not marker.exists()


def test_other_settings_are_refused_and_named() -> None:
    job = begin(run(DEMO))
    for words, told in (
        (("train.seed=8", "train.steps=401"), r"train\.steps is 400, not 401"),
        (("optimizer.lr=1e-9", "optimizer.min_lr=1e-9"), r"optimizer\.lr is .*, not 1e-09"),
        (("data.train.0.prefix=other",), r"data\.train\.0\.prefix is .*, not other"),
    ):
        with pytest.raises(UserError, match=told + ".*--update"):
            prepare(run(DEMO, *words))
    with pytest.raises(UserError, match="processes_per_node is 2, not 1"):
        prepare(Request((DEMO,), False, load_profile("local.yaml"), "local.yaml", processes=1))
    assert prepare(run(DEMO)) == job
    prepare(run(DEMO, "train.steps=401", update=True))
    assert yaml.safe_load((launch_folder(Path(job.directory)) / "config.yaml").read_text())["train"]["steps"] == 401


def test_an_older_code_reads_the_settings_of_its_run(tmp_path: Path) -> None:
    """A setting that newer code adds, or sets otherwise, makes no other run of one that is resubmitted."""
    job = begin(run(DEMO))
    file = code_folder(Path(job.directory)) / "pretrain" / "config.py"
    file.chmod(0o644)
    file.write_text(
        file.read_text().replace(
            "    interval: int = setting(10,", "    old_name: int = setting(3, 'Old.')\n    interval: int = setting(10,"
        )
    )
    config = launch_folder(Path(job.directory)) / "config.yaml"
    config.write_text(config.read_text().replace("log:\n", "log:\n  old_name: 3\n"))
    prepare(run(DEMO))
    assert "old_name: 3" in config.read_text()
    with pytest.raises(UserError, match=r"train\.seed is 42, not 43"):
        prepare(run(DEMO, "train.seed=43"))


def test_a_job_that_never_began_binds_nobody() -> None:
    """Slurm refused it, say; the mended command is not another run's."""
    prepare(run(DEMO, "train.steps=401"))
    job = prepare(run(DEMO))
    assert yaml.safe_load((launch_folder(Path(job.directory)) / "config.yaml").read_text())["train"]["steps"] == 400


def test_a_profile_is_no_setting_of_a_run(tmp_path: Path) -> None:
    begin(run(DEMO))
    (tmp_path / "local.yaml").write_text(LOCAL + "restarts: {max_failures: 9}\n")
    draft = settle(wanted(run(DEMO)), update=False)
    assert "the profile's restarts.max_failures was 5, is 9" in draft.notes
    assert prepare(run(DEMO)).profile["restarts"]["max_failures"] == 9


def test_commands_are_compared_too() -> None:
    begin(command("data_prep", "status", "a", directory="d"))
    with pytest.raises(UserError, match="has the job `data_prep status a`, not `data_prep status b`"):
        prepare(command("data_prep", "status", "b", directory="d"))
    with pytest.raises(UserError, match="array is False, not True"):
        prepare(command("data_prep", "status", "a", directory="d", tasks=2))
    begin(command("data_prep", "status", "a", directory="e", tasks=2))
    with pytest.raises(UserError, match="2 tasks, not 3"):
        prepare(command("data_prep", "status", "a", directory="e", tasks=3))


def test_finished_and_stopped() -> None:
    job = prepare(command("data_prep", "status", "a"))
    finish(job, 0)
    assert settle(wanted(command("data_prep", "status", "a")), update=False).ready == ()
    prepare(command("data_prep", "status", "a", update=True))
    assert settle(wanted(command("data_prep", "status", "a")), update=False).ready == (0,)
    write_json(launch_folder(Path(job.directory)) / "stop.json", {"why": "gave up", "message": "3 failures: out of luck"})
    with pytest.raises(UserError, match=r"gave up: 3 failures: out of luck; to go on: python -m launch requeue"):
        prepare(command("data_prep", "status", "a"))
    prepare(command("data_prep", "status", "a", update=True))


def test_an_array_starts_what_is_left() -> None:
    job = prepare(command("data_prep", "run", tasks=5))
    finish(job, 0, 3)
    write_json(launch_folder(Path(job.items[4].directory)) / "stop.json", {"why": "cancelled"})
    draft = settle(wanted(command("data_prep", "run", tasks=5)), update=False)
    assert draft.ready == (1, 2)
    assert [standing.kind for standing in draft.standings] == ["finished", "idle", "idle", "finished", "stopped"]


def test_a_supervisor_on_this_machine_is_seen() -> None:
    job = prepare(command("data_prep", "status", "a"))
    child = subprocess.Popen(["sleep", "60"])
    state = {"state": "running", "pid": child.pid, "host": socket.gethostname(), "time": time.time()}
    path = launch_folder(Path(job.directory)) / "state.json"
    try:
        write_json(path, state)
        assert standings(job)[0].pid == child.pid
        with pytest.raises(UserError, match=f"has process {child.pid}; see: python -m launch status"):
            prepare(command("data_prep", "status", "a"))
        with pytest.raises(UserError, match="has the old settings; first: python -m launch cancel"):
            prepare(command("data_prep", "status", "a", update=True))
        write_json(path, {**state, "time": time.time() - 100})  # the number was another process's then
        assert standings(job)[0].kind == "idle"
        write_json(path, {**state, "state": "requeued"})
        assert standings(job)[0].kind == "idle"
        write_json(path, {**state, "host": "elsewhere"})
        assert "host elsewhere" in standings(job)[0].where
    finally:
        child.kill()
        child.wait()
    write_json(path, state)
    assert standings(job)[0].kind == "idle"
    prepare(command("data_prep", "status", "a"))


def test_the_start_time_of_a_process() -> None:
    before = time.time()
    child = subprocess.Popen(["sleep", "60"])
    started = alive.start_time(child.pid)
    assert started is not None and before - 0.1 <= started <= time.time() + 0.1
    child.kill()
    while alive.start_time(child.pid) is not None:  # a zombie, for nobody waited for it
        time.sleep(0.01)
    child.wait()
    assert alive.start_time(child.pid) is None


def test_one_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path / "d"), pytest.raises(UserError, match="another launch command"), locked(tmp_path / "d"):
        pass
    with locked(tmp_path / "d"):
        pass


def test_find_job_by_an_item(tmp_path: Path) -> None:
    job = prepare(command("data_prep", "run", tasks=3, directory="d"))
    assert find_job("d") == (job, [0, 1, 2])
    assert find_job(tmp_path / "d" / "tasks" / "0001") == (job, [1])
    for path, told in (("d/tasks", "no launch/job.json"), ("nowhere", "no such directory")):
        with pytest.raises(UserError, match=told):
            find_job(path)
