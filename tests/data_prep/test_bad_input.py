"""Bad input through ``run``: no crash, no hang, every row written or dropped and counted."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from tests.data_prep.conftest import HF, SHARES, cli, read_split, write_parquet

NO_SPLITS = ("--valid-percent", "0", "--test-percent", "0")


def accounted(out: Path) -> tuple[int, dict[str, int]]:
    """Rows and drops of a data folder, after a check that every row was written or dropped."""
    manifest = json.loads((out / "manifest.json").read_text())
    rows, dropped = manifest["source"]["rows"], manifest["source"]["dropped"]
    assert rows == sum(len(read_split(out, name)) for name in manifest["splits"]) + sum(dropped.values())
    return rows, dropped


def test_a_corrupt_row_group_is_counted_and_the_rest_is_written(tmp_path: Path, many: Path, tokenizer: Path) -> None:
    raw = bytearray(many.read_bytes())
    chunk = pq.ParquetFile(many).metadata.row_group(17).column(1)
    start_of_text = chunk.dictionary_page_offset or chunk.data_page_offset
    raw[start_of_text + 40 : start_of_text + 80] = bytes(40)
    (tmp_path / "corrupt.parquet").write_bytes(raw)
    out = tmp_path / "out"
    command = ("run", tmp_path / "corrupt.parquet", "--tokenizer", tokenizer, "--out", out, *SHARES, "--unit-mb", "0.01", *HF)
    result = cli(*command)
    assert result.returncode == 1 and "corrupt.parquet, row 680: unreadable" in result.stderr, result
    assert "Traceback" not in result.stderr and not (out / "manifest.json").exists()
    places = [json.loads(line) for line in (out / "bad_rows.jsonl").read_text().splitlines()]
    assert [(place["place"], place["reason"]) for place in places] == [(680, "unreadable")]
    before = {path.name: path.stat().st_mtime_ns for path in (out / "shards").iterdir()}
    assert before
    result = cli(*command, "--max-bad", "40")
    assert result.returncode == 0 and "units to do" not in result.stdout, result
    assert accounted(out) == (1600, {"unreadable": 40})


def test_max_bad_counts_faults_alone_and_lists_their_places(tmp_path: Path, tokenizer: Path) -> None:
    rows: list[tuple[str | None, str | None]] = [(f"d{i}", "text " * (1 + i % 3)) for i in range(1000)]
    for row in range(100, 150):
        rows[row] = (f"d{row}", None)
    file = write_parquet(tmp_path / "rows.parquet", rows)
    out = tmp_path / "out"
    command = ("run", file, "--tokenizer", tokenizer, "--out", out, *NO_SPLITS, "--min-bytes", "9", *HF)
    for limit in ("49", "4.9%", "0"):
        result = cli(*command, "--max-bad", limit)
        assert result.returncode == 1, result
        lines = result.stderr.splitlines()
        assert lines[0].startswith("data_prep: error: 50 of 1,000 rows are bad (50 null_text)") and "bad_rows.jsonl" in lines[0]
        assert lines[1] == f"  {file}, row 100: null_text" and len(lines) == 22 and "Traceback" not in result.stderr
    assert len((out / "bad_rows.jsonl").read_text().splitlines()) == 50
    result = cli(*command, "--max-bad", "5%")
    assert result.returncode == 0, result
    rows_read, dropped = accounted(out)
    assert rows_read == 1000 and dropped["null_text"] == 50 and dropped["below_min_bytes"] > 300


def test_malformed_lines_and_lone_surrogates_in_json(tmp_path: Path, tokenizer: Path) -> None:
    lines = [
        b'{"id": "a", "text": "fine"}',
        b'{"id": "b", "text": "lone \\ud800 surrogate"}',
        b'{"id": "c", "text": "never closed',
        b'{"id": "d"}',
        b'{"id": "e", "text": null}',
        b'{"id": "f", "text": ""}',
        b'{"text": "no id"}',
        b'{"id": "g", "text": "not \xff UTF-8"}',
        b"[1, 2]",
        b'{"id": "h", "text": 5}',
        b'{"id": "i", "text": "<|endoftext|> is text"}',
        b'{"id": "j", "text": "last, without a line end"}',
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    out = tmp_path / "out"
    result = cli("run", tmp_path / "rows.jsonl", "--tokenizer", tokenizer, "--out", out, *NO_SPLITS, "--max-bad", "9", *HF)
    assert result.returncode == 0, result
    rows, dropped = accounted(out)
    assert rows == 12 and len(read_split(out, "train")) == 3, dropped
    assert dropped["invalid_utf8"] + dropped["malformed"] >= 3 and dropped["empty_text"] == 1 and dropped["null_id"] == 1


@pytest.mark.parametrize(
    ("encoder", "limit", "dropped"),
    [
        ("hf", (), {"above_max_bytes": 1}),
        ("gigatoken", (), {"above_max_bytes": 1}),
        pytest.param("gigatoken", ("--max-bytes", "60000000"), {}, marks=pytest.mark.slow),
    ],
)
def test_a_document_of_50_mb_among_small_ones(
    tmp_path: Path, tokenizer: Path, encoder: str, limit: tuple[str, ...], dropped: dict[str, int]
) -> None:
    """Left out at the default, written whole where the limit is raised; the rest is written either way."""
    long = "word and number 12345 " * (50_000_000 // 22)
    documents = [("a", "first"), ("long", long), ("b", "last")]
    out, file = tmp_path / "out", write_parquet(tmp_path / "long.parquet", documents)
    result = cli("run", file, "--tokenizer", tokenizer, "--out", out, *NO_SPLITS, *limit, "--encoder", encoder)
    assert result.returncode == 0, result
    assert accounted(out) == (3, dropped)
    said = ["first", "last"] if dropped else ["first", long, "last"]
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert [decoder.decode(ids[:-1], skip_special_tokens=False) for ids in read_split(out, "train")] == said


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_stream_that_is_cut_off_fails_whatever_the_share(tmp_path: Path, tokenizer: Path, kind: str) -> None:
    noise = random.Random(5)
    lines = [json.dumps({"id": f"d{i}", "text": f"{i} {noise.randbytes(300).hex()}"}) for i in range(8000)]
    raw = "\n".join(lines).encode()
    file, out = tmp_path / f"cut.jsonl.{kind}", tmp_path / "out"
    whole = gzip.compress(raw, 1) if kind == "gz" else pa.Codec("zstd").compress(raw, asbytes=True)
    file.write_bytes(whole[: int(0.7 * len(whole))])
    command = ("run", file, "--tokenizer", tokenizer, "--out", out, *NO_SPLITS, *HF)
    for limit in ((), ("--max-bad", "1000"), ("--max-bad", "99%")):
        result = cli(*command, *limit)
        assert result.returncode == 1 and not (out / "manifest.json").exists(), result
        assert "1 cut_off" in result.stderr and str(file) in result.stderr and "--max-bad 100%" in result.stderr
    result = cli(*command, "--max-bad", "100%")
    assert result.returncode == 0, result
    rows, dropped = accounted(out)
    assert dropped == {"cut_off": 1} and 2000 < rows < 8000
