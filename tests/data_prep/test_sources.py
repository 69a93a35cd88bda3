"""Tests of inputs: their files, spans and fingerprints. The tests of refused inputs and their
messages are in test_errors.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.encode.documents import Settings
from data_prep.prepared.layout import Identity, Plan, Unit, fingerprint_of, read_plan, write_plan
from data_prep.sources import Columns, SourceFile, Span, open_files, read_span, spans, streams
from data_prep.sources.finding import find_files
from fem_common.errors import UserError
from tests.data_prep.sources_made import COLUMNS, WHOLE, opened, packed, read_all, row, written


def test_inputs_mean_these_files_in_this_order(tmp_path: Path) -> None:
    """A folder gives all data files below it, sorted, without hidden names. A glob is sorted. Links
    are followed.
    """
    kept = (
        "a/1.parquet a/10.parquet a/2.jsonl b.jsonl.gz c/d/e.jsonl.zst f.ndjson g.ndjson.gz "
        "link.parquet"
    ).split()
    others = (
        "a/.3.parquet .hidden/4.parquet README.md state.json y.parquet.gz z.csv parquet LICENSE.txt"
    ).split()
    for name in (*kept[:-1], *others, "folder.parquet/x.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "link.parquet").symlink_to("README.md")

    def means(*inputs: str) -> list[str]:
        return [
            Path(found.path).relative_to(tmp_path).as_posix()
            for found in find_files([str(tmp_path / name) for name in inputs])
        ]

    assert means(".") == kept and means("f.ndjson", "a", "z.csv") == [
        "f.ndjson",
        *kept[:3],
        "z.csv",
    ]
    assert (
        means("a/*.parquet") == kept[:2]
        and means("c/**") == kept[4:5]
        and means("LICENSE.txt") == ["LICENSE.txt"]
    )


def test_a_folder_follows_links_and_names_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every suffix of JSON lines counts. A link to a folder is followed, unless it leads to a
    parent folder.
    """
    own = "a.json.gz b.JSONL c.json d.json.zst e.jsonl.zstd".split()
    kept = [*own, "linked/f.jsonl", "linked/up/g.Parquet"]
    left_out = ".h.jsonl i.csv j.jsonl.bz2 dataset_info.json .git/k.jsonl".split()
    for name in (*(f"here/{name}" for name in (*own, *left_out)), "there/f.jsonl", "up/g.Parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    links = {"here/linked": "there", "there/up": "up", "up/loop": "there", "here/self": "here"}
    for link, target in links.items():
        (tmp_path / link).symlink_to(f"../{target}")
    here = str(tmp_path / "here")
    assert [found.name for found in find_files([here])] == kept
    left = "dataset_info.json, i.csv, j.jsonl.bz2, .git/, .h.jsonl"
    assert capsys.readouterr().err == f"data_prep: {here}: 5 names left out: {left}\n"
    (tmp_path / "here" / "gone").symlink_to("../absent")
    with pytest.raises(UserError, match="gone is a link to ../absent, which does not exist"):
        find_files([here])


@pytest.mark.parametrize("name", ["x.json", "x.json.gz", "x.JSON.zst"])
@pytest.mark.parametrize(
    "content",
    [
        b'{\n "a": 1,\n "rows": [\n{"text": "b"}\n]}',
        b'[\n{"text": "a"},\n{"text": "b"}\n]',
        b'[{"text": "a"}]',
    ],
)
def test_one_json_document_is_refused_and_json_lines_of_that_name_are_read(
    tmp_path: Path, name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(packed(name.lower(), content))
    with pytest.raises(UserError, match=r"one object per line"):
        open_files([str(tmp_path)], COLUMNS)
    rows = [{"text": "a", "id": "1"}, {"text": "b", "id": "2"}]
    file = opened(
        tmp_path / name,
        packed(name.lower(), b"".join(json.dumps(item).encode() + b"\n" for item in rows)),
    )
    assert [(text, key) for text, key, _ in read_all(file)] == [(b"a", b"1"), (b"b", b"2")]


def test_a_zstd_window_that_arrow_does_not_allow_is_named(tmp_path: Path) -> None:
    """The file has one line and a window of 256 MiB (zstd --long=28)."""
    line, window = b'{"text": "a", "id": "1"}\n', (28 - 10) << 3
    block = (len(line) << 3 | 1).to_bytes(3, "little") + line
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\0" + bytes([window]) + block)
    with pytest.raises(
        UserError,
        match=f"{path} was packed by zstd with a window above 128 MiB .*: zstd -d --long=31 ",
    ):
        open_files([str(path)], COLUMNS)


def test_a_plan_may_hold_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = 'm\\\udce9"é🙂.py:f'
    file = SourceFile(name, "jsonl", 5, None, 5, "f", id_prefix=name)
    plan = Plan(
        "", Settings(mask=name), Identity(9, 0, "s"), (file,), (Unit(0, 0, 0, 1, None, 5),), 7
    )
    plan = replace(plan, fingerprint=fingerprint_of(plan))
    write_plan(tmp_path, plan)
    assert read_plan(tmp_path) == plan


def test_the_first_wrong_file_of_many_is_named(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "b"], "id": ["1", "2"]})
    for number in range(20):
        pq.write_table(
            table if number not in (11, 15) else table.drop(["text"]),
            tmp_path / f"{number:02}.parquet",
        )
    with pytest.raises(UserError, match="11.parquet has no column 'text'"):
        open_files([str(tmp_path)], COLUMNS)


def test_files_of_every_kind_are_described(tmp_path: Path) -> None:
    rows = [row(i, words=400) for i in range(500)]
    text = sum(len(item["text"].encode()) for item in rows)
    for name in ("a.parquet", "b.jsonl", "c.jsonl.gz", "d.jsonl.zst", "f.arrow"):
        written(tmp_path / name, rows, row_group_size=100)
    (tmp_path / "e").write_bytes((tmp_path / "c.jsonl.gz").read_bytes())
    files = open_files([str(tmp_path), str(tmp_path / "e")], COLUMNS)
    kinds = "parquet jsonl jsonl.gz jsonl.zst arrow jsonl.gz"
    assert [file.kind for file in files] == kinds.split()
    assert [file.rows for file in files] == [500, None, None, None, 500, None]
    assert all(
        file.bytes == Path(file.path).stat().st_size and abs(file.text_bytes / text - 1) < 0.3
        for file in files
    )
    assert (
        files[2].fingerprint == files[5].fingerprint
        and len({file.fingerprint for file in files}) == 5
    )


class Counting(streams.LocalFile):
    """File that counts the bytes read."""

    total = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        Counting.total += len(data)
        return data

    def readinto(self, buffer: Any, /) -> int:
        size = super().readinto(buffer)
        Counting.total += size
        return size


def test_fingerprints_see_another_size_and_other_content_and_are_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a tenth of a file of 100 MB is read."""
    path, line = tmp_path / "x.jsonl", b'{"text": "%s", "id": "1"}\n' % (b"x" * 4000)
    full = opened(path, line * 25_000)
    with monkeypatch.context() as patch:
        patch.setattr(streams, "LocalFile", Counting)
        patch.setattr(Counting, "total", 0)
        assert (
            open_files([str(path)], COLUMNS)[0] == full and 1e6 < Counting.total < full.bytes / 10
        )
    os.truncate(path, full.bytes - 1)
    assert open_files([str(path)], COLUMNS)[0].fingerprint != full.fingerprint
    with path.open("ab") as stream:
        stream.write(b" ")
    assert open_files([str(path)], COLUMNS)[0].fingerprint != full.fingerprint
    found = set()
    for texts in (["a", "b"], ["a", "c"], ["a", "bb"]):
        rows = [{"text": text, "id": text} for text in texts]
        found.add(written(tmp_path / "x.parquet", rows).fingerprint)
    assert len(found) == 3


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "jsonl.gz", "jsonl.zst"])
def test_spans_cover_each_row_once_in_order_for_any_unit_size(tmp_path: Path, kind: str) -> None:
    random_ = random.Random(1)
    rows = [row(i, words=random_.choice([1, 5, 200])) for i in range(150)]
    file = written(tmp_path / f"x.{kind}", rows, row_group_size=7)
    (full,) = spans(file, COLUMNS, WHOLE)
    expected = read_all(file)
    assert [item[:2] for item in expected] == [
        (item["text"].encode(), item["id"].encode()) for item in rows
    ]
    least = 1 if kind in ("parquet", "arrow") else 500  # each span of JSONL opens the file
    for unit_bytes in (
        least,
        999,
        5000,
        20_000,
        *(random_.randrange(least, 60_000) for _ in range(3)),
    ):
        cut = spans(file, COLUMNS, unit_bytes)
        assert cut == spans(file, COLUMNS, unit_bytes) and read_all(file, cut) == expected
        assert [span.start for span in cut] == [0, *(span.stop for span in cut[:-1])]
        assert cut[-1].stop == full.stop
        if kind in ("parquet", "arrow"):
            sizes = [span.text_bytes for span in spans(file, COLUMNS, 1)]
            assert sum(span.rows or 0 for span in cut) == 150
            assert all(span.text_bytes >= unit_bytes for span in cut[:-1])
            # at most one group above
            assert all(span.text_bytes - sizes[span.stop - 1] < unit_bytes for span in cut)
        else:
            number = 1
            if kind == "jsonl":
                number = max(1, min(file.bytes, round(file.text_bytes / unit_bytes)))
            assert len(cut) == number


def test_plain_lines_may_be_cut_at_any_byte(tmp_path: Path) -> None:
    file = written(tmp_path / "x.jsonl", [row(i, words=2) for i in range(5)])
    expected = read_all(file)
    assert len(expected) == 5
    for cut in range(file.bytes + 1):
        assert read_all(file, [Span(0, cut, None, 0), Span(cut, file.bytes, None, 0)]) == expected


def test_a_folder_of_datasets_is_read(tmp_path: Path) -> None:
    """Shards are read in order, and a DatasetDict only by the name of a split."""
    rows = [row(i, words=3) for i in range(2500)]
    full = datasets.Dataset.from_list(rows)
    full.save_to_disk(tmp_path / "one", num_shards=2)
    files = open_files([str(tmp_path / "one")], COLUMNS)
    assert [file.rows for file in files] == [1250, 1250]
    assert [len(spans(file, COLUMNS, 1)) for file in files] == [2, 2]  # 1,000 rows per batch
    read = [item for file in files for item in read_all(file)]
    assert [item[:2] for item in read] == [
        (item["text"].encode(), item["id"].encode()) for item in rows
    ]
    datasets.DatasetDict({"train": full, "test": full}).save_to_disk(tmp_path / "two")
    with pytest.raises(UserError, match=r"two is a DatasetDict of the splits test, train; name"):
        open_files([str(tmp_path / "two")], COLUMNS)
    (file,) = open_files([str(tmp_path / "two" / "train")], COLUMNS)
    assert read_all(file)[-1][:2] == read[-1][:2]
    os.truncate(file.path, file.bytes - 40_000)
    with pytest.raises(UserError, match=r"is not a readable Arrow stream \(.*; fetch or write it"):
        open_files([file.path], COLUMNS)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl"])
def test_a_file_that_is_gone_or_changed_is_refused(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path / f"x.{kind}", [row(i, words=2) for i in range(5)])
    (span,) = spans(file, Columns(), WHOLE)
    with Path(file.path).open("ab") as stream:
        stream.write(b"\n")
    with pytest.raises(UserError, match="when it was planned: it has changed"):
        list(read_span(file, span, COLUMNS))
    Path(file.path).unlink()
    with pytest.raises(UserError, match="no such file: "):
        list(read_span(file, span, COLUMNS))
