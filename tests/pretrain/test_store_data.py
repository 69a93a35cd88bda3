"""Tests of tokens from a store: the samples equal those of a local folder, with a real S3 server
and a proxy that simulates failures.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from pretrain import subprocesses
from pretrain.config import load_run
from pretrain.data import datasets
from pretrain.data.facts import check_contents, check_data
from pretrain.data.store_cache import CLIENT, local_prefix
from pretrain.data.store_client import BLOCK, blocks_of, may_keep, shares
from pretrain.data.store_reader import StoreReader
from pretrain.validate import prepare
from tests.one_process import megatron_of_one_process
from tests.pretrain.conftest import DEMO, SMALL, Command, data_of
from tests.pretrain.data_folder import write_folder, write_mask, write_pair
from tests.pretrain.jobs import datasets_of
from tests.pretrain.stores import SECRET, Store, bring_here, refused
from tests.ranks import PATIENCE, _pretrain, forked, losses, records, wait_until
from tools.tokens.__main__ import main as tokens

ALL = "data.store_cache_gb=1"
HALF = "data.store_cache_gb=0.0105"
NONE = "data.store_cache_gb=0"
MANY = ["train.global_batch_size=8", "train.steps=16"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with 12 MB of short documents, three times the sample in its manifest, and a
    loss mask of 6 MB.
    """
    dice = random.Random(1)
    folder = write_folder(
        tmp_path_factory.mktemp("large"),
        documents=[dice.choices(range(499), k=600) for _ in range(10_000)],
    )
    write_mask(folder, "train", dice.randbytes(6_000_000).translate(bytes((0, 1)) * 128))
    for name in ("valid.bin", "valid.idx", "test.bin", "test.idx"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def expected(
    large: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[float, float]]:
    """Losses of a run on the local folder."""
    folder = tmp_path_factory.mktemp("local")
    with forked(
        1,
        _pretrain,
        [DEMO, f"run_dir={folder}", *SMALL, *data_of(large, "train"), *MANY],
        {},
        output=folder / "said",
    ) as (rank,):
        rank.join(PATIENCE)
    assert len(losses(folder)) == 16
    return losses(folder)


class Requests:
    """Record of the requested ranges of .bin and .mask files, in order."""

    def __init__(self, store: Store) -> None:
        self.store, self.ranges = store, list[tuple[int, int]]()
        store.proxy.fault = self

    def __call__(self, client: socket.socket, data: bytes) -> bytes:
        for first, last in re.findall(
            rb"^GET \S+\.(?:bin|mask) HTTP.*?^range: bytes=(\d+)-(\d+)", data, re.I | re.S | re.M
        ):
            self.ranges.append((int(first), int(last) + 1))
        return data


@pytest.fixture
def here(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store with its variables in this process, which downloads the small files itself."""
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    bring_here(monkeypatch)
    return store


def trained(environ: dict[str, str], patience: float, arguments: list[str]) -> None:
    """Run ``python -m pretrain`` on this rank, which gives up on a store after ``patience``
    seconds.
    """
    from pretrain.data import store_reader

    os.environ.update(environ)
    vars(store_reader)["_PATIENCE"] = patience
    _pretrain(arguments, {})


def train(
    store: Store, run_dir: Path, *settings: str, ranks: int = 1, patience: float = 600.0
) -> tuple[list[int | None], str]:
    """Run a training and return (exit codes, output)."""
    arguments = [DEMO, f"run_dir={run_dir}", *SMALL, *settings]
    with forked(
        ranks, trained, store.environ, patience, arguments, output=run_dir.with_suffix(".said")
    ) as processes:
        for process in processes:
            process.join(PATIENCE)
        output = "".join(
            Path(f"{run_dir.with_suffix('.said')}.{rank}").read_text() for rank in range(ranks)
        )
        assert SECRET not in output
        return [process.exitcode for process in processes], output


@pytest.mark.slow
def test_two_ranks_and_a_blend_have_the_samples_of_the_folder(
    tiny_data: Path, tmp_path: Path, store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second source is a folder in both runs; only the prefix differs. Packed best-fit; the
    other tests use streams.

    The output of `tools.tokens` for a step differs only by prefixes and by ids, which are in the
    store.
    """
    url = store.upload(tiny_data)
    for place, run_dir in ((tiny_data, tmp_path / "local"), (url, tmp_path / "stored")):
        blend = [
            f"data.train=[{{prefix: {place}/train, weight: 3}}, {{prefix: {tiny_data}/valid}}]",
            f"data.valid.0.prefix={place}/valid",
        ]
        codes, output = train(
            store, run_dir, *blend, "data.test=[]", "data.packing=best_fit", ranks=2
        )
        assert codes == [0, 0], output
    assert losses(tmp_path / "stored") == losses(tmp_path / "local")
    valid = []
    for name in ("local", "stored"):
        lines = records(tmp_path / name)
        valid.append([line["valid_loss"] for line in lines if "valid_loss" in line])
    assert valid[0] == valid[1] and len(valid[0]) == 2
    pieces: list[list[dict[str, Any]]] = []
    for name in ("local", "stored"):
        (tmp_path / name).rename(tmp_path / f"moved_{name}")
        assert tokens([str(tmp_path / f"moved_{name}"), "--step", "9", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for row in rows:
            row["id"] = row["source"].startswith("/") and row["id"]
            row["source"] = Path(row["source"]).name
        pieces.append(rows)
    assert {row["source"] for row in pieces[1]} == {"train", "valid"}
    assert len({row["sample"] for row in pieces[1]}) == 4
    assert [
        {**row, "id": there["id"] and row["id"]} for row, there in zip(*pieces, strict=True)
    ] == pieces[1]


def damaged(prefix: Path) -> None:
    """Flip a byte in every block, and damage the table: its second half is missing, it ends within
    a hash, and some hashes belong to others.
    """
    content = bytearray(prefix.with_suffix(".bin").read_bytes())
    table = prefix.with_suffix(".bin.blocks")
    content[100::BLOCK] = bytes(byte ^ 1 for byte in content[100::BLOCK])
    prefix.with_suffix(".bin").write_bytes(content)
    hashes = bytearray(table.read_bytes())
    hashes[80:160] = hashes[160:240]
    table.write_bytes(hashes[: len(hashes) // 2 - 3])


@pytest.mark.slow
def test_the_losses_are_those_of_the_folder_whatever_is_kept(
    large: Path, tmp_path: Path, here: Store, expected: dict[int, tuple[float, float]]
) -> None:
    requests = Requests(here)
    url = here.upload(large)
    requested = list[int]()
    turns = [(HALF, None), (ALL, None), (ALL, damaged)]
    for number, (cache_bytes, damage) in enumerate(turns):
        cache = tmp_path / cache_bytes
        if damage:
            damage(Path(local_prefix(f"{url}/train", cache)))
        requests.ranges.clear()
        codes, output = train(
            here,
            tmp_path / f"run{number}",
            *data_of(url, "train"),
            *MANY,
            cache_bytes,
            f"data.store_cache={cache}",
        )
        assert codes == [0], output
        assert losses(tmp_path / f"run{number}") == expected
        # Without the requests for the manifest's sample.
        requested.append(len(requests.ranges) - 64 * (number < 2))
    half, full, anew = requested
    assert half > full > 0 and anew > 0


@pytest.mark.parametrize("gigabytes", [0.0135, pytest.param(1.0, marks=pytest.mark.slow)])
def test_what_is_kept_stays_within_its_bound(
    large: Path, tmp_path: Path, here: Store, gigabytes: float
) -> None:
    """Every byte is read twice. The second time the cache is used up to its limit; a third time
    with damage in it.
    """
    url, content = here.upload(large), (large / "train.bin").read_bytes()
    words = [
        *data_of(url, "train"),
        f"data.store_cache={tmp_path}",
        f"data.store_cache_gb={gigabytes}",
    ]
    config = load_run(DEMO, words)
    check_contents(check_data(config))
    requests, size = Requests(here), len(content)
    (allowed, _), count = shares([size, size // 2], int(gigabytes * 1e9)), blocks_of(size)
    for _ in range(2):
        requests.ranges.clear()
        reader = StoreReader(config)
        parts = [(0, start, min(100_000, size - start)) for start in range(0, size, 100_000)]
        with reader.planning():
            assert all(reader.read(part) == bytes(part[2]) for part in parts)
        assert b"".join(map(reader.read, parts)) == content
        assert not reader.requested and not reader.line
        requested = sum(end - start for start, end in requests.ranges)
        assert reader.read((0, 5, 70_000)) == content[5:70_005]  # a read outside the plan
        reader.close()
    kept = sum(
        min(BLOCK, size - number * BLOCK)
        for number in range(count)
        if may_keep(number, allowed, count)
    )
    assert requested == size - kept and abs(kept - allowed * BLOCK) < 4 * BLOCK
    held = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*/train.[bm]*"))
    assert kept <= held <= gigabytes * 1e9
    assert 0 < allowed < count or gigabytes == 1
    damaged(Path(local_prefix(f"{url}/train", tmp_path)))
    reader = StoreReader(config)
    with reader.planning():
        assert all(reader.read(part) == bytes(part[2]) for part in parts)
    assert b"".join(map(reader.read, parts)) == content
    reader.close()


class Dying(Requests):
    """A store that responds to a number of range requests, and again when ``noticed`` is true."""

    def __init__(self, store: Store, answers: int, noticed: Callable[[], bool]) -> None:
        super().__init__(store)
        self.answers = answers
        self.noticed = noticed
        self.died = False

    def __call__(self, client: socket.socket, data: bytes) -> bytes | None:  # type: ignore[override]
        super().__call__(client, data)
        self.died = self.died or len(self.ranges) >= self.answers
        if self.died and not self.noticed():
            refused(client, data)
            return None
        return data


@pytest.mark.slow
def test_a_store_may_be_away_for_a_while(
    large: Path, tmp_path: Path, store: Store, expected: dict[int, tuple[float, float]]
) -> None:
    url = store.upload(large)
    dying = Dying(
        store, 2 * (64 + 80), lambda: "; trying again" in (tmp_path / "run.said.0").read_text()
    )
    codes, output = train(store, tmp_path / "run", *data_of(url, "train"), *MANY, NONE)
    assert codes == [0], output
    assert losses(tmp_path / "run") == expected
    assert dying.died and output.count("; trying again") == output.count("is read again") >= 1


@pytest.mark.slow
def test_a_run_continues_where_its_store_died(
    large: Path, tmp_path: Path, store: Store, expected: dict[int, tuple[float, float]]
) -> None:
    url = store.upload(large)
    settings = (*data_of(url, "train"), *MANY, NONE, "checkpoint.interval=2")
    Dying(store, 2 * (64 + 90), lambda: False)
    codes, output = train(store, tmp_path / "run", *settings, patience=0.5)
    assert codes == [1] and output.count("error: ") == 1 and "Traceback" not in output
    assert f"error: {url}/train cannot be read: " in output
    before = losses(tmp_path / "run")
    assert 0 < len(before) < 16
    store.proxy.fault = lambda client, data: data
    codes, output = train(store, tmp_path / "run", *settings)
    assert codes == [0] and "resumed from" in output
    assert losses(tmp_path / "run") == expected


def test_samples_are_requested_before_they_are_needed(
    large: Path, tmp_path: Path, here: Store
) -> None:
    """Sixteen micro-batches are loaded before the first is used, so a store that fails at that
    point has no effect.
    """
    from pretrain.data.datasets import batches

    def stream(place: object, reader: StoreReader | None = None) -> tuple[Any, StoreReader]:
        words = [
            *SMALL,
            *data_of(place, "train"),
            *MANY,
            NONE,
            f"data.store_cache={tmp_path / 'cache'}",
        ]
        prepared = prepare(load_run(DEMO, words), 1)
        reader = StoreReader(prepared.config)
        data = datasets_of(prepared, 200, tmp_path / "index", reader=reader)
        return batches(data.train, 8, 2, torch.device("cpu"), reader), reader

    url = here.upload(large)
    with megatron_of_one_process():
        (local, _), (stored, reader) = stream(large), stream(f"{url}")
        for number in range(17):
            here_now, there = next(local), next(stored)
            assert all(torch.equal(here_now[key], there[key]) for key in here_now)
            if not number:
                # One range of each file for most samples, without those of the first batch.
                assert len(reader.line) >= 16 * 2 * 2
                # Answers arrive in their order, so the other ones are there with the last.
                last = reader.line[-1]
                reader.requested[last] = reader.read(last)
                here.proxy.fault = refused
        reader.close()


@pytest.mark.slow
def test_index_plan_and_resume_know_urls(
    tiny_data: Path,
    tmp_path: Path,
    here: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, cache = here.upload(tiny_data), f"data.store_cache={tmp_path / 'cache'}"
    pretrain = Command([f"run_dir={tmp_path / 'run'}", *SMALL, *data_of(url), cache], capsys)
    assert "512" in pretrain("--plan")
    assert "the configuration and the data are right" in pretrain("--check")
    requests = Requests(here)
    monkeypatch.setattr(datasets, "ANNOUNCED_SAMPLES", 0)
    assert "built in" in pretrain("--index")
    assert not requests.ranges
    assert "building it" not in pretrain()
    assert url in (tmp_path / "run/config.yaml").read_text()
    assert "resumed from" in pretrain("train.steps=14", *data_of(tiny_data))
    assert f"data.train.0.prefix {url}/train → {tiny_data}/train" in pretrain.out
    # The index of another run is the same if the URL and the contents are the same.
    pretrain(
        f"run_dir={tmp_path / 'other'}",
        f"data.index_cache={tmp_path / 'run/index_cache'}",
        "data.store_cache=null",
    )
    assert "building it" not in pretrain.out and (tmp_path / "other/tokens").is_dir()
    assert SECRET not in "".join(path.read_text() for path in tmp_path.rglob("*.json*"))


def test_a_wrong_place_is_one_line(
    tiny_data: Path,
    tmp_path: Path,
    here: Store,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = here.upload(tiny_data)
    pretrain = Command([f"run_dir={tmp_path / 'run'}", *SMALL, *data_of(url)], capsys)

    def refused_with(code: int, *settings: str) -> str:
        output = pretrain.refused(*settings, code=code)
        assert SECRET not in output
        return output

    assert "data.train.0.prefix = s3://no-such-bucket/data/train: " in refused_with(
        2, "data.train.0.prefix=s3://no-such-bucket/data/train"
    )
    assert f"data.valid.0.prefix = {url}/vlid: {url}/vlid.idx: not found" in refused_with(
        2, f"data.valid.0.prefix={url}/vlid"
    )
    assert "does not name a .bin/.idx pair in a folder" in refused_with(
        2, "data.train.0.prefix=s3://train"
    )
    assert "data.train.0.prefix contains a password" in refused_with(
        2, f"data.train.0.prefix=s3://me:{SECRET}@bucket/folder/train"
    )
    assert "no-such-kind" in refused_with(
        2, "data.train.0.prefix=no-such-kind://bucket/folder/train"
    )
    here.proxy.fault = forbidden
    assert "data.train.0.prefix = s3://" in refused_with(2)
    here.proxy.fault = lambda client, data: None
    monkeypatch.setattr("pretrain.data.store_cache._PATIENCE", 0.3)
    assert f"{url}/train cannot be read: " in refused_with(1)
    here.proxy.fault = lambda client, data: data
    pretrain("--index")
    here.flip("data/train.bin")
    assert f"data.train.0.prefix = {url}/train: its .bin is not the file that" in refused_with(
        2, "--index"
    )
    here.client.put_object(Bucket=here.name, Key="data/train.bin", Body=b"short")
    assert re.search(
        rf"data.train.0.prefix = {url}/train: .*/train.bin has 5 bytes, but .*/manifest.json"
        r" records",
        refused_with(2),
    )
    here.upload(tiny_data)
    pretrain("--index")
    shutil.rmtree(tmp_path / "run")
    for name in here.names():  # only other commands read the tokenizer
        if "/tokenizer/" in name:
            here.client.delete_object(Bucket=here.name, Key=name)
    pretrain("--index")
    assert "trying again" not in pretrain.err
    here.flip("data/train.idx")
    assert "its .idx is not the one that the manifest.json next to it records" in refused_with(
        2, "--index"
    )


def forbidden(client: socket.socket, data: bytes) -> None:
    client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


def test_another_file_of_the_same_size_is_noticed_without_a_manifest(
    tmp_path: Path, here: Store
) -> None:
    """Cached blocks of the old file are not used for it, not even zeros, which are also the content
    of a hole.
    """
    read = []
    for filling in (0, 8):
        folder = tmp_path / str(filling)
        folder.mkdir()
        write_pair(folder / "train", [[filling] * 6_500_000])
        url = here.upload(folder)
        words = [
            *data_of(url, "train"),
            f"data.store_cache={tmp_path}/cache",
            "model.vocab_size=500",
        ]
        config = load_run(DEMO, words)
        contents = check_contents(check_data(config))
        reader = StoreReader(config)
        # These bytes are between two blocks of the sample.
        read.append((contents.key, reader.read((0, 140_000, 4))))
        reader.close()
    assert read[0][0] != read[1][0]
    assert [content for _, content in read] == [
        bytes(4),
        b"\x08\0\x08\0",
    ]


@pytest.mark.slow
def test_many_may_bring_at_once_and_be_killed(large: Path, tmp_path: Path, here: Store) -> None:
    url = here.upload(large)
    command = subprocesses.command(
        CLIENT, "bring", tmp_path, 60, f"data.train.0.prefix={url}/train"
    )
    for delay in (1.2, 1.5):
        killed = subprocess.Popen(command, env=subprocesses.environ())
        time.sleep(delay)
        killed.kill()
        killed.wait()
    together = [subprocess.Popen(command, env=subprocesses.environ()) for _ in range(3)]
    assert [process.wait() for process in together] == [0, 0, 0]
    facts = check_data(
        load_run(
            DEMO,
            [
                *data_of(url, "train"),
                f"data.store_cache={tmp_path}",
            ],
        )
    )
    assert (
        check_contents(facts).sources[0].bin
        == json.loads((large / "manifest.json").read_text())["splits"]["train"]["bin_sha256"]
    )
    assert facts.tokenizer is not None and (facts.tokenizer / "tokenizer.json").is_file()
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {
        ".lock",
        "brought.json",
        "manifest.json",
        "tokenizer",
        "train.bin",
        "train.idx",
        "train.mask",
    }


@pytest.mark.slow
def test_a_killed_rank_leaves_no_process(large: Path, tmp_path: Path, store: Store) -> None:
    url = store.upload(large)
    arguments = [
        DEMO,
        f"run_dir={tmp_path / 'run'}",
        *SMALL,
        *data_of(url, "train"),
        *MANY,
        "train.steps=100000",
    ]
    with forked(1, trained, store.environ, 600.0, arguments, output=tmp_path / "said") as ranks:
        wait_until(lambda: len(records(tmp_path / "run")) > 3, ranks)
        helpers = []
        for child in psutil.Process(ranks[0].pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # the process may just have ended
                helpers += [child] if CLIENT in child.cmdline() else []
        assert len(helpers) == 1
        ranks[0].kill()
        _, alive = psutil.wait_procs(helpers, timeout=PATIENCE / 2)
        assert not alive
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
