"""Tests of `launch doctor` with a profile: a local one from end to end, real ranks over gloo, and
the interpretation of Slurm's output.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.__main__ import main
from launch.cluster import checks
from launch.cluster.profile import HealthProfile, NodesProfile, Profile, SlurmProfile
from launch.cluster.slurm import Node, amounts, fields, mebibytes
from launch.node import measure
from launch.node.checks import Check, Report
from launch.verbs import doctor
from tests import ranks
from tests.launch.hostile import program
from tests.wording import Wording

LOCAL = "scheduler: local\nnodes: {gpus: 0, processes: 2}\nenvironment: {GLOO_SOCKET_IFNAME: lo}\n"
Findings = dict[str, list[tuple[str, str]]]
Examine = Callable[..., tuple[int, Findings]]


def examined(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, *options: str
) -> tuple[int, Findings]:
    """Run `doctor` with a profile's text and options; return the exit code, and name -> (level,
    text).
    """
    (folder / "profile.yaml").write_text(text, encoding="utf-8")
    words = [f"--cluster={folder / 'profile.yaml'}", f"--directory={folder / 'trials'}"]
    code, output = main(["doctor", *words, *options]), Findings()
    for line in capsys.readouterr().out.splitlines():
        if line.startswith(("ok ", "warning ", "FAILED ")):
            output.setdefault(line[9:23].strip(), []).append((line[:8].strip(), line[24:]))
    return code, output


@pytest.fixture
def examine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Examine:
    """Call `examined` in the test's folder."""
    return lambda text, *options: examined(tmp_path, capsys, text, *options)


@pytest.mark.slow
def test_all_is_well_here_and_the_trial_leaves_nothing(examine: Examine, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    code, output = examine(
        f"{LOCAL}paths: {{shared: [{shared}]}}\nhealth: {{all_reduce_gb_per_second: 0.0001}}\n"
    )
    assert code == 0 and {level for lines in output.values() for level, _ in lines} == {"ok"}, (
        output
    )
    assert {
        "profile",
        "python",
        "shared folder",
        "trial",
        "shared folders",
        "all-reduce",
        "clocks",
    } < set(output)
    assert (
        "2 ranks on 1 node over gloo" in output["all-reduce"][0][1]
        and "floor 0.0001" in output["all-reduce"][0][1]
    )
    assert list((tmp_path / "trials").iterdir()) == list(shared.iterdir()) == []


def test_an_unfit_machine_is_reported_in_the_words_of_its_fault_and_the_trial_is_kept(
    examine: Examine, tmp_path: Path
) -> None:
    code, output = examine(f"{LOCAL}health: {{free_memory_gb: 1e6}}\n")
    node = f"node {socket.gethostname().partition('.')[0]}"[:14]
    assert (
        code == 1
        and output[node][0][0] == "FAILED"
        and "GB of memory are free" in output[node][0][1]
    )
    assert (
        output["trial"][0][0] == "FAILED"
        and "all-reduce" not in output
        and len(list((tmp_path / "trials").iterdir())) == 1
    )


def test_mistakes_are_one_line_and_no_trial_is_made(
    examine: Examine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wording: Wording,
) -> None:
    old, bare = (
        program(tmp_path / name / "python", f"#!/bin/sh\necho {message}\n")
        for name, message in (("old", "3 9 18 True"), ("bare", "3 12 1 False"))
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    for text, name in (
        ("scheduler: local\nnodes: {gpuss: 1}\n", "profile"),
        (LOCAL + "python: /nowhere/python\n", "python"),
        (LOCAL + f"python: {old}\n", "python"),
        (LOCAL + f"python: {bare}\n", "python"),
        (LOCAL + f"python: {sys.executable}\npaths: {{shared: [/nowhere]}}\n", "shared folder"),
        ("scheduler: slurm\nnodes: {gpus: 0}\n", "Slurm"),
    ):
        code, output = examine(text)
        level, fault = output[name][-1]
        assert (
            code == 1
            and level == "FAILED"
            and output.get("trial", [("warning", "")])[0][0] == "warning"
        )
        wording(f"{name}: {fault}")
    assert not (tmp_path / "trials").exists()
    assert (
        main(["doctor", "--cluster=x", "--fix"])
        == main(["doctor", "--cluster=x", "--nodes=-1"])
        == 2
    )


def as_node(folder: Path) -> int:
    """Run the measurement of a rank that is the only one on its node."""
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(SLURMD_NODENAME=f"n{rank}", GLOO_SOCKET_IFNAME="lo")
    measure.SEEN_SECONDS, measure.SECONDS_A_SIZE = 1.0, 0.1
    shared = [str(folder / name) for name in ("shared", f"own{rank}")]
    return measure.main(["all-reduce", str(folder), "gloo", *shared])


def test_ranks_of_three_nodes_measure_the_network_and_find_the_folder_that_is_not_shared(
    tmp_path: Path,
) -> None:
    """Three ranks, each of which counts as a node and has a separate folder."""
    (tmp_path / "shared").mkdir()
    for rank in range(3):
        (tmp_path / f"own{rank}").mkdir()
    assert ranks.answer(3, as_node, tmp_path, output=tmp_path / "ranks") == 0
    result = json.loads((tmp_path / "bandwidth.json").read_text())
    assert list(result["clocks"]) == ["n0", "n1", "n2"] and result["world_size"] == 3
    assert result["clocks"]["n0"] == 0 and max(map(abs, result["clocks"].values())) < 2
    for size in result["sizes"]:
        assert size["bus"] == pytest.approx(size["algorithm"] * 4 / 3, abs=0.002)
        assert size["algorithm"] == pytest.approx(
            size["mib"] * 2**20 / size["milliseconds"] / 1e6, rel=0.01, abs=0.002
        )
    assert [fault.split(":")[:2] for fault in result["shared"]] == [
        [str(tmp_path / f"own{rank}"), f" n{rank} does not see what n0 writes into it"]
        for rank in (1, 2)
    ]
    assert not any(
        list((tmp_path / name).iterdir()) for name in ("shared", "own0", "own1", "own2")
    ), "they clean up"


PROFILE = Profile(
    nodes=NodesProfile(gpus=8, cpus=96, memory="1800G"),
    slurm=SlurmProfile(partition="gpu", time="24:00:00"),
)
PARTITION = fields(
    "PartitionName=gpu State=UP MaxTime=2-00:00:00 DefaultTime=01:00:00 TotalNodes=4 MaxNodes=4"
)
HELD = {"partition": "gpu", "time": "24:00:00"}
LIMITS: list[tuple[dict[str, Any], str, int | None, str]] = [
    (HELD, "", 4, "ok"),
    (HELD, "MaxTime=UNLIMITED", None, "ok"),
    (HELD, "MaxTime=12:00:00", 1, "FAILED"),
    ({**HELD, "account": "ours"}, "AllowAccounts=theirs,others", 1, "ok FAILED"),
    ({**HELD, "account": "ours"}, "AllowAccounts=theirs,ours", 1, "ok"),
    ({**HELD, "qos": "high"}, "AllowQos=normal", 1, "ok FAILED"),
    (HELD, "", 5, "ok FAILED"),
    ({"time": "10", "signal_seconds": 300}, "", 1, "warning"),
    ({}, "", 1, "warning"),
]
MACHINES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 4, "ok"),
    ({"gres": "gpu:4"}, 1, "FAILED"),
    ({"gres": "(null)"}, 1, "FAILED"),
    ({"cpus": 64}, 1, "FAILED"),
    ({"memory": 1000000}, 1, "FAILED"),
    ({"state": "IDLE+DRAIN", "reason": "bad fan"}, 1, "warning FAILED"),
    ({"state": "DOWN*"}, 1, "warning FAILED"),
    ({"state": "MIXED"}, 5, "FAILED"),
    ({"gres": "gpu:h100:16"}, 1, "warning ok"),
    ({"partitions": ("cpu",)}, 1, "FAILED"),
]
TWO = "ours|normal,high\nteam|normal\n"
ACCOUNTS: list[tuple[dict[str, Any], str, str]] = [
    ({}, TWO, "ok"),
    ({"account": "team"}, TWO, "ok"),
    ({"account": "teem"}, TWO, "FAILED"),
    ({}, "", "FAILED"),
    ({"account": "team", "qos": "high"}, TWO, "FAILED"),
]
KNOWN = fields(
    "AccountingStorageType=accounting_storage/slurmdbd"
    " AccountingStorageEnforce=associations,limits,qos"
)
PREEMPTION = {
    "PreemptMode=OFF": "",
    "PreemptMode=REQUEUE SlurmctldParameters=x,preempt_send_user_signal": "ok",
    "PreemptMode=REQUEUE PreemptParameters=send_user_signal": "ok",
    "PreemptMode=REQUEUE KillWait=30 sec": "warning",
}
SOUND = Node("n1", "IDLE", "", 192, 2000000, "gpu:h100:8(S:0-1)", ("gpu", "all"))


def test_a_profile_is_held_against_partition_nodes_and_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wording: Wording
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("getpass.getuser", lambda: "me")

    def held(levels: str, *lines: Check) -> None:
        assert " ".join(line.level for line in lines) == levels, lines
        assert all(line.remedy for line in lines if line.level == "FAILED")
        wording("; ".join(f"{line.name}: {line.text} -> {line.remedy}" for line in lines))

    for changed, partition, wanted, levels in LIMITS:
        profile = replace(PROFILE, slurm=SlurmProfile(**changed))
        held(levels, *checks.limits(profile, PARTITION | fields(partition), wanted))
    for changed, wanted, levels in MACHINES:
        nodes = [replace(SOUND, name=f"n{number}", **changed) for number in range(4)]
        held(levels, *checks.machines(PROFILE, nodes, ["gpu"], wanted))
    for gres, gpus, levels in (
        (None, 0, "FAILED"),
        ("none", 0, "ok"),
        ("none", 8, "warning ok"),
        ("gpu:h100:8", 0, "FAILED"),
    ):
        unasked = replace(PROFILE, nodes=replace(PROFILE.nodes, gres=gres))
        node = replace(SOUND, gres=f"gpu:{gpus}")
        held(levels, *checks.machines(unasked, [node], ["gpu"], 1))
    for slurm, answer, levels in ACCOUNTS:
        program(tmp_path / "sacctmgr", f"#!/bin/sh\nprintf '%s' '{answer}'\n")
        profile = replace(PROFILE, slurm=SlurmProfile(**slurm))
        held(levels, checks.account(profile, KNOWN))
    none = {"AccountingStorageType": "accounting_storage/none"}
    held("ok", checks.account(PROFILE, none))
    for known, levels in PREEMPTION.items():
        held(levels, *checks.preemption(fields(known)))


def test_slurms_own_writing_is_read() -> None:
    sizes = {"512": 512, "1800G": 1843200, "62.50G": 64000, "2T": 2097152, "2048K": 2}
    assert {size: mebibytes(size) for size in sizes} == sizes
    assert mebibytes(None) == mebibytes("0") == 0
    found = fields(
        "NodeName=n1 CPUTot=96 Gres=gpu:h100:8(S:0-1),lustre:1 OS=Linux 5.15.0 #1 SMP"
        " RealMemory=2000000 Reason=bad fan [root@2024]"
    )
    assert (found["OS"], found["CPUTot"]) == ("Linux 5.15.0 #1 SMP", "96")
    assert found["Reason"] == "bad fan [root@2024]"
    lines = "PreemptMode             = REQUEUE\nKillWait = 30 sec\n"
    assert fields(lines, "\n") == {"PreemptMode": "REQUEUE", "KillWait": "30 sec"}
    for text, expected in (
        (found["Gres"], "gpu/h100/8 lustre//1"),
        ("gres:gpu:2,gres/gpu:a100:4,gpu,bandwidth:no_consume:4G", "gpu//2 gpu/a100/4 gpu//1"),
        ("gpu:h100:4(IDX:0,2-3),nvme:1,gpu:1g.10gb:7", "gpu/h100/4 nvme//1 gpu/1g.10gb/7"),
        ("(null)", ""),
        ("gres:none", ""),
    ):
        assert " ".join("/".join(map(str, amount)) for amount in amounts(text)) == expected


JOB = fields(
    "Partition=gpu MinCPUsNode=2 MinMemoryNode=300M Features=(null) TresPerNode=gres:gpu:h100:2"
)
NODE = Node("n1", "IDLE", "", 8, 16000, "gpu:h100:8(S:0-1)", ("gpu", "all"), ("ib", "fast"))
# Anything beyond a list of features is left to Slurm.
FITS = """\
yes MinCPUsNode=2
yes TresPerNode=gres:gpu:8
no  TresPerNode=gres/gpu:h100:9
no  TresPerNode=gres:gpu:a100:1
no  TresPerNode=gres:nvme:1
no  MinCPUsNode=9
no  MinMemoryNode=62.50G
no  MinMemoryNode=0 MinMemoryCPU=8001M
no  Partition=cpu
yes Partition=cpu,all
yes Partition=(null) Features=ib&fast
no  Features=ib,slow
yes Features=[slow|odd]
"""


def test_a_node_fits_a_job_by_all_that_the_job_asks_of_it() -> None:
    for line in FITS.splitlines():
        fits, _, requested = line.partition(" ")
        assert NODE.fits(JOB | fields(requested)) == (fits == "yes"), line


def test_clocks_that_differ_are_named() -> None:
    clocks = {"n1": 0.0, "n2": 1.9, "n3": -3.0, "n4": 2.5}
    found = list(doctor.of_clocks(Profile(health=HealthProfile(clock_skew_seconds=2)), clocks))
    assert [check.text for check in found] == ["n3 is 3.0 s behind n1", "n4 is 2.5 s ahead of n1"]
    (sound,) = doctor.of_clocks(Profile(health=HealthProfile(clock_skew_seconds=3)), clocks)
    assert (sound.level, sound.text) == ("ok", "the nodes agree to within 3e+03 ms")


def test_bandwidth_and_nodes_in_words(wording: Wording) -> None:
    sizes = [{"mib": mib, "milliseconds": 1.0, "algorithm": 11.0, "bus": 20.5} for mib in (1, 1024)]
    result = {
        "clocks": dict.fromkeys(("n1", "n2", "n3", "n4"), 0.0),
        "world_size": 32,
        "backend": "nccl",
        "sizes": sizes,
    }
    for floor, level in ((300, "FAILED"), (20, "ok"), (None, "ok")):
        found = doctor.of_bandwidth(
            Profile(health=HealthProfile(all_reduce_gb_per_second=floor)), result
        )
        assert found.level == level
        wording(found.text)
    facts: dict[str, Any] = {
        "gpus": ["NVIDIA H100 80GB HBM3 00000000:18:00.0"] * 8,
        "driver": "550.90.07",
        "tflops": [651.2, 660.9, None],
    }
    facts |= {
        "cpus": 192,
        "free_memory_gb": 1990.2,
        "memory_gb": 2015.0,
        "ports": {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"},
    }
    (line,) = Report(facts=facts, node="n1").checks()
    wording(line.text)
    assert [check.level for check in Report(["a", "b"], ["c"]).checks()] == [
        "FAILED",
        "FAILED",
        "warning",
    ]
