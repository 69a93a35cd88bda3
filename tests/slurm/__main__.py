"""``python -m tests.slurm up | status | down``: a private Slurm to try things with, outside of pytest."""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from tests.slurm.mini import MiniSlurm

READY = "ready\n"
REPOSITORY = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run a verb; 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm", description=__doc__)
    parser.add_argument("verb", choices=("up", "status", "down"))
    parser.add_argument("--root", type=Path, default=Path(tempfile.gettempdir()) / "mini-slurm", help="its folder (default: %(default)s)")
    parser.add_argument("--nodes", type=int, default=2, help="how many nodes (default: %(default)s)")
    options = parser.parse_args(argv)
    try:
        return {"up": up, "status": status, "down": down}[options.verb](options.root.absolute(), options.nodes)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"python -m tests.slurm {options.verb}: {error}", file=sys.stderr)
        return 2


def up(root: Path, nodes: int) -> int:
    """Start one in the background; returns when it takes jobs."""
    if supervisor(root):
        raise RuntimeError(f"one runs in {root} already; end it: {call('down', root)}")
    MiniSlurm(nodes, root=root)  # refuses what is wrong with the arguments here
    if reason := MiniSlurm.unavailable():
        raise RuntimeError(reason)
    code = "import sys; from tests.slurm.__main__ import serve; serve(sys.argv[1], int(sys.argv[2]))"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(nodes)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        said = child.stdout.readline()
    except KeyboardInterrupt:
        child.terminate()
        raise
    if said != READY:
        raise RuntimeError((said + child.stdout.read()).strip())
    print(f"export SLURM_CONF={root.resolve()}/etc/slurm.conf\n")
    show(root)
    print(f"\nLogs: {root}/log. End it: {call('down', root)}")
    return 0


def serve(root: str, nodes: int) -> None:
    """The background process of ``up``: holds the cluster until SIGTERM. Tells on stdout that it is ready, or why not."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, leave)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        with MiniSlurm(nodes, root=root) as cluster, lock_file(cluster.root).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.write(str(os.getpid()))
            lock.flush()
            print(READY, end="", flush=True)
            os.dup2(nowhere, 1)
            while True:
                signal.pause()
    except Exception as error:
        print(error, flush=True)


def status(root: Path, nodes: int) -> int:
    """Whether one runs, and what runs on it; 1 if none does."""
    if not supervisor(root):
        print(f"none runs in {root}; start one: {call('up', root)}")
        return 1
    show(root)
    return 0


def down(root: Path, nodes: int) -> int:
    """End it and remove all of it; 1 if none runs."""
    pid = supervisor(root)
    if not pid:
        print(f"none runs in {root}")
        return 1
    handle = os.pidfd_open(pid)
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    if not select.select([handle], [], [], 30)[0]:
        raise RuntimeError(f"process {pid} does not end")
    print(f"ended; {root} is as before")
    return 0


def show(root: Path) -> None:
    """Partitions, nodes and jobs, on stdout."""
    wanted = {**os.environ, "SLURM_CONF": str(root.resolve() / "etc" / "slurm.conf")}
    for command in (["sinfo"], ["squeue"]):
        subprocess.run(command, env=wanted, check=True)


def call(verb: str, root: Path) -> str:
    """How to call a verb for this root."""
    return f"python -m tests.slurm {verb} --root {shlex.quote(str(root))}"


def lock_file(root: Path) -> Path:
    """The file that the background process holds locked, with its pid."""
    return root / "run" / "supervisor.pid"


def supervisor(root: Path) -> int:
    """Pid of the background process, 0 without one."""
    with suppress(FileNotFoundError, NotADirectoryError), lock_file(root).open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(lock.read() or 0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
