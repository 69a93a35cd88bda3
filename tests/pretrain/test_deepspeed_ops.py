"""Tests of DeepSpeed's compiled operations: real locks of real processes, real compilations,
machine faults.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest

from fem_megatron.megatron import platform
from pretrain.engines import deepspeed_ops as ops
from tests.test_house import ROOT

OP = "cpu_adam"
LOCK = f"{OP}/lock"
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
# Take torch's own lock, without waiting until all of torch is imported.
HOLD = """
import runpy, sys, time
baton = runpy.run_path(sys.argv[1])["FileBaton"](sys.argv[2])
print(baton.try_acquire(), flush=True)
time.sleep(300)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty TORCH_EXTENSIONS_DIR; changes by `prepare_environment` are undone afterwards."""
    extensions = tmp_path / "extensions"
    (extensions / OP).mkdir(parents=True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PATH", os.environ["PATH"])
    return extensions


def age(folder: Path) -> None:
    """Set old modification times, so that a lock without a visible owner counts as abandoned."""
    then = time.time() - 2 * ops.QUIET_SECONDS
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def script(path: Path, text: str) -> Path:
    """Write a shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- the environment ------------------------------------------------------------------------------


def test_cpu_identity(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "cpuinfo").write_text(text)
        return ops.cpu_identity(tmp_path / "cpuinfo")

    here = of(
        "processor\t: 0\ncpu MHz\t: 2000.1\nflags\t\t: fpu avx2 avx512f\n\nprocessor\t:"
        " 1\nflags\t\t: fpu\n"
    )
    # The identity ignores the clock, the order of the flags and the number of cores.
    assert here == of("processor\t: 0\ncpu MHz\t: 3100.7\nflags\t\t: avx512f fpu avx2\n")
    assert here != of("processor\t: 0\ncpu MHz\t: 2000.1\nflags\t\t: fpu avx2\n")
    arm = "processor\t: 0\nFeatures\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
    assert of(arm) != of(arm.replace("sve", "")) and of(arm) != of(arm.replace("0xd40", "0xd4f"))
    assert ops.cpu_identity(tmp_path / "absent")  # a system other than Linux


def test_a_folder_for_each_kind_of_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here = ops.default_directory()
    assert here == ops.default_directory() == ops.extensions_directory()
    assert here.parent == tmp_path / "fem_megatron/torch_extensions"
    others = set()
    for name, value in {
        "cpu_identity": lambda: "x86_64 fpu",
        "_version": lambda package: "0.1",
        "find_spec": lambda package: None,
    }.items():
        with monkeypatch.context() as patch:
            patch.setattr(ops, name, value)
            others.add(ops.default_directory())
    assert len(others - {here}) == 3
    # The XDG specification requires that a relative path is ignored.
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert ops.default_directory().is_relative_to(tmp_path / "home/.cache")


def test_the_environment_is_prepared_where_it_is_not_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operation's file needs no torch, because `launch doctor` imports it."""
    code = (
        f"import runpy, sys; runpy.run_path({ops.__file__!r}); sys.exit(bool({{'torch',"
        " 'deepspeed'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
    ops.prepare_environment()
    assert (os.environ["DS_ACCELERATOR"], os.environ["TORCH_EXTENSIONS_DIR"]) == (
        "cpu",
        str(folder),
    )
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("PATH", str(folder))
    ops.prepare_environment()
    assert os.environ["DS_ACCELERATOR"] == ("cuda" if platform.has_cuda() else "cpu")
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(ops.default_directory())
    scripts = Path(sys.executable).parent
    assert os.environ["PATH"].split(os.pathsep) == [
        str(folder),
        *([str(scripts)] if (scripts / "ninja").exists() else []),
    ]


# --- state and locks ------------------------------------------------------------------------------


def test_built_is_what_ninja_finished(folder: Path) -> None:
    assert ops.op_state(OP) == "missing"
    (folder / OP / f"{OP}.so").touch()
    (folder / OP / ".ninja_log").write_text("# ninja log v6\n0\t9\t0\tadam.o\tff\n")
    assert ops.op_state(OP) == "missing"  # killed during linking
    (folder / OP / ".ninja_log").write_text(
        f"# ninja log v6\n0\t9\t0\tadam.o\tff\n9\t10\t0\t{OP}.so\tff\n"
    )
    assert ops.op_state(OP) == "built"
    (folder / LOCK).touch()
    assert ops.op_state(OP) == "locked"


def test_compiled_when_deepspeed_was_installed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = tmp_path / "deepspeed/__init__.py"
    monkeypatch.setattr(
        ops, "find_spec", lambda package: ModuleSpec("deepspeed", None, origin=str(origin))
    )
    origin.parent.mkdir()
    record = f"installed_ops={{'{OP}': True, 'other': False}}\naccelerator_name='cpu'\n"
    origin.with_name("git_version_info_installed.py").write_text(record)
    (folder / LOCK).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    # Needs no lock, no ninja and no compiler.
    assert ops.op_state(OP) == "built" and ops.check_ops(True) is None
    assert ops.op_state("other") == "missing"
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    assert ops.op_state(OP) == "locked"


def test_a_living_owners_lock_stays_and_a_dead_ones_goes(folder: Path) -> None:
    torch = find_spec("torch")
    assert torch and torch.origin
    baton = Path(torch.origin).parent / "utils/file_baton.py"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(baton), str(folder / LOCK)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout and holder.stdout.readline() == "True\n"
        age(folder / OP)  # the lock is old, but its holder is alive
        assert ops.lock_holders(OP) == [holder.pid]
        assert ops.op_state(OP) == "locked"
        assert ops.stale_lock(OP) is None
        assert ops.remove_stale_lock(OP) is None
        assert (folder / LOCK).exists()
    finally:
        holder.kill()
        holder.communicate()
    age(folder / OP)
    assert ops.stale_lock(OP) == folder / LOCK
    assert ops.remove_stale_lock(OP) == folder / LOCK and not (folder / LOCK).exists()
    assert ops.stale_lock(OP) is None and ops.op_state(OP) == "missing"


@pytest.mark.parametrize(("kind", "at_once"), [(("nfs4", True), False), (("overlay", False), True)])
def test_where_an_owner_might_not_be_seen_only_time_decides(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: tuple[str, bool], at_once: bool
) -> None:
    (folder / LOCK).touch()
    monkeypatch.setattr(ops, "file_system", lambda path: kind)
    assert (ops.stale_lock(OP) is not None) is at_once
    age(folder / OP)
    assert ops.stale_lock(OP)
    (folder / OP / "adam.o").touch()  # a compiler on another machine writes this file
    assert (ops.stale_lock(OP) is not None) is at_once


# --- obstacles ------------------------------------------------------------------------------------


@needs_deepspeed
def test_obstacles_are_one_line_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bin"
    bare.mkdir()
    assert ops.check_ops(True) is None  # not compiled yet, but it can be
    monkeypatch.setenv("CXX", "absent-g++ -O2")
    assert ops.check_ops(True) == f"DeepSpeed's {OP}: {ops.lacks_compiler()}"
    assert "absent-g++)" in str(ops.lacks_compiler())
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.setattr(sys, "executable", str(bare / "python"))
    with pytest.raises(ops.OpError, match="ninja is neither on PATH nor in"):
        ops.build_op(OP)
    for program in ("ninja", "absent-g++"):
        script(bare / program, "")
    (folder / LOCK).touch()
    age(folder / OP)
    report = str(ops.check_ops(True))
    assert str(folder / LOCK) in report
    assert report.endswith("python -m launch doctor --fix")
    assert "\n" not in report
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "set TORCH_EXTENSIONS_DIR" in str(ops.check_ops(True))
    with monkeypatch.context() as homeless:
        homeless.delenv("TORCH_EXTENSIONS_DIR")
        homeless.setenv("XDG_CACHE_HOME", "")
        homeless.setattr(os.path, "expanduser", lambda path: path)
        assert "no home directory" in str(ops.check_ops(True))
    monkeypatch.setattr(ops, "find_spec", lambda package: None)
    assert ops.check_ops(True) == f"DeepSpeed is not installed: {ops.INSTALL}"


@pytest.mark.slow
@needs_deepspeed
def test_the_compilers_error_is_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = script(
        tmp_path / "bin/g++",
        'case " $* " in *" -c "*) echo "adam.cpp:7:1: error: no such luck"; exit 1;; esac',
    )
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(ops.OpError, match=r"adam\.cpp:7:1: error: no such luck") as error:
        ops.build_op(OP)
    log = folder / f"{OP}.log"
    assert str(log) in str(error.value)
    assert "\n" not in str(error.value)
    assert "no such luck" in log.read_text()
    assert ops.op_state(OP) == "missing"  # the lock is removed, too


@needs_deepspeed
@pytest.mark.slow
def test_an_interrupted_compilation_leaves_no_lock(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling = tmp_path / "compiling"
    wait = f"touch {compiling}; while [ -e {compiling} ]; do sleep 0.05; done"
    compiler = script(tmp_path / "bin/g++", f'case " $* " in *" -c "*) {wait};; esac')
    monkeypatch.setenv("CXX", str(compiler))

    def interrupt(seconds: float) -> None:
        if compiling.exists():
            assert ops.op_state(OP) == "locked" and ops.stale_lock(OP) is None
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            ops.build_op(OP, interrupt)
        assert ops.op_state(OP) == "missing"
    finally:
        compiling.unlink(missing_ok=True)  # the compilers outlive ninja


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the operation is Linux's")
def test_the_op_compiles_and_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real compilation in the folder that training uses: minutes on a new machine, the seconds of
    an import afterwards.
    """
    for key, value in {
        "DS_ACCELERATOR": "cpu",
        "PATH": os.environ["PATH"],
        "TORCH_EXTENSIONS_DIR": str(ops.default_directory()),
    }.items():
        monkeypatch.setenv(key, value)
    assert ops.build_op(OP) > 0
    # Locked: a process of another test loads the op at this moment.
    assert ops.op_state(OP) in ("built", "locked")
    assert ops.check_ops(True) is None
