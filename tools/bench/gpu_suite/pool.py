"""Processes (workers) that perform the tasks: one for timed tasks, several at a time for others.

A process that exceeds its time limit is ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tools.bench.gpu_suite.plan import Phase, Task
from tools.bench.gpu_suite.results import OUT_OF_MEMORY, Outcome

LIMIT = 120.0  # seconds for one task, including compilation of its kernels
# Maximum ratio of a task's expected duration to its estimate, and of its time limit to its expected
# duration.
MARGIN = 3.0
WITH_PROCESSES = ("train", "engine")  # kinds whose worker starts other processes
ENDING = 6.0  # seconds in which these processes must stop after SIGTERM
# No more workers are started after this number of consecutive workers that do not find the GPU.
# (A worker that is started after a kernel broke its process does find the GPU.)
GONE = 3


class Worker:
    """Handle of a worker process.

    The process is started for the first task, and again if it was lost.

    tool: run the process under this tool of compute-sanitizer, whose messages are written to a
        separate file.
    """

    def __init__(
        self, log: Path, device: str = "", environment: dict[str, str] | None = None, tool: str = ""
    ) -> None:
        self.log, self.device, self.tool = log, device, tool
        self.environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None
        self.messages = log.with_name(f"{tool}.log")
        self.read = 0  # bytes of the messages that were read
        self.kind = ""  # kind of the current task

    def ask(self, task: Task, limit: float) -> dict[str, Any]:
        """Perform a task in the process and return the process's answer.

        The answer contains a gap (the reason for a missing result) if the process ends or takes
        longer than ``limit`` seconds.
        """
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        self.kind = task.kind
        late = threading.Timer(limit, self._end, (process,))
        late.start()
        requested = {"kind": task.kind, "arguments": task.arguments, "limit": limit} | (
            {"device": self.device} if self.device else {}
        )
        try:
            process.stdin.write(json.dumps(requested) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (BrokenPipeError, ValueError):
            line = ""
        finally:
            timed_out = not late.is_alive()
            late.cancel()
            self.kind = ""
        if line.endswith("\n"):
            answer: dict[str, Any] = json.loads(line)
            if answer.get("lost") or timed_out:  # the timeout killed it just after the answer
                self.close()
        else:
            self.close()
            if timed_out:
                answer = {"gap": f"no answer within {limit:.0f} s"}
            else:
                answer = {"gap": f"the process ended: {self._last_line()}"}
        return self._with_messages(answer) if self.tool else answer

    def close(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is not None:
            self._end(process)
            process.wait()
            for stream in (process.stdin, process.stdout, self.errors):
                if stream is not None:
                    with suppress(OSError):  # flushing input that the process did not read
                        stream.close()

    def _start(self) -> subprocess.Popen[str]:
        self.errors = self.log.open("a", encoding="utf-8")
        command = [sys.executable, "-m", "tools.bench.gpu_suite.worker"]
        environment = self.environment
        if self.tool:
            self.messages.unlink(missing_ok=True)
            self.read = 0
            command = [
                "compute-sanitizer",
                "--tool",
                self.tool,
                "--print-limit",
                "20",
                "--log-file",
                str(self.messages),
                *command,
            ]
            # torch's caching allocator hides accesses past the end of a tensor.
            environment = {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=self.errors,
            text=True,
            env=environment,
            start_new_session=True,
        )
        return self.process

    def _end(self, process: subprocess.Popen[str]) -> None:
        """Kill the process.

        If the process has started other processes, send SIGTERM first, so that it can end them.
        """
        if self.kind in WITH_PROCESSES:
            self._signal(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
        self._signal(process, signal.SIGKILL)

    @staticmethod
    def _signal(process: subprocess.Popen[str], number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)  # the process leads its group

    def _with_messages(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return the worker's answer with the new messages of the sanitizer.

        The answer's result is {"checked": the worker's result, "reported": [first line of each
        report]}.
        """
        text = ""
        if self.messages.exists():
            with self.messages.open(encoding="utf-8", errors="replace") as file:
                file.seek(self.read)
                text = file.read()
                self.read = file.tell()
        lines = [line.removeprefix("=========").strip() for line in text.splitlines()]
        reported = [
            line
            for line in lines
            if line.startswith(("Invalid", "Error", "Warning", "Race reported", "Potential"))
        ]
        if answer.get("gap") and not reported:
            return answer
        result = {"checked": answer.get("result"), "reported": reported}
        return {**answer, "gap": None, "result": result}

    def _last_line(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


class Clock:
    """Clock of the suite, with the longest duration so far of the tasks of each kind."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.began = now()
        self.budget = 60 * minutes
        self.longest: dict[tuple[str, str], float] = {}  # (kind, part) -> seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now() - self.began

    def expected(self, task: Task) -> float:
        """Return the seconds that a task is expected to take.

        This is the maximum of the tasks of its kind so far, limited to between a third and three
        times the task's own estimate.
        """
        longest = self.longest.get((task.kind, task.part), task.seconds)
        return min(MARGIN * task.seconds, max(longest, task.seconds / MARGIN))

    def fits(self, task: Task, until: float) -> bool:
        """Return True if the task is expected to end before ``until`` seconds after the start."""
        return self.elapsed + self.expected(task) <= until

    def limit(self, task: Task, until: float) -> float:
        """Return the seconds after which the task is ended.

        This is three times the expected time or the rest of the phase, whichever is longer. It is
        at most LIMIT (more for tasks with a long estimate), and at most the rest of the suite's
        time.

        until: end of the phase in seconds after the start.
        """
        longest = max(LIMIT, MARGIN * task.seconds)
        wanted = max(MARGIN * self.expected(task), until - self.elapsed)
        return max(1.0, min(longest, wanted, self.budget - self.elapsed))

    def took(self, task: Task, seconds: float) -> None:
        """Record the duration of a task."""
        key = task.kind, task.part
        self.longest[key] = max(self.longest.get(key, 0.0), seconds)


Report = Callable[[Outcome, int, float], None]


class Work:
    """Execution of one phase.

    The tasks are given to the workers, unit by unit, as long as time is left.

    report(outcome, tasks left, expected seconds for them) is called after each task.
    """

    def __init__(self, phase: Phase, clock: Clock, report: Report) -> None:
        self.until, self.clock, self.report = phase.until, clock, report
        self.lock = threading.Lock()
        self.stopped = False
        self.gone = 0  # consecutive workers that did not find the GPU
        self.at_once = 1  # workers that perform tasks at the same time
        units: dict[str, list[Task]] = {}
        for task in phase.tasks:
            units.setdefault(task.unit or task.name, []).append(task)
        self.waiting = list(units.values())
        self.again: list[Task] = []  # tasks that ran out of memory next to other processes
        self.left_out: list[Task] = []
        self.failure: BaseException | None = None  # raised in a thread

    def run(self, workers: Sequence[Worker]) -> list[Task]:
        """Perform the tasks of the phase and return the tasks for which no time was left."""
        self.at_once = len(workers)
        threads = [
            threading.Thread(target=self._serve, args=(worker,), daemon=True) for worker in workers
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if self.failure:
                raise self.failure
            self.waiting, self.again = [[task] for task in self.again], []
            if self.waiting:
                for worker in workers[1:]:
                    worker.close()  # frees its memory
                self.at_once = 1
                self._perform(workers[0])
        except BaseException:
            self.stopped = True
            for worker in workers:
                worker.close()
            for thread, worker in zip(threads, workers, strict=True):
                thread.join(ENDING)
                worker.close()  # a worker that was being started meanwhile
            raise
        return self.left_out + [task for unit in self.waiting for task in unit]

    def _serve(self, worker: Worker) -> None:
        try:
            self._perform(worker)
        except BaseException as error:  # for example a full disk; the waiting thread raises it
            self.failure, self.stopped = error, True

    def _perform(self, worker: Worker) -> None:
        while (unit := self._next(worker)) is not None:
            for place, task in enumerate(unit):
                with self.lock:
                    if self.stopped or self.gone >= GONE or not self.clock.fits(task, self.until):
                        self.left_out.append(task)
                        continue
                began = self.clock.now()
                answer = worker.ask(task, self.clock.limit(task, self.until))
                took = self.clock.now() - began
                if not self.stopped:
                    self._take(task, answer, took, of_unit=len(unit) - place - 1)

    def _next(self, worker: Worker) -> list[Task] | None:
        with self.lock:
            place = next(
                (n for n, unit in enumerate(self.waiting) if unit[0].tool == worker.tool), None
            )
            return None if place is None else self.waiting.pop(place)

    def _take(self, task: Task, answer: dict[str, Any], took: float, of_unit: int) -> None:
        with self.lock:
            self.clock.took(task, took)
            self.gone = self.gone + 1 if answer.get("gone") else 0
            if self.at_once > 1 and answer.get("gap") == OUT_OF_MEMORY:
                self.again.append(task)
                return
            waiting = [other for unit in self.waiting for other in unit]
            ahead = sum(self.clock.expected(other) for other in waiting) / self.at_once
            outcome = Outcome(task, answer.get("result"), answer.get("gap"), took)
            seconds = max(0.0, min(ahead, self.until - self.clock.elapsed))
            self.report(outcome, len(waiting) + of_unit, seconds)
