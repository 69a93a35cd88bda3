"""A program that behaves as a training run does towards the launcher, without training: ``python -m tests.launch.stand_in DIRECTORY``.

DIRECTORY/script.json lists what each attempt does, the last entry for all that follow: {"to", "checkpoint", "end"}. Steps go from the last
checkpoint to "to"; a checkpoint is left at the steps in "checkpoint"; then "end": complete | hang | deaf | wait | exit N | signal N |
raise MESSAGE. One that is deaf leaves the file DIRECTORY/deaf when no signal makes it save any more.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

STEP_SECONDS = 0.01


class Run:
    """The files of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[int] = []
        steps = [int(path.name.removeprefix("step_")) for path in directory.glob("checkpoints/step_*")]
        self.step = self.saved = max(steps, default=0)

    def tell(self, state: str, message: str | None = None) -> None:
        """Write progress.json."""
        words = {
            "format": 1,
            "state": state,
            "step": self.step,
            "time": time.time(),
            "pid": os.getpid(),
            "host": "here",
            "message": message,
        }
        temporary = self.directory / ".progress"
        temporary.write_text(json.dumps(words))
        temporary.replace(self.directory / "progress.json")

    def save(self) -> None:
        """Leave a checkpoint."""
        (self.directory / "checkpoints" / f"step_{self.step:08}").mkdir(parents=True, exist_ok=True)

    def stop_if_asked(self) -> None:
        """After a signal: save, say so, leave with 0."""
        if self.asked:
            self.save()
            self.tell("stopped")
            sys.exit(0)

    def train(self, to: int, checkpoints: list[int]) -> None:
        """Steps, with a line of metrics each."""
        self.tell("running")
        while self.step < to:
            time.sleep(STEP_SECONDS)
            self.step += 1
            with (self.directory / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": self.step, "loss": 1 / self.step}) + "\n")
            if self.step in checkpoints:
                self.save()
            self.stop_if_asked()


def end(run: Run, how: str) -> int:
    """End, or do not."""
    what, _, detail = how.partition(" ")
    if what == "complete":
        run.tell("complete")
        return 0
    if what == "signal":
        os.kill(os.getpid(), int(detail))
    if what == "raise":
        run.tell("failed", detail)
        raise RuntimeError(detail)
    if what == "deaf":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        (run.directory / "deaf").touch()
    while what in ("hang", "wait", "deaf"):
        time.sleep(0.02)
        if what == "wait":
            run.stop_if_asked()
    if detail == "2":
        print("stand_in: error: no such setting", file=sys.stderr)
    return int(detail)


def main() -> int:
    """One attempt."""
    run, number = Run(Path(sys.argv[1])), int(Path(os.environ["LAUNCH_ATTEMPT"]).name)
    signal.signal(signal.SIGUSR1, lambda number, _: run.asked.append(number))
    signal.signal(signal.SIGTERM, lambda number, _: run.asked.append(number))
    script: list[dict[str, Any]] = json.loads((run.directory / "script.json").read_text())
    act = script[min(number, len(script)) - 1]
    print(f"attempt {number} from step {run.step}, token {os.environ.get('MY_TOKEN')}", flush=True)
    run.train(act.get("to", run.step), act.get("checkpoint", []))
    return end(run, act.get("end", "complete"))


if __name__ == "__main__":
    sys.exit(main())
