"""Processes that do the tasks: several at once where nothing is timed, one where something is; each ended when it takes too long."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from tools.bench.gpu_suite.plan import Task

LIMIT = 120.0  # seconds for one task, its kernels' compilation with it
MARGIN = 3.0  # of a guess, to the longest that a task of the same kind took


@dataclass(frozen=True)
class Outcome:
    """What came of a task: its result, or why there is none."""

    task: Task
    result: Any = None
    gap: str | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The outcome with its task, as JSON has it."""
        return asdict(self)


class Worker:
    """A worker's process, started when it is asked for something, and again after it was lost."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None

    def ask(self, task: Task, limit: float) -> dict[str, Any]:
        """The worker's answer; a gap where it takes more than ``limit`` seconds or ends."""
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(limit, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps({"kind": task.kind, "arguments": task.arguments}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timed_out = not late.is_alive()
            late.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            lost = answer.pop("lost", False)
            if lost or timed_out:  # that came with the answer
                self.close()
            if lost:
                answer["gap"] += " (the GPU was lost to this process; another was started)"
            return answer
        self.close()
        return {"gap": f"no answer within {limit:.0f} s" if timed_out else f"the process ended: {self._last_words()}"}

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.errors):
                if stream is not None:
                    with suppress(OSError):  # what the process did not read any more
                        stream.close()
        self.process = None

    def _start(self) -> subprocess.Popen[str]:
        self.errors = self.log.open("a", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.gpu_suite.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        return self.process

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


class Clock:
    """Until when may be worked, and what tasks of a kind have taken so far."""

    def __init__(self, minutes: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.began, self.budget = now, now(), 60 * minutes
        self.longest: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.now() - self.began

    def expected(self, task: Task) -> float:
        """Seconds that a task may take: what the slowest of its kind took, at least a third and at most three times of the guess."""
        return min(MARGIN * task.seconds, max(self.longest.get(task.kind, task.seconds), task.seconds / MARGIN))

    def fits(self, task: Task, share: float = 1.0) -> bool:
        """Whether it may still be begun, ``share`` of the budget being all there is."""
        return self.elapsed + self.expected(task) <= share * self.budget

    def took(self, task: Task, seconds: float) -> None:
        """Remember it."""
        self.longest[task.kind] = max(self.longest.get(task.kind, 0.0), seconds)


Tell = Callable[[Outcome, int, float], None]


def work(tasks: list[Task], workers: list[Worker], clock: Clock, tell: Tell, share: float = 1.0) -> tuple[list[Outcome], list[Task]]:
    """Have the workers do the tasks in their order while the time is enough; what was done, and what was left out.

    tell(outcome, tasks left, seconds expected for them) after each.
    """
    waiting, outcomes, left_out = list(tasks), [], []
    lock = threading.Lock()

    def serve(worker: Worker) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                task = waiting.pop(0)
                if not clock.fits(task, share):
                    left_out.append(task)
                    continue
            began = clock.now()
            answer = worker.ask(task, min(LIMIT, max(MARGIN * clock.expected(task), share * clock.budget - clock.elapsed)))
            took = clock.now() - began
            with lock:
                clock.took(task, took)
                outcome = Outcome(task, answer.get("result"), answer.get("gap"), took)
                outcomes.append(outcome)
                ahead = sum(clock.expected(other) for other in waiting) / len(workers)
                tell(outcome, len(waiting), max(0.0, min(ahead, share * clock.budget - clock.elapsed)))

    threads = [threading.Thread(target=serve, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes, left_out
