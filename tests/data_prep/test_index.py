"""From text to a run: two kinds of input, encoded, blended, indexed ahead, trained on; and the verb ``index`` by itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.store.indexed import index_bytes
from tests.data_prep.conftest import ROOT, cli_alone, kill, make_documents, start, wait_until, write_parquet
from tests.pretrain.conftest import DEMO, SMALL


@pytest.fixture
def blend(tmp_path: Path, tokenizer: Path) -> Path:
    """A blend of a folder made from parquet and one made from JSONL."""
    write_parquet(tmp_path / "web.parquet", make_documents(300, 60, seed=1))
    lines = [json.dumps({"text": text, "meta": {"id": name}}) for name, text in make_documents(300, 60, seed=2)]
    (tmp_path / "books.jsonl").write_text("\n".join(lines) + "\n")
    for name, *more in (("web.parquet",), ("books.jsonl", "--id-column", "text")):
        out = tmp_path / Path(name).stem
        words = [str(tmp_path / name), "--tokenizer", str(tokenizer), "--out", str(out), "--valid-percent", "10", "--test-percent", "5"]
        assert main(["run", *words, *more]) == 0
    assert main(["blend", str(tmp_path / "blend.yaml"), f"{tmp_path}/web=3", f"{tmp_path}/books=1", "--seq-length", "32"]) == 0
    return tmp_path / "blend.yaml"


def settings(blend: Path) -> list[str]:
    here = blend.parent
    small = [text for text in SMALL if not text.startswith("data.")]
    return [DEMO, f"data={blend}", f"data.index_cache={here / 'cache'}", f"run_dir={here / 'run'}", *small]


def pretrain(*words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "pretrain", *words]
    return subprocess.run(command, cwd=ROOT, env={**kept, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)


def caches(blend: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in (blend.parent / "cache").glob("*/complete.json")}


def test_from_text_to_a_run_on_a_blend(blend: Path) -> None:
    """Parquet and JSONL -> run -> blend -> index -> pretrain; then a byte flips, and then one source is made again from other text."""
    here = blend.parent
    done = cli_alone("index", *settings(blend))
    assert done.returncode == 0, done.stderr
    (name,) = caches(blend)
    assert done.stdout.splitlines()[-1].startswith(f"index cache {here / 'cache' / name}: ")
    before = caches(blend)
    for folder in ("web", "books"):
        assert main(["verify", str(here / folder), "--index-cache", str(here / "cache")]) == 0
    trained = pretrain(*settings(blend))
    assert trained.returncode == 0, trained.stderr
    assert "index cache" not in trained.stdout and caches(blend) == before
    steps = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == 12 and losses[-1] < losses[0]

    index = here / "books" / "train.idx"
    whole = index.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    index.write_bytes(flipped)
    refused = cli_alone("index", *settings(blend))
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"pretrain: error: {index} is not the file that {here}/books/manifest.json records")
    assert len(refused.stderr.splitlines()) == 1
    index.write_bytes(whole)

    shutil.rmtree(here / "books")
    write_parquet(here / "books.parquet", make_documents(300, 60, seed=3))
    tokenizer = str(here / "web" / "tokenizer")
    words = [str(here / "books.parquet"), "--tokenizer", tokenizer, "--out", str(here / "books"), "--valid-percent", "10"]
    assert main(["run", *words, "--test-percent", "5"]) == 0
    again = cli_alone("index", *settings(blend))
    assert again.returncode == 0, again.stderr
    assert len(caches(blend)) == 2 and name not in again.stdout
    assert main(["verify", str(here / "books"), "--index-cache", str(here / "cache")]) == 1  # the old one is stale


def test_a_terminated_index_leaves_nothing_half_built(tmp_path: Path) -> None:
    documents = 3_000_000
    (tmp_path / "train.idx").write_bytes(index_bytes(np.full(documents, 9, np.int32), "uint16"))
    with (tmp_path / "train.bin").open("wb") as stream:
        stream.truncate(18 * documents)
    words = [DEMO, f"data.train=[{{prefix: {tmp_path}/train}}]", "data.valid=[]", "data.test=[]", "model.vocab_size=500"]
    process = start("index", *words, f"data.index_cache={tmp_path / 'cache'}", OMP_NUM_THREADS="1")
    try:
        wait_until(lambda: list(tmp_path.glob("cache/.building-*")) or process.poll() is not None, 120)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        kill(process.pid)
    assert process.returncode == 143, said
    assert "data_prep: terminated" in said and "Traceback" not in said
    left = [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    if left:  # the last file was written before the signal was heard: then it is what an index that nobody stopped is
        again = cli_alone("index", *words, f"data.index_cache={tmp_path / 'other'}")
        assert again.returncode == 0, again.stderr
        whole, found = ({path.name: path.read_bytes() for path in (tmp_path / name).glob("*/*.npy")} for name in ("other", "cache"))
        assert left == [path.name for path in (tmp_path / "other").iterdir() if path.is_dir()]
        assert whole and found == whole


def test_a_mistake_is_pretrains_line_and_exit_code(tmp_path: Path) -> None:
    for words, said in (
        ((DEMO, "train.stps=3"), "pretrain: error: command line: unknown key train.stps; did you mean train.steps?\n"),
        ((f"{tmp_path}/no.yaml",), f"pretrain: error: {tmp_path}/no.yaml: no such file\n"),
    ):
        done = cli_alone("index", *words)
        first = done.stderr.splitlines(keepends=True)[0]  # where the demo's data has not been made, a second line says that
        assert (done.returncode, done.stdout, first) == (2, "", said)


def test_without_the_training_code_it_says_what_to_install(tmp_path: Path) -> None:
    """data_prep may live where nothing is trained: here its folder, the ground floor and the libraries alone."""
    for folder in ("data_prep", "fem_common"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    libraries = sysconfig.get_path("purelib")
    command = [sys.executable, "-S", "-m", "data_prep", "index", "run.yaml"]  # -S: the project's own installation is not seen
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": libraries}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("data_prep: error: index needs this project, which ")
    assert "pip install -c constraints.txt -e ." in done.stderr and len(done.stderr.splitlines()) == 1
