"""Shared corpora, tokenizers and data folders, helpers that run the command line, and helpers that
damage a folder.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.encode.encoders import make
from data_prep.encode.tokenizer import load_folder
from data_prep.encode.unit import Engine
from data_prep.prepared.indexed import index_bytes, read_index, sample_digest
from data_prep.prepared.layout import read_plan
from data_prep.prepared.staging import LOCK
from tests.data_prep.forked import forked_workers as forked_workers
from tests.launch.supervised import alive

ROOT = Path(__file__).resolve().parents[2]
SHARES = "--valid-percent 10 --test-percent 5"
ALL_TRAIN = "--valid-percent 0 --test-percent 0"
SMALL_UNITS = "--unit-mb 0.001"  # one unit per row group
HF = "--encoder hf"  # skips gigatoken's self-check, which takes longer than the rest of a run
WORDS = (
    "the of and energy free mixer value return import class self def tensor gate prior reads "
    "writes 3.14 2025 naïve 東京 🙂 "
).split(" ")
Documents = list[tuple[str | None, str | None]]


def make_documents(number: int, words: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return (id, text) of ``number`` documents with different texts."""
    random_ = random.Random(seed)
    return [
        (
            f"doc-{seed}-{i}",
            f"{i}\n    " + " ".join(random_.choices(WORDS, k=random_.randint(1, words))),
        )
        for i in range(number)
    ]


def rows_with_faults(number: int, seed: int = 11) -> Documents:
    """Return documents with occasional bad rows."""
    rows: Documents = []
    for place, document in enumerate(make_documents(number, 40, seed)):
        bad: Documents = [(f"null-{place}", None), (None, "no id")]
        rows += [document, *bad[: 1 + place % 2 if place % 37 == 5 else 0]]
    return rows


def write_parquet(
    path: Path, documents: Sequence[tuple[str | None, str | None]], row_group_size: int = 100
) -> Path:
    """Write a parquet file with the columns id and text and with page checksums."""
    table = pa.table(
        {
            "id": pa.array([d[0] for d in documents], pa.string()),
            "text": pa.array([d[1] for d in documents], pa.string()),
        }
    )
    pq.write_table(table, path, row_group_size=row_group_size, write_page_checksum=True)
    return path


# --- commands -------------------------------------------------------------------------------------


def words_of(*arguments: object) -> list[str]:
    """Return the words of a command line. A text that begins with ``--`` is split at spaces."""
    words: list[str] = []
    for argument in arguments:
        if isinstance(argument, str) and argument.startswith("--"):
            words += argument.split(" ")
        else:
            words.append(str(argument))
    return words


def command(*arguments: object) -> list[str]:
    """Return the words of ``python -m data_prep …``."""
    return [sys.executable, "-m", "data_prep", *words_of(*arguments)]


def cli(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m data_prep …`` in this process and return its exit code and output.

    The keyword arguments are environment variables, except the working folder.
    """
    here, words = environment.pop("HERE", str(ROOT)), words_of(*arguments)
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(here)
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def done(*arguments: object, **environment: str) -> str:
    """Return the output of a command that must succeed."""
    result = cli(*arguments, **environment)
    assert result.returncode == 0, result
    return result.stdout


def refused(*arguments: object, code: int = 2, **environment: str) -> str:
    """Return the single error line of a command that must fail."""
    result = cli(*arguments, **environment)
    assert (result.returncode, result.stderr.count("\n")) == (code, 1) and result.stderr.startswith(
        "data_prep: error: "
    ), result
    return result.stderr


def little(environment: dict[str, str]) -> dict[str, str]:
    """Return a minimal environment with these variables.

    It includes the name of the current test, which tests.mutants reads in the processes that a test
    starts.
    """
    return {
        "PYTHONPATH": str(ROOT),
        "PYTEST_CURRENT_TEST": os.environ.get("PYTEST_CURRENT_TEST", ""),
        **environment,
    }


def alone(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process."""
    return subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env=little(environment),
        capture_output=True,
        text=True,
        timeout=300,
    )


def python(code: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a separate process."""
    words = [sys.executable, "-c", code, *words_of(*arguments)]
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(words, cwd=ROOT, env=known, capture_output=True, text=True, timeout=500)


def start(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    """Start ``python -m data_prep …`` in a new session, as a terminal does."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command(*arguments),
        cwd=ROOT,
        env=little(environment),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


def children(process: int) -> list[int]:
    """Return the live child processes of a process."""
    try:
        return [
            int(child)
            for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


def kill(process: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process, which may already have ended."""
    with suppress(ProcessLookupError):
        os.kill(process, number)


def wait_until(condition: Callable[[], object], seconds: float = 120.0) -> None:
    """Wait until a condition is true. Fail after a timeout."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# --- folders --------------------------------------------------------------------------------------


def plan_folder(out: Path, inputs: Iterable[Path], tokenizer: Path, *options: str) -> Path:
    """Make a folder with a plan and no finished units."""
    done("plan", *inputs, f"--tokenizer {tokenizer} --out {out}", SHARES, *options)
    return out


def encode_units(out: Path, numbers: Iterable[int] | None = None) -> Path:
    """Encode units of a folder's plan in this process without workers. The default is all units."""
    plan = read_plan(out)
    kind = "chat" if plan.settings.messages else "hf"
    engine = Engine(out, plan, make(load_folder(out / "tokenizer"), kind))
    for number in range(len(plan.units)) if numbers is None else numbers:
        engine.encode_unit(plan.units[number], lambda read, tally: None)
    return out


def merge(out: Path, *options: str) -> Path:
    """Run ``merge`` and accept every bad row."""
    done("merge", out, "--max-bad 100%", *options)
    return out


def prepared(out: Path, inputs: Iterable[Path], tokenizer: Path, *options: str) -> Path:
    """Plan, encode in this process and merge, and return the data folder."""
    return merge(encode_units(plan_folder(out, inputs, tokenizer, *options)))


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def merged_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of the merged pairs in a data folder."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.[bi][id][nx]"))
    }


def read_split(folder: Path, name: str) -> list[list[int]]:
    """Return the documents of a split as lists of ids, including EOD."""
    index = read_index(folder / f"{name}.idx")
    ids = np.fromfile(folder / f"{name}.bin", dtype=index.dtype)
    return [part.tolist() for part in np.split(ids, np.cumsum(index.lengths)[:-1])]


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its content, except locks."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != LOCK
    }


def restore(folder: Path, before: dict[str, bytes]) -> None:
    """Restore every file of a snapshot and remove all other files."""
    now = snapshot(folder)
    for name in now.keys() - before.keys():
        (folder / name).unlink()
    for name in (name for name, content in before.items() if now.get(name) != content):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(before[name])


# --- damage ---------------------------------------------------------------------------------------


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def spoil(folder: Path, how: str) -> None:
    """Damage a file as one line specifies.

    The forms are ``FILE cut 2``, ``flip 40``, ``gone``, ``write TEXT``, ``add TEXT``, ``swap
    FILE``, ``copy FILE``, ``ids AT=ID ...``, ``lengths AT+BY ...``, ``set KEY.KEY JSON`` and ``pop
    KEY.KEY``.
    """
    name, verb, *words = how.split(" ", 3 if " set " in how else 2)
    path, given = folder / name, words[0] if words else ""
    raw = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    if verb == "gone":
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif verb == "swap":
        path.write_bytes((folder / given).read_bytes())
        (folder / given).write_bytes(raw)
    elif verb == "copy":
        path.write_bytes((folder / given).read_bytes())
    elif verb == "cut":
        path.write_bytes(raw[: -int(given)])
    elif verb == "write":
        path.write_bytes(given.encode())
    elif verb == "add":
        path.write_bytes(raw + given.encode())
    elif verb == "flip":
        raw[int(given)] ^= 1
        path.write_bytes(raw)
    elif verb == "ids":
        ids = np.frombuffer(raw, "<u2")
        for at, value in (pair.split("=") for pair in given.split()):
            ids[int(at)] = int(value)
        path.write_bytes(raw)
    elif verb == "lengths":
        lengths = read_index(path).lengths.copy()
        for at, by in (pair.split("+") for pair in given.split()):
            lengths[int(at)] += int(by)
        path.write_bytes(index_bytes(lengths, "uint16"))
    else:
        assert verb in ("set", "pop"), how
        edit_json(path, lambda value: _edit(value, given.split("."), words[1:]))


def _edit(value: Any, keys: list[str], new: list[str]) -> None:
    *above, last = [int(key) if key.isdigit() else key for key in keys]
    for key in above:
        value = value[key]
    if new:
        value[last] = json.loads(new[0])
    else:
        del value[last]


def reseal(folder: Path, name: str, manifest: str = "manifest.json", key: str = "") -> None:
    """Update a manifest or an entry to the bytes of a pair, so that only a check of the content
    finds the damage.
    """
    output: dict[str, object] = {} if key else {"bin_sample": sample_digest(folder / f"{name}.bin")}
    for kind in ("bin", "idx"):
        raw = (folder / f"{name}.{kind}").read_bytes()
        output |= {f"{kind}_sha256": hashlib.sha256(raw).hexdigest(), f"{kind}_bytes": len(raw)}
    edit_json(folder / manifest, lambda value: value["splits"][key or name].update(output))


def edit_units(folder: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    """Change units.jsonl and its hash in the manifest."""
    path = folder / "units.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    edit_json(
        folder / "manifest.json",
        lambda manifest: manifest["units"].update(sha256=digest, count=len(lines)),
    )


# --- shared fixtures ------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def documents() -> list[tuple[str, str]]:
    return make_documents(400, 60)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, documents: list[tuple[str, str]]) -> Path:
    return write_parquet(tmp_path_factory.mktemp("corpus") / "corpus.parquet", documents)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    done("train-tokenizer", corpus, "--vocab-size 320 --out", out)
    return out


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, corpus: Path, tokenizer: Path) -> Path:
    """Data of the corpus, made by a complete ``run``."""
    out = tmp_path_factory.mktemp("made") / "data"
    done("run", corpus, f"--tokenizer {tokenizer} --out {out}", SHARES)
    return out


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus with bad rows in five row groups."""
    return write_parquet(
        tmp_path_factory.mktemp("rows") / "rows.parquet", rows_with_faults(250), row_group_size=60
    )


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory, rows: Path, tokenizer: Path) -> Path:
    """Folder with the five units of ``rows``, encoded but not merged."""
    return encode_units(
        plan_folder(tmp_path_factory.mktemp("encoded") / "data", [rows], tokenizer, SMALL_UNITS)
    )


@pytest.fixture(scope="session")
def merged(tmp_path_factory: pytest.TempPathFactory, encoded: Path) -> Path:
    """Folder with the units of ``rows``, merged without interruption."""
    return merge(copied(encoded, tmp_path_factory.mktemp("merged") / "data"))


@pytest.fixture
def shards(tmp_path: Path, encoded: Path) -> Path:
    return copied(encoded, tmp_path / "data")


@pytest.fixture
def data(tmp_path: Path, merged: Path) -> Path:
    return copied(merged, tmp_path / "data")


@pytest.fixture(scope="session")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus of 40 row groups."""
    return write_parquet(
        tmp_path_factory.mktemp("many") / "many.parquet",
        make_documents(1600, 60, seed=3),
        row_group_size=40,
    )


@pytest.fixture(scope="session")
def many_made(tmp_path_factory: pytest.TempPathFactory, many: Path, tokenizer: Path) -> Path:
    """Data of ``many``: 40 units, encoded one after another in this process."""
    return prepared(tmp_path_factory.mktemp("many_made") / "data", [many], tokenizer, SMALL_UNITS)


# A user mask, which runs in the workers. It records each unit that starts (one batch of `many`),
# kills or breaks a worker like a faulty library, or slows down units.
MASK = r"""
import os, time
import numpy as np

def keep(batch, places, path):
    with open(os.environ.get("LOG", os.devnull), "ab", 0) as log:
        log.write(b"%d\n" % places[0])
    if places[0] == int(os.environ.get("POISON", "-1")):
        exec(os.environ["DEATH"])
    if places[0] >= int(os.environ.get("SLOW", "0")):
        time.sleep(float(os.environ.get("DELAY", "0")))
    return np.ones(len(places), bool)
"""
UNITS = 40


@pytest.fixture
def masked(tmp_path: Path, many: Path, tokenizer: Path) -> list[object]:
    """Command of a run of 40 units with a mask into TMP/out."""
    (tmp_path / "mask.py").write_text(MASK)
    files = f"--tokenizer {tokenizer} --out {tmp_path}/out --mask {tmp_path}/mask.py:keep"
    return ["run", many, files, SHARES, SMALL_UNITS, HF, "--workers 2"]


def entries(out: Path) -> set[int]:
    """Return the numbers of the units that are done. A concurrent merge may remove the folder."""
    with suppress(FileNotFoundError):
        return {
            int(name.removesuffix(".json"))
            for name in os.listdir(out / "shards")
            if name.endswith(".json")
        }
    return set()


def live(processes: Iterable[int]) -> list[int]:
    """Return the processes that have not ended."""
    return [process for process in processes if alive(process)]


def unfinished(out: Path) -> list[Path]:
    """Return temporary names in OUT and OUT/shards."""
    return [
        path for folder in (out, out / "shards") for path in folder.glob(".*") if path.name != LOCK
    ]
