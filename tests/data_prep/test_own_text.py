"""Tests of personal text: folders of .txt files, rows without ids, and too few documents for the
default splits.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources import Columns, open_files, spans
from tests.data_prep import conftest as base
from tests.data_prep.sources_made import read_all

LINES = ["", "", " \t", "one line", "two  words ", "naïve é", "\tindented", "x" * 70]


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Folder of 40 text files.

    Some are in a subfolder, have the same name as others, are empty, or start with a BOM.
    """
    random_, folder = random.Random(5), tmp_path / "notes"
    (folder / "more").mkdir(parents=True)
    for number in range(40):
        end = ("\n", "\r\n")[number % 3 == 0]
        content = end.join(random_.choices(LINES, k=number)).encode() + (
            end.encode() if number % 5 else b""
        )
        (folder / ("more" if number % 2 else "") / f"{number // 2:02d}.txt").write_bytes(
            b"\xef\xbb\xbf" * (number == 7) + content
        )
    (folder / ".hidden.txt").write_text("no")
    return folder


def run(inputs: Path, tokenizer: Path, out: Path, *options: object) -> list[object]:
    files = f"--tokenizer {tokenizer} --out {out}"
    return ["run", inputs, files, base.HF, "--max-bad 100%", *options]


@pytest.mark.parametrize("unit_bytes", [1, 7, 40, 100, 777, 10**9])
def test_documents_are_files_or_paragraphs_wherever_units_are_cut(
    notes: Path, unit_bytes: int
) -> None:
    paths = sorted(path for path in notes.rglob("*.txt") if not path.name.startswith("."))
    contents = {
        path.relative_to(notes).as_posix(): path.read_bytes().decode("utf-8-sig") for path in paths
    }
    (files,) = open_files([str(notes)], Columns())
    assert [(text.decode(), name.decode()) for text, name, _ in read_all(files, unit_bytes)] == [
        (text, name) for name, text in contents.items()
    ]
    (parted,) = open_files([str(notes)], Columns(), paragraphs=True)
    cuts = spans(parted, Columns(), unit_bytes)
    assert [cut.stop for cut in cuts[:-1]] == [cut.start for cut in cuts[1:]] and (
        len(cuts) > 1
    ) == (unit_bytes < 10**9)
    found, blank = read_all(parted, cuts), re.compile(r"\n(?:[ \t\r]*\n)+")
    expected = [
        (text.strip("\r\n"), name)
        for name, full in contents.items()
        for text in blank.split(f"\n\n{full}\n\n")
    ]
    assert [(text.decode(), name.decode().rpartition(":")[0]) for text, name, _ in found] == [
        pair for pair in expected if pair[0]
    ]
    for text, name, _ in found:
        file, _, at = name.decode().rpartition(":")
        assert (notes / file).read_bytes()[int(at) :].removeprefix(b"\xef\xbb\xbf").startswith(text)


def test_every_verb_takes_a_folder_of_text(tmp_path: Path, notes: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    base.done("train-tokenizer", notes, "--vocab-size 280 --out", tokenizer)
    for options in ([], ["--paragraphs"]):
        assert "files: 40 " in base.done(
            "inspect", notes, "--tokenizer", tokenizer, base.HF, *options
        )
        one, small = (tmp_path / f"{name}{len(options)}" for name in ("one", "small"))
        base.done(*run(notes, tokenizer, one, base.SHARES, *options, "--unit-mb 1"))
        base.done(*run(notes, tokenizer, small, base.SHARES, *options, base.SMALL_UNITS))
        assert base.merged_hashes(one) == base.merged_hashes(small)
        assert "encoded again agree" in base.done("verify", small)
        assert base.done("status", small) and base.done("stats", small)
    command = run(notes, tokenizer, tmp_path / "one0", base.SHARES, "--unit-mb 1")
    for hidden in notes.rglob(".*"):  # otherwise an additional line would list it
        hidden.unlink()
    assert "another --paragraphs" in base.refused(*command, "--paragraphs")
    (notes / "00.txt").write_text("another text")
    assert "other inputs" in base.refused(*command)
    (notes / "more" / "03.txt").write_bytes(b"a caf\xe9, as latin-1 has it")
    output = base.cli(
        *run(notes, tokenizer, tmp_path / "bad", base.ALL_TRAIN, "--max-bad 0")
    ).stderr
    assert f"{notes / 'more' / '03.txt'}, byte 0: invalid_utf8 (byte 5: " in output


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_without_an_id_have_file_and_place(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    texts = [text for _, text in base.make_documents(300, 9)]
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        for number, part in enumerate((texts[:200], texts[200:])):
            path = tmp_path / folder / f"{number}.{kind}"
            if kind == "jsonl":
                path.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
            else:
                pq.write_table(pa.table({"text": part}), path, row_group_size=10)
    full, small, moved = (tmp_path / name for name in ("whole", "small", "moved"))
    output = base.done(*run(tmp_path / "here", tokenizer, full, base.SHARES, "--workers 1"))
    assert output.count("no column 'id'") == 1
    base.prepared(small, [tmp_path / "here"], tokenizer, base.SMALL_UNITS)
    base.prepared(moved, [tmp_path / "there"], tokenizer)
    assert base.merged_hashes(full) == base.merged_hashes(small) == base.merged_hashes(moved)
    assert "encoded again agree" in base.done("verify", small)
    assert all(len(base.read_split(full, name)) > 3 for name in ("train", "valid", "test"))
    (tmp_path / "there" / f"0.{kind}").rename(tmp_path / "there" / f"00.{kind}")
    assert "other inputs" in base.refused(*run(tmp_path / "there", tokenizer, moved, base.SHARES))


@pytest.mark.parametrize("number", [1, 2, 3, 30])
def test_an_empty_split_is_reported_before_anything_is_encoded_with_one_that_fits(
    tmp_path: Path, tokenizer: Path, number: int
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"text {i}", "id": i}) + "\n" for i in range(number))
    )
    command = run(tmp_path / "a.jsonl", tokenizer, tmp_path / "out")
    error = base.refused(*command, "--valid-percent 0.5 --test-percent 0.5")
    advice = re.search(
        r"valid and test would be empty.* give (--valid-percent \S+ --test-percent \S+)", error
    )
    assert advice and not (tmp_path / "out").exists()
    base.done(*command, *advice[1].split())
