"""Tests of mirrored checkpoints with a real S3 server behind a proxy that simulates failures of
networks and stores.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pretrain.checkpoint.folder import HASHES, MANIFEST, damage, hash_of
from tests.pretrain.conftest import QUIET, Command, edit, flip
from tests.pretrain.stores import ROOT, SECRET, Store, refused
from tests.ranks import PATIENCE, losses
from tools.checkpoint.__main__ import main
from tools.checkpoint.mirror import Mirror


def write_step(run_dir: Path, step: int, size: int = 300_000, files: int = 5) -> Path:
    """Write a folder like a checkpoint: files of random bytes and a manifest."""
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    dice = random.Random(step)
    sizes = {f"__{number}_0.distcp": size // files + number for number in range(files)}
    for name, bytes_ in sizes.items():
        (folder / name).write_bytes(dice.randbytes(bytes_))
    progress = {"step": step, "consumed_samples": step, "order_samples": 100}
    config = {"model": {"hidden_size": 8}, "data": {"seq_length": 8}}
    (folder / MANIFEST).write_text(
        json.dumps(
            {"progress": progress, "data": "key", "config": config, "files": sizes, "sha256": {}}
        )
    )
    assert damage(folder) is None
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST}


def mirror_of(store: Store) -> list[str]:
    """Return the settings of a run with the store as its mirror."""
    return [
        *QUIET,
        "optimizer.schedule=constant",
        f"checkpoint.mirror={store.url}",
        "checkpoint.mirror_interval=8",
        "checkpoint.mirror_keep_last=2",
    ]


def test_a_run_continues_from_its_mirror_where_its_own_folder_is_lost(
    pretrain: Command, tmp_path: Path, entered: Store
) -> None:
    """The run continues bit for bit like one that never lost its folder."""
    store, mirrored = entered, mirror_of(entered)
    pretrain(
        "train.steps=16", "checkpoint.interval=0", f"run_dir={tmp_path / 'whole'}", *mirrored[:3]
    )
    pretrain(*mirrored)
    assert {name.split("/")[1] for name in store.names()} <= {
        "step_00000008",
        "step_00000012",
        "latest",
        "run",
    }
    assert "run/step_00000012/manifest.json" in store.names()
    assert SECRET not in "".join(path.read_text() for path in (tmp_path / "run").rglob("*.json*"))
    shutil.rmtree(tmp_path / "run")
    assert "checkpoint step_00000012 copied from s3://" in pretrain(*mirrored, "train.steps=16")
    assert "step_00000012 at step 12" in pretrain.out
    assert losses(tmp_path / "run") == losses(tmp_path / "whole"), "those before the loss, too"


@pytest.mark.parametrize(
    "kills", [2, *(pytest.param(kills, marks=pytest.mark.slow) for kills in (6, 20))]
)
def test_kills_in_the_middle_leave_nothing_that_counts(
    tmp_path: Path, store: Store, kills: int
) -> None:
    """Each kill is a little later after the start of sending; a checkpoint with a manifest is
    complete.
    """
    write_step(tmp_path, 1)
    assert store.run("mirror", tmp_path, store.url)[0] == 0
    sending = threading.Event()

    def failing(client: socket.socket, data: bytes) -> bytes:
        sending.set() if len(data) >= 20_000 else None
        return data

    store.proxy.fault = failing
    newest = write_step(tmp_path, 2, size=min(kills, 6) * 10_000_000, files=12)
    for number in range(kills):
        sending.clear()
        process = store.start("mirror", tmp_path, store.url, stdout=subprocess.DEVNULL)
        while not sending.wait(0.01) and process.poll() is None:
            pass  # all checkpoints may have been sent before the last kills
        time.sleep(number / kills)
        process.kill()
        process.wait()
        process.stdin and process.stdin.close()
    assert store.run("verify", store.url)[0] == 0
    assert store.run("mirror", tmp_path, store.url)[0] == 0
    assert store.run("fetch", tmp_path / "new", store.url)[0] == 0
    assert content(tmp_path / "new/checkpoints" / newest.name) == content(newest)
    assert not list((tmp_path / "checkpoints").glob(".mirroring*"))


def flipped(client: socket.socket, data: bytes) -> bytes:
    """Change a byte of a large body in transit."""
    return data if len(data) < 20_000 else data[:10_000] + bytes([data[10_000] ^ 1]) + data[10_001:]


def cut(client: socket.socket, data: bytes) -> bytes | None:
    return data if len(data) < 20_000 else None


FAULTS = [flipped, *(pytest.param(fault, marks=pytest.mark.slow) for fault in (refused, cut))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_comes_to_harm_on_its_way_is_sent_again_and_never_counts(
    tmp_path: Path, store: Store, fault: Any
) -> None:
    step, tried = write_step(tmp_path, 4), threading.Event()

    def faulty(client: socket.socket, data: bytes) -> bytes | None:
        tried.set() if len(data) >= 20_000 or fault is refused else None
        changed: bytes | None = fault(client, data)
        return changed

    store.proxy.fault = faulty
    code, output = store.run("mirror", tmp_path, store.url, "--patience", 0.3)
    assert (
        code == 1
        and "the local copy is complete" in output
        and not [name for name in store.names() if name.endswith(MANIFEST)]
    ), output
    tried.clear()
    following = store.start("mirror", tmp_path, store.url, "--follow")
    assert tried.wait(PATIENCE)
    # The run keeps only its last checkpoints, so the one to send is now another one.
    shutil.rmtree(step)
    step = write_step(tmp_path, 5)
    store.proxy.fault = lambda client, data: data
    output, _ = following.communicate(timeout=PATIENCE)
    assert following.returncode == 0 and f"checkpoint {step.name} is in {store.url}" in output
    assert store.run("verify", store.url)[0] == 0


# Answer of the store -> exit code of the command: 2 where the same command would fail again in the
# same way.
ANSWERS = {
    "403 AccessDenied": 2,
    "400 ExpiredToken": 2,
    "403 SignatureDoesNotMatch": 2,
    "403 RequestTimeTooSkewed": 2,
    "404 NoSuchBucket": 2,
    "429 TooManyRequests": 1,
    "500 InternalError": 1,
    "503 SlowDown": 1,
}


def test_each_answer_of_a_store_is_one_line_and_its_exit_code(tmp_path: Path, store: Store) -> None:
    write_step(tmp_path, 1)

    def answer(client: socket.socket, data: bytes) -> bytes | None:
        for report in ANSWERS:
            status, code = report.split()
            if code.encode() in data:
                body = f"<Error><Code>{code}</Code><Message>they say {code}</Message></Error>" * (
                    not data.startswith(b"HEAD")
                )
                client.sendall(
                    f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\nConnection:"
                    f" close\r\n\r\n{body}".encode()
                )
                return None
        return data

    store.proxy.fault = answer
    for report, wanted in ANSWERS.items():
        name = report.split()[1]
        url = f"s3://{store.name}/{name}"
        code, _, output = store.run_tool("mirror", tmp_path, url, "--patience", 0)
        assert code == wanted and output.count("\n") == 1, output
        assert f"is not in {url}: " in output and f"they say {name}" in output


def test_what_a_place_keeps_otherwise_than_it_was_sent_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 compares a checksum itself; not every store does."""
    place = Mirror(str(tmp_path / "mirror"))
    (tmp_path / "file").write_bytes(b"content")
    opened = place.fs.open

    def forgetful(path: str, mode: str = "rb", **given: Any) -> Any:
        file = opened(path, mode, **given)
        if mode == "wb":
            write = file.write
            file.write = lambda block: write(block[:-1])
        return file

    assert place.put(tmp_path / "file", "whole")
    monkeypatch.setattr(place.fs, "open", forgetful)
    with pytest.raises(OSError, match="cut differs from the file that was sent"):
        place.put(tmp_path / "file", "cut")


def test_a_bucket_that_vanishes_and_comes_back_has_all_again(tmp_path: Path, store: Store) -> None:
    write_step(tmp_path, 1)
    assert store.run("mirror", tmp_path, store.url)[0] == 0
    for name in store.names():
        store.client.delete_object(Bucket=store.name, Key=name)
    store.client.delete_bucket(Bucket=store.name)
    code, output = store.run("mirror", tmp_path, store.url, "--patience", 0.3)
    assert code == 2
    assert f"the newest checkpoint of {tmp_path} is not in" in output
    assert "Traceback" not in output
    store.client.create_bucket(Bucket=store.name)
    assert store.run("mirror", tmp_path, store.url)[0] == 0
    assert store.run("verify", store.url)[0] == 0


def test_files_of_a_step_that_was_written_again_are_sent_again(
    tmp_path: Path, store: Store
) -> None:
    """An upload fails after its first files, and the run writes the step again with other weights
    and equal sizes: no file of the first version may remain.
    """
    step = write_step(tmp_path, 5)

    def full(client: socket.socket, data: bytes) -> bytes | None:
        if b"__4_0.distcp" not in data:
            return data
        refused(client, data)
        return None

    store.proxy.fault = full
    assert store.run("mirror", tmp_path, store.url, "--patience", 0.3)[0] == 1
    assert "__0_0.distcp" in json.loads((tmp_path / "mirror.json").read_text())["sent"][step.name]
    store.proxy.fault = lambda client, data: data
    flip(step / "__0_0.distcp", 7)
    edit(step / MANIFEST, lambda manifest: manifest["progress"].update(consumed_samples=6))
    assert store.run("mirror", tmp_path, store.url)[0] == 0
    assert store.run("fetch", tmp_path / "new", store.url)[0] == 0
    assert content(tmp_path / "new/checkpoints" / step.name) == content(step)


def test_another_run_s_place_and_a_damaged_copy_are_refused(tmp_path: Path, store: Store) -> None:
    good, step = (write_step(tmp_path / "one", number) for number in (3, 4))
    shutil.move(step, tmp_path / "later")
    assert store.run("mirror", tmp_path / "one", store.url)[0] == 0
    shutil.move(tmp_path / "later", step)
    assert store.run("mirror", tmp_path / "one", store.url)[0] == 0
    other = write_step(tmp_path / "two", 9)
    edit(other / MANIFEST, lambda manifest: manifest.update(data="other"))
    code, output = store.run("mirror", tmp_path / "two", store.url)
    assert code == 2 and "belongs to another run" in output and output.count("\n") == 1
    store.flip(f"run/{step.name}/__1_0.distcp")
    code, output = store.run("verify", store.url)
    assert code == 1 and f"{step.name}: damaged: __1_0.distcp does not match its hash" in output
    code, output = store.run("fetch", tmp_path / "new", store.url)
    assert code == 0
    assert (
        f"{step.name} is damaged (__1_0.distcp does not match its hash); passing over it" in output
    )
    assert content(tmp_path / "new/checkpoints" / good.name) == content(good)
    assert main(["mirror", str(tmp_path / "one"), "s3://id:password@bucket/x"]) == 2
    assert main(["mirror", str(tmp_path / "none"), str(tmp_path / "m")]) == 2
    assert main(["fetch", str(tmp_path / "none"), str(tmp_path / "nowhere")]) == 2
    before = content(step)
    # The command would overwrite its own input.
    for place in (tmp_path / "one/checkpoints", tmp_path):
        assert (
            main(["mirror", str(tmp_path / "one"), str(place)])
            == main(["fetch", str(tmp_path / "one"), place.as_uri()])
            == 2
        )
    assert content(step) == before


def test_what_came_to_harm_before_it_is_sent_is_not_sent(tmp_path: Path, store: Store) -> None:
    good, step = write_step(tmp_path, 4), write_step(tmp_path, 5)
    hashes = {path.name: hash_of(path) for path in step.glob("*.distcp")}
    edit(step / MANIFEST, lambda manifest: manifest.update({HASHES: hashes}))
    flip(step / "__2_0.distcp", 7)
    code, output = store.run("mirror", tmp_path, store.url)
    assert code == 1
    assert (
        f"{step}: __2_0.distcp does not match the hash taken while it was written; it is not"
        " sent" in output
    )
    assert output.splitlines()[-1].endswith(
        f"{step.name} is damaged in the run directory and was not sent to {store.url}"
    )
    assert {name.split("/")[1] for name in store.names()} == {
        good.name,
        "latest",
        "run",
    }
    assert store.run("verify", store.url)[0] == 0


WITH_PEAK = """
import sys
from tools.checkpoint.__main__ import main
code = main(sys.argv[1:])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
raise SystemExit(code)
"""


@pytest.mark.slow
def test_the_sender_s_memory_does_not_follow_the_size(tmp_path: Path, store: Store) -> None:
    """For four files at a time a few blocks of 8 MiB are in memory: read, buffered, signed, sent,
    read back.
    """
    peaks = []
    for step, size in ((1, 10_000), (2, 320_000_000)):
        write_step(tmp_path, step, size=size, files=4)
        environ = {**os.environ, **store.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", WITH_PEAK, "mirror", str(tmp_path), store.url]
        output = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=True
        ).stdout
        peaks.append(int(output.split("VmHWM:")[1].split()[0]) * 1024)
    assert peaks[1] - peaks[0] < 220e6, peaks  # 150e6 was observed; entire files would be 320e6


def test_a_run_may_delete_what_is_being_sent(tmp_path: Path, store: Store) -> None:
    step = write_step(tmp_path, 5, size=20_000_000)
    expected = content(step)
    stalled = threading.Event()

    def stall(client: socket.socket, data: bytes) -> bytes:
        if len(data) > 20_000:
            stalled.set()
            time.sleep(0.05)
        return data

    store.proxy.fault = stall
    process = store.start("mirror", tmp_path, store.url)
    assert stalled.wait(PATIENCE)
    shutil.rmtree(step)
    store.proxy.fault = lambda client, data: data
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert store.run("fetch", tmp_path / "new", store.url)[0] == 0
    assert content(tmp_path / "new/checkpoints" / step.name) == expected


@pytest.mark.slow
def test_a_stall_of_half_a_minute_is_waited_out(tmp_path: Path, store: Store) -> None:
    write_step(tmp_path, 5)
    stalled = threading.Lock()

    def stall(client: socket.socket, data: bytes) -> bytes:
        if len(data) > 20_000 and stalled.acquire(blocking=False):
            time.sleep(30)
        return data

    store.proxy.fault = stall
    code, output = store.run("mirror", tmp_path, store.url)
    assert code == 0 and stalled.locked() and "trying again" not in output, output


def test_a_signal_ends_the_sender(tmp_path: Path, store: Store) -> None:
    step = write_step(tmp_path, 5)
    process = store.start("mirror", tmp_path, store.url, "--follow")
    assert process.stdout is not None
    assert f"checkpoint {step.name} is in" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 143 and "Traceback" not in output, output
