"""Tests of the verbs ``blend`` and ``index``, from text to training: two kinds of input are
encoded, blended, indexed and trained on.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import yaml

from data_prep.prepared.indexed import index_bytes
from pretrain.__main__ import main as pretrain
from tests.data_prep import conftest as base
from tests.pretrain.conftest import DEMO, SMALL


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    """Folder with three data folders ``a``, ``b`` and ``c`` of 300, 100 and 60 documents.

    ``a`` has all splits and parquet input; ``b`` has no test split and JSONL input; ``c`` has only
    train.
    """
    root = tmp_path_factory.mktemp("blend")
    lines = [
        json.dumps({"text": text, "meta": {"id": name}})
        for name, text in base.make_documents(100, 40, seed=1)
    ]
    (root / "b.jsonl").write_text("\n".join(lines) + "\n")
    files = [
        base.write_parquet(root / "a.parquet", base.make_documents(300, 40)),
        root / "b.jsonl",
    ]
    files.append(base.write_parquet(root / "c.parquet", base.make_documents(60, 40, seed=2)))
    for file, valid, test, column in zip(
        files, ("10", "20", "0"), ("5", "0", "0"), ("id", "text", "id"), strict=True
    ):
        options = f"--valid-percent {valid} --test-percent {test} --id-column {column}"
        base.prepared(root / file.stem, [file], tokenizer, options)
    return root


def tokens(folder: Path, split: str = "train") -> int:
    return int(base.manifest_of(folder)["splits"][split]["tokens"])


# --- blend ----------------------------------------------------------------------------------------


def test_weights_are_shares_of_the_training_tokens_by_default(
    folders: Path, tmp_path: Path
) -> None:
    out, all_ = tmp_path / "deeper" / "blend.yaml", [folders / name for name in "abc"]
    output = base.done("blend", out, *all_, "--seq-length 64")
    section = yaml.safe_load(out.read_text())
    assert section["seq_length"] == 64 and list(section) == ["train", "valid", "test", "seq_length"]
    for split, number in (("train", 3), ("valid", 2), ("test", 1)):
        total = sum(tokens(folder) for folder in all_[:number])
        assert [source["prefix"] for source in section[split]] == [
            str(folder / split) for folder in all_[:number]
        ]
        assert [source["weight"] for source in section[split]] == pytest.approx(
            [tokens(folder) / total for folder in all_[:number]]
        )
    assert output.count("read 1 times") == 3
    assert re.search("valid is without .*/c: ", output) and re.search(
        "test is without .*/b, .*/c: ", output
    )


def test_given_weights_are_normalised_and_what_they_mean_is_reported(
    folders: Path, tmp_path: Path
) -> None:
    out = tmp_path / "blend.yaml"
    a = folders / "a"
    b = folders / "b"
    output = base.done("blend", out, f"{a}=1", f"{b}=3", "--seq-length 64")
    section = yaml.safe_load(out.read_text())
    assert (
        [source["weight"] for source in section["train"]]
        == [0.25, 0.75]
        == [source["weight"] for source in section["valid"]]
    )
    of_a, of_b = tokens(a), tokens(b)
    assert (
        f"read {0.25 * (of_a + of_b) / of_a:.3g} times" in output
        and f"read {0.75 * (of_a + of_b) / of_b:.3g} times" in output
    )
    assert (
        f"{of_b / 0.75 / 1e3:.3g}k tokens can be drawn before any repeats ({b} is the first)"
        in output
    )
    assert f"{of_a / 0.25 / 1e3:.3g}k until all" in output
    base.copied(a, tmp_path / "lr=3")  # relative, and a name with an equals sign
    base.done("blend", "blend.yaml", "lr=3", "--seq-length 64 --overwrite", HERE=str(tmp_path))
    assert yaml.safe_load(out.read_text())["train"] == [
        {"prefix": str(tmp_path / "lr=3" / "train"), "weight": 1.0}
    ]
    base.done("blend", "blend.yaml", "lr=3=0.5", "--seq-length 64", HERE=str(tmp_path))


# --- index ----------------------------------------------------------------------------------------


def test_from_text_to_a_run_on_a_blend(
    folders: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A blend is indexed, and training uses that index. After a byte is flipped, ``--index`` fails
    with one line. After a source is prepared from other text, ``--index`` builds a second cache.
    """
    web = base.copied(folders / "a", tmp_path / "web")
    books = base.copied(folders / "b", tmp_path / "books")
    cache = tmp_path / "cache"
    base.done("blend", tmp_path / "blend.yaml", f"{web}=3", f"{books}=1", "--seq-length 32")
    small = [text for text in SMALL if not text.startswith("data.")]
    settings = [
        DEMO,
        f"data={tmp_path}/blend.yaml",
        f"data.index_cache={cache}",
        f"run_dir={tmp_path / 'run'}",
        *small,
    ]

    def caches() -> dict[str, int]:
        return {path.parent.name: path.stat().st_mtime_ns for path in cache.glob("*/complete.json")}

    done = base.alone("index", *settings)
    assert done.returncode == 0, done.stderr
    (name,) = before = caches()
    assert done.stdout.splitlines()[-1].startswith(f"index cache {cache / name}: ")
    for folder in (web, books):
        assert "1 index caches" in base.done("verify", folder, f"--index-cache {cache}")
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    capsys.readouterr()
    assert pretrain(settings) == 0
    assert "index cache" not in capsys.readouterr().out and caches() == before
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == 12 and losses[-1] < losses[0]

    index = books / "train.idx"
    base.spoil(books, f"train.idx flip {index.stat().st_size // 2}")
    capsys.readouterr()
    assert pretrain([*settings, "--index"]) == 2  # the command that the verb starts
    output = capsys.readouterr().err
    assert len(output.splitlines()) == 1
    assert output.startswith(
        f"pretrain: error: {index} is not the file that {books}/manifest.json records"
    )
    shutil.rmtree(books)
    file = base.write_parquet(tmp_path / "books.parquet", base.make_documents(300, 60, seed=3))
    base.prepared(books, [file], web / "tokenizer")
    assert pretrain([*settings, "--index"]) == 0
    assert len(caches()) == 2 and name not in capsys.readouterr().out
    assert base.cli("verify", books, "--index-cache", cache).returncode == 1  # the old one is stale


# sitecustomize.py, which Python imports at its start. The process sleeps as soon as it has created
# the folder of an unfinished cache.
STUCK = """
import os, time
make = os.mkdir
def mkdir(path, *mode):
    make(path, *mode)
    if ".building-" in str(path):
        open(os.path.join(path, "half.npy"), "w").close()
        time.sleep(600)
os.mkdir = mkdir
"""


def test_a_terminated_index_leaves_nothing_half_built(tmp_path: Path) -> None:
    documents = 3_000
    (tmp_path / "sitecustomize.py").write_text(STUCK)
    (tmp_path / "train.idx").write_bytes(index_bytes(np.full(documents, 9, np.int32), "uint16"))
    with (tmp_path / "train.bin").open("wb") as stream:
        stream.truncate(18 * documents)
    words = [
        DEMO,
        f"data.train=[{{prefix: {tmp_path}/train}}]",
        "data.valid=[]",
        "data.test=[]",
        "model.vocab_size=500",
    ]
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{base.ROOT}", "OMP_NUM_THREADS": "1"}
    process = base.start("index", *words, f"data.index_cache={tmp_path / 'cache'}", **environment)
    try:
        base.wait_until(
            lambda: list(tmp_path.glob("cache/.building-*/half.npy")) or process.poll() is not None,
            300,
        )
        process.send_signal(signal.SIGTERM)
        _, output = process.communicate(timeout=120)
    finally:
        base.kill(process.pid)
    assert (
        process.returncode == 143
        and "data_prep: terminated" in output
        and "Traceback" not in output
    ), output
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_a_mistake_is_pretrains_line_and_exit_code(tmp_path: Path) -> None:
    done = base.alone("index", DEMO, "train.stps=3")
    first = done.stderr.splitlines()[0]  # without the demo's data, a second line reports this
    assert (
        first == "pretrain: error: command line: unknown key train.stps; did you mean train.steps?"
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_without_the_training_code_it_states_what_to_install(tmp_path: Path) -> None:
    """Without the training code, which data_prep does not require, ``index`` prints one line with
    the command that installs it.

    The process can import only data_prep, fem_common and the libraries.
    """
    for folder in ("data_prep", "fem_common"):
        (tmp_path / folder).symlink_to(base.ROOT / folder)
    command = [
        sys.executable,
        "-S",
        "-m",
        "data_prep",
        "index",
        "run.yaml",
    ]  # -S hides the project's installation
    known = {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run(
        command, cwd=tmp_path, env=known, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1
    assert (
        done.stderr.startswith("data_prep: error: index needs this project, which ")
        and "pip install -c constraints.txt -e ." in done.stderr
    )
