"""A program that behaves like a training run for the launcher, without training: ``python -m
tests.launch.stand_in DIRECTORY``.

DIRECTORY/script.json lists the actions of each attempt, with the last entry for all later ones:
{"to", "checkpoint", "end"}. Steps go from the last checkpoint to "to"; a checkpoint is written at
the steps in "checkpoint"; then "end": complete | hang | stop | deaf | wait N | held | exit N |
signal N | raise MESSAGE. An attempt that waits writes DIRECTORY/ready-ATTEMPT: hang; stop (like
SIGSTOP); deaf (ignores signals); wait (saves at a signal and exits with N); held (the same once the
file DIRECTORY/go exists).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEP_SECONDS = 0.01


class Run:
    """Files of a run."""

    def __init__(self, directory: Path, attempt: int) -> None:
        self.directory, self.attempt = directory, attempt
        self.signals: list[int] = []
        steps = [
            int(path.name.removeprefix("step_")) for path in directory.glob("checkpoints/step_*")
        ]
        self.step = max(steps, default=0)

    def report(self, state: str, message: str | None = None) -> None:
        """Write progress.json."""
        words = {
            "state": state,
            "step": self.step,
            "time": time.time(),
            "pid": os.getpid(),
            "host": "here",
            "message": message,
        }
        temporary = self.directory / f".progress-{os.getpid()}"
        temporary.write_text(json.dumps(words))
        temporary.replace(self.directory / "progress.json")

    def save(self) -> None:
        """Write a checkpoint."""
        (self.directory / "checkpoints" / f"step_{self.step:08}").mkdir(parents=True, exist_ok=True)

    def stop_if_signalled(self, code: int = 0) -> None:
        """Save, report and exit if a signal arrived."""
        if self.signals:
            self.save()
            self.report("stopped")
            sys.exit(code)

    def train(self, to: int, checkpoints: list[int]) -> None:
        """Run steps with one line of metrics each."""
        self.report("running")
        while self.step < to:
            time.sleep(STEP_SECONDS)
            self.step += 1
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "loss": 1 / self.step}) + "\n")
            if self.step in checkpoints:
                self.save()
            self.stop_if_signalled()

    def end(self, how: str) -> int:
        """End or wait as ``how`` defines."""
        what, _, detail = how.partition(" ")
        if what == "complete":
            self.report("complete")
            return 0
        if what == "signal":
            os.kill(os.getpid(), int(detail))
        if what == "raise":
            self.report("failed", detail)
            raise RuntimeError(detail)
        if what == "deaf":
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        (self.directory / f"ready-{self.attempt}").touch()
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        while what in ("hang", "wait", "deaf", "held"):
            time.sleep(0.02)
            if what == "wait" or (what == "held" and (self.directory / "go").exists()):
                self.stop_if_signalled(int(detail or 0))
        if detail == "2":
            print("stand_in: error: no such setting", file=sys.stderr)
        return int(detail)


def main() -> int:
    """Run one attempt."""
    run = Run(Path(sys.argv[1]), int(Path(os.environ["LAUNCH_ATTEMPT"]).name))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: run.signals.append(number))
    script = json.loads((run.directory / "script.json").read_text())
    act = script[min(run.attempt, len(script)) - 1]
    print(
        f"attempt {run.attempt} from step {run.step}, token {os.environ.get('MY_TOKEN')}",
        flush=True,
    )
    run.train(act.get("to", run.step), act.get("checkpoint", []))
    return run.end(act.get("end", "complete"))


if __name__ == "__main__":
    sys.exit(main())
