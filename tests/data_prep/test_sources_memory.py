"""Memory: a process that reads stays small whatever the sizes of row groups, values, dictionaries, pages and lines."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SCHEMA = pa.schema([("text", pa.large_string()), ("id", pa.string())])
READ = """
import sys
from data_prep.sources import Columns, Rows, open_files, read_span, spans
(file,) = open_files([sys.argv[1]], Columns())
rows = lost = text = 0
for span in spans(file, Columns(), 64 << 20):
    for part in read_span(file, span, Columns()):
        if isinstance(part, Rows):
            rows, text = rows + len(part.places), text + part.batch.column(0).nbytes
        else:
            lost += part.rows
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(rows, lost, text >> 20, int(peak.split()[1]) >> 10)
"""


def read_in_child(path: Path) -> tuple[int, int, int, int]:
    """(rows read, rows lost, MiB of text, peak MiB of the process) of a process that reads a file."""
    command = [sys.executable, "-c", READ, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows, lost, text, peak = map(int, done.stdout.split())
    return rows, lost, text, peak


READ_WITH_LITTLE = """
import resource, sys
from data_prep.sources import Columns, Rows, open_files, read_span, spans
(file,) = open_files([sys.argv[1]], Columns())
(span,) = spans(file, Columns(), 1 << 40)
now = next(line for line in open("/proc/self/status") if line.startswith("VmSize"))
limit = (int(now.split()[1]) << 10) + (int(sys.argv[2]) << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    for part in read_span(file, span, Columns()):
        print(len(part.places) if isinstance(part, Rows) else part.message)
except MemoryError:
    print("MemoryError")
"""


def read_with_little(path: Path, mib: int) -> str:
    """What a process prints that has ``mib`` MiB of addresses left when it reads a file: rows of each batch, messages, or MemoryError."""
    command = [sys.executable, "-c", READ_WITH_LITTLE, str(path), str(mib)]
    environment = {"OMP_NUM_THREADS": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others set addresses aside
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def document(number: int, size: int) -> str:
    """A text of ``size`` bytes that packs well."""
    return (f"{number:08} the quick brown fox jumps over the lazy dog " * (size // 50 + 1))[:size]


def write(path: Path, size: int, times: int, *, write_batch_size: int, small: int = 0, small_size: int = 100) -> Path:
    """One row group: ``small`` texts of ``small_size`` bytes, then two texts of ``size`` bytes ``times`` times, written a few at a time."""
    chunks = [pa.array([document(i, small_size) for i in range(small)], pa.large_string())]
    chunks += [pa.array([document(i, size) for i in range(2)], pa.large_string())] * times
    rows = sum(map(len, chunks))
    table = pa.table([pa.chunked_array(chunks), pa.array([str(i) for i in range(rows)])], schema=SCHEMA)
    with pq.ParquetWriter(path, SCHEMA, compression="zstd", use_dictionary=False, write_batch_size=write_batch_size) as writer:
        writer.write_table(table, row_group_size=rows)
    assert pq.read_metadata(path).num_row_groups == 1
    return path


def write_one_text(path: Path, size: int, rows: int, stored: bool) -> Path:
    """The same text in every row, once in the file, as its dictionary."""
    indices = pa.array([0] * rows, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(indices, pa.array([document(0, size)])), "id": list(map(str, range(rows)))})
    pq.write_table(table, path, compression="zstd", store_schema=stored)
    return path


def test_a_row_group_of_large_rows_is_not_held(tmp_path: Path) -> None:
    rows, lost, text, peak = read_in_child(write(tmp_path / "x.parquet", 25 * MIB, 20, write_batch_size=1))
    assert (rows, lost, text) == (40, 0, 1000)
    assert peak < 450


@pytest.mark.parametrize("stored", [True, False])
def test_a_large_text_that_is_stored_once_is_not_held_often(tmp_path: Path, stored: bool) -> None:
    path = write_one_text(tmp_path / "x.parquet", 20 * MIB, 100, stored)
    assert path.stat().st_size < MIB
    rows, lost, text, peak = read_in_child(path)
    assert (rows, lost, text) == (100, 0, 2000)
    assert peak < 450


def test_want_of_memory_is_no_damaged_row_group(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", 60 * MIB, 1, write_batch_size=1)
    assert read_with_little(path, 1500).split() == ["1", "1"]
    assert read_with_little(path, 40) == "MemoryError"


def test_want_of_memory_is_no_damaged_stream(tmp_path: Path) -> None:
    line = b'{"text": "a", "id": "1"}\n'
    window = 17 << 3  # 128 MiB, which zstd says it lacks in an error of no special type
    block = (len(line) << 3 | 1).to_bytes(3, "little") + line
    path = tmp_path / "x.jsonl.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\0" + bytes([window]) + block)
    assert read_with_little(path, 400) == "1"
    assert read_with_little(path, 50) == "MemoryError"


def test_large_rows_among_many_small_ones_are_read_few_at_a_time(tmp_path: Path) -> None:
    rows, lost, text, peak = read_in_child(write(tmp_path / "x.parquet", 25 * MIB, 20, write_batch_size=4, small=20_000))
    assert (rows, lost, text >= 1000) == (20_040, 0, True)
    assert peak < 750


def test_long_lines_are_held_a_few_times_and_longer_ones_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as stream:
        for number in range(4):
            stream.write(json.dumps({"text": document(number, 50_000_000), "id": str(number)}).encode() + b"\n")
        stream.write(b'{"id": "long", "text": "')
        stream.writelines(_zeros(400))
        stream.write(b'"}\n{"id": "last", "text": ""}\n')
    rows, lost, text, peak = read_in_child(path)
    assert (rows, lost, text) == (5, 1, 190)
    assert peak < 500


def _zeros(mib: int) -> Iterator[bytes]:
    for _ in range(mib):
        yield b"0" * MIB


@pytest.mark.slow
def test_every_kind_of_large_input_stays_below_the_bound(tmp_path: Path) -> None:
    cases = {
        "512 rows of 50 MiB": write(tmp_path / "a.parquet", 50 * MIB, 256, write_batch_size=1),
        "a million rows": write(tmp_path / "b.parquet", 1000, 1, write_batch_size=1024, small=1_000_000, small_size=1000),
        "a text of 50 MiB 500 times": write_one_text(tmp_path / "c.parquet", 50 * MIB, 500, False),
        "60 of 50 MiB behind 200,000 small": write(
            tmp_path / "d.parquet", 50 * MIB, 30, write_batch_size=8, small=200_000, small_size=1000
        ),
        "a page of 1000 MiB": write(tmp_path / "e.parquet", 1, 0, write_batch_size=1024, small=20, small_size=50 * MIB),
    }
    cases["a line of 2 GiB"] = tmp_path / "f.jsonl"
    cases["lines of 96 MiB with a character above U+FFFF"] = tmp_path / "g.jsonl"
    for path, sizes, text in ((tmp_path / "f.jsonl", 2048, b"0123456\n"), (tmp_path / "g.jsonl", 95, b"a line\\n")):
        with path.open("wb") as stream:
            stream.write(b'{"id": "1", "text": "first"}\n{"id": "2", "text": "\xf0\x9f\x99\x82')
            stream.writelines(text.replace(b"\n", b"7") * (MIB // len(text)) for _ in range(sizes))
            stream.write(b'"}\n')
    found = {what: read_in_child(path) for what, path in cases.items()}
    assert max(peak for _, _, _, peak in found.values()) < 1200, found
    lost = {what: lost for what, (_, lost, _, _) in found.items() if lost}
    assert lost == {"a page of 1000 MiB": 20, "a line of 2 GiB": 1}
    print(found)
