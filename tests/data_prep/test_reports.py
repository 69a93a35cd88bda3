"""Tests of the reports ``inspect``, ``status`` and ``stats``, and of ``stdlib``, the corpus that
every machine has.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib import image

from data_prep.prepared.indexed import read_index
from data_prep.prepared.layout import read_plan
from data_prep.report.lengths import Lengths, count_lengths, draw_lengths, joined
from data_prep.report.status import status_of
from data_prep.verbs.stdlib import SCHEMA, collect, source_files
from tests.data_prep import conftest as base


def report(*arguments: object) -> dict[str, Any]:
    """Return the output of a verb with --json, which must be strict JSON."""
    found: dict[str, Any] = json.loads(
        base.done(*arguments, "--json"),
        parse_constant=lambda name: pytest.fail(f"{name} is no JSON"),
    )
    return found


# --- inspect: exact if it reads everything, approximate if it samples -----------------------------


def test_an_estimate_from_everything_is_what_run_writes(
    corpus: Path, tokenizer: Path, made: Path
) -> None:
    found = report("inspect", corpus, f"--tokenizer {tokenizer} --workers 3", base.HF)
    full, splits = found["estimate"], base.manifest_of(made)["splits"].values()
    sums = {
        name: sum(split[name] for split in splits) for name in ("documents", "tokens", "text_bytes")
    }
    assert (
        found["sample"]["whole"]
        and full["share_of_text"] == 1
        and full["rows"] == 400
        and sums.items() <= full.items()
    )
    assert (
        full["bin_bytes"] == sum(path.stat().st_size for path in made.glob("*.bin"))
        and found["encoding"]["dtype"] == "uint16"
    )
    assert (
        abs(full["idx_bytes"] - sum(path.stat().st_size for path in made.glob("*.idx"))) <= 3 * 64
    )  # headers of the files
    assert (
        full["workers"] == 3
        and full["hours"] == pytest.approx(full["core_hours"] / 3)
        and full["hours"] > 0
    )
    assert found["encoding"]["bytes_per_token"] == pytest.approx(
        full["text_bytes"] / (full["tokens"] - 400)
    )


def test_an_estimate_from_a_sample_is_near_and_states_from_how_much(
    tmp_path: Path, tokenizer: Path
) -> None:
    for number, words in enumerate((100, 100, 200)):
        base.write_parquet(
            tmp_path / f"{number}.parquet",
            base.make_documents(1000, words, seed=20 + number),
            row_group_size=250,
        )
    command = ("inspect", tmp_path, f"--tokenizer {tokenizer}", base.HF)
    truth = report(*command)["estimate"]
    tenth = (*command, f"--sample-mb {truth['text_bytes'] / 1e7}")
    found = report(*tenth)
    sample, guess = found["sample"], found["estimate"]
    assert (
        not sample["whole"]
        and sample["files"] == 3
        and sample["places"] >= 3
        and 0.09 < guess["share_of_text"] < 0.12
    )
    assert guess["rows"] == guess["documents"] == 3000  # from the footers
    for name in ("text_bytes", "tokens", "bin_bytes"):
        assert guess[name] == pytest.approx(truth[name], rel=0.05), name
    assert re.search(
        r"^all \(estimated from (9\.\d+|1\d\.?\d*)% of the text\): about ",
        base.done(*tenth),
        re.MULTILINE,
    )
    assert "all (read to the end): 3k documents" in base.done(*command)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_jsonl_are_estimated(tmp_path: Path, packed: bool) -> None:
    documents = base.make_documents(3000, 60, seed=30)
    content = "".join(
        json.dumps({"id": name, "text": text, "n": 1, "tags": []}) + "\n"
        for name, text in documents
    ).encode()
    file = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    total = sum(len(text.encode()) for _, text in documents)
    file.write_bytes(gzip.compress(content) if packed else content)
    found = report("inspect", file, f"--sample-mb {total / 5e6}")
    assert found["files"]["rows"] is None and found["files"]["kinds"] == {
        "jsonl.gz" if packed else "jsonl": 1
    }
    assert found["files"]["first"]["columns"] == {
        "id": "string",
        "text": "string",
        "n": "number",
        "tags": "list",
    }
    assert not found["sample"]["whole"] and found["sample"]["read_bytes"] < total / 4
    # the content of a compressed file is estimated from its beginning
    assert found["estimate"]["documents"] == pytest.approx(3000, rel=0.5 if packed else 0.1)
    assert found["encoding"] is None and "tokens" not in found["estimate"]
    exact = report("inspect", file, "--sample-mb 1000")["estimate"]
    assert (exact["documents"], exact["text_bytes"]) == (3000, total)


def test_drops_by_reason_and_filters(tmp_path: Path) -> None:
    texts = pa.array([b"good text", b"", None, b"\xff", b"low score", b"French"], pa.binary())
    columns = {
        "text": texts,
        "id": range(6),
        "score": [3.0, 3.0, 3.0, 3.0, 1.0, 3.0],
        "language": [*["en"] * 5, "fr"],
    }
    pq.write_table(
        pa.table({name: pa.array(column) for name, column in columns.items()}),
        tmp_path / "a.parquet",
    )
    options = ("inspect", tmp_path, "--min-score 2 --language en")
    sample = report(*options)["sample"]
    assert sample["dropped"] == dict.fromkeys(
        ("null_text", "empty_text", "invalid_utf8", "below_min_score", "other_language"), 1
    )
    assert (sample["rows"], sample["documents"], sample["examples"]) == (
        6,
        1,
        [{"id": "0", "text": "good text"}],
    )
    assert sample["document_bytes"] == {"mean": 9.0, "median": 9.0, "largest": 9}
    output = base.done(*options)
    assert (
        "documents: 1 (16.67% of the rows); left out: 16.7% null_text, 16.7% empty_text, "
        "16.7% invalid_utf8" in output
    )
    assert (
        "columns of the first file: text binary, id int64, score double, language string; 1 "
        "row group" in output
    )
    nothing = ("inspect", tmp_path, "--min-score 9")
    assert report(*nothing)["sample"][
        "document_bytes"
    ] is None and "no row of the sample is a document" in base.done(*nothing)


def test_documents_are_shown_on_one_line_each_and_nothing_is_written(
    tmp_path: Path, tokenizer: Path
) -> None:
    for number in range(12):
        rows = [
            (f"id\n{i}", f"first\tline\x1b[31m\u2028\x00 of {i} of {number}\n\n" + "word " * 1000)
            for i in range(5)
        ]
        base.write_parquet(tmp_path / f"{number:02d}.parquet", rows, row_group_size=1)
    lines = [
        json.dumps({"id": str(i), "text": f"short {i}" if i < 3 else "x" * 50_000})
        for i in range(6)
    ]
    (tmp_path / "last.jsonl").write_text("\n".join(lines))
    before = base.snapshot(tmp_path)
    files = [tmp_path / "00.parquet", tmp_path / "last.jsonl"]
    found = report("inspect", *files, f"--tokenizer {tokenizer} --sample-mb 30", base.HF)
    for example in found["sample"]["examples"][:2]:
        assert example["text"].startswith("first line [31m of") and len(example["text"]) <= 160
        assert example["text"].isprintable() and example["id"].isprintable()
    assert found["encoding"]["mb_per_second"] > 0 and base.snapshot(tmp_path) == before
    output = base.done("inspect", ".", "--sample-mb 0.02", HERE=str(tmp_path))
    assert (
        "files: 12 parquet, 1 jsonl;" in output
        and "  and 5 more" in output
        and all(line.isprintable() for line in output.splitlines())
    )


# --- status ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, many: Path, tokenizer: Path) -> Path:
    """Folder in which the first of four tasks is done."""
    out = base.plan_folder(
        tmp_path_factory.mktemp("planned") / "out", [many], tokenizer, base.SMALL_UNITS
    )
    return base.encode_units(out, range(0, 40, 4))


def test_counts_of_a_folder_in_work_and_of_a_merged_one(
    planned: Path, many_made: Path, tmp_path: Path
) -> None:
    status = report("status", planned, "--tasks 4")
    assert (status["units_done"], status["units"], status["merged"]) == (10, 40, False)
    assert (status["rows"], status["documents"], status["dropped"], status["bad"]) == (
        400,
        400,
        {},
        0,
    )
    assert status["tasks"] == [
        {"task": task, "units_done": 10 * (task == 0), "units": 10} for task in range(4)
    ]
    assert status["tokens"] == sum(
        path.stat().st_size // 2 for path in (planned / "shards").glob("*.bin")
    )
    output = base.done("status", planned, "--tasks 4")
    assert (
        "10 of 40 units done" in output
        and "task 3 of 4: 0 of 10 units done" in output
        and "not done: 1-3, 5-7" in output
    )
    status = report("status", many_made)
    assert status["merged"] and status["units_done"] == 40 and status["rate"] is None
    assert status["tokens"] == sum(
        len(ids) for name in ("train", "valid", "test") for ids in base.read_split(many_made, name)
    )
    assert base.done("status", many_made).endswith("merged: the data is complete\n")
    spoilt = base.copied(planned, tmp_path / "spoilt")
    for how in (
        "00004.json write {",
        "00008.json copy 00012.json",
    ):  # entries that run rejects
        base.spoil(spoilt / "shards", how)
    assert report("status", spoilt)["units_done"] == 8


def test_rate_and_time_left_are_those_of_the_last_quarter_of_an_hour(
    tmp_path: Path, planned: Path
) -> None:
    out = base.copied(planned, tmp_path / "out")
    plan, now = read_plan(out), time.time()
    done = [unit for unit in plan.units if unit.number % 4 == 0]
    for place, unit in enumerate(done):  # five long ago, then one every 100 s, the last 100 s ago
        os.utime(
            out / "shards" / f"{unit.name}.json",
            times=(now - 50_000,) * 2 if place < 5 else (now - 100 * (10 - place),) * 2,
        )
    status, missing = status_of(out, 0, now)
    rate = sum(unit.text_bytes for unit in done[6:]) / 500
    assert status["rate"] == pytest.approx(rate)
    assert status["seconds_left"] == pytest.approx(
        (status["text_bytes"] - status["text_bytes_done"]) / rate
    )
    assert (
        missing == [unit.number for unit in plan.units if unit.number % 4]
        and status_of(out, 0, now + 10_000)[0]["rate"] is None
    )


# --- stats: every figure against numpy's on the plain list of lengths -----------------------------

LENGTHS: dict[str, Any] = {
    "like text": np.clip(np.random.default_rng(5).lognormal(6.4, 1.0, 5000), 1, None),
    "one": [17],
    "all the same": [8] * 50,
    "very long": [3, 2**20 - 1, 2**20, 2**20, 2**20 + 5, 2**31 - 1],
}


def of(values: npt.NDArray[np.int32]) -> Lengths:
    return count_lengths(values, lambda number: None)


@pytest.mark.parametrize("case", LENGTHS)
def test_figures_are_numpys(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.array(LENGTHS[case], dtype=np.int32)
    lengths = of(values)
    long = np.sort(values.astype(np.int64))
    half = len(values) // 2
    assert lengths.total == len(values) and lengths.tokens == int(long.sum())
    assert np.repeat(lengths.values, lengths.documents).tolist() == long.tolist()
    for share in (0.001, 0.05, 0.25, 0.5, 0.9, 0.999, 1.0):
        assert lengths.quantile(share) == np.quantile(values, share, method="inverted_cdf")
        assert (
            lengths.token_quantile(share)
            == long[: np.searchsorted(np.cumsum(long), share * long.sum()) + 1][-1]
        )
    for mark in (0, 1, 8, 17, 512, 2**20, 2**31):
        short = long[long <= mark]
        assert lengths.at_most(mark) == (len(short) / len(long), int(short.sum()) / int(long.sum()))
    monkeypatch.setattr("data_prep.report.lengths.DOCUMENTS_AT_ONCE", 7)
    for other in (
        of(values),
        of(values[::-1].copy()),
        joined(map(of, (values[:half], values[half:]))),
        joined(map(of, (values[:0], values))),
    ):
        assert np.array_equal(other.values, lengths.values) and np.array_equal(
            other.documents, lengths.documents
        )
    assert draw_lengths(lengths, case).startswith(b"\x89PNG")


def test_the_figures_add_up_and_the_picture_is_drawn(tmp_path: Path, data: Path) -> None:
    output, manifest = report("stats", data), base.manifest_of(data)
    lengths = {
        name: read_index(data / f"{name}.idx").lengths for name in ("train", "valid", "test")
    }
    for name, split in output["splits"].items():
        assert {
            key: split[key] for key in ("documents", "tokens", "text_bytes")
        }.items() <= manifest["splits"][name].items()
        assert split["bytes_per_token"] == split["text_bytes"] / split["tokens"]
        assert split["lengths"]["longest"] == lengths[name].max() and split["lengths"][
            "mean"
        ] == pytest.approx(lengths[name].mean())
    every, full = np.concatenate(list(lengths.values())), output["all"]["lengths"]
    assert full["documents"] == len(every) == 250 and full["tokens"] == every.sum()
    assert full["quantiles"]["0.5"] == np.quantile(every, 0.5, method="inverted_cdf")
    assert full["at_most"]["128"]["documents"] == pytest.approx((every <= 128).mean())
    assert output["dropped"] == manifest["source"]["dropped"] and output["rows"] == 250 + sum(
        output["dropped"].values()
    )
    pictures = [tmp_path / "deeper" / "lengths.png", tmp_path / "again.png"]
    for path in pictures:
        result = base.cli("stats", data, "--picture", path)
        assert result.returncode == 0 and str(path) in result.stderr
    pixels = image.imread(io.BytesIO(pictures[0].read_bytes()))
    assert (
        pixels.shape[0] >= 800
        and pixels.shape[1] >= 1200
        and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50
    )
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
    for name, entry in manifest["splits"].items():
        assert re.search(
            rf"^{name} +{entry['documents']:,} +{entry['tokens']:,} ", result.stdout, re.MULTILINE
        ), result.stdout
    assert (
        f"{output['rows']:,} rows = 250 documents + {sum(output['dropped'].values())} dropped"
        in result.stdout
    )
    assert all(
        re.search(rf"^ +{number} {reason} \(", result.stdout, re.MULTILINE)
        for reason, number in output["dropped"].items()
    )


# --- stdlib ---------------------------------------------------------------------------------------


def test_the_librarys_texts_are_its_own_and_the_same_again(tmp_path: Path) -> None:
    path, root = tmp_path / "new" / "stdlib.parquet", Path(sysconfig.get_path("stdlib"))
    base.done("stdlib", path)
    file = pq.ParquetFile(path, page_checksum_verification=True)
    rows, version = file.read().to_pylist(), ".".join(map(str, sys.version_info[:3]))
    assert file.schema_arrow.equals(SCHEMA) and file.num_row_groups >= 3
    # 10.7 MB with Debian's trimmed Python 3.11, 11.3 to 11.8 MB on CPython 3.10 to 3.13
    assert 9e6 < sum(len(row["text"].encode()) for row in rows) < 20e6
    assert len({row["text"] for row in rows}) == len({row["id"] for row in rows}) == len(rows)
    for row in rows[::37]:
        assert (
            row["url"].startswith(f"https://github.com/python/cpython/blob/v{version}")
            and row["id"] == f"stdlib/{row['file_path']}"
        )
        assert (root / row["file_path"]).read_bytes().decode() == row["text"]
    assert {"os.py", "asyncio/base_events.py", "json/decoder.py"} <= {
        row["file_path"] for row in rows
    }
    before = path.read_bytes()
    assert (
        "unchanged" in base.done("stdlib", path)
        and path.read_bytes() == before
        and len(list(path.parent.iterdir())) == 1
    )


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    sources = {
        "b.py": b"x = 1\n",
        "a/c.py": b"x = 1\n",
        "a/d.py": b"y = '\xc3\xa9'\n",
        "a/e.py": b"z = '\xe9'\n",
        "a/__init__.py": b"\n",
    }
    skipped = (
        "a/test/t.py site-packages/p.py config-3.11-linux/python-config.py "
        "_sysconfigdata__linux_.py notes.txt"
    ).split()
    for name, content in {**sources, **dict.fromkeys(skipped, b"t = 1\n")}.items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(content)
    (tmp_path / "elsewhere.py").write_text("e = 1\n")
    (tmp_path / "lib" / "linked.py").symlink_to(tmp_path / "elsewhere.py")
    assert sorted(source_files(tmp_path / "lib")) == sorted(sources)
    table, dropped = collect(tmp_path / "lib")
    assert table.column("file_path").to_pylist() == ["b.py", "a/d.py"] and dropped == {
        "duplicate": 1,
        "not UTF-8": 1,
        "empty": 1,
    }
