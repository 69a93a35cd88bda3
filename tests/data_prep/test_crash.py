"""Kills and full disks at any moment: nothing partial under a final name, little done twice, and a rerun gives the uninterrupted bytes."""

from __future__ import annotations

import errno
import fcntl
import hashlib
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
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from data_prep.__main__ import main
from data_prep.store.manifest import read_entry
from data_prep.store.staging import LOCK, Lock, Staging
from fem_common.errors import UserError
from fem_common.exits import Exit
from fem_common.files import temporary
from tests.data_prep.conftest import HF, ROOT, SHARES, SMALL_UNITS, children, cli, kill, snapshot, start, wait_until

# Makes units take a while, and writes down each that is begun: a unit of the corpus is one batch. With MOVES, kills its worker in the place
# of one of the moves of a file to its final name.
MASK = """
import os, signal, time
import numpy as np

move, left = os.replace, [int(os.environ.get("MOVES", "-1"))]

def replace(source, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    move(source, target)

def keep(batch, places, path):
    if left[0] >= 0:
        os.replace = replace
    with open(os.environ["LOG"], "ab", 0) as log:
        log.write(b"%d\\\\n" % places[0])
    time.sleep(float(os.environ["DELAY"]))
    return np.ones(len(places), bool)
"""
UNITS = 40
FLOCK = fcntl.flock


@dataclass
class Reference:
    """What a run is to give: the shards before they are merged, all of the folder after; and how to start one."""

    shards: dict[str, bytes]
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
    (folder / "mask.py").write_text(MASK.replace("\\\\", "\\"))
    made = Reference({}, {}, folder / "mask.py", many, tokenizer)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LOG", str(folder / "log"))
        environment.setenv("DELAY", "0")
        command = list(map(str, made.command(folder / "out")))
        assert main([*command, "--task-id", "0", "--tasks", "1"]) == 0
        made.shards = snapshot(folder / "out" / "shards")
        assert main(command) == 0
        made.merged = snapshot(folder / "out")
        yield made


def entries(out: Path) -> int:
    """How many units are done."""
    return len(list((out / "shards").glob("*.json")))


def gone(processes: list[int]) -> bool:
    """Whether none of these processes is there any more."""
    return not any(Path(f"/proc/{process}").exists() for process in processes)


def nothing_partial(out: Path, reference: Reference) -> int:
    """Check that every final name holds what it holds in an uninterrupted run; the number of units done."""
    done = 0
    for path in (out / "shards").glob("*"):
        if not path.name.startswith("."):
            assert path.read_bytes() == reference.shards[path.name], path
    for path in (out / "shards").glob("*.json"):
        done += 1
        for name, split in read_entry(path).splits.items():
            binary = (out / "shards" / f"{path.stem}-{name}.bin").read_bytes()
            assert hashlib.sha256(binary).hexdigest() == split.bin_sha256
    for name, content in snapshot(out).items():
        if not name.startswith((".", "shards/", "tokenizer/.")):
            assert content == reference.merged[name], name
    if (out / "manifest.json").exists():
        assert set(reference.merged) <= set(snapshot(out))
    return done


@pytest.mark.parametrize("moment", [*range(2), *(pytest.param(moment, marks=pytest.mark.slow) for moment in range(2, 26))])
def test_sigkill_at_random_moments(tmp_path: Path, reference: Reference, moment: int) -> None:
    """Of the parent, of a worker, of both; while units are in work, and a little before and after."""
    chance = random.Random(moment)
    out, log = tmp_path / "out", tmp_path / "log"
    log.touch()
    process = start(*reference.command(out), LOG=str(log), DELAY="0.01")
    wanted = chance.choice([None, *range(0, UNITS, 3), UNITS])
    if wanted is None:
        time.sleep(chance.uniform(0, 1))
    else:
        wait_until(lambda: entries(out) >= wanted or process.poll() is not None)
        time.sleep(chance.uniform(0, 0.03))
    workers = children(process.pid)
    victims = [[process.pid], workers[:1], [process.pid, *workers], [*workers, process.pid]][moment % 4]
    for victim in victims:
        kill(victim)
    _, error = process.communicate(timeout=30)
    assert "Traceback" not in error
    wait_until(partial(gone, workers), seconds=5)
    if process.returncode != 0:
        nothing_partial(out, reference)
    result = cli(*reference.command(out), LOG=str(log), DELAY="0")
    assert result.returncode == 0, result
    assert snapshot(out) == reference.merged
    begun = Counter(log.read_text().split())
    assert len(begun) == UNITS and begun.total() - UNITS <= 2


@pytest.mark.parametrize("moves", [0, 6, 23, *(pytest.param(moves, marks=pytest.mark.slow) for moves in (1, 4, 9))])
def test_sigkill_between_any_two_moves_of_files(tmp_path: Path, reference: Reference, moves: int) -> None:
    out, log = tmp_path / "out", str(tmp_path / "log")
    result = cli(*reference.command(out), "--workers", "1", LOG=log, DELAY="0", MOVES=str(moves))
    assert result.returncode == 1 and "SIGKILL" in result.stderr, result
    finals = [path for path in (out / "shards").iterdir() if not path.name.startswith(".")]
    assert len(finals) == moves
    done = nothing_partial(out, reference)
    assert moves // 7 <= done <= moves // 3
    result = cli(*reference.command(out), LOG=log, DELAY="0")
    assert f"{UNITS - done} of {UNITS} units to do" in result.stdout, result
    assert snapshot(out) == reference.merged


def test_many_kills_one_after_the_other(tmp_path: Path, reference: Reference) -> None:
    """Each run gets a few units further, and never back."""
    out, log, done, runs = tmp_path / "out", tmp_path / "log", 0, 0
    while done < UNITS:
        process, goal = start(*reference.command(out), LOG=str(log), DELAY="0.01"), min(done + 12, UNITS)
        while process.poll() is None and entries(out) < goal:
            time.sleep(0.005)
        process.kill()
        workers = children(process.pid)
        process.communicate()
        wait_until(partial(gone, workers), seconds=5)
        runs += 1
        if (out / "manifest.json").exists():
            break
        now = nothing_partial(out, reference)
        assert now >= done
        done = now
    assert runs >= 3
    assert cli(*reference.command(out), LOG=str(log), DELAY="0").returncode == 0
    assert snapshot(out) == reference.merged
    begun = Counter(log.read_text().split())
    assert len(begun) == UNITS and begun.total() - UNITS <= 2 * runs


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
    command = ["run", str(many), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES, "--unit-mb", "0.08", *HF]
    assert main(["plan", *command[1:-2]]) == 0
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
    done = nothing_partial(out, reference)
    assert 3 < done < UNITS
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    result = cli(*reference.command(out), LOG=log, DELAY="0")
    assert result.returncode == 0 and f"{UNITS - done} of {UNITS} units to do" in result.stdout, result
    assert snapshot(out) == reference.merged
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
