"""Find, check and compile DeepSpeed's C++ operations ("ops").

The checks find faults that would make a run fail or wait forever.

Training needs one op, ``cpu_adam``, if the optimizer is offloaded. It is not CUDA: it needs a C++
compiler, but no nvcc. torch.utils.cpp_extension compiles it at its first use into
``$TORCH_EXTENSIONS_DIR/<op>``, for this exact CPU (-march=native).

Even if the op is compiled, every start runs ninja in that folder. Meanwhile the process keeps the
file ``lock`` open (torch.utils.file_baton). A killed process leaves the file, and every later
process waits until the file is deleted. This module imports no torch and no DeepSpeed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fem_common.signals import signal_name

BUILDERS = {"cpu_adam": "CPUAdamBuilder"}  # op -> DeepSpeed class that builds it
# An op compiles in minutes even on two busy cores, and each finished file changes the folder.
QUIET_SECONDS = 1800.0
FIX, BUILD = "python -m launch doctor --fix", "python -m launch doctor --build"
INSTALL = "python -m pip install -c constraints.txt -e .[deepspeed]"

State = Literal["built", "missing", "locked"]

_NETWORK = tuple(
    (
        "nfs cifs smb lustre gpfs beegfs ceph fuse. 9p virtiofs afs panfs weka pvfs orangefs gfs"
    ).split()
)
# PROC_PID_INIT_INO of Linux's proc_ns.h: the machine's own namespace, outside all containers.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
# SIGTERM raises an exception, so that torch's `finally` removes the lock.
_LOAD = """
import signal, sys
signal.signal(signal.SIGTERM, signal.default_int_handler)
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder(sys.argv[1]).load(verbose=True)
"""


class OpError(RuntimeError):
    """Error: an op cannot be compiled or loaded. The message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


# --- the environment ------------------------------------------------------------


def prepare_environment() -> None:
    """Set the environment variables that DeepSpeed reads when it is imported.

    They select the accelerator, the folder of ops, and a log level of warnings for DeepSpeed.
    Variables that are already set remain. If ninja is not on PATH, its folder is appended to PATH.
    """
    # Without the variable DeepSpeed tries seven kinds of accelerator, and warns if it finds none.
    os.environ.setdefault("DS_ACCELERATOR", _accelerator())
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(default_directory()))
    # The folder of a virtual environment that is not activated is not on PATH.
    scripts = Path(sys.executable).parent
    if shutil.which("ninja") is None and os.access(scripts / "ninja", os.X_OK):
        os.environ["PATH"] = os.pathsep.join(
            [*filter(None, [os.environ.get("PATH")]), str(scripts)]
        )


def default_directory() -> Path:
    """Return the folder of ops that is used if TORCH_EXTENSIONS_DIR is unset.

    It is in the user's cache, with a separate folder for each kind of machine and each environment.
    An op that was compiled with another CPU, libc, Python or torch may crash, and ninja recompiles
    whenever the paths of the sources differ.

    Raises:
        OpError: the user has no home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):
        cache = os.path.expanduser("~/.cache")
    if not os.path.isabs(cache):
        raise OpError(
            "this user has no home directory: set TORCH_EXTENSIONS_DIR to a folder for DeepSpeed's "
            "compiled operations"
        )
    facts = [cpu_identity(), *platform.libc_ver(), str(sys.implementation.cache_tag)]
    for package in ("torch", "deepspeed"):
        found = find_spec(package)
        facts += [_version(package), (found.origin if found else None) or ""]
    return Path(
        cache,
        "fem_megatron",
        "torch_extensions",
        hashlib.sha256("\n".join(facts).encode()).hexdigest()[:12],
    )


def extensions_directory() -> Path:
    """Return the folder of compiled ops: TORCH_EXTENSIONS_DIR, or `default_directory` if unset."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given) if given else default_directory()


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return a text that differs between CPUs for which -march=native compiles different code.

    It contains the architecture and the sorted instruction sets of the first core.
    """
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    core = re.split(r"\n\s*\n", text)[0]
    words = set[str]()
    for line in re.findall(r"^(?:flags|Features)\s*:(.*)$", core, re.MULTILINE):
        words.update(line.split())
    model = re.findall(r"^CPU (?:implementer|part)\s*:(.*)$", core, re.MULTILINE)  # on Arm
    if not text:
        return f"{platform.machine()} {platform.processor()}"
    return " ".join([platform.machine(), *(word.strip() for word in model), *sorted(words)])


def file_system(path: Path) -> tuple[str, bool]:
    """Return (type, True if other machines may see it) of the file system for ``path``.

    The result is ("unknown", True) without /proc.
    """
    try:
        mounts = (
            Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        return "unknown", True
    real = os.path.realpath(path)
    kind = "unknown"
    longest = -1
    for mount in mounts:
        fields, _, rest = mount.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= longest:
            kind, longest = rest.split()[0], len(point)
    return kind, kind == "unknown" or kind.startswith(_NETWORK)


def _accelerator() -> str:
    from fem_megatron.megatron.platform import has_cuda

    return "cuda" if has_cuda() else "cpu"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# --- the ops and their state ------------------------------------------------------------


def needed_ops(offload_optimizer: bool) -> list[str]:
    """Return the names of the ops that training loads."""
    return ["cpu_adam"] * offload_optimizer


def op_state(name: str) -> State:
    """Return the state of an op: ``built``, ``locked`` or ``missing``.

    ``locked``: a process compiles or loads it, or was killed while doing so (`stale_lock`
    distinguishes these).
    """
    folder = extensions_directory() / name
    if _came_with_deepspeed(name):
        return "built"
    if (folder / "lock").exists():
        return "locked"
    return "built" if _linked(folder, f"{name}.so") else "missing"


def stale_lock(name: str) -> Path | None:
    """Return the op's lock file if the process that created it has ended, else None.

    If this process can see all processes that may own the lock, the answer is certain: it depends
    on whether a process of this machine has the file open. If the owner may run on another machine
    or in another container, a lock counts as stale after `QUIET_SECONDS` without a change in the
    folder.
    """
    lock = extensions_directory() / name / "lock"
    for _ in range(3):  # torch closes the file shortly before it removes it
        if not lock.exists() or lock_holders(name):
            return None
        time.sleep(0.05)
    try:
        newest = max(path.stat().st_mtime for path in (lock, lock.parent, *lock.parent.iterdir()))
        return lock if _owner_would_be_seen(lock) or time.time() - newest > QUIET_SECONDS else None
    except FileNotFoundError:  # it was removed in the meantime
        return None


def lock_holders(name: str) -> list[int]:
    """Return the ids of the processes of this machine that have the op's lock file open.

    Processes that this user may not inspect are missing.
    """
    try:
        held = (extensions_directory() / name / "lock").stat()
    except FileNotFoundError:
        return []
    found = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process ended or belongs to another user
            for descriptor in Path("/proc", process, "fd").iterdir():
                with contextlib.suppress(OSError):  # the descriptor was closed
                    if os.readlink(descriptor).endswith("/lock") and os.path.samestat(
                        descriptor.stat(), held
                    ):
                        found.add(int(process))
    return sorted(found)


def remove_stale_lock(name: str) -> Path | None:
    """Remove the op's lock file if `stale_lock` finds that its owner has ended.

    Return the path of the removed file, or None.
    """
    lock = stale_lock(name)
    if lock is not None:
        lock.unlink(missing_ok=True)
    return lock


def _owner_would_be_seen(lock: Path) -> bool:
    """Return True if this process could see the lock's owner, were the owner still running."""
    if os.geteuid() not in (0, lock.stat().st_uid) or not Path("/proc/self/fd").exists():
        return False
    kind, shared = file_system(lock)
    # An overlay belongs to one container; several containers may see any other file system.
    return not shared and (
        kind == "overlay" or os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    )


def _linked(folder: Path, library: str) -> bool:
    """Return True if ninja has completely linked the library.

    A killed ninja may also leave the file, but then its log has no entry for the library.
    """
    try:
        log = (folder / ".ninja_log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return (folder / library).is_file() and any(
        line.split("\t")[3:4] == [library] for line in log.splitlines()
    )


def _came_with_deepspeed(name: str) -> bool:
    """Return True if DeepSpeed was installed with the op already compiled (DS_BUILD_OPS=1).

    The op must have been compiled for the accelerator that DeepSpeed would use.
    """
    found = find_spec("deepspeed")
    if found is None or found.origin is None:
        return False
    try:
        text = (
            Path(found.origin)
            .with_name("git_version_info_installed.py")
            .read_text(encoding="utf-8")
        )
    except OSError:
        return False
    accelerator = re.search(r"^accelerator_name='(\w*)'", text, re.MULTILINE)
    return (
        f"'{name}': True" in text
        and accelerator is not None
        and accelerator[1] == os.environ.get("DS_ACCELERATOR", _accelerator())
    )


# --- obstacles, and compiling ------------------------------------------------------------


def check_ops(offload_optimizer: bool) -> str | None:
    """Return one line about an obstacle to training with these ops and its remedy, or None.

    An op that is not compiled yet is no obstacle: the first start compiles it, in one to five
    minutes. Another version of the CUDA toolkit than torch's is no obstacle either, because no op
    that training needs is compiled by nvcc.
    """
    if find_spec("deepspeed") is None:
        return f"DeepSpeed is not installed: {INSTALL}"
    try:
        return next(filter(None, map(_obstacle, needed_ops(offload_optimizer))), None)
    except OpError as error:
        return str(error)


def compiler() -> str:
    """Return the command of the C++ compiler that torch calls."""
    return (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]


def lacks_compiler() -> str | None:
    """Return a text about the missing compiler or header and its installation, or None.

    Python's C++ extensions need both.
    """
    if shutil.which(compiler()) is None:
        return (
            f"there is no C++ compiler ({compiler()}): install one (Debian and Ubuntu: g++) or "
            "name one with CXX=/path/to/g++"
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.is_file():
        return f"there is no {header}: install Python's headers (Debian and Ubuntu: python3-dev)"
    return None


def lacks_ninja() -> str | None:
    """Return a text about installing ninja, or None if ninja is available.

    It is available if it is on PATH or next to the interpreter.
    """
    scripts = Path(sys.executable).parent
    if shutil.which("ninja") or os.access(scripts / "ninja", os.X_OK):
        return None
    return f"ninja is neither on PATH nor in {scripts}: python -m pip install ninja"


def cannot_write(directory: Path) -> str | None:
    """Return an error text with the remedy if the folder of ops cannot be used, else None.

    The folder is created if it is missing.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return None
    except OSError as error:
        return (
            f"{directory}: {error.strerror}: set TORCH_EXTENSIONS_DIR to a folder that can be "
            "written"
        )


def build_op(name: str, waiting: Callable[[float], None] = lambda seconds: None) -> float:
    """Compile an op, load it once in a separate process, and return the seconds that this took.

    An op that is already compiled takes only a few seconds.

    waiting: called about once per second with the seconds so far.

    Raises:
        OpError: the obstacle, or the compiler's first error with the path of its full output.
    """
    obstacle = (
        check_ops(offload_optimizer=False) if find_spec("deepspeed") is None else _obstacle(name)
    )
    if obstacle:
        raise OpError(obstacle)
    prepare_environment()
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        child = subprocess.Popen(
            [sys.executable, "-c", _LOAD, BUILDERS[name]],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(child, name, lambda: waiting(time.monotonic() - start))
        finally:
            _end(child)
        output.seek(0)
        compiler_output = output.read()
    if child.returncode == 0:
        return time.monotonic() - start
    log = extensions_directory() / f"{name}.log"
    log.write_text(compiler_output, encoding="utf-8")
    raise OpError(
        f"DeepSpeed's {name} does not compile or load: "
        f"{_reason(compiler_output, child.returncode)} (full output: {log})"
    )


def _obstacle(name: str) -> str | None:
    if _came_with_deepspeed(name):
        return None
    fault = (
        lacks_ninja()
        or (lacks_compiler() if op_state(name) == "missing" else None)
        or cannot_write(extensions_directory())
    )
    if fault:
        return f"DeepSpeed's {name}: {fault}"
    lock = stale_lock(name)
    return (
        f"{lock} was left by a process that was killed, and DeepSpeed would wait for it forever: "
        f"{FIX}"
        if lock
        else None
    )


def _wait(child: subprocess.Popen[bytes], name: str, waiting: Callable[[], None]) -> None:
    for second in itertools.count(1):
        try:
            child.wait(1)
            return
        except subprocess.TimeoutExpired:
            waiting()
        if second % 10 == 0 and stale_lock(name):  # another build had the lock and was killed
            raise OpError(
                f"another process that compiled DeepSpeed's {name} was killed: {FIX}, then {BUILD}"
            )


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the child process, with ten seconds to remove its lock."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _reason(output: str, code: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.search(r"\b(fatal )?error: |command not found|undefined reference", line)
    ]
    if code < 0:
        return f"{signal_name(-code)}" + (
            ", as from code compiled for another CPU" if -code == signal.SIGILL else ""
        )
    return (errors or lines[-1:] or ["no output"])[0]
