"""Tests of `launch.node.checks`: faults of a node are named in time; a healthy node passes with any
driver; no response is a fault.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from launch.node import checks, hardware, measure
from launch.node.checks import check_command, node_name, read_report, read_reports
from tests.launch import smi
from tests.launch.hostile import program
from tests.launch.supervised import alive, wait_for

PROFILE: dict[str, Any] = {"nodes": {"gpus": 8}, "health": {"timeout_seconds": 60, "matmul": False}}


def run(
    folder: Path, environment: dict[str, str], profile: dict[str, Any] = PROFILE, **options: Any
) -> checks.Report:
    """Check this machine as a job would; return the report."""
    command = check_command(profile, folder / "health", **options)
    done = subprocess.run(command, env=environment, timeout=180, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = read_report(folder / "health" / f"{node_name()}.json")
    assert report is not None
    return report


CheckGpus = Callable[[Mapping[str, Sequence[object]]], checks.Report]


@pytest.fixture
def run_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckGpus:
    """Check eight GPUs within this process, with these responses of nvidia-smi."""

    def check(answers: Mapping[str, Sequence[object]]) -> checks.Report:
        monkeypatch.setattr(os, "environ", smi.install(tmp_path / "bin", answers))
        return checks.graphics(8, None, time.monotonic() + 60)

    return check


def within(
    seconds: float, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], **options: Any
) -> checks.Report:
    """Check this machine in this process, with ``seconds`` for its eight GPUs and a minute for
    everything else.
    """
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(checks, "SHARE", 1.0)
    monkeypatch.setattr(checks, "OF_GPUS", seconds / 60)
    profile = {"nodes": {"gpus": 8}, "health": {"timeout_seconds": 60}}
    return checks.run_checks(json.loads(check_command(profile, "", **options)[-1]))


@pytest.mark.parametrize("older", [False, True])
def test_a_sound_node_passes_with_newer_and_older_drivers(tmp_path: Path, older: bool) -> None:
    report = run(tmp_path, smi.install(tmp_path / "bin", smi.Node(older=older).answers()))
    assert report.ok and report.warnings == []
    assert (
        len(report.facts["gpus"]) == 8
        and report.facts["gpus"][7] == "NVIDIA H100 80GB HBM3 00000000:DB:00.0"
    )
    assert abs(report.time - time.time()) < 300


FAULTS = {
    (3, "ecc.errors.uncorrected.volatile.total", "2"): "2 uncorrected ECC errors",
    (5, "remapped_rows.pending", "Yes"): "waits to be remapped",
    (5, "remapped_rows.pending", "1"): "waits to be remapped",
    (0, "remapped_rows.failure", "Yes"): "could not be remapped: replace it",
    (7, "gpu_recovery_action", "Reboot"): "asks for: Reboot",
    (1, "fabric.state", "In Progress"): "fabric manager",
    (2, "memory.used", "[Unknown Error]"): "memory.used [Unknown Error]",
    (4, "temperature.gpu", "[GPU requires reset]"): "temperature.gpu [GPU requires reset]",
    (6, "clocks_event_reasons.hw_thermal_slowdown", "Active"): "slows it down for heat (34 °C)",
    (6, "clocks_event_reasons.hw_power_brake_slowdown", "Active"): "power brake",
}


def test_each_thing_that_is_wrong_with_a_gpu_is_one_fault_that_names_it(
    run_checks: CheckGpus,
) -> None:
    for (gpu, name, value), fault in FAULTS.items():
        found = run_checks(smi.Node(changed={(gpu, name): value}).answers())
        assert len(found.faults) == 1 and fault in found.faults[0]
        assert found.faults[0].startswith(f"GPU {gpu} (00000000:{smi.BUSES[gpu]}:00.0): ")
    found = run_checks(
        smi.Node(changed={(1, "clocks_event_reasons.sw_thermal_slowdown"): "Active"}).answers()
    )
    # The driver manages the heat itself.
    assert found.faults == [] and len(found.warnings) == 1 and "GPU 1" in found.warnings[0]
    names = [*hardware.CORE[5:], *hardware.ROWS[1:], "gpu_recovery_action", "fabric.state"]
    for value in ("[N/A]", "N/A", "[Not Supported]", "Not Supported"):
        changed = {(gpu, name): value for gpu in range(8) for name in names}
        assert run_checks(smi.Node(changed=changed).answers()).faults == []
    assert run_checks(smi.Node(count=7).answers()).faults == [
        "7 GPUs are visible, the profile says 8"
    ]


NO_DRIVER = """\
NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. \
Make sure that the latest NVIDIA driver is installed and running.

"""
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.90\n"
)
LOST = (
    "Unable to determine the device handle for GPU0000:5D:00.0: GPU is lost.  Reboot the system to"
    " recover this GPU\n"
)


def test_an_nvidia_smi_that_fails_is_a_fault_in_its_own_words(run_checks: CheckGpus) -> None:
    for answer, output in (
        ([9, NO_DRIVER], "couldn't communicate with the NVIDIA driver"),
        ([18, MISMATCH], "Driver/library version mismatch"),
        ([15, LOST], "GPU0000:5D:00.0: GPU is lost"),
        ([6, "No devices were found\n"], "0 GPUs are visible, the profile says 8"),
        ([139, ""], "nvidia-smi failed with exit code 139"),
    ):
        found = run_checks({**smi.Node().answers(), smi.CORE: answer})
        assert any(output in fault for fault in found.faults)


def test_a_program_that_is_missing_is_a_fault_where_it_is_needed(tmp_path: Path) -> None:
    """numactl must be on the ranks' PATH for binding; programs inside a container are not visible
    from outside. nvidia-smi is needed with GPUs.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    environment, numa = {**os.environ, "PATH": str(programs)}, {"nodes": {"numa": "node"}}
    assert "nodes.numa = node needs this program" in run(tmp_path, environment, numa).faults[0]
    for sound in (
        {"nodes": {"numa": "none", "gpus": 0}},
        {},
        {**numa, "container": {"runtime": "pyxis"}},
    ):
        assert run(tmp_path, environment, sound).ok
    (programs / "numactl").touch(0o755)
    assert run(tmp_path, environment, numa).ok
    assert "is the NVIDIA driver installed" in run(tmp_path, environment).faults[0]


def test_an_nvidia_smi_that_hangs_is_named_and_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = within(
        1, monkeypatch, smi.install(tmp_path / "bin", {**smi.Node().answers(), smi.CORE: ["hang"]})
    )
    assert len(report.faults) == 1 and "did not answer" in report.faults[0]
    assert report.facts["cpus"] >= 1, "the other checks are not lost"
    answer = hardware.ask(["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait"], 1)
    assert answer.code is None
    wait_for(lambda: not alive(int(answer.output)))


def test_cuda_visible_devices_states_which_gpus_count() -> None:
    node, rng = smi.Node(), random.Random(0)
    all_gpus = [
        hardware._gpu([node.value(gpu, name) for name in hardware.CORE]) for gpu in range(8)
    ]
    for _ in range(200):
        picked = rng.sample(all_gpus, rng.randint(1, 8))
        by = rng.choice(
            [lambda gpu: str(gpu.index), lambda gpu: gpu.uuid, lambda gpu: gpu.uuid[:12]]
        )
        assert hardware.chosen(all_gpus, ",".join(map(by, picked))) == picked
    for unknown in (None, "", "MIG-11c29e81-e611-50b5-b5ef-609c0a0fe58b", "12", "0,12"):
        assert hardware.chosen(all_gpus, unknown) == all_gpus


def test_memory_of_a_stranger_is_a_fault_that_names_him_unless_it_is_released(
    run_checks: CheckGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = smi.Node(changed={(2, "memory.used"): "71004"})
    before, after = node.answers()[smi.CORE], smi.Node().answers()[smi.CORE]
    assert run_checks({**smi.Node().answers(), smi.CORE: [0, before[1], after[1]]}).faults == []
    monkeypatch.setattr(checks, "RELEASE_SECONDS", 0.0)
    users = f"{node.value(2, 'uuid')}, 4711, /usr/bin/python3, 70996\n"
    found = run_checks({**node.answers(), smi.USERS: [0, users]})
    assert found.faults == [
        "GPU 2 (00000000:3A:00.0): 71004 MiB in use by pid 4711 (/usr/bin/python3, 70996 MiB)"
    ]


def interpreter(folder: Path, **answers: str) -> Path:
    """Write a stand-in for the ranks' interpreter with a behaviour per GPU number; default: a
    correct product at 650 TFLOP/s.
    """
    cases = "\n".join(f"GPU-0000000{number[1:]}-*) {line} ;;" for number, line in answers.items())
    sound = """echo '{"wrong": 0, "tflops": 650.0}'"""
    return program(
        folder / "python",
        f'#!/bin/bash\ncase "$CUDA_VISIBLE_DEVICES" in\n{cases}\n*) {sound} ;;\nesac\n',
    )


def test_a_product_that_is_wrong_slow_broken_or_hangs_is_the_fault_of_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = interpreter(
        tmp_path,
        g0="""echo '{"wrong": 3, "tflops": 640}'; exit 1""",
        g2="""echo '{"wrong": 0, "tflops": 211.5}'""",
        g3="""echo '{"error": "CUDA error: uncorrectable ECC error encountered"}'; exit 1""",
        g5="""echo 'Segmentation fault (core dumped)' >&2; exit 139""",
        g6="""sleep 600""",
    )
    report = within(
        3, monkeypatch, smi.install(tmp_path / "bin", smi.Node().answers()), python=str(python)
    )
    output = {fault.split(" ")[1]: fault.partition("): ")[2] for fault in report.faults}
    assert output == {
        "0": "3 entries of a product are wrong",
        "2": "212 TFLOP/s in bfloat16, the node's median is 650",
        "3": "CUDA error: uncorrectable ECC error encountered",
        "5": "a product ended with 139: Segmentation fault (core dumped)",
        "6": "a product did not end in time: it hangs",
    }
    assert report.facts["tflops"] == [None, 650.0, 211.5, None, 650.0, None, None, 650.0]


def test_the_product_is_right_on_a_sound_device_and_wrong_on_another() -> None:
    class Broken(TorchFunctionMode):
        """A device that computes one entry wrong."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            if (
                getattr(func, "__name__", "") in ("matmul", "__matmul__")
                and result.dtype is torch.bfloat16
            ):
                result[1, 2] += 1
            return result

    sizes = {"size": 256, "timed": 512, "repeats": 1}
    sound = measure.check("cpu", **sizes)
    assert sound["wrong"] == 0 and float(str(sound["tflops"])) > 0
    with Broken():
        assert measure.check("cpu", **sizes)["wrong"] == 1


XIDS = [
    "[{at:.6f}] NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.",
    (
        "[{at:.6f}] [ T1946] NVRM: Xid (PCI:0000:2b:00): 31, pid=1942, name=python, channel 0x2,"
        " intr 00000000. MMU Fault: ENGINE GRAPHICS"
    ),
    (
        "[{at:.6f}] NVRM: Xid (PCI:0000:8a:00): 48, pid='<unknown>', name=<unknown>, An"
        " uncorrectable double bit error (DBE) has been detected"
    ),
    (
        "[{at:.6f}] NVRM: Xid (PCI:0004:01:00): 119, pid=430, name=nv_queue, Timeout waiting for"
        " RPC from GSP!"
    ),
    (
        "[{at:.6f}] NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for"
        " remapping, reset gpu to activate."
    ),
]


def test_recent_errors_of_the_driver_are_faults_where_the_hardware_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = smi.install(tmp_path / "bin", smi.Node().answers())
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    lines = [line.format(at=max(0, uptime - 60)) for line in [*XIDS, XIDS[0]]]
    text = "\n".join(["[    0.000000] Linux version 6.8.0", *lines])
    program(tmp_path / "bin" / "dmesg", f'#!/bin/sh\ncat << "END"\n{text}\nEND\n')
    report = run(tmp_path, environment)
    assert [fault.split(" ")[1] for fault in report.faults] == ["79", "48", "119"]
    assert [warning.split(" ")[1] for warning in report.warnings] == ["31", "63"]
    assert "GPU has fallen off the bus" in report.faults[0] and "PCI:0000:06:00" in report.faults[0]
    program(tmp_path / "dmesg", f"#!/bin/sh\necho '{XIDS[0].format(at=1000)}'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    limit = 1000 + hardware.RECENT_SECONDS
    assert hardware.recent_xids(now=limit + 1) == []
    assert [number for number, _ in hardware.recent_xids(now=limit - 1)] == [79]


def test_folders_that_cannot_be_written_or_are_full_are_faults_and_nothing_is_left_in_them(
    tmp_path: Path,
) -> None:
    good = tmp_path / "good"
    odd = tmp_path / "a $(touch x) 'b'"
    missing = tmp_path / "missing"
    for path in (good, odd):
        path.mkdir()
    profile = {"paths": {"shared": [str(good), str(odd), str(missing)]}}
    report = run(tmp_path, dict(os.environ), profile)
    assert report.faults == [
        f"{missing}: cannot be written on this node: No such file or directory (is it mounted?)"
    ]
    assert list(good.iterdir()) == list(odd.iterdir()) == []
    report = run(tmp_path, dict(os.environ), {"health": {"free_disk_gb": 1e9}}, folders=[str(good)])
    assert [fault.split(":")[0] for fault in report.faults] == ["/tmp", str(good)]


def test_network_ports_that_are_down_are_reported(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    assert hardware.network_ports(tmp_path) == {"mlx5_0/1": "ACTIVE", "mlx5_1/1": "DOWN"}


def test_a_node_without_a_whole_report_has_that_as_its_fault(tmp_path: Path) -> None:
    run(tmp_path, dict(os.environ), {})
    full = (tmp_path / "health" / f"{node_name()}.json").read_text()
    rng, folder = random.Random(1), tmp_path / "reports"
    folder.mkdir()
    texts = [full[: rng.randrange(len(full) - 2)] for _ in range(40)]
    texts += [
        "[]",
        "null",
        '{"node": 1}',
        full.replace('"faults": []', '"faults": 3'),
        full.replace('"time": ', '"time": "x'),
    ]
    for number, text in enumerate(texts):
        (folder / f"n{number}.json").write_text(text)
    (folder / "n0.log").write_text(
        "slurmstepd: error: something\nbash: line 1: /venv/bin/python: No such file or"
        " directory\n\n"
    )
    names = [*(f"n{number}" for number in range(len(texts))), "silent"]
    reports = read_reports(folder, names)
    assert list(reports) == names and not any(report.ok for report in reports.values())
    assert reports["n0"].faults == [
        "did not answer the health check: bash: line 1: /venv/bin/python: No such file or directory"
    ]
    assert "it hangs" in reports["silent"].faults[0]
    (folder / "good.json").write_text(full)
    assert read_reports(folder, ["good"])["good"].ok
