"""Worker processes: one that dies is named, the others finish their unit, none outlives its parent, and nothing that is done is lost."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.verbs.run import task_of
from fem_common.errors import UserError
from tests.data_prep.conftest import (
    HF,
    ROOT,
    SHARES,
    SMALL_UNITS,
    children,
    cli,
    command,
    kill,
    merged_hashes,
    start,
    wait_until,
    write_parquet,
)

# A mask of the user's runs in the workers: here it slows them down, or does to them what a broken library would.
MASK = """
import os, signal, time
import numpy as np

def keep(batch, places, path):
    time.sleep(float(os.environ.get("DELAY", "0")))
    if places[0] == int(os.environ.get("POISON", "-1")):
        if os.environ["DEATH"].isdigit():
            os._exit(int(os.environ["DEATH"]))
        os.kill(os.getpid(), getattr(signal, os.environ["DEATH"]))
        time.sleep(60)
    return np.ones(len(places), bool)
"""


@pytest.fixture
def masked(tmp_path: Path, many: Path, tokenizer: Path) -> list[object]:
    """The options of a run of 40 units with the mask, into OUT."""
    (tmp_path / "mask.py").write_text(MASK)
    mask = ("--mask", f"{tmp_path / 'mask.py'}:keep")
    return ["run", many, "--tokenizer", tokenizer, "--out", tmp_path / "out", *SHARES, *SMALL_UNITS, *HF, *mask]


def entries(out: Path) -> set[int]:
    """The units that are done."""
    return {int(path.stem) for path in (out / "shards").glob("*.json")}


def unfinished(out: Path) -> list[Path]:
    """Names in OUT/shards that are no final ones."""
    return list((out / "shards").glob(".*"))


@pytest.mark.parametrize(
    ("death", "said"),
    [
        ("SIGKILL", "was killed by SIGKILL at {} (for want of memory? give fewer --workers); what is finished is kept"),
        ("3", "ended with exit code 3 at {}; what is finished is kept"),
    ],
)
def test_a_workers_death_is_one_line_and_loses_one_unit(
    tmp_path: Path, many: Path, many_made: Path, masked: list[object], death: str, said: str
) -> None:
    result = cli(*masked, "--workers", 2, POISON=str(20 * 40), DEATH=death)
    assert result.returncode == 1, result
    where = f"unit 20 ({many}, row groups 20 to 20)"
    assert result.stderr.startswith(f"data_prep: error: a worker {said.format(where)}"), result.stderr
    assert result.stderr.count("\n") == 1
    out = tmp_path / "out"
    done = entries(out)
    assert {*range(20)} <= done and 20 not in done and len(done) < 39  # none was handed out once the death was heard of
    assert unfinished(out) == []
    assert cli(*masked).returncode == 0
    assert merged_hashes(out) == merged_hashes(many_made)


def test_workers_leave_when_the_parent_is_killed(tmp_path: Path, masked: list[object]) -> None:
    process = start(*masked, "--workers", 3, DELAY="100")
    wait_until(lambda: len(unfinished(tmp_path / "out")) == 3)
    workers = children(process.pid)
    assert len(workers) == 3
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers), seconds=5)
    process.communicate()
    assert len(unfinished(tmp_path / "out")) == 3  # the next run removes them: see test_crash


@pytest.mark.parametrize(
    ("number", "whom", "code", "said"),
    [
        (signal.SIGINT, "group", 130, "interrupted"),
        (signal.SIGTERM, "parent", 143, "terminated"),
        (signal.SIGHUP, "group", 129, "the terminal hung up"),
    ],
)
def test_an_interrupt_ends_in_a_line_and_keeps_what_is_done(
    tmp_path: Path, many_made: Path, masked: list[object], number: signal.Signals, whom: str, code: int, said: str
) -> None:
    process, out = start(*masked, "--workers", 2, DELAY="0.05"), tmp_path / "out"
    wait_until(lambda: len(entries(out)) >= 4)
    workers = children(process.pid)
    if whom == "group":
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    _, error = process.communicate(timeout=10)
    assert (process.returncode, error) == (code, f"data_prep: {said}; what is finished is kept: the same command goes on\n")
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
    assert 4 <= len(entries(out)) < 40 and unfinished(out) == []
    assert main(list(map(str, masked))) == 0
    assert merged_hashes(out) == merged_hashes(many_made)


def test_a_terminal_that_is_closed_ends_it_cleanly_and_nohup_holds(tmp_path: Path, masked: list[object]) -> None:
    out, words = tmp_path / "out", command(*masked, "--workers", 2)
    process, terminal = pty.fork()
    if process == 0:
        os.execve(words[0], words, {"PYTHONPATH": str(ROOT), "DELAY": "0.05"})
    wait_until(lambda: len(entries(out)) >= 4)
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert 4 <= len(entries(out)) < 40 and unfinished(out) == []
    pipe, environment = subprocess.PIPE, {"PYTHONPATH": str(ROOT), "DELAY": "0.02"}
    silenced = subprocess.Popen(["/usr/bin/env", "nohup", *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe)
    before = len(entries(out))
    wait_until(lambda: len(entries(out)) > before)
    silenced.send_signal(signal.SIGHUP)
    silenced.communicate()
    assert silenced.returncode == 0


def test_interrupts_of_a_worker_are_the_parents_to_handle(tmp_path: Path, masked: list[object]) -> None:
    process = start(*masked, "--workers", 2, DELAY="0.05")
    wait_until(lambda: len(entries(tmp_path / "out")) >= 2)
    for worker in children(process.pid):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            kill(worker, number)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (0, "")


def test_an_error_in_one_unit_lets_the_others_finish_theirs(tmp_path: Path, masked: list[object]) -> None:
    out = tmp_path / "out"
    (tmp_path / "mask.py").write_text(MASK.replace('os._exit(int(os.environ["DEATH"]))', "raise ValueError('no such luck')"))
    result = cli(*masked, "--workers", 2, POISON="400", DEATH="1")
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "no such luck" in result.stderr, result
    assert {*range(10)} <= entries(out) and 10 not in entries(out) and len(entries(out)) <= 12 and unfinished(out) == []


def test_no_more_workers_than_units_and_all_cores_by_default(tmp_path: Path, many: Path, masked: list[object]) -> None:
    at = masked.index("--unit-mb") + 1
    masked[at] = "0.2"
    process, seen = start(*masked, "--workers", 7, DELAY="0.1"), 0
    while process.poll() is None:
        seen = max(seen, sum(path.is_dir() for path in unfinished(tmp_path / "out")))
        time.sleep(0.01)
    output, _ = process.communicate()
    assert f"2 of 2 units to do, {seen} workers" in output and seen == 2
    masked[at] = "0.001"
    masked[masked.index("--out") + 1] = tmp_path / "cores"
    assert re.search(f"40 of 40 units to do, {len(os.sched_getaffinity(0))} worker", cli(*masked).stdout)


def test_a_share_of_the_work(tmp_path: Path) -> None:
    def named(**slurm: int) -> dict[str, str]:
        return {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in slurm.items()}

    def share(*arguments: object) -> tuple[int, int] | None:
        task = task_of(*arguments)  # type: ignore[arg-type]
        return (task.index, task.tasks) if task else None

    assert share(None, None, {}) is None
    assert share(2, 3, named(ID=9, COUNT=10)) == (2, 3)  # the command line comes first
    assert share(None, None, named(ID=0, MIN=0, MAX=9, COUNT=10, STEP=1)) == (0, 10)
    assert [share(None, None, named(ID=number, MIN=1, MAX=13, COUNT=4, STEP=4)) for number in (1, 5, 9, 13)] == [(i, 4) for i in range(4)]
    assert share(None, 16, named(ID=7, MIN=3, COUNT=2, STEP=1)) == (7, 16)  # some of an array, again
    for index, tasks, slurm, said in (
        (3, 3, {}, "--task-id is 3; of 3 tasks it must be 0 to 2"),
        (-1, 3, {}, "--task-id is -1"),
        (0, 0, {}, "--tasks is 0"),
        (1, None, {}, "go together"),
        (None, 2, {}, "go together"),
        (None, None, named(ID=4, MIN=1, COUNT=3, STEP=2), "not one of 3 tasks"),
        (None, None, named(ID=9, MIN=1, COUNT=3, STEP=1), "of an array with gaps give --tasks"),
        (None, 4, named(ID=4), "SLURM_ARRAY_TASK_ID is 4; of 4 tasks"),
        (None, None, named(ID=4), "SLURM_ARRAY_TASK_COUNT is not"),
    ):
        with pytest.raises(UserError, match=said):
            task_of(index, tasks, slurm)


MEMORY = """
import resource, sys
from data_prep.__main__ import main
code = main(sys.argv[1:])
print("VmHWM", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["gigatoken", "hf"])
def test_memory_of_a_worker_is_bounded(tmp_path: Path, tokenizer: Path, encoder: str) -> None:
    """The longest documents there may be, of the worst letters, and small ones, in one row group."""
    nasty = ["\U0001f642" * 1_300_000, "a" * 5_200_000, " " * 5_200_000, "\n\t" * 2_600_000, "word 123 " * 570_000, "x" * 50_000_000]
    rows = [(f"n{i}", text) for i, text in enumerate(nasty)] + [(f"d{i}", "small text " * 500) for i in range(3_000)]
    file, out = write_parquet(tmp_path / "nasty.parquet", rows, row_group_size=len(rows)), tmp_path / "out"
    words = ["run", file, "--tokenizer", tokenizer, "--out", out, "--workers", "1", "--encoder", encoder, "--max-bad", "1"]
    result = subprocess.run([sys.executable, "-c", MEMORY, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result
    kilobytes = int(result.stdout.split("VmHWM ")[1])
    assert kilobytes < 1.5e6, f"{kilobytes / 1e6:.2f} GB"
