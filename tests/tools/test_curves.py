"""Tests of tools.curves: the events that it finds in a run's files, the picture, and its use."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from fem_common.plot import COLOURS
from tests.wording import Wording
from tools import curves
from tools.curves import Curves, main


def step(number: int, passed_over: int = 0, *, tokens: int = 64, **changes: Any) -> dict[str, Any]:
    """Return the record of a step in metrics.jsonl."""
    return {
        "step": number,
        "consumed_tokens": number * tokens,
        "loss": 3.0 + math.exp(-number / 20),
        "lr": 1e-3,
        "grad_norm": 1.0,
        "skipped": False,
        "tokens_per_second": 1000.0,
        "passed_over": passed_over,
        **changes,
    }


def lines(file: Path, records: list[dict[str, Any]]) -> None:
    """Append JSON lines to a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.writelines(json.dumps(record) + "\n" for record in records)


def progress(folder: Path, state: str) -> None:
    """Write the run's progress.json with the given state."""
    folder.mkdir(exist_ok=True)
    (folder / "progress.json").write_text(json.dumps({"format": 1, "state": state, "step": 1}))


@pytest.fixture
def eventful(tmp_path: Path) -> Path:
    """A fork at step 5 that is killed after 20, resumed at 15, stopped and resumed at 30, rewinds
    from a spike at 38 to 35, skips step 40, and is killed after it skipped step 60.
    """
    run = tmp_path / "eventful"
    metrics = [step(number) for number in (*range(6, 21), *range(16, 38))]
    metrics += [step(38, loss=50.0), *(step(number, 12) for number in range(36, 40))]
    metrics += [step(40, 12, skipped=True, loss=None), *(step(n, 12) for n in range(41, 61))]
    metrics[-1]["skipped"] = True
    metrics += [*(step(n, 12) for n in range(51, 61))]
    metrics += [{"step": 30, "valid_loss": 3.4}, {"message": "text"}]
    lines(run / "metrics.jsonl", metrics)
    lines(run / "attempts.jsonl", [{"step": 5}, {"step": 15}, {"step": 30}, {"step": 50}])
    fork: dict[str, Any] = {"parent": "/runs/first", "checkpoint": "/runs/first/step_00000005"}
    fork |= {"step": 5, "order_begin": 0, "manifest_sha256": "0"}
    (run / "fork.json").write_text(json.dumps(fork))
    return run


def test_stops_resumes_forks_stages_and_spikes_are_found(eventful: Path) -> None:
    one = Curves.read(eventful, "name")
    assert one.events() == [
        (5, "fork of first"),
        (15, "stopped at 20, resumed at 15"),
        (30, "stopped and resumed at 30"),
        (50, "stopped at 60, resumed at 50"),
    ]
    assert one.spikes() == [38, 40]
    (eventful / "config.yaml").write_text(
        "stages: [{name: first, steps: 24}, {name: second, steps: 36}]\ntrain: {steps: null}\n"
    )
    assert (24, "stage second") in Curves.read(eventful, "name").events()


def test_the_picture_shows_every_run(eventful: Path, tmp_path: Path) -> None:
    """Runs with batches of different sizes are drawn over tokens; a run of 5,000 steps is drawn by
    means.
    """
    long = tmp_path / "long"
    lines(long / "metrics.jsonl", [step(number, tokens=1) for number in range(1, 5001)])
    runs = [Curves.read(eventful, "eventful"), Curves.read(long, "long")]
    where, values = runs[1].curve("loss", by_tokens=True)
    assert len(where) == curves.POINTS
    assert where[0] == 3.0  # the mean of 1 to 5
    assert values[0] == pytest.approx(np.mean(runs[1].column("loss")[:5]), rel=1e-12)
    out = tmp_path / "out.png"
    curves.draw(runs, out)
    pixels = np.round(image.imread(out)[..., :3] * 255).astype(int)
    for colour in COLOURS[:2]:
        exact = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        # At least as many pixels as a line of 100 pixels.
        assert (np.abs(pixels - exact).max(axis=-1) <= 1).sum() > 500


def test_the_command_names_runs_and_finds_wrong_ones(
    eventful: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """The picture is in the run directory, or in the folder that several have in common; a folder
    of runs, and a run without a step, are refused.
    """
    other = tmp_path / "other"
    lines(other / "metrics.jsonl", [step(1)])
    assert main([str(eventful)]) == 0
    assert (eventful / "curves.png").is_file()
    assert main([str(eventful), str(other)]) == 0
    assert (tmp_path / "curves.png").is_file()
    wording(capsys.readouterr().out.replace(str(tmp_path), "FOLDER"))
    # As `make demo` links the checkpoints of its model.
    (tmp_path / "demo").mkdir()
    (eventful / "checkpoints").mkdir()
    (tmp_path / "demo" / "checkpoints").symlink_to(eventful / "checkpoints")
    assert main([str(tmp_path / "demo")]) == 0
    capsys.readouterr()
    progress(tmp_path / "new", "running")
    for wrong in (tmp_path, tmp_path / "new", tmp_path / "nothing"):
        assert main([str(wrong)]) == 2
    wording(capsys.readouterr().err.replace(str(tmp_path), "FOLDER"))


def test_a_followed_run_is_drawn_until_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out.png"
    progress(run, "running")

    def train() -> None:
        """Log a step, wait for its picture, log another one and end."""
        time.sleep(0.1)
        lines(run / "metrics.jsonl", [step(1)])
        while not out.exists():
            time.sleep(0.01)
        lines(run / "metrics.jsonl", [step(2)])
        progress(run, "complete")

    trainer = threading.Thread(target=train)
    trainer.start()
    assert main([str(run), "--follow", "0.05", "--out", str(out)]) == 0
    trainer.join()
    assert "step 2" in capsys.readouterr().out
