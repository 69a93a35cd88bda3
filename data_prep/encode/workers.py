"""data_prep: worker processes, one unit at a time each, and the parent that hands out units and notices when one dies.

Every worker is a fresh interpreter with a connection to its parent and the end of a pipe, the lifeline, that the parent holds open: a
worker leaves when the lifeline breaks, however its parent ended. Knows neither how a unit is done nor what is shown of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from data_prep.sources import locate
from data_prep.sources.rows import Tally
from data_prep.store.layout import SHARDS, TOKENIZER, Plan, Unit, read_plan
from data_prep.store.manifest import UnitEntry
from fem_common.cli import is_want_of_memory
from fem_common.errors import FULL, CommandError, Fault, UserError, told
from fem_common.files import remove_leftovers
from fem_common.signals import signal_name
from fem_common.text import one_line

if TYPE_CHECKING:
    from data_prep.encode.unit import Engine
    from data_prep.report.progress import Board

REPORT_SECONDS = 0.2
TICK_SECONDS = 0.5
LEAVE_SECONDS = 10.0
START = "import sys; from data_prep.encode.workers import work; work(*sys.argv[1:])"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
LEFT = "what is finished is kept: the same command goes on from there"


class Step(NamedTuple):
    """How far a worker is with its unit: bytes of text read, and what came of them."""

    read: int
    tally: Tally


Message = (
    Step | UnitEntry | CommandError | None
)  # a worker's: so far, done, given up, or it is dead


def run_units(
    out: Path, plan: Plan, kind: str, units: Sequence[Unit], workers: int, board: Board
) -> None:
    """Do ``units`` in at most ``workers`` processes that encode with ``kind`` (see encoders.make); the board shows it.

    Raises CommandError for the first unit that fails, Fault where its worker died, after the others have ended the unit they are at.
    """
    waiting = deque(units)
    problems: list[CommandError] = []
    with _Crew(out, plan, kind) as crew:
        for _ in range(min(workers, len(waiting))):
            crew.hire(waiting.popleft())
        while crew.workers:
            for worker in crew.heard():
                message = worker.receive()
                if isinstance(message, Step):
                    board.step(worker.unit, message.read, message.tally)
                    continue
                if isinstance(message, UnitEntry):
                    board.done(worker.unit, message)
                else:
                    problems.append(message or Fault(crew.describe_death(worker)))
                if waiting and not problems:
                    worker.give(waiting.popleft())
                else:
                    crew.dismiss(worker)
            board.tick()
    if problems:
        raise problems[0]


class _Worker:
    """The parent's side of a worker, and the unit it is at."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: Connection, unit: Unit
    ) -> None:
        self.process, self.connection = process, connection
        self.give(unit)

    def give(self, unit: Unit) -> None:
        """Hand the next unit over; where the worker is gone, ``receive`` will tell."""
        self.unit = unit
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(unit.number)

    def receive(self) -> Message:
        """The next message."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            return None
        return message


class _Crew:
    """The workers of a run; none outlives it."""

    def __init__(self, out: Path, plan: Plan, kind: str) -> None:
        self.out, self.plan, self.kind = out, plan, kind
        self.workers: list[_Worker] = []
        self._lifeline, self._held = os.pipe()

    def __enter__(self) -> _Crew:
        return self

    def hire(self, unit: Unit) -> None:
        """Start a worker on a unit. SIGINT, SIGTERM and SIGHUP are the parent's to handle: workers are born with them blocked."""
        ours, theirs = Pipe()
        command = [
            sys.executable,
            "-c",
            START,
            str(theirs.fileno()),
            str(self._lifeline),
            str(self.out),
            self.plan.fingerprint,
            self.kind,
        ]
        root = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
        )
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._lifeline),
                env=os.environ | ONE_THREAD | {"PYTHONPATH": paths},
            )
        finally:
            theirs.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.workers.append(_Worker(process, ours, unit))

    def heard(self) -> list[_Worker]:
        """The workers with a message, or with an end to notice; none after a tick's time."""
        ready = wait([worker.connection for worker in self.workers], TICK_SECONDS)
        return [worker for worker in self.workers if worker.connection in ready]

    def dismiss(self, worker: _Worker) -> None:
        """Let an idle or dead worker go."""
        worker.connection.close()
        self.workers.remove(worker)
        _await_end(worker.process)
        remove_leftovers(self.out / SHARDS, worker.process.pid)

    def describe_death(self, worker: _Worker) -> str:
        """One line on a worker that is dead: signal, unit and file."""
        code = _await_end(worker.process)
        end, advice = f"ended with exit code {code}", ""
        if code < 0:
            name = signal_name(-code)
            end = f"was killed by {name}"
            if name == "SIGKILL":
                advice = " (for want of memory? give fewer --workers)"
            elif self.kind != "hf" and name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL"):
                advice = " (--encoder hf does without gigatoken)"
        return f"a worker {end} at {describe_unit(self.plan, worker.unit)}{advice}; {LEFT}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._held)
        for worker in list(self.workers):
            self.dismiss(worker)
        os.close(self._lifeline)


def _await_end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def describe_unit(plan: Plan, unit: Unit) -> str:
    """A unit as an error names it: number, file, and which part of it."""
    file = plan.files[unit.file]
    what = {
        "parquet": f", row groups {unit.start} to {unit.stop - 1}",
        "jsonl": f", bytes {unit.start} to {unit.stop}",
    }
    if file.parts:
        what[file.kind] = f", from {locate(file, unit.start)[0]} on"
    return f"unit {unit.number} ({file.path}{what.get(file.kind, '')})"


def work(connection: str, lifeline: str, out: str, fingerprint: str, kind: str) -> None:
    """A worker's life: units as they come, until the parent closes the connection or is gone."""
    parent = Connection(int(connection))
    engine: Engine | None = None
    try:
        while True:
            number = parent.recv()
            try:
                if engine is None:
                    threading.Thread(
                        target=_leave_with_parent, args=(int(lifeline),), daemon=True
                    ).start()
                    engine = _engine(Path(out), fingerprint, kind)
                message: Message = engine.encode_unit(engine.plan.units[number], _reporter(parent))
            except BaseException as error:  # a panic in a Rust library is no Exception
                message = _explain(error, Path(out), engine.plan if engine else None, number)
            parent.send(message)
    except (EOFError, OSError):
        os._exit(0)


def _engine(out: Path, fingerprint: str, kind: str) -> Engine:
    from data_prep.encode.encoders import make
    from data_prep.encode.tokenizer import load_folder
    from data_prep.encode.unit import Engine

    plan, folder = read_plan(out), load_folder(out / TOKENIZER)
    if plan.fingerprint != fingerprint:
        raise UserError(
            f"{out} was planned anew while this run worked on it; give the command again"
        )
    if folder.sha256 != plan.tokenizer.sha256:
        raise UserError(
            f"{folder.path} is not the tokenizer of the plan; plan again with --overwrite"
        )
    return Engine(out, plan, make(folder, kind))


def _reporter(parent: Connection) -> Callable[[int, Tally], None]:
    sent = 0.0

    def report(read: int, tally: Tally) -> None:
        nonlocal sent
        now = time.monotonic()
        if now - sent > REPORT_SECONDS:
            sent = now
            parent.send(Step(read, tally))

    return report


def _explain(error: BaseException, out: Path, plan: Plan | None, number: int) -> CommandError:
    """An error in a worker as one line; of a fault of ours the traceback is printed too."""
    if isinstance(error, CommandError):
        return error
    where = describe_unit(plan, plan.units[number]) if plan else f"unit {number}"
    if is_want_of_memory(error):
        return Fault(
            f"not enough memory for {where}: give fewer --workers, or a lower --max-bytes; {LEFT}"
        )
    if isinstance(error, OSError):
        if error.errno in FULL:
            error.filename = str(out / SHARDS / "unfinished")
        return told(error, after=f" ({where})")
    traceback.print_exception(error)
    return Fault(f"{type(error).__name__} at {where}: {one_line(error)}")


def _leave_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)
