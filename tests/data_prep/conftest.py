"""A small corpus, its tokenizer and its data folder, made once; and the command line as a user calls it."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.indexed import read_index

ROOT = Path(__file__).resolve().parents[2]
WORDS = "the of and energy free mixer value return import class self def tensor gate prior reads writes 3.14 2025 naïve 東京 🙂 ".split(" ")


def make_documents(number: int, words: int, seed: int = 0) -> list[tuple[str, str]]:
    """(id, text) of ``number`` documents, each with its own text."""
    random_ = random.Random(seed)
    return [(f"doc-{seed}-{i}", f"{i}\n    " + " ".join(random_.choices(WORDS, k=random_.randint(1, words)))) for i in range(number)]


def write_parquet(path: Path, documents: Sequence[tuple[str | None, str | None]], row_group_size: int = 100) -> Path:
    """A parquet file with the columns id and text, with page checksums."""
    table = pa.table({"id": pa.array([d[0] for d in documents], pa.string()), "text": pa.array([d[1] for d in documents], pa.string())})
    pq.write_table(table, path, row_group_size=row_group_size, write_page_checksum=True)
    return path


def command(*arguments: object) -> list[str]:
    """The words of ``python -m data_prep …``."""
    return [sys.executable, "-m", "data_prep", *map(str, arguments)]


def cli(*arguments: object, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``python -m data_prep …`` in its own process."""
    return subprocess.run(command(*arguments), cwd=cwd, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60)


def read_split(folder: Path, name: str) -> list[list[int]]:
    """The documents (ids, EOD included) of a split."""
    index = read_index(folder / f"{name}.idx")
    ids = np.fromfile(folder / f"{name}.bin", dtype=index.dtype)
    return [part.tolist() for part in np.split(ids, np.cumsum(index.lengths)[:-1])]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="session")
def documents() -> list[tuple[str, str]]:
    return make_documents(400, 60)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[tuple[str, str]]) -> Path:
    return write_parquet(tmp_path_factory.mktemp("corpus") / "corpus.parquet", documents)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    assert main(["train-tokenizer", str(corpus), "--vocab-size", "320", "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Path) -> Path:
    out = tmp_path_factory.mktemp("made") / "data"
    assert main(["run", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out), "--valid-percent", "10", "--test-percent", "5"]) == 0
    return out
