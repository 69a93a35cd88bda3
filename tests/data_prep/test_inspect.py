"""inspect: exact where it reads everything, near where it samples, and honest about which."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.report.inspect import evenly
from tests.data_prep.conftest import cli, make_documents, snapshot, write_parquet


def inspect(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """The report of ``inspect --json``."""
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return report


def inspect_text(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a person reads."""
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("number", "most"), [(0, 3), (1, 8), (3, 3), (5, 3), (8, 8), (100, 8), (1000, 1)])
def test_evenly(number: int, most: int) -> None:
    places = evenly(number, most)
    assert len(places) == min(number, most) == len(set(places))
    assert places == sorted(places) and all(0 <= place < number for place in places)
    gaps = [b - a for a, b in zip([-places[0] - 1, *places], [*places, 2 * number - 1 - places[-1]], strict=True)] if places else [0]
    assert max(gaps) - min(gaps) <= 2


def test_estimate_from_everything_is_what_run_writes(
    corpus: Path, tokenizer: Path, made: Path, documents: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    report = inspect(capsys, corpus, "--tokenizer", tokenizer, "--workers", 3)
    manifest = json.loads((made / "manifest.json").read_text())
    whole = report["estimate"]
    assert report["sample"]["whole"] and whole["share_of_text"] == 1
    assert whole["rows"] == whole["documents"] == len(documents) == sum(split["documents"] for split in manifest["splits"].values())
    assert whole["text_bytes"] == sum(split["text_bytes"] for split in manifest["splits"].values())
    assert whole["tokens"] == sum(split["tokens"] for split in manifest["splits"].values())
    assert whole["bin_bytes"] == sum(path.stat().st_size for path in made.glob("*.bin"))
    assert abs(whole["idx_bytes"] - sum(path.stat().st_size for path in made.glob("*.idx"))) <= 3 * 64  # the files' headers
    assert whole["workers"] == 3 and whole["hours"] == pytest.approx(whole["core_hours"] / 3)
    assert whole["core_hours"] > 0
    assert report["encoding"]["dtype"] == "uint16"
    assert report["encoding"]["bytes_per_token"] == pytest.approx(whole["text_bytes"] / (whole["tokens"] - len(documents)))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of 1,000 documents in row groups of 250, the third of longer documents."""
    folder = tmp_path_factory.mktemp("large")
    for number, words in enumerate((300, 300, 600)):
        write_parquet(folder / f"{number}.parquet", make_documents(1000, words, seed=20 + number), row_group_size=250)
    return folder


def test_estimate_from_a_sample_is_near_and_says_from_how_much(large: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = inspect(capsys, large, "--tokenizer", tokenizer)["estimate"]
    report = inspect(capsys, large, "--tokenizer", tokenizer, "--sample-mb", truth["text_bytes"] / 1e7)
    sample, guess = report["sample"], report["estimate"]
    assert not sample["whole"] and sample["files"] == 3 and sample["places"] >= 3
    assert 0.09 < guess["share_of_text"] < 0.12  # asked for a tenth
    assert guess["rows"] == guess["documents"] == 3000  # footers tell
    for name in ("text_bytes", "tokens", "bin_bytes"):
        assert guess[name] == pytest.approx(truth[name], rel=0.05), name
    said = inspect_text(capsys, large, "--tokenizer", tokenizer, "--sample-mb", truth["text_bytes"] / 1e7)
    assert re.search(r"^all \(estimated from (9\.\d+|1\d\.?\d*)% of the text\): about ", said, re.MULTILINE), said
    assert "all (read to the end): 3k documents" in inspect_text(capsys, large, "--tokenizer", tokenizer)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_jsonl_are_estimated(tmp_path: Path, packed: bool, capsys: pytest.CaptureFixture[str]) -> None:
    documents = make_documents(3000, 60, seed=30)
    content = "".join(json.dumps({"id": name, "text": text, "n": 1, "tags": []}) + "\n" for name, text in documents).encode()
    file = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    file.write_bytes(gzip.compress(content) if packed else content)
    total = sum(len(text.encode()) for _, text in documents)
    report = inspect(capsys, file, "--sample-mb", total / 5e6)
    assert report["files"]["rows"] is None and report["files"]["kinds"] == {"jsonl.gz" if packed else "jsonl": 1}
    assert report["files"]["first"]["columns"] == {"id": "string", "text": "string", "n": "number", "tags": "list"}
    assert not report["sample"]["whole"]
    assert report["sample"]["read_bytes"] < total / 4
    # what a packed file holds is known from its beginning alone
    assert report["estimate"]["documents"] == pytest.approx(3000, rel=0.5 if packed else 0.1)
    assert report["encoding"] is None and "tokens" not in report["estimate"]
    exact = inspect(capsys, file, "--sample-mb", 1000)["estimate"]
    assert (exact["documents"], exact["text_bytes"]) == (3000, total)


def test_drops_by_reason_and_filters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts: list[bytes | None] = [b"good text", b"", None, b"\xff", b"low score", b"French"]
    columns = {
        "text": pa.array(texts, pa.binary()),
        "id": pa.array(range(6)),
        "score": pa.array([3.0, 3.0, 3.0, 3.0, 1.0, 3.0]),
        "language": ["en", "en", "en", "en", "en", "fr"],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    report = inspect(capsys, tmp_path, "--min-score", 2, "--language", "en")
    dropped = {"null_text": 1, "empty_text": 1, "invalid_utf8": 1, "below_min_score": 1, "other_language": 1}
    assert report["sample"]["dropped"] == dropped
    assert (report["sample"]["rows"], report["sample"]["documents"], report["estimate"]["documents"]) == (6, 1, 1)
    assert report["sample"]["document_bytes"] == {"mean": 9.0, "median": 9.0, "largest": 9}
    assert report["sample"]["examples"] == [{"id": "0", "text": "good text"}]
    said = inspect_text(capsys, tmp_path, "--min-score", 2, "--language", "en")
    assert "documents: 1 (16.67% of the rows); left out: 16.7% null_text, 16.7% empty_text, 16.7% invalid_utf8" in said
    assert "columns of the first file: text binary, id int64, score double, language string; 1 row group" in said
    nothing = inspect(capsys, tmp_path, "--min-score", 9)
    assert nothing["sample"]["documents"] == nothing["estimate"]["documents"] == 0
    assert nothing["sample"]["document_bytes"] is None
    assert "no row of the sample is a document" in inspect_text(capsys, tmp_path, "--min-score", 9)


def test_a_sample_whose_last_batches_hold_no_document_is_still_timed(tmp_path: Path, tokenizer: Path) -> None:
    lines = [json.dumps({"id": str(i), "text": f"short {i}"}) for i in range(3)]
    lines += [json.dumps({"id": str(i), "text": "x" * 6_000_000}) for i in range(3, 6)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    result = cli("inspect", tmp_path / "x.jsonl", "--tokenizer", tokenizer, "--sample-mb", "30", "--encoder", "hf", "--json")
    assert result.returncode == 0, result
    assert json.loads(result.stdout)["encoding"]["mb_per_second"] > 0


def test_documents_are_shown_on_one_line_each_cut_and_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [(f"id\n{i}", f"first\tline\x1b[31m\u2028\x00 of {i}\n\n" + "word " * 1000) for i in range(5)]
    file = write_parquet(tmp_path / "a.parquet", documents, row_group_size=1)
    for example in inspect(capsys, file)["sample"]["examples"]:
        assert len(example["text"]) <= 160 and example["text"].startswith("first line [31m") and example["text"].isprintable()
        assert example["id"].isprintable()
    lines = inspect_text(capsys, file).splitlines()
    assert len([line for line in lines if "first line" in line]) == 3
    assert all(line.isprintable() for line in lines)


def test_many_files_are_not_all_listed_and_nothing_is_written(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(12):
        write_parquet(tmp_path / f"{number:02d}.parquet", make_documents(20, 10, seed=number))
    before = snapshot(tmp_path)
    result = cli("inspect", ".", "--tokenizer", tokenizer, "--sample-mb", "0.002", HERE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert snapshot(tmp_path) == before
    assert "files: 12 parquet;" in result.stdout and "  and 4 more" in result.stdout
    assert "encoder: " in result.stdout
    assert inspect(capsys, tmp_path, "--sample-mb", "0.002")["sample"]["files"] == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sample-mb", "0"], "--sample-mb is 0; it must be a number above 0"),
        (["--sample-mb", "nan"], "--sample-mb is nan"),
        (["--workers", "0"], "--workers is 0; it must be at least 1"),
        (["--text-column", "txet"], "has no column 'txet' (it has: id, text)"),
        (["--min-score", "1"], "has no column 'score'"),
        (["--min-bytes", "-3"], "--min-bytes is -3"),
        (["--subset", "x"], "--subset x goes with an hf:// input"),
        (["--tokenizer", "absent-folder"], "absent-folder"),
    ],
)
def test_mistakes_are_one_line(corpus: Path, options: list[str], said: str) -> None:
    result = cli("inspect", corpus, *options)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result
    assert said in result.stderr
