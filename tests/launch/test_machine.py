"""Tests of ``python -m launch doctor`` for this machine: one line for each machine fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fem_megatron.megatron import platform, upstream
from launch.__main__ import main
from tests.launch.hostile import program
from tests.pretrain.test_deepspeed_ops import LOCK, OP, age, folder, needs_deepspeed
from tests.test_house import ROOT
from tools.machine import checks as machine

__all__ = ["folder"]  # re-exports the fixture


@needs_deepspeed
def test_a_machine_without_tools(folder: Path, tmp_path: Path) -> None:
    """Run by the interpreter of a virtual environment without ninja, on a PATH without a
    compiler.
    """
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    place = venv / site.relative_to(site.parents[2])
    place.parent.mkdir(parents=True)
    place.symlink_to(site)
    (venv / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).resolve().parent}\n")
    (folder / LOCK).touch()
    age(folder / OP)
    environment = {key: value for key, value in os.environ.items() if key != "CXX"} | {
        "PATH": str(tmp_path)
    }
    done = subprocess.run(
        [str(python), "-m", "launch", "doctor"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    wrong = {
        line[9:23].strip(): (line, after)
        for line, after in zip(lines, lines[1:], strict=False)
        if line.startswith("FAILED")
    }
    assert list(wrong) == ["ninja", "C++ compiler", OP], done.stdout
    assert "pip install ninja" in wrong["ninja"][1] and "g++" in wrong["C++ compiler"][1]
    assert str(folder / LOCK) in wrong[OP][0] and wrong[OP][1].endswith(
        "-> python -m launch doctor --fix"
    )
    assert lines[-1].startswith("3 failed, ")


@pytest.mark.slow
@needs_deepspeed
def test_fix_removes_what_was_left(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / LOCK).touch()
    age(folder / OP)
    assert main(["doctor", "--fix"]) == 0
    assert f"removed {folder / LOCK}" in capfd.readouterr().out and not (folder / LOCK).exists()
    (after,) = machine.of_op(OP, False, False, lambda name, seconds: None)
    assert (after.level, after.remedy) == ("absent", "python -m launch doctor --build")


def test_another_megatron_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check.level for check in machine.torch_and_megatron()] == ["ok", "ok"]
    monkeypatch.setattr(upstream, "installed", lambda: "0.16.0")
    last = list(machine.torch_and_megatron())[-1]
    assert (last.level, last.name, last.text, last.remedy) == (
        "FAILED",
        "megatron-core",
        "0.16.0, but this code is verified against 0.16.1 or newer, below 0.20",
        "pip install 'megatron-core>=0.16.1,<0.20'",
    )


def test_gpus_that_torch_does_not_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "has_cuda", lambda: False)
    monkeypatch.setattr(platform, "toolkit", lambda: None)
    assert [check.level for check in machine.gpus()] == ["ok"]
    program(
        tmp_path / "nvidia-smi",
        "#!/bin/sh\necho NVIDIA H100 80GB HBM3, 9.0; echo NVIDIA H100 80GB HBM3, 9.0\n",
    )
    (check,) = machine.gpus()
    assert (
        check.level == "FAILED"
        and "2 x NVIDIA H100 80GB HBM3, compute capability 9.0: torch is built without CUDA"
        in check.text
    )
    program(tmp_path / "nvidia-smi", "#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert [check.level for check in machine.gpus()] == ["ok"]


def test_the_toolkit_against_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(platform, "toolkit", lambda: "CUDA 12.8, cuDNN 91002")
    program(
        tmp_path / "bin/nvcc", "#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n"
    )
    assert [check.level for check in machine.cuda_toolkit()] == ["ok"]
    program(
        tmp_path / "bin/nvcc", "#!/bin/sh\necho Cuda compilation tools, release 13.0, V13.0.48\n"
    )
    (check,) = machine.cuda_toolkit()
    assert (
        check.level == "warning"
        and "13.0" in check.text
        and "12.8" in check.text
        and "DS_SKIP_CUDA_CHECK=1" in check.remedy
    )
