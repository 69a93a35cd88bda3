"""Deaths and full disks at any moment: nothing partial under a final name, little done twice, and a rerun gives the uninterrupted bytes."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from data_prep.store.layout import SHARDS, read_plan
from data_prep.store.staging import LOCK, Lock, Staging
from data_prep.verbs.run import finished
from fem_common.errors import UserError
from fem_common.exits import Exit
from fem_common.files import remove_leftovers, temporary
from tests.data_prep.conftest import HF, ROOT, SHARES, SMALL_UNITS, children, cli, kill, snapshot, start, wait_until, write_parquet
from tests.data_prep.units_made import encode_units, merge, plan_folder, rows_with_faults

FLOCK = fcntl.flock

# --- a death before any call that changes what is on the disk -------------------------------------------------------------------------

CALLS = ("fsync", "replace", "unlink", "rmdir")


def work(out: Path) -> None:
    """What run does of a folder's plan, in this process: the units that are not done, then the merge."""
    for folder in (out, out / SHARDS):
        remove_leftovers(folder)
    plan = read_plan(out)
    encode_units(out, [unit.number for unit in plan.units if not (out / "manifest.json").exists() and not finished(out, plan, unit)])
    assert merge(out) == 0


def dies_at(number: int, out: Path) -> bool:
    """`work` in a copy of this process that is gone, without a word, before the call of that number; whether there was such a call."""
    child = os.fork()
    if not child:
        left = [number]

        def dying(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*given: Any, **options: Any) -> Any:
                if not left[0]:
                    os._exit(9)
                left[0] -= 1
                return call(*given, **options)

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
    """A plan of two units, with bad rows."""
    folder = tmp_path_factory.mktemp("planned")
    file = write_parquet(folder / "rows.parquet", rows_with_faults(40), row_group_size=25)
    return plan_folder(folder / "out", [file], tokenizer, "--valid-percent", "30", "--test-percent", "0", *SMALL_UNITS)


@pytest.mark.parametrize("again", [False, True])
def test_a_death_before_any_call_loses_nothing_that_was_done(tmp_path: Path, planned: Path, again: bool) -> None:
    """``again``: what is begun anew dies too, a few calls later, before it may end."""
    work(Path(shutil.copytree(planned, tmp_path / "whole")))
    whole, number, most = snapshot(tmp_path / "whole"), 0, 0
    shards = snapshot(encode_units(Path(shutil.copytree(planned, tmp_path / "shards"))))
    while True:
        out = Path(shutil.copytree(planned, tmp_path / f"at-{number}"))
        died = dies_at(number, out)
        found = {name: content for name, content in snapshot(out).items() if "/." not in f"/{name}"}
        assert all(content == (shards | whole)[name] for name, content in found.items()), number
        done = {name.split("/")[1][:5] for name in found if name.endswith(".json") and name.startswith("shards/")}
        assert all(name in found for name in shards if name.startswith("shards/") and name[7:12] in done and "manifest.json" not in found)
        if "manifest.json" in found:
            assert set(whole) <= set(found)
        else:
            assert len(done) >= most, "a unit that was done is lost"
            most = len(done)
        if again:
            dies_at(3 + number % 7, out)
        work(out)
        assert snapshot(out) == whole and not (out / ".unfinished").exists() and not (out / "shards").exists(), number
        shutil.rmtree(out)
        if not died:
            break
        number += 1 if not again else 5
    assert number > 20


def test_what_gets_its_final_name_is_on_the_disk_before(tmp_path: Path, planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, named, fsync, replace = set[int](), list[str](), os.fsync, os.replace

    def syncs(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def names(source: Path, target: Path) -> None:
        assert os.stat(source).st_ino in synced, target
        named.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", syncs)
    monkeypatch.setattr(os, "replace", names)
    work(Path(shutil.copytree(planned, tmp_path / "out")))
    assert {"00000-train.bin", "00001-train.idx", "00001.json", "train.bin", "valid.idx", "units.jsonl", "manifest.json"} <= set(named)


# --- real processes, killed -----------------------------------------------------------------------------------------------------------

# Makes units take a while, and writes down each that is begun: a unit of the corpus is one batch.
MASK = r"""
import os, time
import numpy as np

def keep(batch, places, path):
    with open(os.environ["LOG"], "ab", 0) as log:
        log.write(b"%d\n" % places[0])
    time.sleep(float(os.environ["DELAY"]))
    return np.ones(len(places), bool)
"""
UNITS = 40


@dataclass
class Reference:
    """What a run is to give, and how to start one."""

    merged: dict[str, bytes]
    mask: Path
    many: Path
    tokenizer: Path

    def command(self, out: Path) -> list[object]:
        """A run into OUT."""
        options = ("--tokenizer", self.tokenizer, "--out", out, *SHARES, *SMALL_UNITS, *HF, "--mask", f"{self.mask}:keep", "--workers", "2")
        return ["run", self.many, *options]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, many: Path, tokenizer: Path) -> Iterator[Reference]:
    folder = tmp_path_factory.mktemp("reference")
    (folder / "mask.py").write_text(MASK)
    made = Reference({}, folder / "mask.py", many, tokenizer)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOG", str(folder / "log"))
        environment.setenv("DELAY", "0")
        assert main(list(map(str, made.command(folder / "out")))) == 0
        made.merged = snapshot(folder / "out")
        yield made


def entries(out: Path) -> int:
    """How many units are done."""
    return len(list((out / "shards").glob("*.json")))


def gone(processes: list[int]) -> bool:
    """Whether none of these processes is there any more."""
    return not any(Path(f"/proc/{process}").exists() for process in processes)


@pytest.mark.parametrize("moment", [0, *(pytest.param(moment, marks=pytest.mark.slow) for moment in range(1, 26))])
def test_sigkill_at_random_moments(tmp_path: Path, reference: Reference, moment: int) -> None:
    """Of the parent, of a worker, of both; while units are in work, and a little before and after."""
    chance = random.Random(moment)
    out, log = tmp_path / "out", tmp_path / "log"
    log.touch()
    process = start(*reference.command(out), LOG=str(log), DELAY="0.01")
    wanted = chance.choice([*range(0, UNITS, 3), UNITS])
    wait_until(lambda: entries(out) >= wanted or process.poll() is not None)
    workers = children(process.pid)
    for victim in [[process.pid], workers[:1], [process.pid, *workers], [*workers, process.pid]][moment % 4]:
        kill(victim)
    _, error = process.communicate(timeout=30)
    assert "Traceback" not in error
    wait_until(partial(gone, workers), seconds=5)
    result = cli(*reference.command(out), LOG=str(log), DELAY="0")
    assert result.returncode == 0, result
    assert snapshot(out) == reference.merged
    begun = Counter(log.read_text().split())
    assert len(begun) == UNITS and begun.total() - UNITS <= 2


def test_leftovers_of_the_dead_go_those_of_the_living_stay(tmp_path: Path, reference: Reference) -> None:
    out = tmp_path / "out"
    assert cli(*reference.command(out), "--task-id", "0", "--tasks", "2", LOG=str(tmp_path / "log"), DELAY="0").returncode == 0
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    shards, host = out / "shards", socket.gethostname()
    mine = temporary(shards / "00001")
    of_another = f"{mine.name.rpartition('~')[0]}~{dead.pid}"
    of_the_dead = [shards / of_another, out / f".plan.json{of_another.removeprefix('.00001')}"]
    elsewhere, long_ago = (shards / mine.name.replace(f"~{host}~", f"~{name}~") for name in ("elsewhere", "long-ago"))
    for folder in (mine, of_the_dead[0], elsewhere, long_ago):
        folder.mkdir()
        (folder / "train.bin").write_bytes(b"part")
    of_the_dead[1].write_bytes(b"{")
    os.utime(long_ago, times=(time.time() - 100_000,) * 2)
    assert cli(*reference.command(out), "--task-id", "1", "--tasks", "2", LOG=str(tmp_path / "log"), DELAY="0").returncode == 0
    assert {path for path in (*shards.glob(".*"), *out.glob(".*")) if path.name != LOCK} == {mine, elsewhere}


def test_a_second_run_at_the_same_time_is_refused_tasks_are_not(
    tmp_path: Path, reference: Reference, capsys: pytest.CaptureFixture[str]
) -> None:
    out, command = tmp_path / "out", list(map(str, reference.command(tmp_path / "out")))
    with Lock(out):
        for options in ([], ["--task-id", "0", "--tasks", "2"]):
            assert main([*command, *options]) == Exit.IN_USE
            assert "another data_prep process is writing" in capsys.readouterr().err
    with Lock(out, shared=True):
        assert main(command) == Exit.IN_USE and entries(out) == 0
        assert main([*command, "--task-id", "0", "--tasks", "40"]) == 0
    assert main(command) == 0
    assert snapshot(out) == reference.merged


def flock_of_nfs(descriptor: int, operation: int) -> None:
    """flock as NFS has it: of files alone, and a lock of one's own for those alone who may write them."""
    writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE in (os.O_RDWR, os.O_WRONLY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or (operation & fcntl.LOCK_EX and not writable):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(descriptor, operation)


def test_the_lock_works_as_nfs_wants_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fem_common.files.fcntl.flock", flock_of_nfs)
    with Lock(tmp_path):
        for shared in (False, True):
            with pytest.raises(UserError, match="another data_prep process is writing"), Lock(tmp_path, shared=shared):
                pass
    with Lock(tmp_path, shared=True), Lock(tmp_path, shared=True), pytest.raises(UserError, match="another"), Staging(tmp_path):
        pass
    with Staging(tmp_path) as staging, pytest.raises(UserError, match="another"), Staging(tmp_path):
        pass
    assert not staging.path.parent.exists() and capsys.readouterr().err == ""


LIMITED = """
import resource, sys
from data_prep.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


def test_a_file_that_cannot_grow_is_one_line_and_a_rerun_finishes(tmp_path: Path, many: Path, tokenizer: Path) -> None:
    out = tmp_path / "out"
    command = ["run", str(many), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES, "--unit-mb", "0.08", *HF, "--workers", "1"]
    assert main(["plan", *command[1:-4]]) == 0
    planned = snapshot(out)
    for limit in (2_000, 40_000):  # no unit at all; none of train
        result = subprocess.run([sys.executable, "-c", LIMITED, str(limit), *command], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 1, result
        assert result.stderr.startswith(f"data_prep: error: {out / 'shards'}: File too large; make room"), result.stderr
        assert result.stderr.count("\n") == 1
        assert snapshot(out) == planned
    assert main(command) == 0
    whole = tmp_path / "whole"
    assert main([*command[:4], "--out", str(whole), *command[6:]]) == 0
    assert snapshot(out) == snapshot(whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 600 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if not mount or subprocess.run([mount, "-t", "tmpfs", "-o", "size=600k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_line_and_a_rerun_with_room_finishes(tmp_path: Path, small_disk: Path, reference: Reference) -> None:
    out, log = small_disk / "out", str(tmp_path / "log")
    result = cli(*reference.command(out), LOG=log, DELAY="0")
    assert result.returncode == 1, result
    assert result.stderr.startswith(f"data_prep: error: {out / 'shards'}: No space left on device; make room"), result.stderr
    assert result.stderr.count("\n") == 1 and not list((out / "shards").glob(".*"))
    done = entries(out)
    assert 3 < done < UNITS
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    result = cli(*reference.command(out), LOG=log, DELAY="0")
    assert result.returncode == 0 and f"{UNITS - done} of {UNITS} units to do" in result.stdout, result
    assert snapshot(out) == reference.merged
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
