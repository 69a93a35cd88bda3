"""`launch doctor` without a queue: a local profile from end to end, real ranks over gloo, and what it makes of Slurm's words."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.__main__ import main
from launch.cluster import checks as doctor_slurm
from launch.cluster import profile_values
from launch.cluster.checks import Node
from launch.cluster.profile import HealthProfile, NodesProfile, Profile, SlurmProfile
from launch.cluster.trial import Outcome
from launch.node.checks import Check, Report
from launch.verbs import doctor
from tests.launch import smi

LOCAL = "scheduler: local\nnodes: {gpus: 0, processes: 2}\nenvironment: {GLOO_SOCKET_IFNAME: lo}\n"
Examine = Callable[..., tuple[int, dict[str, list[tuple[str, str]]]]]


@pytest.fixture
def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Examine:
    """`doctor` with a profile's text and options: the exit code, and what is said by name as (level, text)."""

    def run(text: str, *options: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
        (tmp_path / "profile.yaml").write_text(text, encoding="utf-8")
        code = main(["doctor", f"--cluster={tmp_path / 'profile.yaml'}", f"--directory={tmp_path / 'trials'}", *options])
        said: dict[str, list[tuple[str, str]]] = {}
        for line in capsys.readouterr().out.splitlines():
            if line.startswith(("ok ", "warning ", "FAILED ")):
                said.setdefault(line[9:23].strip(), []).append((line[:8].strip(), line[24:]))
        return code, said

    return run


def levels(checks: Sequence[Check]) -> list[str]:
    return [check.level for check in checks]


# --- a local profile -------------------------------------------------------------------------------------------------------------


def test_all_is_well_here_and_the_trial_leaves_nothing(examine: Examine, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    code, said = examine(f"{LOCAL}paths: {{shared: [{shared}]}}\nhealth: {{all_reduce_gb_per_second: 0.0001}}\n")
    assert code == 0 and {level for lines in said.values() for level, _ in lines} == {"ok"}, said
    assert {"profile", "python", "shared folder", "trial", "shared folders", "all-reduce", "clocks"} < set(said)
    assert "2 ranks on 1 node over gloo" in said["all-reduce"][0][1] and "floor 0.0001" in said["all-reduce"][0][1]
    assert list((tmp_path / "trials").iterdir()) == list(shared.iterdir()) == []


def test_a_bandwidth_below_the_floor_fails_alone_and_the_trial_is_kept(examine: Examine, tmp_path: Path) -> None:
    code, said = examine(f"{LOCAL}health: {{all_reduce_gb_per_second: 1e6}}\n")
    assert code == 1 and [name for name, lines in said.items() for level, _ in lines if level == "FAILED"] == ["all-reduce"]
    assert "below the floor of 1e+06" in said["all-reduce"][0][1]
    (kept,) = (tmp_path / "trials").iterdir()
    assert (kept / "bandwidth.json").exists()


def test_an_unfit_machine_is_said_in_the_words_of_its_fault(examine: Examine, tmp_path: Path) -> None:
    code, said = examine(f"{LOCAL}health: {{free_memory_gb: 1e6}}\n")
    node = f"node {socket.gethostname().partition('.')[0]}"[:14]
    assert code == 1 and said[node][0][0] == "FAILED" and "GB of memory are free" in said[node][0][1]
    assert said["trial"][0][0] == "FAILED" and "all-reduce" not in said


MISTAKES = {
    "scheduler: local\nnodes: {gpuss: 1}\n": ("profile", "did you mean nodes.gpus?"),
    LOCAL + "python: /nowhere/python\n": ("python", "cannot be started here: No such file or directory"),
    LOCAL + f"python: {sys.executable}\npaths: {{shared: [/nowhere]}}\n": ("shared folder", "/nowhere: cannot be written here"),
}


@pytest.mark.parametrize(("text", "fault"), MISTAKES.items(), ids=[name for name, _ in MISTAKES.values()])
def test_a_mistake_is_one_line_and_no_trial_is_made(examine: Examine, tmp_path: Path, text: str, fault: tuple[str, str]) -> None:
    code, said = examine(text)
    assert code == 1 and said[fault[0]][-1][0] == "FAILED" and fault[1] in said[fault[0]][-1][1]
    assert said.get("trial", [("warning", "")])[0][0] == "warning" and not (tmp_path / "trials").exists()


def test_an_interpreter_that_is_too_old_or_has_no_torch_fails(examine: Examine, tmp_path: Path) -> None:
    for answer, fault in (("3 9 18 True", "Python 3.9.18"), ("3 12 1 False", "has no torch")):
        python = smi.script(tmp_path / "python", f"#!/bin/sh\necho {answer}\n")
        code, said = examine(f"{LOCAL}python: {python}\n", "--nodes=0")
        assert code == 1 and said["python"][0][0] == "FAILED" and fault in said["python"][0][1]


def test_without_slurm_a_profile_of_it_fails_in_one_line(examine: Examine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = examine("scheduler: slurm\nnodes: {gpus: 0}\n")
    assert code == 1 and said["Slurm"][0][0] == "FAILED" and "not installed here" in said["Slurm"][0][1]


# --- ranks that measure ----------------------------------------------------------------------------------------------------------


def test_ranks_of_three_nodes_measure_each_other_and_find_the_folder_that_is_not_shared(tmp_path: Path) -> None:
    """Three ranks, each of which takes itself for a node; a link leads each of them to a folder of its own."""
    (tmp_path / "shared").mkdir()
    for rank in range(3):
        (tmp_path / f"own{rank}").mkdir()
    (tmp_path / "clock.json").write_text(json.dumps({"time": time.time() - 100}))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mine = f'export SLURMD_NODENAME=n$LOCAL_RANK; exec "$@" --shared={tmp_path}/own$LOCAL_RANK'
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", "--rdzv-backend=static", "--master-addr=127.0.0.1"]
    command += [
        f"--master-port={port}",
        "--no-python",
        "bash",
        "-c",
        mine,
        "bash",
        sys.executable,
        "-m",
        "launch.node.measure",
        "all-reduce",
        str(tmp_path),
    ]
    command += ["--backend=gloo", "--floor=1e6", f"--shared={tmp_path / 'shared'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    patience = "import launch.node.measure as b, sys; b.SEEN_SECONDS = 1.0; b.SECONDS_A_SIZE = 0.1; sys.exit(b.main(sys.argv[1:]))"
    command[command.index("launch.node.measure") - 1 : command.index("launch.node.measure") + 1] = ["-c", patience]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "bandwidth.json").read_text())
    assert result["nodes"] == ["n0", "n1", "n2"] and result["world_size"] == 3
    for size in result["sizes"]:
        assert size["bus"] == pytest.approx(size["algorithm"] * 4 / 3, abs=0.002)
        assert size["algorithm"] == pytest.approx(size["mib"] * 2**20 / size["milliseconds"] / 1e6, rel=0.01, abs=0.002)
    assert [pair["nodes"] for pair in result["pairs"]] == [["n0", "n1"], ["n1", "n2"], ["n2", "n0"]]
    assert all(pair["bus"] > 0 for pair in result["pairs"])
    assert sorted(fault.split(": ")[1] for fault in result["shared"]) == [
        f"n{rank} does not see what {', '.join(f'n{other}' for other in range(3) if other != rank)} wrote" for rank in range(3)
    ]
    assert 95 < result["clocks"]["ahead_at_most"] < 200 and set(result["clocks"]["skew"]) == {"n0", "n1", "n2"}
    assert not any(list((tmp_path / name).iterdir()) for name in ("shared", "own0", "own1", "own2")), "they clean up"


# --- what is made of answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("12:00:00", 43200),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-00:00:01", 86401),
        ("UNLIMITED", float("inf")),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(limit: str, seconds: float) -> None:
    assert profile_values.seconds(limit) == seconds


@pytest.mark.parametrize(("size", "mebibytes"), [(None, 0), ("0", 0), ("512", 512), ("1800G", 1843200), ("2T", 2097152), ("2048K", 2)])
def test_memory_sizes_are_read_as_slurm_writes_them(size: str | None, mebibytes: float) -> None:
    assert doctor_slurm.mebibytes(size) == mebibytes


def test_scontrols_records_are_read() -> None:
    line = "NodeName=n1 CPUTot=96 Gres=gpu:h100:8(S:0-1),lustre:1 OS=Linux 5.15.0 #1 SMP RealMemory=2000000 Reason=bad fan [root@2024]"
    found = doctor_slurm.fields(line)
    assert found["OS"] == "Linux 5.15.0 #1 SMP" and found["CPUTot"] == "96" and found["Reason"] == "bad fan [root@2024]"
    assert doctor_slurm.fields("PreemptMode             = REQUEUE\nKillWait = 30 sec\n", "\n") == {
        "PreemptMode": "REQUEUE",
        "KillWait": "30 sec",
    }


PROFILE = Profile(nodes=NodesProfile(gpus=8, cpus=96, memory="1800G"), slurm=SlurmProfile(partition="gpu", time="24:00:00"))
PARTITION = {"PartitionName": "gpu", "State": "UP", "MaxTime": "2-00:00:00", "DefaultTime": "01:00:00", "TotalNodes": "4", "MaxNodes": "4"}


@pytest.mark.parametrize(
    ("changed", "partition", "nodes", "failed"),
    [
        ({}, {}, 4, []),
        ({}, {"MaxTime": "UNLIMITED"}, None, []),
        ({}, {"MaxTime": "12:00:00"}, 1, ["time limit"]),
        ({"account": "ours"}, {"AllowAccounts": "theirs,others"}, 1, ["account"]),
        ({"account": "ours"}, {"AllowAccounts": "theirs,ours"}, 1, []),
        ({"qos": "high"}, {"AllowQos": "normal"}, 1, ["QOS"]),
        ({}, {}, 5, ["nodes"]),
    ],
)
def test_a_partitions_limits_are_held_against_the_profile(
    changed: dict[str, str], partition: dict[str, str], nodes: int | None, failed: list[str]
) -> None:
    profile = replace(PROFILE, slurm=replace(PROFILE.slurm, **changed))  # type: ignore[arg-type]
    found = list(doctor_slurm.limits(profile, PARTITION | partition, nodes))
    assert [check.name for check in found if check.level == "FAILED"] == failed
    assert all(check.remedy for check in found if check.level == "FAILED")


def test_a_time_limit_that_leaves_no_time_or_is_left_to_the_partition_is_a_warning() -> None:
    for slurm in (SlurmProfile(time="10", signal_seconds=300), SlurmProfile()):
        assert levels(list(doctor_slurm.limits(replace(PROFILE, slurm=slurm), PARTITION, 1))) == ["warning"]


def h100(number: int, **changed: Any) -> Node:
    values: dict[str, Any] = {"state": "IDLE", "reason": "", "gpus": 8, "cpus": 192, "memory": 2000000, "partitions": ("gpu", "all")}
    return Node(name=f"n{number}", **{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "wanted", "expected", "said"),
    [
        ({}, 4, ["ok"], "4 of 4 are in service and have 8 GPUs and 96 CPUs"),
        ({"gpus": 4}, 1, ["FAILED"], "nodes.gpus: 4"),
        ({"gpus": 0}, 1, ["FAILED"], "a partition with GPUs"),
        ({"cpus": 64}, 1, ["FAILED"], "nodes.cpus: 64 at most"),
        ({"memory": 1000000}, 1, ["FAILED"], "nodes.memory: 1000000M at most"),
        ({"state": "IDLE+DRAIN", "reason": "bad fan"}, 1, ["warning", "FAILED"], "n0 IDLE+DRAIN (bad fan)"),
        ({"state": "DOWN*"}, 1, ["warning", "FAILED"], "no reason given"),
        ({"state": "MIXED"}, 5, ["FAILED"], "4 nodes in service fit the profile, 5 wanted"),
        ({"gpus": 16}, 1, ["warning", "ok"], "nodes.gpus: 16"),
        ({"partitions": ("cpu",)}, 1, ["FAILED"], "has no nodes"),
    ],
)
def test_nodes_are_held_against_the_profile(changed: dict[str, Any], wanted: int, expected: list[str], said: str) -> None:
    found = list(doctor_slurm.machines(PROFILE, [h100(number, **changed) for number in range(4)], ["gpu"], wanted))
    assert levels(found) == expected
    assert any(said in check.text + check.remedy for check in found)


@pytest.mark.parametrize(
    ("slurm", "answer", "level", "said"),
    [
        (SlurmProfile(), "ours|normal,high\nteam|normal\n", "ok", "ours, team"),
        (SlurmProfile(account="team"), "ours|normal,high\nteam|normal\n", "ok", "team"),
        (SlurmProfile(account="teem"), "ours|normal,high\nteam|normal\n", "FAILED", "one of ours, team"),
        (SlurmProfile(account="team", qos="high"), "ours|normal,high\nteam|normal\n", "FAILED", "one of normal"),
        (SlurmProfile(), "", "FAILED", "in no account"),
    ],
)
def test_accounts_are_those_that_accounting_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slurm: SlurmProfile, answer: str, level: str, said: str
) -> None:
    smi.script(tmp_path / "sacctmgr", f"#!/bin/sh\nprintf '%s' '{answer}'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    known = {"AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageEnforce": "associations,limits,qos"}
    found = doctor_slurm.account(replace(PROFILE, slurm=slurm), known)
    assert found.level == level and said in found.text + found.remedy
    assert doctor_slurm.account(PROFILE, {"AccountingStorageType": "accounting_storage/none"}).level == "ok"


def test_preemption_without_notice_is_a_warning() -> None:
    def said(**known: str) -> list[str]:
        return levels(list(doctor_slurm.preemption(known)))

    assert said(PreemptMode="OFF") == []
    assert said(PreemptMode="REQUEUE", SlurmctldParameters="idle_on_node_suspend,preempt_send_user_signal") == ["ok"]
    assert said(PreemptMode="REQUEUE", KillWait="30 sec") == ["warning"]


@pytest.mark.parametrize(
    ("skew", "least", "most", "said"),
    [
        ({"n1": 0.0, "n2": 0.01}, -0.2, 0.3, None),
        ({"n1": 0.0, "n2": 3.0}, -0.2, 0.3, "n2 is at least 2.8 s ahead of this host"),
        ({"n1": 0.0, "n2": -3.0}, -0.2, 0.3, "n2 is at least 2.7 s behind this host"),
        ({"n1": 0.0, "n2": 3.0}, -30.0, 30.0, "n2 is 3.0 s ahead of n1"),
        ({"n1": 0.0, "n2": 0.0}, -30.0, 30.0, None),
        ({"n1": 0.0}, 9.0, 9.5, "n1 is at least 9.0 s ahead of this host"),
        ({"n1": 0.0}, -9.5, -9.0, "n1 is at least 9.0 s behind this host"),
        ({"n1": 0.0}, -0.2, None, None),
    ],
)
def test_only_a_clock_that_is_certainly_off_fails(skew: dict[str, float], least: float, most: float | None, said: str | None) -> None:
    """The file system's delay widens what can be known; it never makes a sound clock a bad one."""
    now = time.time()
    result = {"nodes": list(skew), "clocks": {"skew": skew, "ahead_at_most": most, "written": now + least}}
    found = list(doctor.of_clocks(Profile(health=HealthProfile(clock_skew_seconds=2)), Outcome(Path(), result=result, received=now)))
    assert [check.text for check in found if check.level == "FAILED"] == ([] if said is None else [said])
    assert said is not None or levels(found) == ["ok"]


def test_the_slowest_neighbours_are_named_where_the_bandwidth_is_too_low() -> None:
    pairs = [{"nodes": pair.split("+"), "bus": bus} for pair, bus in (("n1+n2", 350.0), ("n2+n3", 20.0), ("n3+n4", 21.0), ("n4+n1", 351.0))]
    sizes = [{"mib": mib, "milliseconds": 1.0, "algorithm": 11.0, "bus": 20.5} for mib in (1, 1024)]
    result = {"nodes": ["n1", "n2", "n3", "n4"], "world_size": 32, "backend": "nccl", "sizes": sizes, "pairs": pairs}
    found = doctor.of_bandwidth(Profile(health=HealthProfile(all_reduce_gb_per_second=300)), result)
    assert (
        found.level == "FAILED" and found.text.endswith("slowest neighbours: n2+n3 20, n3+n4 21; below the floor of 300") and found.remedy
    )


def test_a_nodes_line_says_what_it_has() -> None:
    facts: dict[str, Any] = {"gpus": ["NVIDIA H100 80GB HBM3 00000000:18:00.0"] * 8, "driver": "550.90.07", "tflops": [651.2, 660.9, None]}
    facts |= {"cpus": 192, "free_memory_gb": 1990.2, "memory_gb": 2015.0, "ports": {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}}
    (line,) = Report("n1", facts=facts).checks()
    assert line.text == (
        "8 x NVIDIA H100 80GB HBM3, driver 550.90.07, 651 to 661 TFLOP/s in bfloat16, 192 CPUs, 1990 of 2015 GB of memory free, "
        "1 of 2 network ports active"
    )
    assert levels(list(Report("n1", ("a", "b"), ("c",)).checks())) == ["FAILED", "FAILED", "warning"]
