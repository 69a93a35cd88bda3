"""Each error as a user would cause it: exit code 2, one line that names the thing, no traceback, nothing under a final name."""

from __future__ import annotations

import errno
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import VERBS, main
from tests.data_prep.conftest import ROOT, cli, command, make_documents, write_parquet


class Place:
    """A folder with a corpus and a tokenizer, and ways to spoil them."""

    def __init__(self, root: Path, corpus: Path, tokenizer: Path) -> None:
        self.root, self.corpus, self.tokenizer, self.out = root, corpus, tokenizer, root / "out"

    def run(
        self, *inputs: object, tokenizer: Path | None = None, out: Path | None = None, options: tuple[object, ...] = ()
    ) -> list[object]:
        return ["run", *(inputs or (self.corpus,)), "--tokenizer", tokenizer or self.tokenizer, "--out", out or self.out, *options]

    def file(self, name: str, content: bytes) -> Path:
        (self.root / name).write_bytes(content)
        return self.root / name

    def corrupt(self) -> Path:
        documents = make_documents(300, 40, seed=5)
        raw = bytearray(write_parquet(self.root / "corrupt.parquet", documents).read_bytes())
        raw[len(raw) // 2 : len(raw) // 2 + 64] = bytes(64)
        return self.file("corrupt.parquet", bytes(raw))

    def bit_flipped(self) -> Path:
        """One letter changed in a page that is neither compressed nor encoded: its checksum alone can tell."""
        documents = make_documents(300, 40, seed=5)
        table = pa.table({"id": [d[0] for d in documents], "text": [d[1] for d in documents]})
        options = {"compression": "none", "use_dictionary": False, "row_group_size": 100, "write_page_checksum": True}
        pq.write_table(table, self.root / "flipped.parquet", **options)
        raw = bytearray((self.root / "flipped.parquet").read_bytes())
        raw[raw.index(b" import ", len(raw) // 2) + 1] ^= 1
        return self.file("flipped.parquet", bytes(raw))

    def columns(self, **columns: object) -> Path:
        pq.write_table(pa.table(columns), self.root / "columns.parquet")
        return self.root / "columns.parquet"

    def tokenizer_without(self, part: str) -> Path:
        folder = Path(shutil.copytree(self.tokenizer, self.root / "spoilt"))
        if part == "eos_token":
            config = json.loads((folder / "tokenizer_config.json").read_text())
            del config["eos_token"]
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        elif part == "entry":
            (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        elif part == "file":
            (folder / "tokenizer.json").unlink()
        else:
            (folder / "tokenizer.json").write_text('{"version": "1.0"}')
        return folder


CASES: dict[str, tuple[Callable[[Place], list[object]], str]] = {
    "missing file": (lambda p: p.run(p.root / "absent.parquet"), "no such file: .*absent.parquet"),
    "glob without match": (lambda p: p.run(p.root / "*.pq"), r"no file matches .*\*.pq"),
    "folder without parquet": (lambda p: p.run(p.tokenizer), "no .parquet, .* file in the folder"),
    "file given twice": (lambda p: p.run(p.corpus, p.corpus), "corpus.parquet is given twice"),
    "wrong file type": (lambda p: p.run(p.file("a.parquet", b'{"text": "x"}\n')), "a.parquet is not a parquet file: its content is jsonl"),
    "parquet called JSONL": (lambda p: p.run(p.file("a.jsonl", p.corpus.read_bytes())), "a.jsonl"),
    "not gzip": (lambda p: p.run(p.file("a.jsonl.gz", b'{"text": "x", "id": "y"}\n')), "a.jsonl.gz"),
    "unknown file type": (lambda p: p.run(p.file("a.csv", b"text,id\n")), "a.csv"),
    "empty file": (lambda p: p.run(p.file("a.parquet", b"")), "a.parquet is empty"),
    "truncated parquet": (lambda p: p.run(p.file("t.parquet", p.corpus.read_bytes()[:-20])), "t.parquet is not a readable parquet file"),
    "corrupt row group in training": (
        lambda p: ["train-tokenizer", p.corrupt(), "--vocab-size", 300, "--out", p.out],
        "corrupt.parquet: row group 1 of 3 cannot be read",
    ),
    "missing text column": (lambda p: p.run(options=("--text-column", "txet")), "no column 'txet' .*did you mean 'text'"),
    "missing id column": (
        lambda p: p.run(p.columns(text=["a"], name=["b"]), options=("--id-column", "key")),
        r"no column 'key' \(it has: text, name\); name it with --id-column",
    ),
    "text is no text": (lambda p: p.run(p.columns(text=[1.5], id=["b"])), "column 'text' is double, not text"),
    "id is a float": (lambda p: p.run(p.columns(text=["a"], id=[1.5])), "column 'id' is double"),
    "no tokenizer": (lambda p: p.run(tokenizer=p.root / "none"), "no such folder: .*none"),
    "tokenizer is a file": (lambda p: p.run(tokenizer=p.tokenizer / "tokenizer.json"), "tokenizer.json is a file"),
    "tokenizer without tokenizer.json": (lambda p: p.run(tokenizer=p.tokenizer_without("file")), "no tokenizer.json in"),
    "tokenizer unreadable": (lambda p: p.run(tokenizer=p.tokenizer_without("content")), "tokenizer.json is not a tokenizer"),
    "tokenizer without EOD": (lambda p: p.run(tokenizer=p.tokenizer_without("eos_token")), "has no EOD: set eos_token"),
    "EOD not in vocabulary": (lambda p: p.run(tokenizer=p.tokenizer_without("entry")), "EOD token '</s>' .* is not in tokenizer.json"),
    "inputs without tokenizer": (lambda p: ["run", p.corpus, "--out", p.out], "inputs without --tokenizer"),
    "neither inputs nor a plan": (lambda p: ["run", "--out", p.out], "no plan.json in .*: .*plan INPUT"),
    "status of nothing": (lambda p: ["status", p.out], "no such folder: .*out"),
    "merge of nothing": (lambda p: ["merge", p.out], "no such folder: .*out"),
    "plan without tokenizer": (lambda p: ["plan", p.corpus, "--out", p.out], "arguments are required: --tokenizer"),
    "no workers": (lambda p: p.run(options=("--workers", 0)), "--workers is 0; it must be at least 1"),
    "unknown encoder": (lambda p: p.run(options=("--encoder", "fast")), "--encoder: invalid choice: 'fast'"),
    "unit of nothing": (lambda p: p.run(options=("--unit-mb", 0)), "--unit-mb is 0; it must be at least 0.001"),
    "unit of no number": (lambda p: p.run(options=("--unit-mb", "nan")), "--unit-mb is nan"),
    "bad rows no number": (lambda p: p.run(options=("--max-bad", "few")), "--max-bad is 'few'; give a number of rows"),
    "bad rows over all": (lambda p: p.run(options=("--max-bad", "101%")), "--max-bad is '101%'"),
    "bad rows below none": (lambda p: p.run(options=("--max-bad=-1",)), "--max-bad is '-1'"),
    "task out of range": (lambda p: p.run(options=("--task-id", 3, "--tasks", 3)), "--task-id is 3; of 3 tasks it must be 0 to 2"),
    "task without tasks": (lambda p: p.run(options=("--task-id", 3)), "--task-id and --tasks go together"),
    "task that overwrites": (lambda p: p.run(options=("--task-id", 0, "--tasks", 3, "--overwrite")), "--overwrite is not for one task"),
    "out below a file": (lambda p: p.run(out=p.file("note", b"x") / "out"), "cannot create the folder .*note"),
    "percent out of range": (lambda p: p.run(options=("--valid-percent", "-1")), "--valid-percent is -1.0; it must be at least 0"),
    "percent not finite": (lambda p: p.run(options=("--test-percent", "nan")), "--test-percent is nan"),
    "percent no number": (lambda p: p.run(options=("--valid-percent", "two")), "--valid-percent: invalid float value: 'two'"),
    "percents leave no train": (lambda p: p.run(options=("--valid-percent", 60, "--test-percent", 40)), "leave nothing to train on"),
    "vocabulary too small": (lambda p: ["train-tokenizer", p.corpus, "--vocab-size", 100, "--out", p.out], "smallest is 257"),
    "sample of nothing": (
        lambda p: ["train-tokenizer", p.corpus, "--vocab-size", 300, "--out", p.out, "--sample-mb", 0],
        "--sample-mb is 0.0; it must be above 0",
    ),
    "nothing to train on": (
        lambda p: ["train-tokenizer", p.columns(text=[""], id=["a"]), "--vocab-size", 300, "--out", p.out],
        "no document to train on",
    ),
    "stdlib over another file": (lambda p: ["stdlib", p.file("mine.parquet", b"mine")], "mine.parquet exists and holds something else"),
    "stdlib into a folder": (lambda p: ["stdlib", p.root], "is a folder; name the file to write"),
    "out is a file": (lambda p: p.run(out=p.file("note", b"x")), "cannot create the folder .*note"),
    "stdlib below a file": (lambda p: ["stdlib", p.file("note", b"x") / "s.parquet"], "cannot create the folder .*note"),
    "verify nothing": (lambda p: ["verify", p.root / "none"], "no such folder: .*none"),
    "verify a folder without manifest": (lambda p: ["verify", p.tokenizer], "no manifest.json in"),
    "unknown verb": (lambda p: ["runn"], "invalid choice: 'runn'"),
    "unknown option": (lambda p: p.run(options=("--worker", 3)), "unrecognized arguments: --worker 3"),
    "no verb": (lambda p: [], "the following arguments are required: VERB"),
}


@pytest.mark.parametrize("case", CASES)
def test_user_error(tmp_path: Path, corpus: Path, tokenizer: Path, case: str) -> None:
    arguments, said = CASES[case]
    place = Place(tmp_path, corpus, tokenizer)
    result = cli(*arguments(place))
    assert result.returncode == 2, result
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert re.match(f"data_prep: error: .*{said}", result.stderr), result.stderr
    assert not place.out.exists() or not any(path.name != ".lock" for path in place.out.iterdir())


@pytest.mark.parametrize("damage", ["corrupt", "bit_flipped"])
def test_a_damaged_row_group_fails_the_job_at_its_end(tmp_path: Path, corpus: Path, tokenizer: Path, damage: str) -> None:
    place = Place(tmp_path, corpus, tokenizer)
    result = cli(*place.run(getattr(place, damage)(), options=("--encoder", "hf")))
    assert result.returncode == 1 and "Traceback" not in result.stderr, result
    assert re.match("data_prep: error: 100 of 300 rows are bad .100 unreadable., more than --max-bad 0.1% allows", result.stderr)
    assert re.search("parquet, row 100: unreadable .*row group 1 of 3 cannot be read", result.stderr), result.stderr
    assert not (place.out / "manifest.json").exists() and not (place.out / "train.bin").exists()


def test_want_of_memory_is_one_line(corpus: Path) -> None:
    """150 MB of address space: pyarrow does not load."""
    words = ["sh", "-c", 'ulimit -v 150000; exec "$@"', "sh", *command("inspect", corpus)]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"})
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "not enough memory" in result.stderr, result


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libarrow.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "Cannot allocate memory", "/usr"),
        pa.ArrowMemoryError("malloc of size 9 failed"),
    ],
)
def test_want_of_memory_of_any_type_is_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> NoReturn:
        raise error

    monkeypatch.setattr("fem_common.cli.importlib.import_module", fail)
    assert main(["stats", "x"]) == 1
    said = capsys.readouterr().err
    assert "not enough memory" in said and said.count("\n") == 1


def test_help_is_quick_and_lists_every_verb() -> None:
    code = "import sys; from data_prep.__main__ import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not {"numpy", "pyarrow", "tokenizers", "gigatoken", "huggingface_hub"} & set(result.stdout.splitlines()[-1].split())
    for verb in VERBS:
        assert f"\n    {verb}" in result.stdout
        assert cli(verb, "--help").returncode == 0, verb


def test_damaged_manifest_is_named(tmp_path: Path, made: Path) -> None:
    shutil.copytree(made, tmp_path / "data")
    for content in (b"{", b"[]", b'{"format": 1}', b'{"format": 99}'):
        (tmp_path / "data" / "manifest.json").write_bytes(content)
        result = cli("verify", tmp_path / "data")
        assert result.returncode == 2 and "manifest.json" in result.stderr and result.stderr.count("\n") == 1, result.stderr
