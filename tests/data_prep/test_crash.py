"""Tests of kills and full disks at any moment.

Files with final names are always complete, little work is repeated, and a second run gives the same
bytes as an uninterrupted run.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import shutil
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.prepared.layout import SHARDS, read_plan
from data_prep.prepared.staging import LOCK, Staging, lock
from data_prep.verbs.run import finished
from fem_common.errors import UserError
from fem_common.exits import Exit
from fem_common.files import remove_leftovers, temporary
from tests.data_prep import conftest as base

FLOCK = fcntl.flock

# --- death before any call that changes the disk --------------------------------------------------

CALLS = ("fsync", "replace", "unlink", "rmdir")


def work(out: Path) -> None:
    """Do the work of ``run`` for a planned folder in this process: encode the missing units, then
    merge.
    """
    for folder in (out, out / SHARDS):
        remove_leftovers(folder)
    plan = read_plan(out)
    base.encode_units(
        out,
        [
            unit.number
            for unit in plan.units
            if not (out / "manifest.json").exists() and not finished(out, plan, unit)
        ],
    )
    base.merge(out)


def dies_at(number: int, out: Path) -> bool:
    """Run `work` in a fork that exits before the call with this number. Return True if the call was
    reached.
    """
    child = os.fork()
    if not child:
        # The child must not finalize objects of other libraries, whose threads are gone.
        gc.disable()
        left = [number]

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*given: Any, **options: Any) -> Any:
                left[0] -= 1
                return call(*given, **options) if left[0] >= 0 else os._exit(9)

            return called

        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        try:
            work(out)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Plan of two units with bad rows."""
    folder = tmp_path_factory.mktemp("planned")
    file = base.write_parquet(folder / "rows.parquet", base.rows_with_faults(40), row_group_size=25)
    shares = "--valid-percent 30 --test-percent 0"
    return base.plan_folder(folder / "out", [file], tokenizer, shares, base.SMALL_UNITS)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 4))]
)
def test_a_death_before_any_call_loses_nothing_that_was_done(
    tmp_path: Path, planned: Path, first: int
) -> None:
    """The process dies before every fourth call. Before every fifth of these, the restarted process
    dies a few calls later.
    """
    work(base.copied(planned, tmp_path / "whole"))
    full = base.snapshot(tmp_path / "whole")
    number = first
    most = 0
    died = True
    shards = base.snapshot(base.encode_units(base.copied(planned, tmp_path / "shards")))
    while died:
        out = base.copied(planned, tmp_path / f"at-{number}")
        died = dies_at(number, out)
        found = {
            name: content for name, content in base.snapshot(out).items() if "/." not in f"/{name}"
        }
        assert all(content == (shards | full)[name] for name, content in found.items()), number
        done = {
            name.split("/")[1][:5]
            for name in found
            if name.endswith(".json") and name.startswith("shards/")
        }
        assert all(
            name in found
            for name in shards
            if name.startswith("shards/") and name[7:12] in done and "manifest.json" not in found
        )
        assert set(full) <= set(found) if "manifest.json" in found else len(done) >= most, (
            "a unit that was done is lost"
        )
        most = len(done)
        if number % 5 == 0:
            dies_at(3 + number % 7, out)
        work(out)
        assert (
            base.snapshot(out) == full
            and not (out / ".unfinished").exists()
            and not (out / "shards").exists()
        ), number
        shutil.rmtree(out)
        number += 4
    assert number > 20


def test_what_gets_its_final_name_is_on_the_disk_before(
    tmp_path: Path, planned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[int]()
    named = list[str]()
    fsync = os.fsync
    replace = os.replace

    def syncs(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def names(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in synced, target
        named.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", names)
    work(base.copied(planned, tmp_path / "out"))
    expected = (
        "00000-train.bin 00001-train.idx 00001.json train.bin valid.idx units.jsonl manifest.json"
    )
    assert set(expected.split()) <= set(named)


# --- real processes, killed -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "moment", [0, *(pytest.param(moment, marks=pytest.mark.slow) for moment in range(1, 26))]
)
def test_sigkill_at_random_moments(
    tmp_path: Path, masked: list[object], many_made: Path, moment: int
) -> None:
    """The parent, a worker, or both are killed while units are in progress, and shortly before and
    after.
    """
    chance = random.Random(moment)
    out = tmp_path / "out"
    log = tmp_path / "log"
    process = base.start(*masked, LOG=str(log), DELAY="0.01")
    wanted = chance.choice([*range(0, base.UNITS, 3), base.UNITS])
    base.wait_until(lambda: len(base.entries(out)) >= wanted or process.poll() is not None)
    workers = base.children(process.pid)
    for victim in [[process.pid], workers[:1], [process.pid, *workers], [*workers, process.pid]][
        moment % 4
    ]:
        base.kill(victim)
    assert "Traceback" not in process.communicate(timeout=120)[1]
    base.wait_until(lambda: not base.live(workers))
    base.done(*masked, LOG=str(log))
    assert base.merged_hashes(out) == base.merged_hashes(many_made) and base.unfinished(out) == []
    begun = Counter(log.read_text().split())
    assert len(begun) == base.UNITS and begun.total() - base.UNITS <= 2


def test_a_second_run_at_the_same_time_is_refused_tasks_are_not(
    tmp_path: Path, masked: list[object], many_made: Path
) -> None:
    out, task = tmp_path / "out", f"--task-id 0 --tasks {base.UNITS}"
    with lock(out):
        for options in ([], [task]):
            error = base.refused(*masked, *options, code=Exit.IN_USE)
            assert "another data_prep process is writing" in error
    with lock(out, shared=True):
        base.refused(*masked, code=Exit.IN_USE)
        assert base.entries(out) == set()
        base.done(*masked, task)
    base.done(*masked)
    assert base.merged_hashes(out) == base.merged_hashes(many_made)


def flock_of_nfs(descriptor: int, operation: int) -> None:
    """Emulate flock on NFS: it locks only files, and an exclusive lock requires write access."""
    writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE in (os.O_RDWR, os.O_WRONLY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or (
        operation & fcntl.LOCK_EX and not writable
    ):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(descriptor, operation)


def test_the_lock_works_as_nfs_wants_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fem_common.files.fcntl.flock", flock_of_nfs)
    with (
        lock(tmp_path, shared=True),
        lock(tmp_path, shared=True),
        pytest.raises(UserError, match="another"),
        Staging(tmp_path),
    ):
        pass
    with Staging(tmp_path) as staging:
        for other in (lock(tmp_path), lock(tmp_path, shared=True), Staging(tmp_path)):
            with pytest.raises(UserError, match="another data_prep process is writing"), other:
                pass
    assert not staging.path.parent.exists() and capsys.readouterr().err == ""


LIMITED = """
import resource, sys
from data_prep.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


def test_a_file_that_cannot_grow_is_one_line_and_a_rerun_finishes(
    tmp_path: Path, rows: Path, tokenizer: Path, merged: Path
) -> None:
    """The file size limit is too small first for units, then for merged pairs."""
    out = base.plan_folder(tmp_path / "out", [rows], tokenizer, base.SMALL_UNITS)
    command = ["run", "--out", out, base.HF, "--workers 1 --max-bad 100%"]
    for limit, done, folder in (
        (1_000, set(), SHARDS),
        ((merged / "train.bin").stat().st_size // 2, {*range(5)}, ".unfinished"),
    ):
        result = base.python(LIMITED, limit, *command)
        assert (
            result.returncode == 1
            and result.stderr.count("\n") == 1
            and ".bin: File too large; raise the limit" in result.stderr
        ), result
        assert f"{out / folder}" in result.stderr and base.entries(out) == done
        assert not list((out / SHARDS).glob(".*")) and not base.merged_hashes(out), result
    base.done(*command)
    assert base.snapshot(out) == base.snapshot(merged)


# Merges without working locks. At one of the calls, a second merge runs and must succeed.
BESIDE = """
import errno, fcntl, os, subprocess, sys
def no_lock(*_):
    if sys.argv[1] == "none":
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = no_lock
from data_prep.__main__ import main
name, left = sys.argv[2], [int(sys.argv[3])]
call = getattr(os, name)
def meeting(*arguments, **options):
    left[0] -= 1
    if left[0] == -1:
        words = [sys.argv[1], name, "1000", *sys.argv[4:]]
        second = subprocess.run(
            [sys.executable, "-c", os.environ["BESIDE"], *words], capture_output=True
        )
        assert second.returncode == 0, second
        print("met")
    return call(*arguments, **options)
setattr(os, name, meeting)
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize(
    ("lock", "call", "number"),
    [("none", "fsync", 3), ("none", "replace", 4), ("of this node", "replace", 1)],
)
def test_merges_at_once_without_a_working_lock_leave_the_data_whole(
    shards: Path, merged: Path, lock: str, call: str, number: int
) -> None:
    result = base.python(
        BESIDE, lock, call, number, "merge", shards, "--max-bad 100%", BESIDE=BESIDE
    )
    errors = [line for line in result.stderr.splitlines() if "cannot be locked" not in line]
    # Refused as busy, or because the other merge has moved a file, depending on its progress.
    assert "met" in result.stdout and (result.returncode, len(errors)) in (
        (0, 0),
        (2, 1),
        (75, 1),
    ), result
    assert base.snapshot(shards) == base.snapshot(merged)


def test_leftovers_of_the_dead_go_those_of_the_living_stay(
    tmp_path: Path, masked: list[object]
) -> None:
    out = tmp_path / "out"
    base.done(*masked, "--task-id 0 --tasks 2")
    nobody = Path("/proc/sys/kernel/pid_max").read_text().strip()
    shards, host = out / "shards", socket.gethostname()
    mine = temporary(shards / "00001")
    of_another = f"{mine.name.rpartition('~')[0]}~{nobody}"
    of_the_dead = [shards / of_another, out / f".plan.json{of_another.removeprefix('.00001')}"]
    elsewhere, long_ago = (
        shards / mine.name.replace(f"~{host}~", f"~{name}~") for name in ("elsewhere", "long-ago")
    )
    for folder in (mine, of_the_dead[0], elsewhere, long_ago):
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"part")
    of_the_dead[1].write_bytes(b"{")
    os.utime(long_ago, times=(time.time() - 100_000,) * 2)
    base.done(*masked, "--task-id 1 --tasks 2")
    assert {path for path in (*shards.glob(".*"), *out.glob(".*")) if path.name != LOCK} == {
        mine,
        elsewhere,
    }
