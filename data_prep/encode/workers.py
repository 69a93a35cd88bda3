"""Pool of worker processes that encode one unit at a time.

The parent assigns units and detects dead workers. Every worker is a new interpreter with two
connections: one for messages, and the read end of a pipe called the lifeline, whose write end
the parent keeps open. A worker exits when the lifeline closes, however its parent ended. This
module depends neither on the encoding of a unit nor on the display of progress.
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

from data_prep.prepared.layout import SHARDS, TOKENIZER, Plan, Unit, read_plan
from data_prep.prepared.manifest import UnitEntry
from data_prep.sources import locate
from data_prep.sources.rows import Tally
from fem_common.cli import is_want_of_memory
from fem_common.errors import FULL, CommandError, Fault, UserError, from_os_error
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
LEFT = "finished units are kept: run the same command again to continue"


class Step(NamedTuple):
    """Progress message of a worker.

    read: bytes of text of the current unit that were read so far.
    tally: counts of the unit so far.
    """

    read: int
    tally: Tally


# Message of a worker: progress, unit done, unit failed, or None if the worker is dead.
Message = Step | UnitEntry | CommandError | None


def run_units(
    out: Path, plan: Plan, kind: str, units: Sequence[Unit], workers: int, board: Board
) -> None:
    """Encode ``units`` in at most ``workers`` processes and report progress to ``board``.

    kind: encoder of encoders.make.

    After a failure no new units start, and the workers finish their current units. Then the
    function raises the CommandError of the first failed unit, or Fault if a worker died.
    """
    waiting = deque(units)
    problems: list[CommandError] = []
    with _Crew(out, plan, kind) as crew:
        for _ in range(min(workers, len(waiting))):
            crew.hire(waiting.popleft())
        while crew.workers:
            for worker in crew.ready():
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
    """Parent's view of a worker process: its connection and its current unit."""

    def __init__(
        self, process: subprocess.Popen[bytes], connection: Connection, unit: Unit
    ) -> None:
        self.process, self.connection = process, connection
        self.give(unit)

    def give(self, unit: Unit) -> None:
        """Send a unit to the worker. If the worker is dead, the next ``receive`` returns None."""
        self.unit = unit
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(unit.number)

    def receive(self) -> Message:
        """Return the next message of the worker, or None if it is dead."""
        try:
            message: Message = self.connection.recv()
        except (EOFError, OSError):
            return None
        return message


class _Crew:
    """Context manager that starts the workers of a run and ends all of them on exit."""

    def __init__(self, out: Path, plan: Plan, kind: str) -> None:
        self.out = out
        self.plan = plan
        self.kind = kind
        self.workers: list[_Worker] = []
        self._lifeline, self._held = os.pipe()

    def __enter__(self) -> _Crew:
        return self

    def hire(self, unit: Unit) -> None:
        """Start a worker on a unit.

        Workers start with SIGINT, SIGTERM and SIGHUP blocked, because the parent handles these
        signals.
        """
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

    def ready(self) -> list[_Worker]:
        """Return the workers that have sent a message or have ended.

        The call waits for at most TICK_SECONDS; then the list is empty.
        """
        ready = wait([worker.connection for worker in self.workers], TICK_SECONDS)
        return [worker for worker in self.workers if worker.connection in ready]

    def dismiss(self, worker: _Worker) -> None:
        """Close the connection to an idle or dead worker, and wait for its end.

        The unfinished files of the worker are removed.
        """
        worker.connection.close()
        self.workers.remove(worker)
        _await_end(worker.process)
        remove_leftovers(self.out / SHARDS, worker.process.pid)

    def describe_death(self, worker: _Worker) -> str:
        """Describe a dead worker in one line: signal or exit code, unit and file."""
        code = _await_end(worker.process)
        end, advice = f"ended with exit code {code}", ""
        if code < 0:
            name = signal_name(-code)
            end = f"was killed by {name}"
            if name == "SIGKILL":
                advice = " (out of memory? use fewer --workers)"
            elif self.kind != "hf" and name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL"):
                advice = " (--encoder hf avoids gigatoken)"
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
    """Return the description of a unit for error messages: number, file, and part of the file."""
    file = plan.files[unit.file]
    what = {
        "parquet": f", row groups {unit.start} to {unit.stop - 1}",
        "arrow": f", record batches {unit.start} to {unit.stop - 1}",
        "jsonl": f", bytes {unit.start} to {unit.stop}",
    }
    if file.parts:
        what[file.kind] = f", from {locate(file, unit.start)[0]} on"
    return f"unit {unit.number} ({file.path}{what.get(file.kind, '')})"


def work(connection: str, lifeline: str, out: str, fingerprint: str, kind: str) -> None:
    """Run a worker: encode the units it receives until the parent closes the connection or ends.

    ``connection`` and ``lifeline`` are the numbers of file descriptors. ``fingerprint`` is that of
    the plan, and ``kind`` is the encoder for encoders.make.
    """
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
            except BaseException as error:  # a Rust panic is not an Exception
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
        raise UserError(f"{out} was planned again during this run; run the command again")
    if folder.sha256 != plan.tokenizer.sha256:
        raise UserError(
            f"{folder.path} is not the tokenizer of the plan; plan again with --overwrite"
        )
    return Engine(out, plan, make(folder, kind, plan.settings.template_sha256))


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
    """Convert an error in a worker into a one-line CommandError.

    Unexpected errors also print their traceback.
    """
    if isinstance(error, CommandError):
        return error
    where = describe_unit(plan, plan.units[number]) if plan else f"unit {number}"
    if is_want_of_memory(error):
        return Fault(
            f"not enough memory for {where}: use fewer --workers, or a lower --max-bytes; {LEFT}"
        )
    if isinstance(error, OSError):
        if error.errno in FULL:
            error.filename = str(out / SHARDS / "unfinished")
        return from_os_error(error, after=f" ({where})")
    traceback.print_exception(error)
    return Fault(f"{type(error).__name__} at {where}: {one_line(error)}")


def _leave_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)
