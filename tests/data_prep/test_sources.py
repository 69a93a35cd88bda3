"""Inputs: which files they mean, what is refused before any work and in which words, spans, identities."""

from __future__ import annotations

import gzip
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.encode.documents import Settings
from data_prep.sources import Columns, SourceFile, Span, open_files, read_span, spans
from data_prep.sources.finding import find_files, kind_by_name
from data_prep.store.layout import Identity, Plan, Unit, fingerprint_of, read_plan, write_plan
from fem_common.errors import UserError
from fem_common.files import json_bytes
from tests.data_prep.sources_made import TEXT, packed, read_all, row, write_lines

COLUMNS = Columns()
GOOD = pa.table({"text": ["a", "b"], "id": ["1", "2"]})


def paths(*inputs: object) -> list[str]:
    """The files of inputs, by name."""
    return [found.path for found in find_files([str(name) for name in inputs])]


def refused(inputs: object, columns: Columns = COLUMNS, subset: str | None = None) -> str:
    """The line that refuses inputs."""
    with pytest.raises(UserError) as error:
        open_files([str(inputs)] if isinstance(inputs, str | Path) else list(inputs), columns, subset)  # type: ignore[call-overload]
    text = str(error.value)
    assert "\n" not in text
    return text


# --- finding ------------------------------------------------------------------------------------------------------------------------


def make_tree(folder: Path, *names: str) -> None:
    """Empty files."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_a_folder_means_every_data_file_below_sorted_without_hidden_names(tmp_path: Path) -> None:
    kept = ["a/1.parquet", "a/2.jsonl", "b.jsonl.gz", "c/d/e.jsonl.zst", "f.ndjson", "g.ndjson.gz"]
    make_tree(tmp_path, *kept, "a/.3.parquet", ".hidden/4.parquet", "README.md", "x.json", "y.parquet.gz", "z.csv", "parquet")
    (tmp_path / "folder.parquet").mkdir()
    assert paths(tmp_path) == [str(tmp_path / name) for name in kept]


def test_inputs_keep_their_order_and_a_glob_is_sorted(tmp_path: Path) -> None:
    make_tree(tmp_path, "z.jsonl", "b/2.parquet", "b/10.parquet", "a.any")
    assert paths(tmp_path / "z.jsonl", tmp_path / "b", tmp_path / "a.any") == [
        str(tmp_path / name) for name in ("z.jsonl", "b/10.parquet", "b/2.parquet", "a.any")
    ]
    assert paths(tmp_path / "b" / "*.parquet") == [str(tmp_path / "b" / name) for name in ("10.parquet", "2.parquet")]
    assert paths(tmp_path / "**") == [str(tmp_path / name) for name in ("b/10.parquet", "b/2.parquet", "z.jsonl", "a.any")]


def test_links_are_followed_to_files(tmp_path: Path) -> None:
    make_tree(tmp_path, "blobs/abc", "snapshot/x.txt")
    os.symlink(tmp_path / "blobs" / "abc", tmp_path / "snapshot" / "1.parquet")
    assert paths(tmp_path / "snapshot") == [str(tmp_path / "snapshot" / "1.parquet")]


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (["nothere.parquet"], "no such file: nothere.parquet"),
        (["no*.parquet"], "no file matches no*.parquet"),
        (["empty"], "no .parquet, .jsonl, .jsonl.gz, .jsonl.zst or .txt file in the folder empty"),
        (["x.jsonl", "./x.jsonl"], "x.jsonl is given twice; each input file counts once"),
        (["x.jsonl", "link.jsonl"], "link.jsonl is given twice"),
        ([".", "x.jsonl"], "given twice"),
    ],
)
def test_inputs_without_files_or_with_a_file_twice_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tree(tmp_path, "x.jsonl", "empty/readme.md")
    os.symlink("x.jsonl", "link.jsonl")
    assert words in refused(inputs)


@pytest.mark.parametrize("inputs", ["", "name", "*.jsonl"])
def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path, inputs: str) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9.jsonl"
    try:
        Path(os.fsdecode(raw)).write_bytes(b'{"text": "a", "id": "1"}\n')
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    words = f"{tmp_path}/caf\\udce9.jsonl: its name is not UTF-8: rename it"
    assert refused(os.fsdecode(raw) if inputs == "name" else tmp_path / inputs) == words
    assert "caf\\udce9/train: its name is not UTF-8" in refused("hf://datasets/a/b/caf\udce9/train")


def test_other_names_that_are_not_utf8_are_written_as_json_has_them(tmp_path: Path) -> None:
    name = 'm\\\udce9"é🙂.py:f'
    assert json.loads(json_bytes({name: [name]}).decode()) == {name: [name]}
    plan = Plan(
        "", Settings(mask=name), Identity(9, 0, "s"), (SourceFile(name, "jsonl", 5, None, 5, "f", name),), (Unit(0, 0, 0, 1, None, 5),), 7
    )
    plan = replace(plan, fingerprint=fingerprint_of(plan))
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan


def test_a_subset_needs_an_address_on_the_hub(tmp_path: Path) -> None:
    pq.write_table(GOOD, tmp_path / "x.parquet")
    assert refused(tmp_path, subset="sample-10BT") == "--subset sample-10BT goes with an hf:// input"


def test_kinds_by_name() -> None:
    names = {"a.parquet": "parquet", "a.b.jsonl": "jsonl", "a.jsonl.gz": "jsonl.gz", "a.ndjson.zst": "jsonl.zst"}
    assert {name: kind_by_name(name) for name in names} == names
    assert [kind_by_name(name) for name in ("a.json", "a.parquet.gz", "a", "a.gz", "a.csv.gz", "jsonl")] == [None] * 6


# --- what is refused ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.parquet", b"", "x.parquet is empty"),
        ("x.jsonl", b"", "x.jsonl is empty"),
        ("x.jsonl", b"\n \r\n", "holds no line"),
        ("x.jsonl.gz", gzip.compress(b"", mtime=0), "holds no line"),
        ("x.parquet", b"PAR1PAR1", "is not a readable parquet file"),
        ("x.parquet", b'{"text":"a"}\n', "x.parquet is not a parquet file: its content is jsonl; rename it"),
        ("x.jsonl", gzip.compress(b"{}\n", mtime=0), "x.jsonl is not a jsonl file: its content is jsonl.gz; rename it"),
        ("x.jsonl.gz", b'{"text":"a"}\n', "x.jsonl.gz is not a jsonl.gz file: its content is jsonl; rename it"),
        (
            "x.parquet",
            b"version https:" + b"//git-lfs.github.com/spec/v1\n",
            "is a Git LFS pointer; fetch the file itself with git lfs pull",
        ),
        ("x.parquet", b"<!DOCTYPE html>", "looks like an HTML or XML page; download the file again"),
        ("x.jsonl", b'[{"text": "a"}]', "looks like a JSON array; write one object a line"),
        ("x.jsonl", '{"text"'.encode("utf-16"), "looks like UTF-16"),
        ("x.any", b"text,id\n", "x.any is no parquet or JSONL file: it begins with b'text,id\\n'; inputs are .parquet, .jsonl"),
        ("x.jsonl", b'{\n "text": "a"\n}\n', "x.jsonl is no JSONL: line 1: Expecting property name enclosed in double quotes"),
        ("x.jsonl.gz", gzip.compress(b'{"text":"a"}\n' * 9, mtime=0)[:12], "the gzip stream ends early"),
    ],
)
def test_a_wrong_kind_is_refused_by_content(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert words in refused(tmp_path / name)


def test_a_truncated_parquet_file_is_refused(tmp_path: Path) -> None:
    pq.write_table(GOOD, tmp_path / "x.parquet")
    whole = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "x.parquet").write_bytes(whole[: len(whole) // 2])
    assert "x.parquet is not a readable parquet file" in refused(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    pq.write_table(GOOD, tmp_path / "x.parquet")
    (tmp_path / "x.parquet").chmod(0)
    assert "cannot be read (Permission denied)" in refused(tmp_path)


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz"])
def test_missing_columns_are_named_with_the_nearest_or_the_option(tmp_path: Path, kind: str) -> None:
    def written(*names: str) -> Path:
        table = pa.table({name: ["v"] for name in names})
        path = tmp_path / f"x.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        else:
            write_lines(path, [json.dumps(item).encode() for item in table.to_pylist()])
        return path

    where = "" if kind == "parquet" else " in its first line"
    text = refused(written("texts", "id"))
    assert text.endswith(f"has no column 'text'{where} (it has: texts, id); did you mean 'texts'?")
    assert refused(written("content", "id")).endswith("(it has: content, id); name it with --text-column")
    text = refused(written("text", "url"), Columns(id="key"))
    assert text.endswith(
        f"has no column 'key'{where} (it has: text, url); name it with --id-column, or --id-column text to split by the text itself"
    )
    assert "did you mean 'keys'? name it with --id-column" in refused(written("text", "keys"), Columns(id="key"))
    assert "did you mean 'score'?" in refused(written("text", "id", "score"), Columns(extra=("scores",)))
    assert "a filter or the mask asks for it" in refused(written("text", "id"), Columns(extra=("language",)))
    assert len(refused(written("id", *(f"column{i}" for i in range(99))))) < 600
    assert open_files([str(written("text"))], Columns(id="text"))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"text": [1], "id": ["1"]}, "column 'text' is int64, not text; name the text column with --text-column"),
        ({"text": [["a"]], "id": ["1"]}, "not text"),
        ({"text": ["a"], "id": [1.5]}, "column 'id' is double, neither text nor integer; name the id column with --id-column"),
        ({"text": ["a"], "id": [True]}, "column 'id' is bool, neither"),
    ],
)
def test_wrong_column_types_are_refused(tmp_path: Path, table: dict[str, list[Any]], words: str) -> None:
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    assert words in refused(tmp_path)
    (tmp_path / "x.parquet").unlink()
    write_lines(tmp_path / "x.jsonl", [json.dumps({name: values[0] for name, values in table.items()}).encode()])
    assert ("not text" if "not text" in words else "neither text nor a whole number") in refused(tmp_path)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["1"])], names=["text", "text", "id"]), tmp_path / "x.parquet")
    assert "has 2 columns named 'text'" in refused(tmp_path)


def test_the_first_wrong_file_of_many_is_named(tmp_path: Path) -> None:
    for number in range(20):
        pq.write_table(GOOD if number not in (11, 15) else GOOD.drop(["text"]), tmp_path / f"{number:02}.parquet")
    assert "11.parquet has no column 'text'" in refused(tmp_path)


# --- what a file is -----------------------------------------------------------------------------------------------------------------


def test_files_of_every_kind_are_described(tmp_path: Path) -> None:
    rows = [row(i, words=400) for i in range(500)]
    text = sum(len(item["text"].encode()) for item in rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=100)
    for name in ("b.jsonl", "c.jsonl.gz", "d.jsonl.zst"):
        write_lines(tmp_path / name, [json.dumps(item).encode() for item in rows])
    (tmp_path / "e").write_bytes((tmp_path / "c.jsonl.gz").read_bytes())
    files = open_files([str(tmp_path), str(tmp_path / "e")], COLUMNS)
    assert [(Path(f.path).name, f.kind, f.rows) for f in files] == [
        ("a.parquet", "parquet", 500),
        ("b.jsonl", "jsonl", None),
        ("c.jsonl.gz", "jsonl.gz", None),
        ("d.jsonl.zst", "jsonl.zst", None),
        ("e", "jsonl.gz", None),
    ]
    for file in files:
        assert file.bytes == Path(file.path).stat().st_size
        assert abs(file.text_bytes / text - 1) < 0.3, file
    assert files[2].fingerprint == files[4].fingerprint
    assert len({file.fingerprint for file in files}) == 4


def test_fingerprints_see_another_size_and_other_content_and_are_fast(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = json.dumps(row(0, words=1000)).encode() + b"\n"
    path.write_bytes(line * (100_000_000 // len(line)))
    begin = time.perf_counter()
    (whole,) = open_files([str(path)], COLUMNS)
    assert time.perf_counter() - begin < 1
    with path.open("ab") as stream:
        stream.write(b"\n")
    assert open_files([str(path)], COLUMNS)[0].fingerprint != whole.fingerprint
    with path.open("r+b") as stream:
        stream.truncate(whole.bytes)
        assert open_files([str(path)], COLUMNS)[0].fingerprint == whole.fingerprint
        stream.seek(whole.bytes - 5)
        stream.write(b"#")
    assert open_files([str(path)], COLUMNS)[0].fingerprint != whole.fingerprint
    prints = set()
    for texts in (["a", "b"], ["a", "c"], ["a", "bb"]):
        pq.write_table(pa.table({"text": texts, "id": ["1", "2"]}), tmp_path / "x.parquet")
        prints.add(open_files([str(tmp_path / "x.parquet")], COLUMNS)[0].fingerprint)
    assert len(prints) == 3


# --- spans --------------------------------------------------------------------------------------------------------------------------


def written(folder: Path, kind: str, rows: list[dict[str, Any]]) -> SourceFile:
    """A file of rows, opened."""
    path = folder / f"x.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    else:
        write_lines(path, [json.dumps(item).encode() for item in rows])
    return open_files([str(path)], COLUMNS)[0]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_spans_cover_each_row_once_in_order_for_any_unit_size(tmp_path: Path, kind: str) -> None:
    random_ = random.Random(1)
    rows = [row(i, words=random_.choice([1, 5, 200])) for i in range(150)]
    file = written(tmp_path, kind, rows)
    (whole,) = spans(file, COLUMNS, 1 << 40)
    expected = read_all(file, [whole])
    assert [item[:2] for item in expected] == [(item["text"].encode(), item["id"].encode()) for item in rows]
    least = 1 if kind == "parquet" else 500  # a span of JSONL costs an opened file
    for unit_bytes in (least, 999, 5000, 20_000, *(random_.randrange(least, 60_000) for _ in range(6))):
        cut = spans(file, COLUMNS, unit_bytes)
        assert cut == spans(file, COLUMNS, unit_bytes)
        assert [span.start for span in cut] == [0, *(span.stop for span in cut[:-1])]
        assert cut[-1].stop == whole.stop
        assert read_all(file, cut) == expected
        if kind == "parquet":
            assert sum(span.rows or 0 for span in cut) == 150
            assert all(span.text_bytes >= unit_bytes for span in cut[:-1])
            sizes = [span.text_bytes for span in spans(file, COLUMNS, 1)]
            assert all(span.text_bytes - sizes[span.stop - 1] < unit_bytes for span in cut)  # never more than a group beyond
        elif kind == "jsonl":
            assert len(cut) == max(1, min(file.bytes, round(file.text_bytes / unit_bytes)))
        else:
            assert len(cut) == 1


def test_plain_lines_may_be_cut_at_any_byte(tmp_path: Path) -> None:
    file = written(tmp_path, "jsonl", [row(i, words=2) for i in range(5)])
    expected = read_all(file, [Span(0, file.bytes, None, 0)])
    assert len(expected) == 5
    for cut in range(file.bytes + 1):
        assert read_all(file, [Span(0, cut, None, 0), Span(cut, file.bytes, None, 0)]) == expected


def test_a_parquet_file_without_rows_has_no_rows(tmp_path: Path) -> None:
    pq.write_table(GOOD.slice(0, 0), tmp_path / "x.parquet")
    (file,) = open_files([str(tmp_path)], COLUMNS)
    assert (file.rows, read_all(file, spans(file, COLUMNS, 100))) == (0, [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.unlink(), "no such file: "),
        (lambda path: path.write_bytes(path.read_bytes() + b"\n"), "when it was planned: it has changed"),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_file_that_is_gone_or_changed_is_refused(tmp_path: Path, kind: str, change: Callable[[Path], object], words: str) -> None:
    file = written(tmp_path, kind, [row(i, words=2) for i in range(5)])
    (span,) = spans(file, COLUMNS, 1 << 30)
    change(Path(file.path))
    with pytest.raises(UserError, match=words):
        list(read_span(file, span, COLUMNS))


def test_made_rows_hold_what_the_tests_need() -> None:
    assert max(map(ord, TEXT)) > 0xFFFF and '"' in TEXT and "\\" in TEXT and "\n" in TEXT
    assert packed("x.jsonl.gz", b"a")[:2] == b"\x1f\x8b"
