"""``status``: what it counts, and the rate and time left that it reads off the entries' times."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.report.status import status_of
from data_prep.store.layout import read_plan
from tests.data_prep.conftest import HF, SHARES, SMALL_UNITS, read_split


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, many: Path, tokenizer: Path) -> Path:
    """A folder where the first of four tasks is done."""
    out = tmp_path_factory.mktemp("planned") / "out"
    assert main(["plan", str(many), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES, *SMALL_UNITS]) == 0
    assert main(["run", "--out", str(out), "--task-id", "0", "--tasks", "4", *HF]) == 0
    return out


def test_counts_of_a_folder_in_work(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(planned), "--tasks", "4", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["units_done"], status["units"], status["merged"]) == (10, 40, False)
    assert (status["rows"], status["documents"], status["dropped"], status["bad"]) == (400, 400, {}, 0)
    assert status["tasks"] == [{"task": task, "units_done": 10 * (task == 0), "units": 10} for task in range(4)]
    sizes = [(planned / "shards" / f"{number:05d}-{split}.bin") for number in range(0, 40, 4) for split in ("train", "valid", "test")]
    assert status["tokens"] == sum(path.stat().st_size // 2 for path in sizes if path.exists())
    assert main(["status", str(planned), "--tasks", "4"]) == 0
    said = capsys.readouterr().out
    assert "10 of 40 units done" in said and "task 3 of 4: 0 of 10 units done" in said and "not done: 1-3, 5-7" in said


def test_rate_and_time_left_are_those_of_the_last_quarter_of_an_hour(tmp_path: Path, planned: Path) -> None:
    out = Path(shutil.copytree(planned, tmp_path / "out"))
    plan, now = read_plan(out), time.time()
    done = [unit for unit in plan.units if unit.number % 4 == 0]
    for place, unit in enumerate(done):  # five long ago, then one each hundred seconds, the last a hundred seconds ago
        os.utime(out / "shards" / f"{unit.name}.json", times=(now - 50_000,) * 2 if place < 5 else (now - 100 * (10 - place),) * 2)
    status, missing = status_of(out, 0, now)
    recent = sum(unit.text_bytes for unit in done[6:])
    assert status.rate == pytest.approx(recent / 500)
    assert status.seconds_left == pytest.approx((status.text_bytes - status.text_bytes_done) / (recent / 500))
    assert missing == [unit.number for unit in plan.units if unit.number % 4]
    assert status_of(out, 0, now + 10_000)[0].rate is None


def test_a_merged_folder(many_made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(many_made), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["merged"] and status["units_done"] == 40 and status["rate"] is None
    assert status["tokens"] == sum(len(ids) for name in ("train", "valid", "test") for ids in read_split(many_made, name))
    assert main(["status", str(many_made)]) == 0
    assert capsys.readouterr().out.endswith("merged: the data is complete\n")


def test_an_entry_that_run_would_not_take_is_not_done(tmp_path: Path, planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path(shutil.copytree(planned, tmp_path / "out"))
    (out / "shards" / "00004.json").write_bytes(b"{")
    (out / "shards" / "00008.json").write_text((out / "shards" / "00012.json").read_text())
    assert main(["status", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["units_done"] == 8


def test_errors(tmp_path: Path, planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([str(tmp_path / "none")], "no such folder"),
        ([str(tmp_path)], "no plan.json in"),
        ([str(planned), "--tasks", "0"], "--tasks is 0"),
    ):
        assert main(["status", *arguments]) == 2
        assert said in capsys.readouterr().err
