"""Fixtures of training tests: small real data from modules of the standard library, tokenized by
data_prep.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import gc
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pretrain.__main__ import main
from tests.ranks import records

if TYPE_CHECKING:
    from tests.pretrain.stores import Store

ROOT = Path(__file__).resolve().parents[2]
DEMO = str(ROOT / "configs/run/demo.yaml")
MANY_THREADS = 150
# Fixed sizes of the demo, so that the numbers in the tests do not depend on how the demo is tuned.
DEMO_SIZES = (
    "model.hidden_size=192",
    "model.num_layers=6",
    "model.num_attention_heads=6",
    "model.ffn_hidden_size=512",
    "model.tie_embeddings=true",
    "data.seq_length=256",
    "train.steps=160",
    "train.micro_batch_size=4",
    "train.global_batch_size=16",
    "train.precision=fp32",
    "optimizer.lr=3e-3",
    "optimizer.min_lr=3e-4",
    "optimizer.warmup_steps=20",
)
# No validations within a run, and no layer diagnostics.
QUIET = ("train.eval_interval=0", "log.diagnostics_interval=0")
# Checkpoints to which training may go back after a spike.
REWINDABLE = ("checkpoint.interval=2", "checkpoint.keep_last=9", "train.spike_rewind=2", *QUIET)
MODULES = (argparse, ast, inspect, json, os, subprocess, textwrap)


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_prep folder, created once for all workers: a vocabulary of 512 entries, train and
    valid.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "tiny_data"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "data/manifest.json").exists():
            write_tiny_data(folder)
    return folder / "data"


def write_tiny_data(folder: Path) -> None:
    """Write a corpus, a tokenizer and the data of the standard library's modules."""
    texts = [part for module in MODULES for part in inspect.getsource(module).split("\n\n\n")]
    table = pa.table({"text": texts, "id": [f"doc-{i}" for i in range(len(texts))]})
    pq.write_table(table, folder / "corpus.parquet")
    run(
        "-m",
        "data_prep",
        "train-tokenizer",
        str(folder / "corpus.parquet"),
        "--vocab-size",
        "512",
        "--out",
        str(folder / "tokenizer"),
    )
    prefix = (
        "-m",
        "data_prep",
        "run",
        str(folder / "corpus.parquet"),
        "--tokenizer",
        str(folder / "tokenizer"),
    )
    run(*prefix, "--out", str(folder / "data"), "--valid-percent", "10", "--test-percent", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """Port of an S3 server."""
    from tests.pretrain.stores import s3_server  # importing its packages takes a second

    with s3_server() as port:
        yield port


@pytest.fixture
def store(server: int, request: pytest.FixtureRequest) -> Iterator[Store]:
    """A separate bucket for each test."""
    from tests.pretrain.stores import Store

    made = Store(server, f"bucket-{abs(hash(request.node.name))}")
    yield made
    made.proxy.listening.close()


@pytest.fixture
def entered(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store, with its variables in this process."""
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def groups() -> Iterator[None]:
    """Megatron's process groups of one process."""
    from tests.one_process import megatron_of_one_process

    with megatron_of_one_process():
        yield


def data_of(folder: object, *splits: str) -> list[str]:
    """Return the overrides for these splits of a data folder; default: training and validation."""
    named = splits or ("train", "valid")
    prefixes = [f"data.{split}.0.prefix={folder}/{split}" for split in named]
    empty = [f"data.{split}=[]" for split in ("train", "valid", "test") if split not in named]
    return prefixes + empty


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the records of steps in a run directory."""
    return [record for record in records(run_dir) if "loss" in record]


def back_to(run_dir: Path, step: int) -> None:
    """Delete the checkpoints after a step, as if the run had been killed before them."""
    for path in run_dir.glob("checkpoints/step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)


def spikes_at(monkeypatch: pytest.MonkeyPatch, *judged: int) -> None:
    """Let the guard find spikes in the judged steps with these numbers, counted from 1."""
    from pretrain.spikes import Spikes

    steps = itertools.count(1)
    monkeypatch.setattr(Spikes, "found", lambda *given: "loss" if next(steps) in judged else None)


def edit(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a JSON file in place."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def flip(path: Path, place: int) -> None:
    """Flip one bit of a file; its size, headers and times stay valid."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.fixture
def settings(tiny_data: Path, tmp_path: Path) -> list[str]:
    """Overrides that turn configs/run/demo.yaml into a run of one second on the small data, in a
    separate folder.
    """
    return [
        f"run_dir={tmp_path / 'run'}",
        *data_of(tiny_data),
        *SMALL,
    ]


SMALL = [
    "data.seq_length=32",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=64",
    "train.steps=12",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.eval_interval=6",
    "train.eval_batches=1",
    "optimizer.warmup_steps=3",
    "checkpoint.interval=4",
    "checkpoint.keep_last=3",
]


class Command:
    """Run ``python -m pretrain`` in this process, check its exit code and capture its output."""

    def __init__(self, settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        self.settings, self.capsys = settings, capsys
        self.run_dir = Path(settings[0].removeprefix("run_dir="))
        self.checkpoints = self.run_dir / "checkpoints"
        self.out = self.err = ""

    def __call__(self, *overrides: str, code: int = 0, config: str = DEMO) -> str:
        """Return the output; of a run that fails, the error output."""
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        ended = main([config, *(self.settings if config == DEMO else ()), *overrides])
        assert "LOCAL_RANK" not in os.environ, (
            "the engine gave DeepSpeed one and left it for others"
        )
        self.out, self.err = self.capsys.readouterr()
        assert ended == code, self.out + self.err
        if len(os.listdir("/proc/self/task")) > MANY_THREADS:
            gc.collect()  # frees the process groups of earlier runs
            # Most remaining objects come from imports: exclude them from the next collection.
            gc.freeze()
        return self.err if code else self.out

    def refused(self, *overrides: str, code: int = 2, config: str = DEMO) -> str:
        """Return the error output of a run that fails, which is one line."""
        output = self(*overrides, code=code, config=config)
        assert output.count("\n") == 1, output
        return output

    def fork(self, parent: Path | str, new: Path, *overrides: str, code: int = 0) -> str:
        """Run a fork of ``parent`` in the folder ``new``."""
        return self(*overrides, "--fork", str(new), code=code, config=str(parent))


@pytest.fixture
def pretrain(settings: list[str], capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(settings, capsys)
