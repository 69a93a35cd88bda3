"""Checks of this machine for training.

They cover Python, torch, Megatron-core, GPUs, Triton, DeepSpeed and compilers. Only the checks of
DeepSpeed's operations change files, and only with ``build`` or ``fix``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from fem_common.errors import UserError
from fem_common.text import one_line
from launch.node import hardware
from launch.node.checks import Check

PYTHON = ((3, 11), (3, 13))
LOOK_SECONDS = 300.0  # limit for an import from a cold network file system
# GB. Containers have 0.064 of shared memory by default. The disk must fit a small checkpoint and a
# few compiled operations.
LITTLE_SHM, LITTLE_DISK = (1.0, 10.0)
GPU_PACKAGES = {"flash_attn": "flash-attn", "fla": "flash-linear-attention"}
GPU_EXTRA = "python -m pip install --no-build-isolation -c constraints.txt -e .[gpu]"
SOURCE = (
    "#include <omp.h>\n#include <string>\nint threads() { return omp_get_max_threads() + "
    "std::string().size(); }\n"
)
Progress = Callable[[str, float], None]  # (op, seconds so far)


def examine(build: bool, fix: bool, progress: Progress) -> Iterator[Check]:
    """Yield the results of all checks in order; those that need no torch are first.

    A check that raises an error yields a fault, and the next check follows.

    build: compile DeepSpeed's operations that are not compiled.
    fix: remove lock files of compilations that were killed.
    progress: called with (operation, seconds so far) during a compilation.
    """
    yield from _guarded("python", python)
    torch = list(_guarded("torch", torch_and_megatron))
    yield from torch
    if any(check.level == "FAILED" for check in torch):
        yield Check("warning", "the rest", "was not checked: it needs torch and Megatron-core")
        return
    for name, checks in {
        "gpu": gpus,
        "triton": triton,
        "deepspeed": deepspeed,
        "compiler": compiling,
    }.items():
        yield from _guarded(name, checks)
    if find_spec("deepspeed") is not None:
        yield from _guarded("ops", lambda: ops(build, fix, progress))
    for name, checks in {"nvcc": cuda_toolkit, "packages": packages, "room": free_space}.items():
        yield from _guarded(name, checks)


def _guarded(name: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    try:
        yield from checks()
    except Exception as error:  # report all other checks, whatever is broken
        yield Check("FAILED", name, f"{type(error).__name__}: {one_line(error)}")


def _output_of(*command: str, seconds: float = LOOK_SECONDS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
        stdin=subprocess.DEVNULL,
    )


def python() -> Iterator[Check]:
    """Check the interpreter's version."""
    right = PYTHON[0] <= sys.version_info[:2] <= PYTHON[1]
    remedy = "" if right else "3.11 to 3.13 is needed; make setup PYTHON_BASE=/path/to/python"
    yield Check(
        "ok" if right else "FAILED",
        "python",
        f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}",
        remedy,
    )


def torch_and_megatron() -> Iterator[Check]:
    """Check the version of Megatron-core, and that it and torch can be imported as in training."""
    try:
        torch = importlib.import_module("torch")
        platform = importlib.import_module("fem_megatron.megatron.platform")
        upstream = importlib.import_module("fem_megatron.megatron.upstream")
    except (ImportError, OSError) as error:
        yield Check(
            "FAILED",
            "torch",
            f"cannot be imported ({hardware.last_line(str(error))})",
            "make setup",
        )
        return
    yield Check("ok", "torch", f"{torch.__version__}, {platform.toolkit() or 'built without CUDA'}")
    try:
        with warnings.catch_warnings():
            upstream.import_megatron()
            # This imports all of Megatron-core that training imports.
            importlib.import_module("pretrain.engines")
    except UserError:
        pass  # an unsupported release, which the check below reports
    except (ImportError, OSError) as error:
        yield Check(
            "FAILED",
            "megatron-core",
            f"cannot be imported ({hardware.last_line(str(error))})",
            upstream.REMEDY,
        )
        return
    found = upstream.installed()
    supported = f"{upstream.OLDEST} or newer, below {upstream.TOO_NEW}"
    yield _tested("megatron-core", found, supported, upstream.is_supported(found), upstream.REMEDY)


def _tested(name: str, found: str, tested: str, fits: bool, remedy: str) -> Check:
    """Return the check that a package has a version with which this code was tested."""
    if not fits:
        return Check("FAILED", name, f"{found}, but this code is verified against {tested}", remedy)
    return Check("ok", name, found)


def gpus() -> Iterator[Check]:
    """Check that torch computes on a GPU if the driver lists at least one."""
    from fem_megatron.megatron.platform import has_cuda, toolkit
    from kernels import machine

    seen = hardware.named_gpus(60.0)
    if not has_cuda():
        if not seen:
            yield Check("ok", "gpu", "no GPU: everything runs on the CPU with gloo")
            return
        why = "torch is built without CUDA"
        if toolkit():
            why = "the driver is older than torch's CUDA, or CUDA_VISIBLE_DEVICES hides them"
        remedy = "install a torch for the driver that nvidia-smi names"
        yield Check("FAILED", "gpu", f"torch uses none of {', '.join(seen)}: {why}", remedy)
        return
    import torch

    device = machine.device()
    # Fails if this build has no machine code for the GPU.
    torch.ones(8, device=device).sum().item()
    capability = machine.architecture(device)
    yield Check(
        "ok",
        "gpu",
        ", ".join(seen)
        or f"{machine.name(device)}, compute capability {capability // 10}.{capability % 10}",
    )


def triton() -> Iterator[Check]:
    """Check that the Triton kernels can run."""
    from kernels import machine
    from kernels.implementations import lacks_triton, triton_version

    on_gpu = machine.device().type == "cuda"
    found, fault = triton_version(), lacks_triton(machine.device())
    if found is None:
        remedy = "only tests need it on a CPU: make setup"
        if on_gpu:
            remedy = f"slower implementations run: {GPU_EXTRA}"
        yield Check("absent", "triton", "not installed", remedy)
        return
    yield Check(
        "warning" if fault and on_gpu else "ok",
        "triton",
        f"{found[0]}.{found[1]}{f' ({fault})' if fault else ''}",
    )


def deepspeed() -> Iterator[Check]:
    """Check that DeepSpeed can be imported, in a separate process, and its version."""
    from pretrain.engines.deepspeed_ops import INSTALL, prepare_environment

    if find_spec("deepspeed") is None:
        yield Check(
            "absent", "deepspeed", "not installed; engine.name: deepspeed needs it", INSTALL
        )
        return
    prepare_environment()
    requested = _output_of(sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)")
    if requested.returncode:
        yield Check(
            "FAILED",
            "deepspeed",
            f"cannot be imported ({hardware.last_line(requested.stderr)})",
            INSTALL,
        )
        return
    tested = None
    with contextlib.suppress(PackageNotFoundError):  # this project may not be installed
        pins = [re.match(r"deepspeed==([\w.]+)", line) for line in requires("fem-megatron") or []]
        tested = next((pin[1] for pin in pins if pin), None)
    found = hardware.last_line(requested.stdout)
    yield _tested("deepspeed", found, tested or "", tested in (None, found), INSTALL)


def compiling() -> Iterator[Check]:
    """Check ninja, and that the compiler builds a shared library with OpenMP."""
    from pretrain.engines import deepspeed_ops

    missing = deepspeed_ops.lacks_ninja()
    if missing:
        text, _, remedy = missing.partition(": ")
        yield Check(
            "FAILED" if find_spec("deepspeed") else "absent",
            "ninja",
            text,
            f"{remedy} (DeepSpeed runs it at every start)",
        )
    else:
        deepspeed_ops.prepare_environment()
        version = hardware.last_line(_output_of("ninja", "--version").stdout)
        yield Check("ok", "ninja", f"{version}, {shutil.which('ninja')}")
    missing = deepspeed_ops.lacks_compiler()
    if missing:
        text, _, remedy = missing.partition(": ")
        yield Check(
            "FAILED",
            "C++ compiler",
            text,
            f"{remedy} (Megatron-core's data sets and DeepSpeed are compiled)",
        )
        return
    compiler = deepspeed_ops.compiler()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "threads.cpp")
        source.write_text(SOURCE)
        done = _output_of(
            compiler,
            "-fopenmp",
            "-fPIC",
            "-shared",
            str(source),
            "-o",
            str(source.with_suffix(".so")),
        )
    if done.returncode:
        fault = next(
            (line for line in done.stderr.splitlines() if "error" in line),
            hardware.last_line(done.stderr),
        )
        text = f"{shutil.which(compiler)} compiles no program with OpenMP ({fault})"
        yield Check("FAILED", "C++ compiler", text, "CXX=/path/to/g++")
    else:
        version = _output_of(compiler, "--version").stdout.splitlines()[0]
        yield Check("ok", "C++ compiler", f"{version}, {shutil.which(compiler)}")


def ops(build: bool, fix: bool, progress: Progress) -> Iterator[Check]:
    """Check DeepSpeed's compiled operations and their folder."""
    from pretrain.engines import deepspeed_ops

    directory = deepspeed_ops.extensions_directory()
    kind, shared = deepspeed_ops.file_system(directory)
    fault = deepspeed_ops.cannot_write(directory)
    if fault:
        yield Check("FAILED", "extensions", fault)
    elif shared and directory != deepspeed_ops.default_directory():
        text = (
            f"{directory} ({kind}) may be used by machines whose CPU cannot run code that this one "
            "compiled"
        )
        yield Check(
            "warning",
            "extensions",
            text,
            "unset TORCH_EXTENSIONS_DIR, and each kind of machine gets its own folder below "
            "~/.cache",
        )
    else:
        yield Check(
            "warning" if shared else "ok",
            "extensions",
            f"{directory} ({kind}{', a network file system' if shared else ''})",
        )
    for name in deepspeed_ops.needed_ops(offload_optimizer=True):
        yield from of_op(name, build, fix, progress)


def of_op(name: str, build: bool, fix: bool, progress: Progress) -> Iterator[Check]:
    """Check one of DeepSpeed's operations: its lock file and its compilation.

    A compilation that was killed leaves a lock file. The arguments are those of `examine`.
    """
    from pretrain.engines import deepspeed_ops

    stale = deepspeed_ops.stale_lock(name)
    if stale and fix and deepspeed_ops.remove_stale_lock(name):
        yield Check("ok", name, f"removed {stale}, which a killed process had left")
    elif stale:
        text = f"{stale} was left by a killed process, and DeepSpeed would wait for it forever"
        yield Check("FAILED", name, text, deepspeed_ops.FIX)
        return
    state = deepspeed_ops.op_state(name)
    if build:
        try:
            seconds = deepspeed_ops.build_op(name, lambda seconds: progress(name, seconds))
        except deepspeed_ops.OpError as error:
            yield Check("FAILED", name, str(error))
        else:
            yield Check(
                "ok",
                name,
                f"{'compiled before; loaded' if state == 'built' else 'compiled and loaded'} "
                f"in {seconds:.0f} s",
            )
    elif state == "built":
        yield Check("ok", name, "compiled")
    elif state == "missing":
        yield Check(
            "absent",
            name,
            "not compiled yet; the first start does it, in one to five minutes",
            deepspeed_ops.BUILD,
        )
    else:
        holders = (
            ", ".join(map(str, deepspeed_ops.lock_holders(name))) or "of another machine or user"
        )
        lock = deepspeed_ops.extensions_directory() / name / "lock"
        yield Check(
            "warning", name, f"is being compiled or loaded by process {holders}, which holds {lock}"
        )


def cuda_toolkit() -> Iterator[Check]:
    """Compare the CUDA version of nvcc with torch's.

    Packages of the extra `gpu` are compiled with nvcc. DeepSpeed's operations do not need it.
    """
    from fem_megatron.megatron.platform import toolkit

    built_with = re.search(r"CUDA (\d+\.\d+)", toolkit() or "")
    if built_with is None:
        yield Check("absent", "nvcc", "not needed: torch is built without CUDA")
        return
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None) or shutil.which(
        "/usr/local/cuda/bin/nvcc"
    )
    if nvcc is None:
        yield Check(
            "absent",
            "nvcc",
            "no CUDA toolkit; flash-attn is compiled with one where no wheel fits",
        )
        return
    release = re.search(r"release (\d+\.\d+)", _output_of(nvcc, "-V").stdout)
    found = release[1] if release else "unknown"
    if found == built_with[1]:
        yield Check("ok", "nvcc", f"{found}, {nvcc}")
    else:
        text = f"{found} ({nvcc}), but torch's CUDA is {built_with[1]}"
        yield Check("warning", "nvcc", text, "CUDA_HOME=/path, or DS_SKIP_CUDA_CHECK=1")


def packages() -> Iterator[Check]:
    """Check which optional GPU packages are installed, without importing them."""
    from fem_megatron.megatron.platform import has_cuda

    for module, distribution in GPU_PACKAGES.items():
        if find_spec(module):
            found = "unknown version"
            with contextlib.suppress(PackageNotFoundError):
                found = version(distribution)
            yield Check("ok", module, found)
        elif has_cuda():
            yield Check("absent", module, "not installed; other implementations run", GPU_EXTRA)
        else:
            yield Check("absent", module, "not installed; of use with a GPU only")


def free_space() -> Iterator[Check]:
    """Check the free space of the working directory's disk and of shared memory."""
    for name, path, little, why in (
        ("disk", Path.cwd(), LITTLE_DISK, "checkpoints may not fit"),
        (
            "shared memory",
            Path("/dev/shm"),
            LITTLE_SHM,
            "NCCL and data loaders use it; docker run --shm-size=8g, or --ipc=host",
        ),
    ):
        if not path.is_dir():
            yield Check("warning", name, f"{path} does not exist")
            continue
        free = shutil.disk_usage(path).free / hardware.GB
        yield Check(
            "warning" if free < little else "ok",
            name,
            f"{free:.1f} GB free in {path}",
            why if free < little else "",
        )
