"""Starts a job's ranks by torchrun and takes their answers, or the reason why there are none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.data_prep.processes import ROOT
from tools.bench.engines.variants import Job

SET_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENDING = 60.0  # seconds that torchrun has for ending its ranks; it gives them 30

Answer = dict[str, Any]


class CannotRun(Exception):
    """A job that came to nothing: why, in one line."""


def launch(job: Job) -> list[Answer]:
    """The ranks' answers (`tools.bench.engines.rank`), of fresh processes.

    Raises:
        CannotRun: a rank failed, ended, or took longer than the job's limit.
    """
    with tempfile.TemporaryDirectory(prefix="bench-engines-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job.as_json()), encoding="utf-8")
        log = folder / "log"
        with log.open("wb") as stream:
            torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}", f"--master-port={_free_port()}"]
            command = [sys.executable, "-W", "ignore", *torchrun, "-m", "tools.bench.engines.rank", str(folder)]
            process = subprocess.Popen(
                command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT
            )
            try:
                process.wait(job.limit)
            except subprocess.TimeoutExpired:
                raise CannotRun(f"no answer within {job.limit} s") from None
            finally:
                _end(process)
        return _answers(job, folder, log)


def _environment() -> dict[str, str]:
    given = {key: value for key, value in os.environ.items() if key not in SET_BY_LAUNCHERS}
    given.setdefault("OMP_NUM_THREADS", "1")
    given["PYTHONPATH"] = str(ROOT)
    return given


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks when it is asked to, not when it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(job: Job, folder: Path, log: Path) -> list[Answer]:
    # The first to fail has the reason; the others say that it is gone.
    files = sorted(folder.glob("answer*.json"), key=lambda path: path.stat().st_mtime_ns)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    gap = next((answer["gap"] for answer in found if "gap" in answer), None)
    if gap is not None:
        raise CannotRun(gap)
    if len(found) < job.ranks:
        lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
        said = [line for line in lines if "exitcode" in line or "Signal" in line or "Error" in line]
        raise CannotRun(f"a rank ended without an answer: {(said or lines or ['it said nothing'])[-1][:300]}")
    return sorted(found, key=lambda answer: int(answer["rank"]))
