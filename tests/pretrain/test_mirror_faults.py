"""Tests of runs with failing mirrors: damage on either side, an unavailable store, kills of the run
and of its sender. A real S3 server.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from pretrain.checkpoint.folder import MANIFEST, damage, damaged_files, newest_first
from pretrain.checkpoint.reader import read_metadata
from tests.pretrain.conftest import DEMO, SMALL, Command, data_of, flip
from tests.pretrain.stores import Store, refused
from tests.pretrain.test_mirror import cut, flipped, mirror_of
from tests.ranks import _pretrain, forked, losses, wait_until
from tools.checkpoint.__main__ import main


@pytest.mark.slow
def test_damage_at_either_place_is_named_and_the_other_one_s_checkpoint_taken(
    pretrain: Command, tmp_path: Path, entered: Store
) -> None:
    """A damaged newest checkpoint in the mirror is skipped; a damaged local one is replaced from
    the mirror.
    """
    store, mirrored = entered, mirror_of(entered)
    for steps in (12, 16):
        pretrain(*mirrored, f"train.steps={steps}")
    store.flip("run/step_00000016/__0_0.distcp")
    shutil.rmtree(tmp_path / "run")
    pretrain(*mirrored, "train.steps=16")
    assert (
        "step_00000016 is damaged (__0_0.distcp does not match its hash); passing over it"
        in pretrain.out
    )
    assert "step_00000012 copied from" in pretrain.out
    # Damage that is found only when tensors are read: the mirror's copy equals the local one before
    # the damage.
    local = tmp_path / "run/checkpoints/step_00000016/__0_0.distcp"
    store_copy = local.read_bytes()
    flip(local, len(store_copy) // 2)
    (tmp_path / "run/progress.json").unlink()  # otherwise the run is complete and reads no file
    assert f"{local.parent} is damaged: __0_0.distcp: " in pretrain(*mirrored, "train.steps=16")
    assert "step_00000016 copied from s3://" in pretrain.out
    assert "step_00000016 at step 16" in pretrain.out and local.read_bytes() == store_copy
    assert main(["verify", str(tmp_path)]) == 0


@pytest.mark.slow
def test_a_dead_store_ends_a_run_when_too_much_would_be_lost_and_not_before(
    pretrain: Command, tmp_path: Path, entered: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = f"checkpoint.mirror={entered.url}"
    monkeypatch.setattr("pretrain.checkpoint.mirroring._FETCH_PATIENCE", 1.0)
    pretrain(mirror, "train.steps=4")
    entered.proxy.fault = lambda client, data: None
    limited = (mirror, "checkpoint.interval=2", "checkpoint.max_unsaved_steps=5")
    pretrain("train.steps=40", *limited, code=1)
    assert "it may contain a newer checkpoint than" in pretrain.out
    assert "step_00000004 at step 4" in pretrain.out
    assert "is 6 steps behind (checkpoint.max_unsaved_steps = 5)" in pretrain.err
    assert pretrain.err.count("\n") == 1
    assert max(losses(tmp_path / "run")) == 10
    assert damage(tmp_path / "run/checkpoints/step_00000010") is None
    shutil.rmtree(tmp_path / "run")
    assert "cannot be read, and" in pretrain.refused(mirror, code=1)
    assert not list((tmp_path / "run").glob("checkpoints/step_*"))


def slowly(environ: dict[str, str], arguments: list[str]) -> None:
    """Run ``python -m pretrain`` on this rank with half a second per step, so that a sender can
    work in between.
    """
    os.environ.update(environ)
    _pretrain(arguments, {0: 0.25})


def newest_complete(folder: Path, store: Store) -> int:
    """Return the step of the newest complete checkpoint, local or mirrored, with every byte
    verified; 0 if none is.
    """
    here = [
        path.name
        for path in newest_first(folder)
        if damage(path) is None and not [*damaged_files(path, lambda count: None)]
    ]
    there = [name.split("/")[1] for name in store.names() if name.endswith(MANIFEST)]
    return max((int(name.removeprefix("step_")) for name in (*here, *there)), default=0)


@pytest.mark.slow
def test_twenty_kills_while_it_saves_and_sends_cost_no_bit(
    tiny_data: Path, tmp_path: Path, entered: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kills of the rank and of its sender, alternately during a save and an upload, with a failing
    store and damaged checkpoints.

    Each attempt continues from the newest complete checkpoint of both sides, and reports it.
    """
    store = entered
    dice = random.Random(20)
    sending = threading.Event()
    output = ""
    settings = [*data_of(tiny_data), *SMALL, "train.steps=300"]
    mirrored = [
        f"run_dir={tmp_path / 'run'}",
        *settings,
        f"checkpoint.mirror={store.url}",
        "checkpoint.mirror_keep_last=3",
    ]

    def failing(client: socket.socket, data: bytes) -> bytes | None:
        if len(data) < 20_000:
            return data
        sending.set()
        changed: bytes | None = dice.choice(
            [flipped, cut, refused, *[lambda client, data: data] * 45]
        )(client, data)
        return changed

    folder, harmed = tmp_path / "run/checkpoints", False
    for number in range(20):
        expected, before = newest_complete(folder, store), set(folder.glob("step_*"))
        arguments = [
            DEMO,
            *mirrored,
            "checkpoint.interval=1",
            f"checkpoint.async_save={str(number % 4 < 2).lower()}",
        ]
        store.proxy.fault = failing
        with forked(
            1, slowly, store.environ, arguments, output=tmp_path / f"said{number}"
        ) as ranks:
            wait_until(lambda: bool({*folder.glob("step_*")} - before), ranks)  # noqa: B023
            if number % 5 == 3:  # the folder of the next run will be lost
                wait_until(lambda: any(name.endswith(MANIFEST) for name in store.names()), ranks)
            sending.clear()
            wait_until(
                sending.is_set if number % 2 else lambda: any(folder.glob(".writing_*")),
                ranks,
                nap=0.0,
            )
            time.sleep(dice.random() / 20)
            # Stop all of them first: a process would report that another one has ended before it.
            rank = psutil.Process(ranks[0].pid)
            rank.suspend()
            family = [rank, *rank.children(recursive=True)]
            for act in (psutil.Process.suspend, psutil.Process.kill):
                for process in family:
                    with contextlib.suppress(psutil.NoSuchProcess):  # it may just have ended
                        act(process)
            ranks[0].join()
        output = (tmp_path / f"said{number}.0").read_text()
        assert (
            "Traceback" not in output
            and f"step_{expected:08d} at step {expected}\n" * bool(expected) in output
        ), output
        assert ("resumed from" in output) is bool(expected) and (
            "is damaged" in output
        ) is harmed, output
        assert "copied from" in output or number % 5 or not number, output
        harmed = number % 5 == 2
        if harmed:  # flip a bit of a weight
            newest = newest_first(folder)[0]
            place = max(
                read_metadata(newest / ".metadata").storage_data.values(),
                key=lambda place: place.length,
            )
            flip(newest / place.relative_path, place.offset + place.length // 2)
        elif number % 5 == 4:
            shutil.rmtree(folder)
    store.proxy.fault = lambda client, data: data
    pretrain = Command(mirrored, capsys)
    pretrain("checkpoint.interval=100")
    Command([f"run_dir={tmp_path / 'whole'}", *settings], capsys)()
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert store.run("verify", store.url)[0] == 0 and main(["verify", str(tmp_path / "run")]) == 0
