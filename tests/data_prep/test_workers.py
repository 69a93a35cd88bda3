"""Tests of worker processes.

A dead worker is reported, the other workers finish their units, none outlives its parent, and
finished units are kept.
"""

from __future__ import annotations

import os
import pty
import re
import signal
from pathlib import Path

import pytest

from data_prep.verbs.run import task_of
from fem_common.errors import UserError
from tests.data_prep import conftest as base


@pytest.mark.parametrize(
    ("death", "code", "expected"),
    [
        (
            "os.kill(os.getpid(), 9)",
            1,
            "was killed by SIGKILL at {} (out of memory? use fewer --workers); finished "
            "units are kept",
        ),
        pytest.param(
            "os._exit(3)",
            1,
            "ended with exit code 3 at {}; finished units are kept",
            marks=pytest.mark.slow,
        ),
        ("raise ValueError('no such luck')", 2, "no such luck"),
    ],
)
def test_a_workers_death_is_one_line_and_loses_one_unit(
    tmp_path: Path,
    many: Path,
    many_made: Path,
    masked: list[object],
    death: str,
    code: int,
    expected: str,
) -> None:
    # The other worker is slowed down, so that it does not finish many units meanwhile.
    known = {"SLOW": str(21 * 40), "DELAY": "0.5", "POISON": str(20 * 40), "DEATH": death}
    error, out = base.refused(*masked, code=code, **known), tmp_path / "out"
    assert expected.format(f"unit 20 ({many}, row groups 20 to 20)") in error
    done = base.entries(out)
    assert (
        {*range(20)} <= done and 20 not in done and len(done) < 39
    )  # no unit was assigned after the death was noticed
    assert base.unfinished(out) == []
    base.done(*masked)
    assert base.merged_hashes(out) == base.merged_hashes(many_made)


def test_workers_leave_when_the_parent_is_killed(tmp_path: Path, masked: list[object]) -> None:
    process = base.start(*masked, "--workers 3", DELAY="100")
    base.wait_until(lambda: len(base.unfinished(tmp_path / "out")) == 3)
    workers = base.children(process.pid)
    assert len(workers) == 3
    process.kill()
    process.wait()
    base.wait_until(lambda: not base.live(workers))
    process.communicate()


@pytest.mark.parametrize(
    ("number", "whom", "code", "expected"),
    [
        (signal.SIGINT, "group", 130, "interrupted"),
        (signal.SIGTERM, "parent", 143, "terminated"),
        pytest.param(
            signal.SIGHUP, "terminal", 129, "", marks=pytest.mark.slow
        ),  # the pipe is closed: no process would read the message
    ],
)
def test_an_interrupt_ends_in_a_line_and_keeps_what_is_done(
    tmp_path: Path,
    many_made: Path,
    masked: list[object],
    number: signal.Signals,
    whom: str,
    code: int,
    expected: str,
) -> None:
    """The interrupt arrives while both workers encode units that take longer than the test."""
    out, words = tmp_path / "out", base.command(*masked)
    slow = {"SLOW": str(8 * 40), "DELAY": "1000"}
    if whom == "terminal":
        pid, terminal = pty.fork()
        if pid == 0:
            os.execve(words[0], words, {"PYTHONPATH": str(base.ROOT), **slow})
        base.wait_until(lambda: len(base.entries(out)) == 8)
        workers = base.children(pid)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    else:
        process = base.start(*masked, **slow)
        base.wait_until(lambda: len(base.entries(out)) == 8)
        workers = base.children(process.pid)
        os.killpg(process.pid, number) if whom == "group" else process.send_signal(number)
        error = process.communicate(timeout=120)[1]
        assert (process.returncode, error) == (
            code,
            f"data_prep: {expected}; "
            "finished work is kept: run the same command again to continue\n",
        )
    assert not base.live(workers)
    assert len(base.entries(out)) == 8 and base.unfinished(out) == []
    base.done(*masked)
    assert base.merged_hashes(out) == base.merged_hashes(many_made)


def test_interrupts_of_a_worker_are_the_parents_to_handle(
    tmp_path: Path, masked: list[object]
) -> None:
    process = base.start(*masked, DELAY="0.02")
    base.wait_until(lambda: len(base.entries(tmp_path / "out")) >= 2)
    for worker in base.children(process.pid):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            base.kill(worker, number)
    assert (process.communicate(timeout=120)[1], process.returncode) == ("", 0)


def test_no_more_workers_than_units_and_all_cores_by_default(
    tmp_path: Path, masked: list[object]
) -> None:
    output = base.done(*masked, "--unit-mb 0.2 --workers 7")
    assert "2 of 2 units to do, 2 workers" in output
    output = base.done(*masked[:-1], f"--out {tmp_path}/cores")
    assert re.search(f"40 of 40 units to do, {len(os.sched_getaffinity(0))} worker", output)


SHARES = """
 -  -  |                               | None
 2  3  | ID=9 COUNT=10                 | (2, 3)
 -  -  | ID=0 MIN=0 MAX=9 COUNT=10 STEP=1 | (0, 10)
 -  -  | ID=1 MIN=1 MAX=13 COUNT=4 STEP=4 | (0, 4)
 -  -  | ID=13 MIN=1 MAX=13 COUNT=4 STEP=4 | (3, 4)
 -  16 | ID=7 MIN=3 COUNT=2 STEP=1     | (7, 16)
 3  3  |                               | --task-id is 3; of 3 tasks it must be 0 to 2
 -1 3  |                               | --task-id is -1
 0  0  |                               | --tasks is 0
 1  -  |                               | go together
 -  2  |                               | go together
 -  -  | ID=4 MIN=1 COUNT=3 STEP=2     | not one of 3 tasks
 -  -  | ID=9 MIN=1 COUNT=3 STEP=1     | for an array with gaps, give --tasks
 -  4  | ID=4                          | SLURM_ARRAY_TASK_ID is 4; of 4 tasks
 -  -  | ID=4                          | SLURM_ARRAY_TASK_COUNT is not
"""


@pytest.mark.parametrize("case", SHARES.strip().splitlines())
def test_a_share_of_the_work(case: str) -> None:
    """The columns are --task-id, --tasks | Slurm's array | the task, or the error."""
    given, slurm, output = case.split("|")
    index, tasks = (None if word == "-" else int(word) for word in given.split())
    environment = {
        f"SLURM_ARRAY_TASK_{name}": value
        for name, value in (pair.split("=") for pair in slurm.split())
    }
    if output.strip()[0] in "N(":
        task = task_of(index, tasks, environment)
        assert str(task and (task.index, task.tasks)) == output.strip()
    else:
        with pytest.raises(UserError, match=re.escape(output.strip())):
            task_of(index, tasks, environment)


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
    """One row group contains the longest accepted documents, of the most expensive characters, and
    small documents.
    """
    nasty = [
        "\U0001f642" * 1_300_000,
        "a" * 5_200_000,
        " " * 5_200_000,
        "\n\t" * 2_600_000,
        "word 123 " * 570_000,
        "x" * 50_000_000,
    ]
    rows = [(f"n{i}", text) for i, text in enumerate(nasty)] + [
        (f"d{i}", "small text " * 500) for i in range(3_000)
    ]
    file = base.write_parquet(tmp_path / "nasty.parquet", rows, row_group_size=len(rows))
    options = f"--tokenizer {tokenizer} --out {tmp_path}/out --workers 1 --max-bad 1"
    result = base.python(MEMORY, "run", file, options, f"--encoder {encoder}")
    assert result.returncode == 0, result
    kilobytes = int(result.stdout.split("VmHWM ")[1])
    assert kilobytes < 1.5e6, f"{kilobytes / 1e6:.2f} GB"
