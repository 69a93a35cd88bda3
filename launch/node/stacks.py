"""Dump a hanging process: its state, stacks from py-spy and faulthandler, NCCL's flight recorder.

Uses only the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

_STOPPED = re.compile(r"=== .* rank (\d+), process \d+: [Tt] ")
# limit for py-spy: it cannot read a process in an endless system call
SECONDS = 20.0


def dump(pid: int, rank: int, environ: Mapping[str, str]) -> str:
    """Return a text about a process's state and stacks, within `SECONDS`.

    pid: id of the process. rank: its rank. environ: its environment.

    The process is signalled to write faulthandler's stacks, and its NCCL is triggered to write the
    flight recorder, because only they can write these.
    """
    status = _status(pid)
    waits = _read(f"/proc/{pid}/wchan").strip("0 \n")
    state = status.get("State", "gone")
    messages = [
        f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}, process {pid}: {state}",
        f"waits in the kernel in {waits}" if waits else None,
        _ask_nccl(rank, environ),
        # py-spy is before the handler because it would otherwise show the handler's work.
        _py_spy(pid, stopped=state.startswith(("T", "t"))),
    ]
    if int(status.get("SigCgt", "0"), 16) >> (signal.SIGUSR2 - 1) & 1:
        # Without a handler the signal would end the process.
        os.kill(pid, signal.SIGUSR2)
        messages.append("SIGUSR2 was sent: Python's own stacks are in the rank's log")
    return "\n".join(filter(None, messages)) + "\n"


def stopped_ranks(folder: Path) -> list[int]:
    """Return the ranks whose dumps in a folder show them stopped, by SIGSTOP or a debugger."""
    found = (
        _STOPPED.match(text)
        for path in folder.glob("rank_*.txt")
        for text in _read(str(path)).splitlines()
    )
    return sorted({int(match[1]) for match in found if match})


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _status(pid: int) -> dict[str, str]:
    """Return /proc/PID/status as a mapping, or {} if the process does not exist."""
    pairs = (line.partition(":") for line in _read(f"/proc/{pid}/status").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _py_spy(pid: int, *, stopped: bool) -> str:
    """Return the stacks of a process from py-spy, or an error text if py-spy gives none.

    stopped: the process is stopped, by SIGSTOP or a debugger.
    """
    program_path = Path(sys.executable).with_name("py-spy")
    program = str(program_path) if program_path.exists() else shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed for this interpreter: no stacks"
    try:
        # A stopped process cannot be paused, and stacks read without a pause can be inconsistent.
        # Then try the other mode.
        output = _run_py_spy(program, pid, pause=not stopped)
        return output if output.startswith("Process") else _run_py_spy(program, pid, pause=stopped)
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {SECONDS / 2:.0f} s"
    except OSError as error:
        return f"py-spy cannot be started: {error}"


def _run_py_spy(program: str, pid: int, *, pause: bool) -> str:
    """Run py-spy once and return its output, or an error text.

    pause: pause the process while its stacks are read.
    """
    command = [program, "dump", "--pid", str(pid), *([] if pause else ["--nonblocking"])]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS / 2,
        check=False,
    )
    if done.returncode == 0:
        return done.stdout.strip()
    return (
        "py-spy failed: "
        f"{' '.join(done.stderr.partition('Stack backtrace')[0].split()) or done.returncode}"
    )


def _ask_nccl(rank: int, environ: Mapping[str, str]) -> str | None:
    """Trigger NCCL's flight recorder through its pipe.

    Return a text for the dump, or None if the pipe does not exist (gloo, or NCCL has not started
    yet).
    """
    path = f"{environ.get('TORCH_NCCL_DEBUG_INFO_PIPE_FILE', '')}{rank}.pipe"
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        os.write(pipe, b"x")
    except OSError as error:
        return f"NCCL's flight recorder does not listen: {error}"
    finally:
        os.close(pipe)
    return f"NCCL's flight recorder writes {environ.get('TORCH_FR_DUMP_TEMP_FILE', '')}{rank}"
