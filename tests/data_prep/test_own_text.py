"""Text as a person has it: folders of .txt files, rows without ids, and so little of it that a split would be empty."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.encode.splits import Split, fitting
from data_prep.sources import Columns, open_files, spans
from tests.data_prep.conftest import HF, SHARES, SMALL_UNITS, make_documents, merged_hashes, read_split
from tests.data_prep.sources_made import read_all

LINES = ["", "", " \t", "one line", "two  words ", "naïve é", "\tindented", "x" * 70]
ALL_TRAIN = ("--valid-percent", "0", "--test-percent", "0")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of 40 text files, some of them below another folder, of the same name as others, empty or with a BOM."""
    random_ = random.Random(5)
    folder = tmp_path / "notes"
    for number in range(40):
        path = folder / ("more" if number % 2 else "") / f"{number // 2:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        end = ("\n", "\r\n")[number % 3 == 0]
        content = end.join(random_.choices(LINES, k=number)).encode()
        path.write_bytes((b"\xef\xbb\xbf" if number == 7 else b"") + content + (end.encode() if number % 5 else b""))
    (folder / ".hidden.txt").write_text("no")
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Name and text of each file, in order."""
    paths = sorted(path for path in folder.rglob("*.txt") if not path.name.startswith("."))
    return {path.relative_to(folder).as_posix(): path.read_bytes().decode("utf-8-sig") for path in paths}


def run(inputs: Path, tokenizer: Path, out: Path, *options: str) -> int:
    return main(["run", str(inputs), "--tokenizer", str(tokenizer), "--out", str(out), *HF, "--max-bad", "100%", *options])


@pytest.mark.parametrize("unit_bytes", [1, 7, 40, 100, 777, 10**9])
def test_documents_are_files_or_paragraphs_wherever_units_are_cut(notes: Path, unit_bytes: int) -> None:
    (files,) = open_files([str(notes)], Columns())
    rows = read_all(files, spans(files, Columns(), unit_bytes))
    assert [(text.decode(), name.decode()) for text, name, _ in rows] == [(text, name) for name, text in contents(notes).items()]
    (parted,) = open_files([str(notes)], Columns(), paragraphs=True)
    cuts = spans(parted, Columns(), unit_bytes)
    assert [cut.stop for cut in cuts[:-1]] == [cut.start for cut in cuts[1:]] and (len(cuts) > 1) == (unit_bytes < 10**9)
    found = read_all(parted, cuts)
    blank = re.compile(r"\n(?:[ \t\r]*\n)+")
    expected = [(text.strip("\r\n"), name) for name, whole in contents(notes).items() for text in blank.split(f"\n\n{whole}\n\n")]
    expected = [(text, name) for text, name in expected if text]
    assert [(text.decode(), name.decode().rpartition(":")[0]) for text, name, _ in found] == expected
    for text, name, _ in found:
        file, _, at = name.decode().rpartition(":")
        assert (notes / file).read_bytes()[int(at) :].removeprefix(b"\xef\xbb\xbf").startswith(text)


def test_every_verb_takes_a_folder_of_text(tmp_path: Path, notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = tmp_path / "tokenizer"
    assert main(["train-tokenizer", str(notes), "--vocab-size", "280", "--out", str(tokenizer)]) == 0
    for options in ([], ["--paragraphs"]):
        assert main(["inspect", str(notes), "--tokenizer", str(tokenizer), "--encoder", "hf", *options]) == 0
        assert "files: 40 " in capsys.readouterr().out
        outs = [tmp_path / f"{size}{''.join(options)}" for size in ("1", "0.001")]
        for out in outs:
            assert run(notes, tokenizer, out, *SHARES, *options, "--unit-mb", out.name.split("-")[0]) == 0
        assert merged_hashes(outs[0]) == merged_hashes(outs[1])
        for verb in ("verify", "status", "stats"):
            assert main([verb, str(outs[1])]) == 0
        assert "encoded again agree" in capsys.readouterr().out
    assert run(notes, tokenizer, tmp_path / "1", *SHARES, "--paragraphs", "--unit-mb", "1") == 2
    assert "another --paragraphs" in capsys.readouterr().err
    (notes / "00.txt").write_text("another text")
    assert run(notes, tokenizer, tmp_path / "1", *SHARES, "--unit-mb", "1") == 2 and "other inputs" in capsys.readouterr().err


def test_bytes_that_are_no_utf8_are_told_with_file_and_offset(
    tmp_path: Path, notes: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (notes / "more" / "03.txt").write_bytes(b"a caf\xe9, as latin-1 has it")
    (notes / "00.txt").write_bytes(b"no longer empty")
    assert run(notes, tokenizer, tmp_path / "out", *ALL_TRAIN, "--max-bad", "0") == 1
    assert f"{notes / 'more' / '03.txt'}, byte 0: invalid_utf8 (byte 5: " in capsys.readouterr().err
    place = next(json.loads(line) for line in (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines() if "utf8" in line)
    assert (place["file"], place["place"]) == (str(notes / "more" / "03.txt"), 0)


@pytest.mark.parametrize(
    ("name", "content", "options", "said"),
    [
        ("a.txt", "text".encode("utf-16"), [], "a.txt is named .txt and looks like UTF-16; write it as UTF-8"),
        ("a.txt", b"PAR1....", [], "a.txt is named .txt and its content is parquet; rename it"),
        ("a.txt", b'{"text": "x"}\n{"text": "y"}\n', [], "begins with a JSON object; name it .jsonl"),
        ("a.txt", b"text", ["--min-score", "1"], "no column 'score', as no .txt file has"),
        ("a.txt", b"text", ["--id-column", "name"], "no column 'name', as no .txt file has"),
        ("a.jsonl", b'{"text": "x"}\n', ["--paragraphs"], "--paragraphs goes with .txt inputs"),
    ],
)
def test_what_is_no_plain_text_is_refused(
    tmp_path: Path, name: str, content: bytes, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["inspect", str(tmp_path), *options]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1, error


def test_text_files_beside_data_are_left_alone_unless_named(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.txt").write_text("a licence")
    (tmp_path / "a.jsonl").write_text('{"text": "x", "id": "a"}\n')
    assert [file.kind for file in open_files([str(tmp_path)], Columns())] == ["jsonl"]
    assert [file.kind for file in open_files([str(tmp_path / "*")], Columns())] == ["txt", "jsonl"]
    assert [file.kind for file in open_files([str(tmp_path / "LICENSE.txt")], Columns())] == ["txt"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_without_an_id_have_file_and_place(tmp_path: Path, tokenizer: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text for _, text in make_documents(300, 9)]
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for number, part in enumerate((texts[:200], texts[200:])):
            path = tmp_path / folder / f"{number}.{kind}"
            if kind == "jsonl":
                path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
            else:
                pq.write_table(pa.table({"text": part}), path, row_group_size=10)
    outs = [tmp_path / name for name in ("whole", "small", "killed", "moved")]
    assert run(tmp_path / "here", tokenizer, outs[0], *SHARES, "--workers", "1") == 0
    said = capsys.readouterr().out
    assert said.count("no column 'id'") == 1
    assert run(tmp_path / "here", tokenizer, outs[1], *SHARES, *SMALL_UNITS, "--workers", "2") == 0
    assert main(["plan", str(tmp_path / "here"), "--tokenizer", str(tokenizer), "--out", str(outs[2]), *SHARES, *SMALL_UNITS]) == 0
    assert main(["run", "--out", str(outs[2]), "--task-id", "1", "--tasks", "2", *HF]) == 0
    assert main(["run", "--out", str(outs[2]), *HF]) == 0
    assert run(tmp_path / "there", tokenizer, outs[3], *SHARES) == 0
    assert len({json.dumps(merged_hashes(out)) for out in outs}) == 1
    assert all(main(["verify", str(out)]) == 0 for out in outs)
    assert all(len(read_split(outs[0], name)) > 3 for name in ("train", "valid", "test"))
    capsys.readouterr()
    (tmp_path / "there" / f"0.{kind}").rename(tmp_path / "there" / f"00.{kind}")
    assert run(tmp_path / "there", tokenizer, outs[3], *SHARES) == 2 and "other inputs" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "here"), "--id-column", "name"]) == 2
    assert "no column 'name'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [1, 2, 3, 30])
def test_an_empty_split_is_told_before_anything_is_encoded_with_one_that_fits(
    tmp_path: Path, tokenizer: Path, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"text {i}", "id": i}) + "\n" for i in range(number)))
    shares = ("--valid-percent", "0.5", "--test-percent", "0.5")
    for out in (tmp_path / "out", tmp_path / "planned"):
        assert main(["run", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer), "--out", str(out), *HF, *shares]) == 2
        error = capsys.readouterr().err
        assert "valid and test would be empty" in error and error.count("\n") == 1 and not out.exists()
    advice = re.search(r"give (--valid-percent \S+ --test-percent \S+)", error)
    assert advice
    assert run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out", *advice[1].split()) == 0


def test_the_shares_that_fit_leave_no_split_empty() -> None:
    random_ = np.random.default_rng(3)
    for _ in range(200):
        hashes = random_.integers(0, 2**64, size=random_.integers(3, 2000), dtype=np.uint64)
        split = Split(*random_.choice([0.0, 0.001, 0.05, 2.0, 30.0], size=2).tolist())
        found = fitting(split, hashes)
        if found:
            assert len(np.unique(found.of_hashes(hashes))) == len(found.names) == len(split.names)
            assert found.valid_percent >= split.valid_percent and found.test_percent >= split.test_percent
        else:
            assert len(hashes) < 20
