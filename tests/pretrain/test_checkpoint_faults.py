"""Tests of disk and machine faults: full file systems, flipped bits, killed writers. Valid
checkpoints survive, and the run reports the fault.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from pretrain.__main__ import main
from pretrain.checkpoint.folder import MANIFEST, PARTS, Progress, damage, newest_good, parts_of
from pretrain.checkpoint.manager import Checkpoints
from pretrain.checkpoint.reader import CheckedReader, DamagedCheckpoint, read_metadata, read_part
from pretrain.checkpoint.tensors import in_background
from pretrain.checkpoint.writer import save_weights
from pretrain.config import RunConfig
from pretrain.report.loggers import Console
from pretrain.trainer import Trainer
from tests.pretrain.conftest import DEMO, QUIET, Command, flip
from tests.pretrain.jobs import TP2, same
from tests.pretrain.test_checkpoints import weights
from tests.ranks import PATIENCE, ended, forked, losses, wait_for_lock, wait_until


def _sleep(pipe: Any) -> None:
    pipe.send(os.getpid())
    time.sleep(PATIENCE)


def _rank_with_a_writer(pipe: Any) -> None:
    in_background(partial(_sleep, pipe))
    time.sleep(PATIENCE)


# Bytes. The tensor files of the small run are larger; all other files are smaller.
LARGER_THAN_METADATA = 300_000


def steps(pretrain: Command) -> list[str]:
    """Return the names in the run's folder of checkpoints."""
    return sorted(path.name for path in pretrain.checkpoints.iterdir())


# --- flipped bits ---------------------------------------------------------------------------------


def test_no_flipped_bit_makes_another_tensor() -> None:
    """A flipped bit in any byte of a tensor's archive, including headers and padding, is refused as
    damage or has no effect.
    """
    archive, tensor = io.BytesIO(), torch.randn(16, 16)
    torch.save(tensor, archive)
    whole, dice = archive.getvalue(), random.Random(0)
    place = SimpleNamespace(relative_path="__0_0.distcp", offset=3, length=len(whole))
    refused = 0
    for position in range(len(whole)):
        content = bytearray(b"abc" + whole + b"the next one")
        content[3 + position] ^= 1 << dice.randrange(8)
        try:
            found = read_part(io.BytesIO(content), place)
        except DamagedCheckpoint:
            refused += 1
        else:
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), position
    assert refused > tensor.nbytes, "each of the tensor's own bytes is covered"


def test_a_read_that_fails_states_what_the_file_system_reported() -> None:
    """Torch converts the error to an AttributeError, which would be a traceback."""
    archive = io.BytesIO()
    torch.save(torch.ones(1000), archive)

    class Failing(io.BytesIO):
        def readinto(self, buffer: Any) -> int:
            if len(memoryview(buffer)) == 4000:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(buffer)

    with pytest.raises(OSError, match="Input/output error"):
        read_part(
            Failing(archive.getvalue()),
            SimpleNamespace(relative_path="a", offset=0, length=len(archive.getvalue())),
        )


@pytest.mark.parametrize("older", [False, True], ids=["XXH3", "CRC-32"])
def test_a_flipped_bit_in_any_tensor_is_found_while_an_engine_reads(
    tmp_path: Path, older: bool
) -> None:
    """Tensors are compared in parallel to reading: faults of the first and of the last tensor are
    reported.
    """
    written = {f"weight_{number}": torch.full((300, 40), float(number)) for number in range(6)}
    step = save_weights(tmp_path, written.items(), RunConfig(), Progress(1, 1, 1), "")
    assert marked(step)
    if older:
        (step / PARTS).unlink()
    found = {name: torch.zeros(300, 40) for name in written}
    for place in read_metadata(step / ".metadata").storage_data.values():
        file, position = step / place.relative_path, place.offset + place.length // 2
        flip(file, position)
        with pytest.raises(
            CheckpointException,
            match=f"DamagedCheckpoint: {file.name}: the bytes do not match their checksum",
        ):
            load(found, storage_reader=CheckedReader(step), no_dist=True)
        flip(file, position)
    load(found, storage_reader=CheckedReader(step), no_dist=True)
    assert same(found, written)
    flip(step / PARTS, 70) if not older else None
    with (
        contextlib.nullcontext()
        if older
        else pytest.raises(CheckpointException, match="do not match their checksum")
    ):
        load(found, storage_reader=CheckedReader(step), no_dist=True)


def marked(step: Path) -> bool:
    """Return True if every tensor has a hash."""
    places = {
        (place.relative_path, str(place.offset))
        for place in read_metadata(step / ".metadata").storage_data.values()
    }
    return places == {(name, begin) for name, marks in parts_of(step).items() for begin in marks}


def test_a_flipped_bit_is_named_and_the_next_good_checkpoint_taken(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is found while the engine reads. The engine then loads the earlier checkpoint, and
    the run equals an undamaged one.
    """
    pretrain()
    expected, last = losses(pretrain.run_dir), weights(pretrain.run_dir)
    newest = pretrain.checkpoints / "step_00000012"
    weight = "decoder.layers.0.mlp.gate_up"
    place = next(
        place
        for index, place in read_metadata(newest / ".metadata").storage_data.items()
        if index.fqn == weight
    )
    file = newest / place.relative_path
    flip(file, place.offset + place.length // 2)
    damaged = file.read_bytes()
    with pytest.raises(
        DamagedCheckpoint, match=f"step_00000012 is damaged: {weight}: {file.name}: "
    ):
        weights(pretrain.run_dir)
    (pretrain.run_dir / "progress.json").unlink()  # otherwise the run is complete and reads no file
    monkeypatch.setattr("fem_megatron.megatron.model.start", None)
    assert f"{newest} is damaged: {file.name}: " in pretrain("checkpoint.keep_last=1")
    assert "step_00000008 at step 8" in pretrain.out
    assert losses(pretrain.run_dir) == expected and same(weights(pretrain.run_dir), last)
    assert steps(pretrain) == ["damaged_step_00000012", "latest", "step_00000012"]
    assert (pretrain.checkpoints / "damaged_step_00000012" / file.name).read_bytes() == damaged


def test_a_start_without_a_checkpoint_after_one_that_was_damaged_draws_its_weights(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that was created for the checkpoint has no weights and is replaced by another."""
    pretrain("train.steps=4")
    expected = losses(pretrain.run_dir)
    (pretrain.run_dir / "progress.json").unlink()
    flip(pretrain.checkpoints / "step_00000004" / "__0_1.distcp", 400_000)
    monkeypatch.setattr(Checkpoints, "_newest", lambda self: newest_good(self.folder, self.damaged))
    pretrain("train.steps=4")
    assert "step_00000004 is damaged" in pretrain.out and losses(pretrain.run_dir) == expected


@pytest.mark.slow
def test_two_ranks_agree_on_a_flipped_bit(
    pretrain: Command, settings: list[str], tmp_path: Path
) -> None:
    """If one rank finds the fault in its tensors, both skip the checkpoint. Uses DeepSpeed's
    engine, which reads in parts.
    """
    arguments = [DEMO, *settings, *TP2, "engine.name=deepspeed"]
    assert ended(2, arguments, tmp_path / "first")[0] == [0, 0]
    expected = losses(pretrain.run_dir)
    flip(pretrain.checkpoints / "step_00000012" / "__1_0.distcp", 100_000)
    (pretrain.run_dir / "progress.json").unlink()
    codes, output = ended(2, arguments, tmp_path / "second")
    assert codes == [0, 0], output
    assert "step_00000012 is damaged: __1_0.distcp: " in output[0]
    assert "step_00000008 at step 8" in output[0]
    assert losses(pretrain.run_dir) == expected


@pytest.mark.parametrize(
    "fault", ["a bit is flipped", pytest.param("a file is missing", marks=pytest.mark.slow)]
)
def test_no_run_starts_anew_over_damaged_checkpoints(pretrain: Command, fault: str) -> None:
    """A temporary fault of the file system destroys no data: the start is refused, files are
    unchanged, and a later start continues.
    """
    pretrain("train.steps=8", "optimizer.schedule=constant")
    (pretrain.run_dir / "progress.json").unlink()
    before = steps(pretrain)
    for step in pretrain.checkpoints.glob("step_*"):
        shutil.copytree(step, pretrain.run_dir / "kept" / step.name)
        (step / "common.pt").unlink() if fault == "a file is missing" else flip(
            step / "__0_1.distcp", 400_000
        )
    for _ in range(2):
        output = pretrain.refused(
            "checkpoint.keep_last=1", "optimizer.schedule=constant", "train.steps=10", code=1
        )
        assert output.startswith("pretrain: error: no checkpoint in ")
        assert "checkpoint.load" in output and "run_dir" in output
        assert steps(pretrain) == before
    shutil.copytree(pretrain.run_dir / "kept", pretrain.checkpoints, dirs_exist_ok=True)
    assert "step_00000008 at step 8" in pretrain("train.steps=10", "optimizer.schedule=constant")


def test_what_its_run_deletes_while_it_is_inspected_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = save_weights(tmp_path, [("weight", torch.ones(3))], RunConfig(), Progress(1, 1, 1), "")
    there = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: there(path) and path.unlink() is None)
    assert str(damage(step)).endswith(" is missing")


def test_keep_last_deletes_no_damaged_checkpoint(pretrain: Command) -> None:
    pretrain("train.steps=8", "optimizer.schedule=constant")
    (pretrain.checkpoints / "step_00000004" / "common.pt").unlink()
    pretrain("checkpoint.keep_last=1", "optimizer.schedule=constant")
    assert steps(pretrain) == ["damaged_step_00000004", "latest", "step_00000012"]


# --- full file systems ----------------------------------------------------------------------------


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the file size like ``ulimit -f`` in this process and its children: writes are cut
    short, as on a full disk.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failed(run_dir: Path, step: str) -> None:
    """Check that progress.json reports a failure at this checkpoint, and that no part of the
    checkpoint remains.
    """
    report = json.loads((run_dir / "progress.json").read_text())
    assert report["state"] == "failed" and f"{step} cannot be written: " in report["message"]
    assert not [path.name for path in (run_dir / "checkpoints").iterdir() if step in path.name]


EACH_WAY = [
    "checkpoint.async_save=false",
    pytest.param("checkpoint.async_save=true", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("how", EACH_WAY)
def test_a_checkpoint_that_the_disk_does_not_take_is_one_line(pretrain: Command, how: str) -> None:
    pretrain("train.steps=4", "optimizer.schedule=constant")
    with largest_file(LARGER_THAN_METADATA):
        pretrain(how, "optimizer.schedule=constant", code=1)
    step = pretrain.checkpoints / "step_00000008"
    assert re.fullmatch(
        rf"pretrain: error: checkpoint {step} cannot be written: File too large: "
        rf"'{step.parent}/\.writing_{step.name}/\S+\.distcp' \(rank 0\)\n",
        pretrain.err,
    )
    failed(pretrain.run_dir, step.name)
    assert "step_00000004 at step 4" in pretrain(how, "optimizer.schedule=constant")


@pytest.mark.parametrize("how", EACH_WAY)
def test_training_continues_over_a_save_that_fails(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Training continues bit for bit for ``max_unsaved_steps`` steps, but not after a failure of
    the last save or of one at a signal.
    """
    pretrain(*QUIET, "checkpoint.interval=0", f"run_dir={pretrain.run_dir}_whole")
    saves = Trainer._save
    fails = {6, 8, 10}
    alerts = list[str]()
    monkeypatch.setattr(
        Console, "on_alert", lambda ours, title, text: alerts.append(f"{title}: {text}")
    )

    def save(trainer: Trainer, *, needed: bool) -> None:
        with (
            largest_file(LARGER_THAN_METADATA)
            if trainer.progress.step in fails
            else contextlib.nullcontext()
        ):
            saves(trainer, needed=needed)
            trainer.checkpoints.complete(blocking=True, needed=needed)

    monkeypatch.setattr(Trainer, "_save", save)
    limited = (*QUIET, how, "checkpoint.interval=2")
    pretrain(*limited, "checkpoint.max_unsaved_steps=6")
    for number in fails:
        report = re.compile(
            rf"step_{number:08d} cannot be written: File too large: \S+ \(rank 0\); "
            rf"training continues, {number - 4} steps are not saved"
        )
        assert len(report.findall(pretrain.out)) == len(list(filter(report.search, alerts))) == 1
    whole = pretrain.run_dir.with_name(f"{pretrain.run_dir.name}_whole")
    assert losses(pretrain.run_dir) == losses(whole)
    assert same(weights(pretrain.run_dir), weights(whole))
    shutil.rmtree(pretrain.run_dir)
    output = pretrain.refused(*limited, "checkpoint.max_unsaved_steps=5", code=1)
    assert re.search(r"step_00000010 cannot be written: File too large: \S+ \(rank 0\)\n$", output)
    shutil.rmtree(pretrain.run_dir)
    fails.add(12)
    output = pretrain.refused(*limited, "checkpoint.max_unsaved_steps=100", code=1)
    assert re.search(r"step_00000012 cannot be written: File too large: \S+ \(rank 0\)\n$", output)
    assert alerts[-1] == "training failed: " + output.removeprefix("pretrain: error: ").rstrip()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder on a separate file system on which `fill` leaves a given number of bytes."""
    folder = tmp_path / "full"
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("free_bytes", ["for nothing", "for the tensors alone"])
def test_a_full_file_system_under_two_ranks(
    full: Path, settings: list[str], tmp_path: Path, free_bytes: str
) -> None:
    """No rank hangs or raises, whichever meets the error: tensors belong to both ranks, .metadata
    only to the first.
    """
    run_dir = full / "run"
    # The free space for the index does not matter for this test.
    index = f"data.index_cache={tmp_path / 'index'}"
    arguments = [DEMO, f"run_dir={run_dir}", *settings[1:], "optimizer.schedule=constant", index]
    assert ended(2, [*arguments, "train.steps=4"], tmp_path / "first")[0] == [0, 0]
    tensors = sum(
        path.stat().st_size for path in (run_dir / "checkpoints" / "step_00000004").glob("*.distcp")
    )
    fill(full, 200_000 if free_bytes == "for nothing" else tensors + 60_000)
    codes, output = ended(2, arguments, tmp_path / "second")
    assert codes == [1, 1]
    for text in output:
        failures = re.findall(r"cannot be written: (?:\S+: )?No space left on device", text)
        assert len(failures) == 1 and "Traceback" not in text, text
    failed(run_dir, "step_00000008")
    (full / "filling").unlink()
    assert ended(2, arguments, tmp_path / "third")[0] == [0, 0]


def fill(folder: Path, left: int) -> None:
    """Fill a file system until ``left`` bytes remain."""
    free = os.statvfs(folder)
    with (folder / "filling").open("wb") as filling, contextlib.suppress(OSError):
        filling.write(bytes(free.f_bavail * free.f_frsize - left))


def test_a_full_file_system_has_space_for_the_last_word(full: Path, pretrain: Command) -> None:
    """The final state is written although no byte is free while the run writes its metrics."""
    run_dir = full / "run"
    pretrain(f"run_dir={run_dir}", "train.steps=4")
    fill(full, 0)
    output = pretrain.refused(f"run_dir={run_dir}", code=1)
    assert "No space left on device" in output
    assert json.loads((run_dir / "progress.json").read_text())["state"] == "failed"


# --- killed writers -------------------------------------------------------------------------------


def _pretrain_with_writers_that_hang(arguments: list[str], pids: Path) -> None:
    """Train with writers that stop before a file is synced, and that store their process ids in a
    folder.
    """
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            (pids / str(os.getpid())).touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        sync(descriptor)

    vars(os)["fsync"] = fsync
    main(arguments)


def test_a_writer_that_hangs_does_not_hold_the_run_directory(
    pretrain: Command, settings: list[str], tmp_path: Path
) -> None:
    """The rank is killed while its writer is stopped before the sync; the incomplete files are
    removed, whatever the step.
    """
    pids = tmp_path / "pids"
    pids.mkdir()
    try:
        with forked(
            1,
            _pretrain_with_writers_that_hang,
            [DEMO, *settings, "train.steps=4"],
            pids,
            output=tmp_path / "out",
        ) as ranks:
            wait_until(lambda: any(pids.iterdir()), ranks)
            assert list(pretrain.checkpoints.glob(".writing_*"))
        # Stopped processes release the lock only when they are killed.
        wait_for_lock(pretrain.run_dir)
        pretrain("train.steps=5", "checkpoint.interval=0")
        assert steps(pretrain) == ["latest", "step_00000005"]
    finally:
        for pid in pids.iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.name), signal.SIGKILL)


# --- hashes and foreign files ---------------------------------------------------------------------


def test_every_file_and_every_tensor_has_a_hash(
    pretrain: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save also forks no process: a fork copies the page tables of all memory of a rank."""
    monkeypatch.delattr(os, "fork")
    pretrain("train.steps=4")
    step = pretrain.checkpoints / "step_00000004"
    hashed = set(json.loads((step / MANIFEST).read_text())["sha256"])
    assert {path.name for path in step.iterdir() if path.suffix != ".distcp"} == {*hashed, MANIFEST}
    assert marked(step)


def test_a_writer_ends_with_its_rank() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_rank_with_a_writer, args=(theirs,))
    rank.start()
    theirs.close()
    assert ours.recv()
    rank.kill()
    rank.join()
    assert ours.poll(PATIENCE / 2), "nobody holds the other end any more"
    with pytest.raises(EOFError):
        ours.recv()
