"""Parquet: the same rows as pyarrow's read_table, whatever the types and encodings; damage costs the rest of its row group."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources import Columns, Rows, Span, Unreadable, open_files, parquet, read_span, spans, streams
from data_prep.sources.pages import BadHeader, Pages, pages_of
from data_prep.sources.rows import BATCH_BYTES, Drop
from fem_common.errors import StorageError, UserError
from tests.data_prep.sources_made import parts, read_all, row

COLUMNS = Columns()
TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view()]
DICTIONARIES = [pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_binary())]


def as_bytes(value: Any) -> bytes | None:
    """A value as text and id are read."""
    if value is None or isinstance(value, bytes):
        return value
    return str(value).encode()


def expected_rows(path: Path, *names: str) -> list[tuple[Any, ...]]:
    """The columns text and id as bytes, the others as they are, and the row's number, by pyarrow."""
    table = pq.read_table(path)
    columns = [table.column(name).to_pylist() for name in names]
    columns[:2] = [[as_bytes(value) for value in column] for column in columns[:2]]
    return [*zip(*columns, range(len(table)), strict=True)]


@pytest.mark.parametrize("kind", [*TYPES, *DICTIONARIES], ids=str)
@pytest.mark.parametrize("stored", [True, False])
def test_text_and_id_of_every_type_are_read_as_bytes(tmp_path: Path, kind: pa.DataType, stored: bool) -> None:
    values = ["a", None, "", "東京 🙂", "a", "b" * 1000] * 50
    array = pa.array([None if value is None else value.encode() for value in values], pa.binary())
    column = array.cast(kind.value_type).dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array.cast(kind)
    pq.write_table(pa.table({"text": column, "id": column}), tmp_path / "x.parquet", row_group_size=70, store_schema=stored)
    (file,) = open_files([str(tmp_path)], COLUMNS)
    assert read_all(file, spans(file, COLUMNS, 500)) == [(as_bytes(v), as_bytes(v), i) for i, v in enumerate(values)]
    (file,) = open_files([str(tmp_path)], Columns(id="text"))
    assert read_all(file, spans(file, COLUMNS, 500), Columns(id="text")) == [(as_bytes(v), i) for i, v in enumerate(values)]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint64(), pa.dictionary(pa.int8(), pa.int32())], ids=str)
def test_integer_ids_are_their_digits(tmp_path: Path, kind: pa.DataType) -> None:
    values = [0, 7, None, 127] if kind != pa.uint64() else [0, 2**64 - 1, None, 5]
    ids = pa.array(values).dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else pa.array(values, kind)
    pq.write_table(pa.table({"text": ["a"] * 4, "id": ids}), tmp_path / "x.parquet")
    (file,) = open_files([str(tmp_path)], COLUMNS)
    assert read_all(file, spans(file, COLUMNS, 1)) == [(b"a", as_bytes(value), i) for i, value in enumerate(values)]


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_read_table_however_they_were_written(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(seed)
    rows: list[dict[str, Any]] = [row(i, words=random_.choice([0, 1, 30, 300, 20_000 if seed % 2 else 9])) for i in range(400)]
    for item in rows:
        item |= {
            "score": random_.choice([None, random_.random()]),
            "tags": ["x"] * random_.randrange(3),
            "meta": random_.choice([None, {"set": "a"}]),
        }
        item |= random_.choice([{}, {}, {"text": None}, {"id": None}, {"text": "again"}])
    path = tmp_path / "x.parquet"
    options = {
        "compression": random_.choice(["none", "snappy", "zstd", "gzip", "lz4"]),
        "use_dictionary": random_.random() < 0.5,
        "data_page_size": random_.choice([1000, 1 << 20]),
        "write_batch_size": random_.choice([1, 20, 1024]),
        "data_page_version": random_.choice(["1.0", "2.0"]),
        "row_group_size": random_.choice([1, 50, 399, 1000]),
        "write_page_checksum": random_.random() < 0.5,
        "version": random_.choice(["1.0", "2.6"]),
    }
    pq.write_table(pa.Table.from_pylist(rows), path, **options)
    if random_.random() < 0.5:  # the walk over the pages, which large row groups ask for
        monkeypatch.setattr(parquet, "HELD_BYTES", 100_000)
    columns = Columns(extra=("score", "tags", "meta"))
    (file,) = open_files([str(path)], columns)
    assert file.rows == 400
    assert read_all(file, spans(file, columns, random_.randrange(1, 10**6)), columns) == expected_rows(path, *columns.all)


def test_fields_of_structs_are_read_by_dotted_name(tmp_path: Path) -> None:
    meta = [{"set": {"name": "a"}, "n": 1}, None, {"set": None, "n": 2}, {"set": {"name": "b"}, "n": 3}]
    table = pa.table({"doc": [{"text": f"t{i}", "id": i} for i in range(4)], "meta": meta, "meta.n": ["own"] * 4})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    columns = Columns("doc.text", "doc.id", ("meta.set.name", "meta.n"))
    (file,) = open_files([str(tmp_path)], columns)
    assert read_all(file, spans(file, columns, 1), columns) == [
        (f"t{i}".encode(), str(i).encode(), name, "own", i) for i, name in enumerate(["a", None, None, "b"])
    ]
    with pytest.raises(UserError, match="has no column 'meta.nam' .*did you mean 'meta.n'"):
        open_files([str(tmp_path)], Columns("doc.text", "doc.id", ("meta.nam",)))


def test_text_that_is_not_utf8_is_given_as_it_is(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff\xfe", b"\xed\xa0\x80", "é".encode()])
    text = pa.StringArray.from_buffers(4, raw.buffers()[1], raw.buffers()[2])
    pq.write_table(pa.table({"text": text, "id": ["1", "2", "3", "4"]}), tmp_path / "x.parquet")
    (file,) = open_files([str(tmp_path)], COLUMNS)
    assert [text for text, _, _ in read_all(file, spans(file, COLUMNS, 1))] == raw.to_pylist()


def test_batches_are_small_and_hold_little_more_than_their_rows(tmp_path: Path) -> None:
    texts = ["x" * 100] * 50_000 + ["y" * (9 << 20)] * 3 + [""] * 100_000 + [None] * 10
    table = pa.table({"text": texts, "id": [str(i) for i in range(len(texts))]})
    pq.write_table(table, tmp_path / "x.parquet", compression="zstd")
    (file,) = open_files([str(tmp_path)], COLUMNS)
    found = [part for part in parts(file, spans(file, COLUMNS, 1 << 40), COLUMNS) if isinstance(part, Rows)]
    assert np.array_equal(np.concatenate([part.places for part in found]), np.arange(len(texts)))
    assert max(part.batch.get_total_buffer_size() for part in found) < 3 * (9 << 20) + BATCH_BYTES  # three large rows read at once
    assert 10 < len(found) < 40


# --- damage -----------------------------------------------------------------------------------------------------------------------------


def damaged(path: Path, group: int, at: float, name: str = "text") -> Path:
    """Zeros in a column chunk, ``at`` of its length from its start."""
    chunk = next(chunk for chunk in (pq.read_metadata(path).row_group(group).column(i) for i in range(2)) if chunk.path_in_schema == name)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    with path.open("r+b") as stream:
        stream.seek(start + int(chunk.total_compressed_size * at))
        stream.write(bytes(40))
    return path


@pytest.mark.parametrize("name", ["text", "id"])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.9])
def test_a_damaged_row_group_is_read_up_to_the_damage_and_the_others_whole(tmp_path: Path, name: str, at: float) -> None:
    rows = [row(i, words=300) for i in range(1000)]
    path, columns = tmp_path / "x.parquet", Columns()
    pq.write_table(
        pa.Table.from_pylist(rows),
        path,
        row_group_size=400,
        write_page_checksum=True,
        use_dictionary=False,
        data_page_size=900,
        write_batch_size=20,
        write_statistics=False,
    )
    (whole,) = open_files([str(path)], columns)
    damaged(path, 1, at, name)
    (file,) = open_files([str(path)], columns)
    assert file == whole  # a footer does not tell
    found = parts(file, [Span(0, 3, None, 0)], columns)
    (fault,) = [part for part in found if isinstance(part, Unreadable)]
    assert fault.reason is Drop.UNREADABLE
    assert fault.place + fault.rows == 800
    assert 400 <= fault.place <= 400 + 400 * at
    assert at < 0.5 or fault.place > 600
    assert fault.message.startswith(f"{path}: row group 1 of 3 cannot be read from its row {fault.place - 400} on (")
    good = [item for item in read_all(file, [Span(0, 3, None, 0)]) if len(item) == 3 and isinstance(item[0], bytes)]
    assert good == [(rows[i]["text"].encode(), rows[i]["id"].encode(), i) for i in [*range(fault.place), *range(800, 1000)]]
    places = [(part.places[0], part.places[-1] + 1) if isinstance(part, Rows) else (part.place, part.place + part.rows) for part in found]
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_bytes_are_wrong_every_row_is_read_or_reported(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    table = pa.Table.from_pylist([row(i, words=random_.randrange(60)) for i in range(300)])
    path = tmp_path / "x.parquet"
    for _ in range(20):
        pq.write_table(
            table,
            path,
            compression=random_.choice(["none", "snappy", "zstd", "gzip"]),
            use_dictionary=random_.random() < 0.5,
            data_page_size=1000,
            write_batch_size=20,
            row_group_size=100,
        )
        raw = bytearray(path.read_bytes())
        end = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
        for _ in range(random_.choice([1, 3, 30])):
            raw[random_.randrange(4, end)] = random_.randrange(256)
        path.write_bytes(raw)
        (file,) = open_files([str(path)], COLUMNS)
        found = list(read_span(file, Span(0, 3, None, 0), COLUMNS))
        places = [(int(part.places[0]), len(part.places)) if isinstance(part, Rows) else (part.place, part.rows) for part in found]
        assert sum(number for _, number in places) == 300
        assert [start for start, _ in places] == [0, *(start + number for start, number in places[:-1])]


class Failing(streams.LocalFile):
    """A file on a disk that fails after some reads."""

    left = 3

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise StorageError(f"{self.name} cannot be read (Input/output error)")
        return super().read(size)


def test_a_failing_disk_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row(i, words=3000) for i in range(300)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", compression="none")
    (file,) = open_files([str(tmp_path)], COLUMNS)
    monkeypatch.setattr(streams, "LocalFile", Failing)
    with pytest.raises(StorageError, match="Input/output error"):
        list(read_span(file, Span(0, 1, None, 0), COLUMNS))


def test_an_os_error_becomes_one_line(tmp_path: Path) -> None:
    with (
        streams.LocalFile("/proc/self/mem") as file,
        pytest.raises(StorageError, match="^/proc/self/mem cannot be read \\(Input/output error\\)$"),
    ):
        file.read(10)
    with pytest.raises(UserError, match="no such file: "):
        streams.LocalFile(str(tmp_path / "x"))


# --- pages ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_pages_add_up_to_their_chunk(tmp_path: Path, version: str, dictionary: bool, statistics: bool) -> None:
    rows = [row(i, words=i % 100) for i in range(700)]
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.Table.from_pylist(rows),
        path,
        data_page_version=version,
        use_dictionary=dictionary,
        write_statistics=statistics,
        data_page_size=3000,
        write_batch_size=10,
        dictionary_pagesize_limit=20_000,
        write_page_checksum=statistics,
    )
    with path.open("rb") as file:
        for number in range(2):
            chunk = pq.read_metadata(path).row_group(0).column(number)
            pages = pages_of(file, chunk)
            assert sum(pages.rows) == 700
            assert len(pages.rows) > 2 or (dictionary and number)
            assert bool(pages.dictionary) == dictionary
            headers = chunk.total_uncompressed_size - sum(pages.bytes) - pages.dictionary
            assert headers > 0
            assert headers < 100 * (len(pages.rows) + 1) or statistics


def test_long_statistics_make_long_headers(tmp_path: Path) -> None:
    text = ["a" * 50_000, "b" * 60_000]
    pq.write_table(pa.table({"text": text}), tmp_path / "x.parquet", use_dictionary=False)
    with (tmp_path / "x.parquet").open("rb") as file:
        assert pages_of(file, pq.read_metadata(tmp_path / "x.parquet").row_group(0).column(0)).rows == [2]


@pytest.mark.parametrize("seed", range(20))
def test_held_is_the_most_that_a_run_of_rows_touches(seed: int) -> None:
    random_ = random.Random(seed)
    rows = [random_.randrange(1, 6) for _ in range(random_.randrange(1, 12))]
    sizes = [random_.randrange(100) for _ in rows]
    page_of_row = [page for page, number in enumerate(rows) for _ in range(number)]
    for window in range(1, sum(rows) + 3):
        runs = [set(page_of_row[start : start + window]) for start in range(max(1, len(page_of_row) - window + 1))]
        assert Pages(rows, sizes, 0).held(window) == max(sum(sizes[page] for page in run) for run in runs)
        assert Pages(rows, sizes, 1000).held(window) == max(Pages(rows, sizes, 0).held(window), 1000 * window)
    assert Pages([], [], 0).held(3) == 0


def test_bytes_that_are_no_page_header_are_told(tmp_path: Path) -> None:
    random_ = random.Random(0)
    pq.write_table(pa.table({"text": ["a" * 300] * 50}), tmp_path / "x.parquet", use_dictionary=False)
    chunk = pq.read_metadata(tmp_path / "x.parquet").row_group(0).column(0)
    told = 0
    for _ in range(500):
        (tmp_path / "y").write_bytes(random_.randbytes(random_.choice([3, 30, 300, 3000])))
        with (tmp_path / "y").open("rb") as file:
            try:
                assert pages_of(file, chunk).largest >= 0
            except BadHeader:
                told += 1
    assert told > 300


def test_a_page_above_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "HELD_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "MAX_PAGE_BYTES", 5 << 20)
    table = pa.table({"text": ["a" * 100_000] * 60, "id": [str(i) for i in range(60)]})
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="zstd")
    (file,) = open_files([str(tmp_path)], COLUMNS)
    (fault,) = parts(file, spans(file, COLUMNS, 1), COLUMNS)
    assert isinstance(fault, Unreadable)
    assert (fault.place, fault.rows) == (0, 60)
    assert fault.message.endswith("(it has a page of 5 MiB, the limit is 5; write it with smaller pages)")
    pq.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="zstd", write_batch_size=10)
    (file,) = open_files([str(tmp_path)], COLUMNS)
    assert len(read_all(file, spans(file, COLUMNS, 1))) == 60


def test_reads_are_small_where_rows_may_be_large(tmp_path: Path) -> None:
    def rows_per_read(texts: list[str]) -> int:
        pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
        with (tmp_path / "x.parquet").open("rb") as file:
            return parquet._rows_per_read(file, pq.read_metadata(tmp_path / "x.parquet"), 0, Columns(id="text"))

    distinct = [f"{i:08}" + "x" * 3992 for i in range(500)]
    assert 6 <= rows_per_read(distinct) <= 8
    assert rows_per_read(["x" * (20 << 20), *[""] * 20_000]) <= math.ceil(parquet.HELD_BYTES / (20 << 20))
    assert rows_per_read([""] * 30_000) == parquet.MAX_ROWS
