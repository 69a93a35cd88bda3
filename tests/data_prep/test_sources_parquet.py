"""Tests of parquet: the rows equal pyarrow's read_table for all types and encodings; damage;
bounded memory.

Damage costs only the rest of its row group.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.sources import (
    Columns,
    Rows,
    Span,
    Unreadable,
    open_files,
    parquet,
    read_span,
    spans,
    streams,
)
from data_prep.sources.pages import Pages, pages_of
from data_prep.sources.rows import BATCH_BYTES, Drop
from fem_common.errors import StorageError, UserError
from tests.data_prep import conftest as base
from tests.data_prep.sources_made import COLUMNS, WHOLE, parts, read_all, row, written

TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.large_binary(),
    pa.binary_view(),
]
DICTIONARIES = [pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.large_binary())]
MIB = 1 << 20


def as_bytes(value: Any) -> bytes | None:
    """Return a value in the form in which text and id are read."""
    return value if value is None or isinstance(value, bytes) else str(value).encode()


def opened(path: Path, table: pa.Table, columns: Columns = COLUMNS, **options: Any) -> Any:
    pq.write_table(table, path, **options)
    return open_files([str(path)], columns)[0]


@pytest.mark.parametrize(
    "kind",
    [*TYPES, *DICTIONARIES, pa.int8(), pa.uint64(), pa.dictionary(pa.int8(), pa.int32())],
    ids=str,
)
@pytest.mark.parametrize("stored", [True, False])
def test_text_and_id_of_every_type_are_read_as_bytes(
    tmp_path: Path, kind: pa.DataType, stored: bool
) -> None:
    """Integers, which only ids may be, are read as their digits."""
    plain = kind.value_type if pa.types.is_dictionary(kind) else kind
    texts = ["a", None, "", "東京 🙂", "a", "b" * 1000]
    numbers = [0, 7, None, 2**64 - 1 if kind == pa.uint64() else 127, 7, 1]
    values: list[Any] = (numbers if pa.types.is_integer(plain) else texts) * 50
    array = (
        pa.array(values, plain)
        if pa.types.is_integer(plain)
        else pa.array([as_bytes(v) for v in values], pa.binary()).cast(plain)
    )
    column = array.dictionary_encode().cast(kind) if pa.types.is_dictionary(kind) else array
    text = pa.array(texts * 50) if pa.types.is_integer(plain) else column
    file = opened(
        tmp_path / "x.parquet",
        pa.table({"text": text, "id": column}),
        row_group_size=70,
        store_schema=stored,
    )
    assert read_all(file, 500) == [
        (as_bytes(t), as_bytes(v), i)
        for i, (t, v) in enumerate(zip(texts * 50, values, strict=True))
    ]
    assert read_all(file, 500, Columns(id="text")) == [
        (as_bytes(t), i) for i, t in enumerate(texts * 50)
    ]


def any_way(random_: random.Random) -> dict[str, Any]:
    """Return random options of a parquet writer."""
    return {
        "compression": random_.choice(["none", "snappy", "zstd", "gzip", "lz4"]),
        "use_dictionary": random_.random() < 0.5,
        "data_page_size": random_.choice([1000, 1 << 20]),
        "write_batch_size": random_.choice([1, 20, 1024]),
        "data_page_version": random_.choice(["1.0", "2.0"]),
        "row_group_size": random_.choice([1, 50, 399, 1000]),
        "write_page_checksum": random_.random() < 0.5,
        "version": random_.choice(["1.0", "2.6"]),
    }


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_read_table_however_they_were_written(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = random.Random(seed)
    rows = [
        row(i, words=random_.choice([0, 1, 30, 300, 20_000 if seed % 2 else 9])) for i in range(400)
    ]
    for item in rows:
        item |= {
            "score": random_.choice([None, 0.5]),
            "tags": ["x"] * random_.randrange(3),
            "meta": random_.choice([None, {"set": "a"}]),
        }
        item |= random_.choice([{}, {}, {"text": None}, {"id": None}, {"text": "again"}])
    columns = Columns(extra=("score", "tags", "meta"))
    file = written(tmp_path / "x.parquet", rows, columns, **any_way(random_))
    if random_.random() < 0.5:  # read the page headers, as for large row groups
        monkeypatch.setattr(parquet, "HELD_BYTES", 100_000)
    table = pq.read_table(tmp_path / "x.parquet")
    expected = [table.column(name).to_pylist() for name in columns.all]
    expected[:2] = [[as_bytes(value) for value in column] for column in expected[:2]]
    assert file.rows == 400
    assert read_all(file, random_.randrange(1, 10**6), columns) == [
        *zip(*expected, range(400), strict=True)
    ]


def test_fields_of_structs_are_read_by_dotted_name(tmp_path: Path) -> None:
    meta = [
        {"set": {"name": "a"}, "n": 1},
        None,
        {"set": None, "n": 2},
        {"set": {"name": "b"}, "n": 3},
    ]
    table = pa.table(
        {"doc": [{"text": f"t{i}", "id": i} for i in range(4)], "meta": meta, "meta.n": ["own"] * 4}
    )
    columns = Columns("doc.text", "doc.id", ("meta.set.name", "meta.n"))
    found = read_all(opened(tmp_path / "x.parquet", table, columns, row_group_size=3), 1, columns)
    assert found == [
        (f"t{i}".encode(), str(i).encode(), name, "own", i)
        for i, name in enumerate(["a", None, None, "b"])
    ]
    with pytest.raises(UserError, match="has no column 'meta.nam' .*did you mean 'meta.n'"):
        open_files([str(tmp_path)], Columns("doc.text", "doc.id", ("meta.nam",)))


def test_text_that_is_not_utf8_is_given_as_it_is_and_no_rows_are_none(tmp_path: Path) -> None:
    raw = pa.array([b"a", b"\xff\xfe", b"\xed\xa0\x80", "é".encode()])
    table = pa.table(
        {
            "text": pa.StringArray.from_buffers(4, raw.buffers()[1], raw.buffers()[2]),
            "id": ["1", "2", "3", "4"],
        }
    )
    assert [
        text for text, _, _ in read_all(opened(tmp_path / "x.parquet", table), 1)
    ] == raw.to_pylist()
    file = opened(tmp_path / "x.parquet", table.slice(0, 0))
    assert (file.rows, read_all(file, 100)) == (0, [])


def test_batches_are_small_and_hold_little_more_than_their_rows(tmp_path: Path) -> None:
    texts = ["x" * 100] * 50_000 + ["y" * (9 << 20)] * 3 + [""] * 100_000 + [None] * 10
    file = opened(
        tmp_path / "x.parquet",
        pa.table({"text": texts, "id": [str(i) for i in range(len(texts))]}),
        compression="zstd",
    )
    found = [part for part in parts(file, spans(file, COLUMNS, WHOLE)) if isinstance(part, Rows)]
    assert np.array_equal(np.concatenate([part.places for part in found]), np.arange(len(texts)))
    assert (
        max(part.batch.get_total_buffer_size() for part in found) < 3 * (9 << 20) + BATCH_BYTES
    )  # three large rows read at once
    assert 10 < len(found) < 40


# --- damage ---------------------------------------------------------------------------------------

PAGES: dict[str, Any] = {
    "use_dictionary": False,
    "data_page_size": 900,
    "write_batch_size": 20,
    "write_statistics": False,
    "write_page_checksum": True,
}


@pytest.mark.parametrize("name", ["text", "id"])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.9])
def test_a_damaged_row_group_is_read_up_to_the_damage_and_the_others_whole(
    tmp_path: Path, name: str, at: float
) -> None:
    rows, path = [row(i, words=300) for i in range(1000)], tmp_path / "x.parquet"
    full = written(path, rows, row_group_size=400, **PAGES)
    group = pq.read_metadata(path).row_group(1)
    chunk = next(chunk for chunk in map(group.column, range(2)) if chunk.path_in_schema == name)
    with path.open("r+b") as stream:
        stream.seek(chunk.data_page_offset + int(chunk.total_compressed_size * at))
        stream.write(bytes(40))
    (file,) = open_files([str(path)], COLUMNS)
    assert file == full  # the footer does not reveal it
    found = parts(file, [Span(0, 3, None, 0)])
    (fault,) = [part for part in found if isinstance(part, Unreadable)]
    assert fault.reason is Drop.UNREADABLE and fault.place + fault.rows == 800
    assert 400 <= fault.place <= 400 + 400 * at and (at < 0.5 or fault.place > 600)
    assert fault.message.startswith(
        f"{path}: row group 1 of 3 cannot be read from its row {fault.place - 400} on ("
    )
    good = [item for item in read_all(file, [Span(0, 3, None, 0)]) if isinstance(item[0], bytes)]
    assert good == [
        (rows[i]["text"].encode(), rows[i]["id"].encode(), i)
        for i in [*range(fault.place), *range(800, 1000)]
    ]
    check_places(found, 1000)


def check_places(found: list[Rows | Unreadable], rows: int) -> None:
    """Check that every row is read or reported, once and in order."""
    places = [
        (int(part.places[0]), len(part.places))
        if isinstance(part, Rows)
        else (part.place, part.rows)
        for part in found
    ]
    assert [start for start, _ in places] == [0, *(start + number for start, number in places[:-1])]
    assert sum(number for _, number in places) == rows


@pytest.mark.parametrize("seed", range(5))
def test_whatever_bytes_are_wrong_every_row_is_read_or_reported(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Page headers are damaged too. They are read if a row group is large."""
    random_, path = random.Random(seed), tmp_path / "x.parquet"
    monkeypatch.setattr(parquet, "HELD_BYTES", [1 << 30, 1000][seed % 2])
    rows = [row(i, words=random_.randrange(60)) for i in range(300)]
    for _ in range(20):
        written(
            path,
            rows,
            **any_way(random_)
            | {"data_page_size": 1000, "write_batch_size": 20, "row_group_size": 100},
        )
        raw = bytearray(path.read_bytes())
        end = len(raw) - 8 - int.from_bytes(raw[-8:-4], "little")
        for _ in range(random_.choice([1, 3, 30])):
            raw[random_.randrange(4, end)] = random_.randrange(256)
        path.write_bytes(raw)
        check_places(
            list(read_span(open_files([str(path)], COLUMNS)[0], Span(0, 3, None, 0), COLUMNS)), 300
        )


class Failing(streams.LocalFile):
    """File on a disk that fails after some reads."""

    left = 3

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left < 0:
            raise StorageError(f"{self.name} cannot be read (Input/output error)")
        return super().read(size)


def test_a_failing_disk_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(
        tmp_path / "x.parquet", [row(i, words=3000) for i in range(300)], compression="none"
    )
    monkeypatch.setattr(streams, "LocalFile", Failing)
    with pytest.raises(StorageError, match="Input/output error"):
        list(read_span(file, Span(0, 1, None, 0), COLUMNS))
    output = "^/proc/self/mem cannot be read \\(Input/output error\\)$"
    monkeypatch.undo()
    with streams.LocalFile("/proc/self/mem") as memory, pytest.raises(StorageError, match=output):
        memory.read(10)


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("statistics", [True, False])
def test_pages_add_up_to_their_chunk(
    tmp_path: Path, version: str, dictionary: bool, statistics: bool
) -> None:
    rows, path = [row(i, words=i % 100) for i in range(700)], tmp_path / "x.parquet"
    rows += [
        {"text": "a" * 50_000, "id": "b" * 60_000}
    ] * statistics  # statistics that make a long header
    sizes: dict[str, Any] = {
        "data_page_size": 3000,
        "write_batch_size": 10,
        "dictionary_pagesize_limit": 20_000,
    }
    options = {
        "data_page_version": version,
        "use_dictionary": dictionary,
        "write_page_checksum": statistics,
    }
    written(path, rows, write_statistics=statistics, **sizes | options)
    with path.open("rb") as file:
        for number in range(2):
            chunk = pq.read_metadata(path).row_group(0).column(number)
            pages = pages_of(file, chunk)
            assert sum(pages.rows) == len(rows) and bool(pages.dictionary) == dictionary
            assert len(pages.rows) > 2 or (dictionary and number)
            headers = chunk.total_uncompressed_size - sum(pages.bytes) - pages.dictionary
            assert headers > 0 and (headers < 100 * (len(pages.rows) + 1) or statistics)


@pytest.mark.parametrize("seed", range(20))
def test_held_is_the_most_that_a_run_of_rows_touches(seed: int) -> None:
    random_ = random.Random(seed)
    rows = [random_.randrange(1, 6) for _ in range(random_.randrange(1, 12))]
    sizes = [random_.randrange(100) for _ in rows]
    page_of_row = [page for page, number in enumerate(rows) for _ in range(number)]
    for window in range(1, sum(rows) + 3):
        runs = [
            set(page_of_row[start : start + window])
            for start in range(max(1, len(page_of_row) - window + 1))
        ]
        held = [sum(sizes[page] for page in run) for run in runs]
        assert Pages(rows, sizes, 0).held(window) == max(held)
        assert Pages(rows, sizes, 1000).held(window) == max(
            Pages(rows, sizes, 0).held(window), 1000 * window
        )
    assert Pages([], [], 0).held(3) == 0


def test_a_page_above_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "HELD_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "MAX_PAGE_BYTES", 5 << 20)
    table = pa.table({"text": ["a" * 100_000] * 60, "id": [str(i) for i in range(60)]})
    file = opened(tmp_path / "x.parquet", table, use_dictionary=False, compression="zstd")
    (fault,) = parts(file, spans(file, COLUMNS, 1))
    assert isinstance(fault, Unreadable) and (fault.place, fault.rows) == (0, 60)
    assert fault.message.endswith(
        "(it has a page of 5 MiB, the limit is 5; write it with smaller pages)"
    )
    file = opened(
        tmp_path / "x.parquet",
        table,
        use_dictionary=False,
        compression="zstd",
        write_batch_size=10,
    )
    assert len(read_all(file)) == 60


# --- bounded memory for all sizes of row groups, values, dictionaries, pages and lines ------------

SCHEMA = pa.schema([("text", pa.large_string()), ("id", pa.string())])
READ = """
import resource, sys
from data_prep.sources import Columns, Rows, open_files, read_span, spans
(file,) = open_files([sys.argv[1]], Columns())
rows = lost = text = 0
cuts = spans(file, Columns(), 64 << 20)
if len(sys.argv) > 2:
    now = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
    limit = (int(now.split()[1]) << 10) + (int(sys.argv[2]) << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    for span in cuts:
        for part in read_span(file, span, Columns()):
            if isinstance(part, Rows):
                rows, text = rows + len(part.places), text + part.batch.column(0).nbytes
            else:
                lost += part.rows
except MemoryError:
    sys.exit("MemoryError")
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(rows, lost, text >> 20, int(peak.split()[1]) >> 10)
"""


def read_in_child(path: Path) -> tuple[int, int, int, int]:
    """Read a file in a child process and return (rows read, rows lost, MiB of text, peak MiB of the
    process).
    """
    done = base.python(READ, path)
    assert done.returncode == 0, done.stderr
    rows, lost, text, peak = map(int, done.stdout.split())
    return rows, lost, text, peak


def document(number: int, size: int) -> str:
    """Return a text of ``size`` bytes that compresses well."""
    return (f"{number:08} the quick brown fox jumps over the lazy dog " * (size // 50 + 1))[:size]


def write(
    path: Path, size: int, times: int, batch: int, small: int = 0, small_size: int = 100
) -> Path:
    """Write one row group: ``small`` texts of ``small_size`` bytes, then ``times`` times two texts
    of ``size`` bytes.

    A page contains ``batch`` rows.
    """
    chunks = [pa.array([document(i, small_size) for i in range(small)], pa.large_string())]
    chunks += [pa.array([document(i, size) for i in range(2)], pa.large_string())] * times
    rows = sum(map(len, chunks))
    table = pa.table(
        [pa.chunked_array(chunks), pa.array([str(i) for i in range(rows)])], schema=SCHEMA
    )
    pq.write_table(
        table,
        path,
        row_group_size=rows,
        compression="zstd",
        use_dictionary=False,
        write_batch_size=batch,
    )
    return path


def write_one_text(path: Path, size: int, rows: int, stored: bool = False) -> Path:
    """Write a file with the same text in every row, stored once as its dictionary."""
    text = pa.DictionaryArray.from_arrays(
        pa.array([0] * rows, pa.int32()), pa.array([document(0, size)])
    )
    pq.write_table(
        pa.table({"text": text, "id": list(map(str, range(rows)))}),
        path,
        compression="zstd",
        store_schema=stored,
    )
    return path


def write_lines(path: Path, before: bytes, part: bytes, times: int) -> Path:
    """Write a short line, a line with ``part`` many times, and another short line."""
    with path.open("wb") as stream:
        stream.write(b'{"id": "1", "text": "first"}\n{"id": "2", "text": "' + before)
        stream.writelines(part for _ in range(times))
        stream.write(b'"}\n{"id": "3", "text": ""}\n')
    return path


LARGE: dict[
    str, tuple[Any, tuple[int, int, int], int]
] = {  # writer of a file -> rows, lost rows, MiB of text; maximum MiB of memory
    "large rows": (lambda path: write(path, 25 * MIB, 20, 1), (40, 0, 1000), 450),
    "large rows behind small": (
        lambda path: write(path, 25 * MIB, 20, 4, small=20_000),
        (20_040, 0, 1001),
        750,
    ),
    "a text 100 times": (lambda path: write_one_text(path, 20 * MIB, 100), (100, 0, 2000), 450),
    "a text 100 times, stored": (
        lambda path: write_one_text(path, 20 * MIB, 100, True),
        (100, 0, 2000),
        450,
    ),
    "a long line.jsonl": (lambda path: write_lines(path, b"", b"0" * MIB, 50), (3, 0, 50), 450),
    "a longer line.jsonl": (lambda path: write_lines(path, b"", b"0" * MIB, 400), (2, 1, 0), 450),
}


FEW = ("large rows", "a text 100 times", "a long line.jsonl")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LARGE]
)
def test_large_input_is_not_held(tmp_path: Path, name: str) -> None:
    write_it, expected, most = LARGE[name]
    *found, peak = read_in_child(write_it(tmp_path / (name if name.endswith("l") else "x.parquet")))
    assert tuple(found[:2]) == expected[:2] and abs(found[2] - expected[2]) <= 2 and peak < most, (
        found,
        peak,
    )


def test_want_of_memory_is_no_damage(tmp_path: Path) -> None:
    """With a limited address space, the result is the rows or MemoryError."""
    line = b'{"text": "a", "id": "1"}\n'
    window = 17 << 3  # 128 MiB, which zstd reports as missing in an error of a general type
    block = (len(line) << 3 | 1).to_bytes(3, "little") + line
    (tmp_path / "x.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\0" + bytes([window]) + block)
    for path, enough, rows in (
        (write(tmp_path / "x.parquet", 60 * MIB, 1, 1), 1500, 2),
        (tmp_path / "x.jsonl.zst", 400, 1),
    ):
        for mib, output in ((enough, f"{rows} 0 "), (40, "MemoryError")):
            done = base.python(
                READ, path, mib, ARROW_DEFAULT_MEMORY_POOL="system"
            )  # other allocators reserve address space
            assert (done.stdout + done.stderr).startswith(output), (mib, done)
