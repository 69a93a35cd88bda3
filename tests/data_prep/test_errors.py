"""Tests of user mistakes: exit code 2, one line that names the fault (tests/wording.yaml), and no
files written.
"""

from __future__ import annotations

import errno
import gzip
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import VERBS
from fem_common.cli import is_want_of_memory
from tests.data_prep import conftest as base
from tests.wording import Wording

FILES: dict[str, bytes] = {
    "x.jsonl": b'{"text": "x", "id": "y"}\n',
    "mine/empty.parquet": b"",
    "mine/blank.jsonl": b"\n \r\n",
    "mine/none.jsonl.gz": gzip.compress(b"", mtime=0),
    "mine/magic.parquet": b"PAR1PAR1",
    "mine/lines.parquet": b'{"text":"a"}\n',
    "mine/packed.jsonl": gzip.compress(b"{}\n", mtime=0),
    "mine/plain.jsonl.gz": b'{"text":"a"}\n',
    "mine/lfs.parquet": b"version https:" + b"//git-lfs.github.com/spec/v1\n",
    "mine/page.parquet": b"<!DOCTYPE html>",
    "mine/array.jsonl": b'[{"text": "a"}]',
    "mine/wide.jsonl": '{"text"'.encode("utf-16"),
    "mine/x.any": b"text,id\n",
    "mine/pretty.jsonl": b'{\n "text": "a"\n}\n',
    "mine/early.jsonl.gz": gzip.compress(b'{"text":"a"}\n' * 9, mtime=0)[:12],
    "mine/number.jsonl": b'{"text": 1, "id": "1"}\n',
    "mine/real.jsonl": b'{"text": "a", "id": 1.5}\n',
    "wide.txt": "text".encode("utf-16"),
    "parquet.txt": b"PAR1....",
    "lines.txt": b'{"text": "x"}\n{"text": "y"}\n',
    "meta.jsonl": b'{"text": "a", "meta": {"set": 1}}\n',
    "old/plan.json": b'{"format": 1}',
    "v1/manifest.json": b'{"format": 1}',
    "listed/manifest.json": b"[]",
    "blend.yaml": b"mine: 1\n",
    **dict.fromkeys(
        "good.txt note note.parquet kept/valid.bin empty/readme.md bad/plan.json shards/x".split(),
        b"{mine",
    ),
}
TABLES: dict[str, dict[str, list[object]]] = {
    "name": {"text": ["a"], "name": ["b"]},
    "texts": {"texts": ["a"], "id": ["b"]},
    "wide": {"id": ["a"], **{f"column{i}": ["b"] for i in range(99)}},
    "real": {"text": [1.5], "id": ["b"]},
    "list": {"text": [["a"]], "id": ["b"]},
    "realid": {"text": ["a"], "id": [1.5]},
    "boolid": {"text": ["a"], "id": [True]},
    "nested": {"text": ["a"], "id": ["b"], "score": [[1.0]], "language": [["en"]]},
    "nothing": {"text": [""], "id": ["a"]},
    "few": {"text": ["a", "b", "c"], "id": [1, 2, 3]},
}
MASKS = {  # file of a mask -> its code
    "zero": "x = 1\ny = 1 / 0\ndef keep(b, p, q): ...",
    "syntax": "x = 1\ndef keep(b, p, q:\n",
    "imports": "import absent_module\n",
    "columns": "columns = 'url'\ndef keep(b, p, q): ...",
    "files": "files = ('gone.txt',)\ndef keep(b, p, q): ...",
    "few": "number = 1\ndef helper(): ...\ndef keep(b, p, q): ...",
}
# Return values of a mask for three rows.
ANSWERS = (
    "raise_() | b['nothing'] | None | [True] * 3 | np.ones(3) | np.ones((3, 1), bool) | "
    "np.ones(2, bool) | pa.array([1, 0, 1]) | "
    "pa.array([True, None, None]) | pa.array([True] * 4)"
).split(" | ")
# Beginning of a command: its possible continuations.
COMMANDS = """
inspect: absent.parquet; *.pq; empty; corpus.parquet ./corpus.parquet; corpus.parquet link.parquet
inspect: tables tables/few.parquet
inspect: twice.parquet; truncated.parquet; tables/name.parquet --id-column nam
inspect: meta.jsonl --id-column meta.sat
inspect: wide.txt; parquet.txt; lines.txt; good.txt --min-score 1; good.txt --id-column name
inspect tables/nested.parquet: --min-score 1; --language en
inspect corpus.parquet: --subset x; --sample-mb 0; --sample-mb nan; --workers 0; --paragraphs
inspect corpus.parquet: --text-column txet; --text-column=
inspect corpus.parquet: --id-column key; --min-score 1; --min-score nan; --min-bytes -3
inspect corpus.parquet: --max-bytes 0; --min-bytes 10 --max-bytes 9
inspect corpus.parquet --mask: dedup.py; masks/few.txt:keep; masks/few.py:keep(); absent.py:keep
inspect corpus.parquet --mask: masks/few.py:keeep; masks/few.py:number
inspect corpus.parquet: --language=; --mask masks.py:keep
run: absent.parquet --tokenizer tok --out out; corpus.parquet --out out; --out out; --out old
run: --out bad
run corpus.parquet --out out --tokenizer: none/at/all; tok/tokenizer.json
run corpus.parquet --tokenizer tok --out: note; note/out; kept
run corpus.parquet --tokenizer tok --out out: --workers 0; --encoder fast; --unit-mb 0
run corpus.parquet --tokenizer tok --out out: --unit-mb nan; --worker 3
run corpus.parquet --tokenizer tok --out out: --max-bad few; --max-bad 101%; --max-bad=-1
run corpus.parquet --tokenizer tok --out out: --task-id 3 --tasks 3; --task-id 3
run corpus.parquet --tokenizer tok --out out: --task-id 0 --tasks 3 --overwrite
run corpus.parquet --tokenizer tok --out out: --valid-percent -1; --test-percent nan
run corpus.parquet --tokenizer tok --out out: --test-percent inf; --valid-percent two
run corpus.parquet --tokenizer tok --out out: --valid-percent 60 --test-percent 40
run tables/few.parquet --tokenizer tok --out out: --valid-percent 0.001 --test-percent 0
plan: corpus.parquet --out out; none.parquet --tokenizer tok --out out
train-tokenizer corpus.parquet --out out --vocab-size: 100; 353 --style llama; 300 --sample-mb 0
train-tokenizer --vocab-size 400 --out: out tables/nothing.parquet; out corrupt.parquet
train-tokenizer --vocab-size 400 --out: tok corpus.parquet
stdlib: note.parquet; empty; note/s.parquet
status: none; empty; old; data --tasks 0
merge: none; empty; data --tasks 0
verify: none; empty; .; v1; listed; data --sample -1; data --index-cache none
stats: none; empty; data --picture a.jpg; cut
blend out.yaml: none; empty; corpus.parquet; data data; data empty/../data; data=0; data=-1
blend out.yaml: data=nan; data=much; data other=2
blend out.yaml: data otherend; data other; cut; data --seq-length 1000000; data --seq-length 0
blend: blend data; blend.yaml data; folder.yaml data
"""


@pytest.fixture
def spoilt(tmp_path: Path, corpus: Path, tokenizer: Path, merged: Path) -> Path:
    """Folder with all files that the commands name."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    for folder in ("tables", "masks", "folder.yaml", "masks.py"):
        (tmp_path / folder).mkdir()
    for name, columns in TABLES.items():
        pq.write_table(pa.table(columns), tmp_path / "tables" / f"{name}.parquet")
    pq.write_table(
        pa.table([["a"], ["b"], ["1"]], names=["text", "text", "id"]), tmp_path / "twice.parquet"
    )
    for name, code in MASKS.items():
        (tmp_path / "masks" / f"{name}.py").write_text(code)
    for number, answer in enumerate(ANSWERS):
        code = (
            "import numpy as np, pyarrow as pa\ndef raise_():\n    raise ValueError('a\\nb')\n"
            f"def keep(b, p, q):\n    return {answer}\n"
        )
        (tmp_path / "masks" / f"answer{number}.py").write_text(code)
    raw = corpus.read_bytes()
    corrupt = bytearray(
        base.write_parquet(
            tmp_path / "corrupt.parquet", base.make_documents(300, 40, seed=5)
        ).read_bytes()
    )
    corrupt[len(corrupt) // 2 : len(corrupt) // 2 + 64] = bytes(64)
    for name, content in (
        ("corpus", raw),
        ("truncated", raw[: len(raw) // 2]),
        ("corrupt", bytes(corrupt)),
    ):
        (tmp_path / f"{name}.parquet").write_bytes(content)
    base.write_parquet(tmp_path / "none.parquet", [])
    (tmp_path / "link.parquet").symlink_to("corpus.parquet")
    base.copied(tokenizer, tmp_path / "tok")
    for name, how in (
        ("data", "train.idx add "),
        ("other", 'manifest.json set tokenizer.sha256 "99"'),
        ("cut", "test.idx cut 8"),
        ("otherend", "manifest.json set tokenizer.eod_id 7"),
    ):
        base.spoil(base.copied(merged, tmp_path / name), how)
    return tmp_path


def test_a_mistake_is_one_line_that_names_it_and_nothing_is_written(
    spoilt: Path, wording: Wording
) -> None:
    groups = (line.split(": ") for line in COMMANDS.strip().splitlines())
    commands = ["runn", *(f"{begin} {rest}" for begin, ends in groups for rest in ends.split("; "))]
    commands += [
        f"inspect {path.relative_to(spoilt)}"
        for folder in ("mine", "tables")
        for path in sorted((spoilt / folder).iterdir())
    ]
    commands += [
        f"inspect tables/few.parquet --mask {path.relative_to(spoilt)}:keep"
        for path in sorted((spoilt / "masks").iterdir())
    ]
    before, report = base.snapshot(spoilt), set[str]()
    sha256 = base.manifest_of(spoilt / "data")["tokenizer"]["sha256"]
    for words in commands:
        result = base.cli(*words.split(), HERE=str(spoilt))
        if result.returncode == 0:  # some of the tables and masks are valid
            assert words.startswith("inspect tables/") and words.endswith(
                ("few.parquet", "name.parquet", "nested.parquet", "nothing.parquet")
            ), words
            continue
        assert result.returncode == 2 and not result.stdout, (words, result)
        assert (
            result.stderr.startswith("data_prep: error: ")
            and result.stderr.count("\n") == 1
            and len(result.stderr) < 700
        ), (
            words,
            result,
        )
        wording(f"{words}: {result.stderr.removeprefix('data_prep: error: ')}", SHA256=sha256[:12])
        report.add(words)
    assert len(report) > 130 and base.snapshot(spoilt) == before


TOKENIZERS: dict[str, Callable[[Path], object]] = {
    "without tokenizer.json": lambda t: (t / "tokenizer.json").unlink(),
    "with another tokenizer.json": lambda t: (t / "tokenizer.json").write_text("{}"),
    "without EOD": lambda t: (t / "tokenizer_config.json").unlink(),
    "with EOD null": lambda t: (t / "tokenizer_config.json").write_text('{"eos_token": null}'),
    "with no object": lambda t: (t / "tokenizer_config.json").write_text("[]"),
    "with an EOD that is no entry": lambda t: (t / "tokenizer_config.json").write_text(
        '{"eos_token": "</s>"}'
    ),
    "with random ids": lambda t: base.edit_json(
        t / "tokenizer.json", lambda spec: spec["model"].update(dropout=0.1)
    ),
}


def test_a_tokenizer_that_cannot_be_used_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, wording: Wording
) -> None:
    for name, damage in TOKENIZERS.items():
        damage(base.copied(tokenizer, tmp_path / name))
        wording(
            base.refused("plan", corpus, "--tokenizer", tmp_path / name, f"--out {tmp_path}/out"),
            VERSION=__import__("tokenizers").__version__,
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("inputs", ["", "/caf\udce9.jsonl", "/*.jsonl"])
def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path, inputs: str) -> None:
    try:
        Path(f"{tmp_path}/caf\udce9.jsonl").write_bytes(FILES["x.jsonl"])
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    assert f"{tmp_path}/caf\\udce9.jsonl: its name is not UTF-8: rename it\n" in base.refused(
        "inspect", f"{tmp_path}{inputs}"
    )
    assert "caf\\udce9/train: its name is not UTF-8" in base.refused(
        "inspect", "hf://datasets/a/b/caf\udce9/train"
    )


# --- memory, help ---------------------------------------------------------------------------------


def test_want_of_memory_is_one_line(corpus: Path) -> None:
    """With 150 MB of address space, pyarrow cannot be loaded."""
    words = ["sh", "-c", 'ulimit -v 150000; exec "$@"', "sh", *base.command("inspect", corpus)]
    known = {"PYTHONPATH": str(base.ROOT), "OPENBLAS_NUM_THREADS": "1"}
    result = subprocess.run(words, cwd=base.ROOT, capture_output=True, text=True, env=known)
    assert (
        result.returncode == 1
        and result.stderr.count("\n") == 1
        and "not enough memory" in result.stderr
    ), result


WANTS = [
    "libarrow.so: failed to map segment from shared object",
    "can't start new thread",
    "malloc of size 9 failed: bad_alloc",
]


def test_want_of_memory_by_any_librarys_words_is_known() -> None:
    errors = [
        *map(RuntimeError, WANTS),
        OSError(errno.ENOMEM, "Cannot allocate memory", "/usr"),
        pa.ArrowMemoryError("malloc of size 9"),
    ]
    assert all(map(is_want_of_memory, errors)) and not is_want_of_memory(
        OSError(errno.EIO, "Input/output error")
    )


def test_help_is_quick_and_lists_every_verb() -> None:
    output = base.python(
        "import sys; from data_prep.__main__ import main\ntry: main(['--help'])\nfinally: "
        "print(*sys.modules)"
    ).stdout
    assert not {"numpy", "pyarrow", "tokenizers", "gigatoken", "huggingface_hub"} & set(
        output.splitlines()[-1].split()
    )
    for verb in VERBS:
        assert f"\n    {verb}" in output and base.cli(verb, "--help").returncode == 0, verb
