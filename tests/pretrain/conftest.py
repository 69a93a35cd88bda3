"""Small real data for training tests: some modules of the standard library, tokenized by data_prep."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = (argparse, ast, inspect, json, os, subprocess, textwrap)


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data_prep folder: 512 entries, train and valid."""
    folder = tmp_path_factory.mktemp("data")
    texts = [part for module in MODULES for part in inspect.getsource(module).split("\n\n\n")]
    table = pa.table({"text": texts, "id": [f"doc-{i}" for i in range(len(texts))]})
    pq.write_table(table, folder / "corpus.parquet")
    run("-m", "data_prep", "train-tokenizer", str(folder / "corpus.parquet"), "--vocab-size", "512", "--out", str(folder / "tokenizer"))
    prefix = ("-m", "data_prep", "run", str(folder / "corpus.parquet"), "--tokenizer", str(folder / "tokenizer"))
    run(*prefix, "--out", str(folder / "data"), "--valid-percent", "10", "--test-percent", "0")
    return folder / "data"


@pytest.fixture
def settings(tiny_data: Path, tmp_path: Path) -> list[str]:
    """Overrides that turn configs/run/demo.yaml into a run of a second on the small data, in a folder of its own."""
    return [
        f"run_dir={tmp_path / 'run'}",
        f"data.train.0.prefix={tiny_data / 'train'}",
        f"data.valid.0.prefix={tiny_data / 'valid'}",
        "data.test=[]",
        *SMALL,
    ]


SMALL = [
    "data.seq_length=32",
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=64",
    "train.steps=12",
    "train.micro_batch_size=2",
    "train.global_batch_size=8",
    "train.eval_interval=6",
    "train.eval_batches=1",
    "optimizer.warmup_steps=3",
    "checkpoint.interval=4",
    "checkpoint.keep_last=3",
]
