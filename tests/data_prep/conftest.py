"""A small corpus, its tokenizer and its data folder, made once; and the command line as a user calls it."""

from __future__ import annotations

import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.store.indexed import read_index
from data_prep.store.staging import LOCK

ROOT = Path(__file__).resolve().parents[2]
SHARES = ("--valid-percent", "10", "--test-percent", "5")
SMALL_UNITS = ("--unit-mb", "0.001")  # a unit for each row group
HF = ("--encoder", "hf")  # spares a run gigatoken's self-check, which takes longer than the rest of it
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


def cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m data_prep …`` in this process, with these variables, in the folder HERE: exit code and what it said."""
    here, words, out, err = environment.pop("HERE", str(ROOT)), list(map(str, arguments)), io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(here)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def cli_alone(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The same in its own process."""
    known = {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command(*arguments), cwd=ROOT, env=known, capture_output=True, text=True, timeout=60)


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start ``python -m data_prep …`` in a session of its own, as a terminal does."""
    pipe, known = subprocess.PIPE, {"PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(command(*arguments), cwd=ROOT, env=known, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def children(process: int) -> list[int]:
    """The processes that a process has started and that are still there."""
    try:
        return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(process: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process that may be gone."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for something to become true; fail where it does not."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def merged_hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of the merged pairs in a data folder."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.[bi][id][nx]"))}


def read_split(folder: Path, name: str) -> list[list[int]]:
    """The documents (ids, EOD included) of a split."""
    index = read_index(folder / f"{name}.idx")
    ids = np.fromfile(folder / f"{name}.bin", dtype=index.dtype)
    return [part.tolist() for part in np.split(ids, np.cumsum(index.lengths)[:-1])]


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its content, but for locks."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


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
    assert main(["run", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES]) == 0
    return out


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 40 row groups."""
    return write_parquet(tmp_path_factory.mktemp("many") / "many.parquet", make_documents(1600, 60, seed=3), row_group_size=40)


@pytest.fixture(scope="session")
def many_made(tmp_path_factory: pytest.TempPathFactory, many: Path, tokenizer: Path) -> Path:
    """Its data, made in 40 units by an uninterrupted run."""
    out = tmp_path_factory.mktemp("many_made") / "data"
    assert main(["run", str(many), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES, *SMALL_UNITS, *HF]) == 0
    return out
