"""verify's sample: documents read again and encoded by Hugging Face tokenizers; inputs that are gone or changed are said, and no fault."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.data_prep.conftest import write_parquet
from tests.data_prep.damage import pair_entry, reseal, set_id, verify
from tests.data_prep.units_made import edit_json, encode_units, merge, plan_folder, rows_with_faults


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_parquet(tmp_path_factory.mktemp("rows") / "rows.parquet", rows_with_faults(250), row_group_size=60)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, rows: Path, tokenizer: Path) -> Path:
    """Five units, done and not merged."""
    return encode_units(plan_folder(tmp_path_factory.mktemp("encoded") / "data", [rows], tokenizer, "--unit-mb", "0.001"))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, encoded: Path) -> Path:
    out = Path(shutil.copytree(encoded, tmp_path_factory.mktemp("merged") / "data"))
    assert merge(out) == 0
    return out


@pytest.fixture
def data(tmp_path: Path, merged: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "data"))


@pytest.fixture
def shards(tmp_path: Path, encoded: Path) -> Path:
    return Path(shutil.copytree(encoded, tmp_path / "data"))


def reencode(folder: Path) -> None:
    """Another valid document in place of the first, and everything that is said made to agree."""
    (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes())
    set_id(folder / "train.bin", 0, 77)
    reseal(folder, "train")


def test_the_sample_alone_sees_a_document_that_is_not_its_text(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reencode(data)
    assert verify(data, capsys, "--sample", "0")[0] == 0
    code, output = verify(data, capsys, "--sample", "1000")
    assert code == 1 and output.count("fault: ") == 1, output
    assert re.search(
        r"train.bin: document 0 \(unit 0, place 0 of .*rows.parquet\) is not what Hugging Face tokenizers makes of its text, from id 0 on",
        output,
    )


def test_the_sample_sees_shards_that_are_not_their_text(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_id(shards / "shards" / "00001-train.bin", 0, 77)
    said = pair_entry(shards / "shards", "00001-train")
    edit_json(shards / "shards" / "00001.json", lambda entry: entry["splits"]["train"].update(said))
    code, output = verify(shards, capsys, "--sample", "1000")
    assert code == 1 and "00001-train.bin: document 0 (unit 1, place 60 " in output, output


def test_a_sample_of_everything_is_everything_in_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tokenizer that makes EOD or nothing of some texts: these are passed over, and what follows them is still found."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<eod>": 0, "?": 1, **{f"w{i}": i + 2 for i in range(50)}}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Strip()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eod>"}))
    documents = [
        (f"d{i}", "   " if i % 7 == 3 else f"w{i % 50} <eod>" if i % 11 == 4 else f"w{i % 50} w1 " * (1 + i % 3)) for i in range(150)
    ]
    file = write_parquet(tmp_path / "a.parquet", documents, row_group_size=40)
    out = encode_units(plan_folder(tmp_path / "out", [file], tmp_path / "tokenizer", "--unit-mb", "0.0010"))
    assert merge(out) == 0
    dropped = json.loads((out / "manifest.json").read_text())["source"]["dropped"]
    assert dropped.keys() == {"no_tokens", "contains_eod"}
    code, output = verify(out, capsys, "--sample", "1000")
    assert code == 0 and f"{150 - sum(dropped.values())} documents encoded again" in output, output


def test_inputs_gone_or_changed_are_said_and_are_no_fault(
    tmp_path: Path, rows: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(shutil.copy(rows, tmp_path / "mine.parquet"))
    out = encode_units(plan_folder(tmp_path / "out", [mine], tokenizer))
    assert merge(out) == 0
    assert verify(out, capsys)[0] == 0
    write_parquet(mine, rows_with_faults(250, seed=12), row_group_size=60)
    code, output = verify(out, capsys)
    assert code == 0 and re.search(
        "^not checked: a sample of unit 0 against the inputs: .*mine.parquet has changed since", output, re.MULTILINE
    ), output
    mine.unlink()
    code, output = verify(out, capsys)
    assert code == 0 and re.search("^not checked: a sample .* no such file: .*mine.parquet", output, re.MULTILINE), output
    assert "encoded again" not in output and "whole" in output


def test_an_input_that_went_bad_later_is_no_fault_of_the_data(
    tmp_path: Path, rows: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Path(shutil.copy(rows, tmp_path / "mine.parquet"))
    out = encode_units(plan_folder(tmp_path / "out", [mine], tokenizer))
    assert merge(out) == 0
    raw = bytearray(mine.read_bytes())
    raw[2000:2064] = bytes(64)
    mine.write_bytes(raw)
    code, output = verify(out, capsys)
    assert code == 0 and re.search("^not checked: .*mine.parquet can no longer be read as it was", output, re.MULTILINE), output


def test_a_mask_that_is_gone_is_said(tmp_path: Path, rows: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = tmp_path / "mask.py"
    mask.write_text("import numpy as np\n\ndef keep(batch, places, path):\n    return np.array(places) % 2 == 0\n")
    out = encode_units(plan_folder(tmp_path / "out", [rows], tokenizer, "--mask", f"{mask}:keep"))
    assert merge(out) == 0
    code, output = verify(out, capsys)
    assert code == 0 and "100 documents encoded again" in output, output
    mask.unlink()
    code, output = verify(out, capsys)
    assert code == 0 and "not checked: a sample of unit 0 against the inputs" in output and "mask.py" in output, output


def test_inputs_that_moved_are_read_where_the_plan_now_says(
    tmp_path: Path, rows: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Path(shutil.copy(rows, tmp_path / "first.parquet"))
    out = encode_units(plan_folder(tmp_path / "out", [first], tokenizer))
    assert merge(out) == 0
    moved = first.rename(tmp_path / "moved.parquet")
    edit_json(out / "plan.json", lambda plan: plan["files"][0].update(path=str(moved)))
    code, output = verify(out, capsys)
    assert code == 0 and "100 documents encoded again" in output, output
