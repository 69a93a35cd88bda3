"""verify: silent on whole data, and each injected fault named with its file and the fix, in merged folders and in shards."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.store.indexed import read_index
from tests.data_prep.conftest import SHARES, cli, snapshot, write_parquet
from tests.data_prep.damage import change, cut, flip, remake_index, remove, reseal, set_id, set_ids, swap, swap_pairs, verify
from tests.data_prep.units_made import edit_json, edit_units, encode_units, merge, plan_folder, rows_with_faults


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


def test_whole_data_passes_and_is_not_touched(merged: Path, encoded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, said in (
        (merged, r"whole; train [\d.]+k tokens, valid .*, test .*"),
        (encoded, "whole; not merged yet; go on with: .* merge"),
    ):
        before = snapshot(folder)
        code, output = verify(folder, capsys)
        assert code == 0 and re.search(said, output) and "fault" not in output and "not checked" not in output, output
        assert "hashes, indices, EOD, 100 documents encoded again agree" in output
        assert snapshot(folder) == before


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "byte missing": (lambda d: cut(d / "train.bin", 1), r"train.bin: \d+ bytes, .*truncated"),
    "tail missing": (lambda d: cut(d / "train.bin", 200), "train.idx does not belong to train.bin"),
    "all missing": (lambda d: (d / "train.bin").write_bytes(b""), r"train.bin: 0 bytes, .*truncated"),
    "bin longer": (lambda d: change(d / "train.bin", lambda raw: raw.extend(b"\1\0")), "train.bin: .*too long"),
    "byte of bin flipped": (lambda d: flip(d / "valid.bin", 50), "valid.bin: content differs"),
    "last byte of bin flipped": (lambda d: flip(d / "train.bin", -1), "train.bin: content differs"),
    "byte of idx flipped": (lambda d: flip(d / "test.idx", 40), "test.idx: content differs"),
    "header of idx flipped": (lambda d: flip(d / "test.idx", 0), "test.idx is not a Megatron index"),
    "idx cut": (lambda d: cut(d / "test.idx", 8), r"test.idx is \d+ bytes, its header says"),
    "idx empty": (lambda d: (d / "test.idx").write_bytes(b""), "test.idx is not a Megatron index"),
    "idx swapped": (lambda d: swap(d / "train.idx", d / "valid.idx"), "valid.idx does not belong to valid.bin"),
    "bin swapped": (lambda d: swap(d / "train.bin", d / "valid.bin"), "train.idx does not belong to train.bin"),
    "pair swapped": (lambda d: swap_pairs(d / "train", d / "valid"), "train.bin: content differs"),
    "foreign idx": (lambda d: remake_index(d, "test", lambda lengths: lengths.sort()), "test.idx: content differs"),
    "idx gone": (lambda d: (d / "valid.idx").unlink(), "valid.idx is missing"),
    "bin gone": (lambda d: (d / "valid.bin").unlink(), "valid.bin is missing"),
    "tokenizer altered": (
        lambda d: change(d / "tokenizer" / "tokenizer.json", lambda raw: raw.extend(b"\n")),
        "tokenizer.json: content differs",
    ),
    "tokenizer gone": (lambda d: shutil.rmtree(d / "tokenizer"), "no such folder: .*tokenizer"),
    "EOD renamed": (
        lambda d: edit_json(d / "tokenizer" / "tokenizer_config.json", lambda c: c.update(eos_token="a")),
        "its EOD is .*, the manifest says 0",
    ),
    "dtype altered": (lambda d: edit_json(d / "manifest.json", lambda m: m.update(dtype="int32")), "manifest.json: dtype is 'int32'"),
    "EOD altered": (lambda d: edit_json(d / "manifest.json", lambda m: m["tokenizer"].update(eod_id=5)), "EOD is 0, the manifest says 5"),
    "documents altered": (
        lambda d: edit_json(d / "manifest.json", lambda m: m["splits"]["train"].update(documents=7)),
        "splits.train.documents is 7",
    ),
    "tokens altered": (lambda d: edit_json(d / "manifest.json", lambda m: m["splits"]["test"].update(tokens=7)), "splits.test.tokens is 7"),
    "text bytes altered": (lambda d: edit_json(d / "manifest.json", lambda m: m["splits"]["test"].update(text_bytes=7)), "text_bytes is 7"),
    "sample altered": (
        lambda d: edit_json(d / "manifest.json", lambda m: m["splits"]["test"].update(bin_sample="9:x")),
        "test.bin: its sample differs",
    ),
    "rows altered": (lambda d: edit_json(d / "manifest.json", lambda m: m["source"].update(rows=1)), "source.rows is 1"),
    "drops altered": (
        lambda d: edit_json(d / "manifest.json", lambda m: m["source"]["dropped"].update(masked=3)),
        "source.dropped.masked is 3",
    ),
    "a file's rows altered": (
        lambda d: edit_json(d / "manifest.json", lambda m: m["source"]["files"][0].update(rows=1)),
        "source.files.0.rows is 1",
    ),
    "settings altered": (
        lambda d: edit_json(d / "manifest.json", lambda m: m["source"]["settings"].update(min_bytes=1)),
        "settings.min_bytes is 1",
    ),
    "of another plan": (lambda d: edit_json(d / "manifest.json", lambda m: m["source"].update(fingerprint="0")), "is of another plan than"),
    "split taken out": (lambda d: edit_json(d / "manifest.json", lambda m: m["splits"].pop("test")), "lacks the split 'test'"),
    "split without entry": (lambda d: edit_json(d / "manifest.json", lambda m: m["splits"].pop("test")), "test.bin is not in the manifest"),
    "units altered": (lambda d: edit_units(d, lambda u: u[1].update(encoder="x"), sealed=False), "units.jsonl: content differs"),
    "units gone": (lambda d: (d / "units.jsonl").unlink(), "units.jsonl is missing"),
    "unit missing, resealed": (lambda d: edit_units(d, lambda u: u.pop()), "units.jsonl has 4 units, .*plan.json has 5"),
    "units in another order": (lambda d: edit_units(d, lambda u: u.reverse()), "not the entries of units 0 to 4"),
    "unit of another plan": (lambda d: edit_units(d, lambda u: u[2].update(plan="0")), "unit 2 is of another plan"),
    "unit's documents altered": (
        lambda d: edit_units(d, lambda u: u[2]["splits"]["train"].update(tokens=9)),
        "splits.train.tokens is .*, units and plan say",
    ),
    "unit's rows altered": (
        lambda d: edit_units(
            d, lambda u: u[2].update(rows=u[2]["rows"] + 1, dropped={"masked": 1 + sum(u[2]["dropped"].values())}, bad=[])
        ),
        "unit 2 accounts for 61 rows, the plan for 60",
    ),
    "a unit's encoder altered": (lambda d: edit_units(d, lambda u: u[2].update(encoder="other 1.0")), "source.encoder is"),
    "plan gone": (lambda d: (d / "plan.json").unlink(), "plan.json is missing"),
    "a unit of the plan cut": (lambda d: edit_json(d / "plan.json", lambda p: p["units"][0].__setitem__(2, 0)), "plan.json was altered"),
    "plan's settings altered": (lambda d: edit_json(d / "plan.json", lambda p: p["settings"].update(min_bytes=9)), "plan.json was altered"),
    "plan's settings unknown": (lambda d: edit_json(d / "plan.json", lambda p: p["settings"].update(more=9)), "plan.json is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_fault_is_found_and_named(data: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = DAMAGE[case]
    damage(data)
    code, output = verify(data, capsys, "--sample", "5")
    assert code == 1 and re.search(f"^fault: .*{said}", output, re.MULTILINE), output
    faults = [line for line in output.splitlines() if line.startswith("fault: ")]
    assert all("; " in line and ("--overwrite" in line or f"run --out {data}" in line or "remove it" in line) for line in faults), output
    assert f"{data}: {len(faults)} fault" in output.splitlines()[-1]


INSIDE: dict[str, tuple[Callable[[Path], object], str]] = {
    "EOD missing": (lambda d: set_id(d / "test.bin", -1, 9), "EOD stands"),
    "EOD inside": (lambda d: set_id(d / "test.bin", 0, 0), "EOD stands"),
    "EOD moved": (lambda d: set_ids(d / "test.bin", {-1: 9, 0: 0}), "1 documents do not end in EOD, number 7 first"),
    "id outside the vocabulary": (lambda d: set_id(d / "test.bin", 0, 320), "1 ids lie outside the vocabulary of 320"),
    "boundary moved": (
        lambda d: remake_index(d, "test", lambda n: n.__iadd__([1, -1, *[0] * (len(n) - 2)])),
        "1 documents do not end in EOD, number 0",
    ),
    "pointer moved": (
        lambda d: flip(d / "test.idx", 34 + 4 * len(read_index(d / "test.idx").lengths) + 8),
        "lengths and pointers disagree",
    ),
    "document index moved": (lambda d: flip(d / "test.idx", -8), "document indices are not one document a sequence"),
    "length 0": (
        lambda d: remake_index(d, "test", lambda n: n.__iadd__([-int(n[0]), int(n[0]), *[0] * (len(n) - 2)])),
        "lengths and pointers disagree",
    ),
}


@pytest.mark.parametrize("case", INSIDE)
def test_fault_that_no_hash_shows_is_found(data: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = INSIDE[case]
    assert len(read_index(data / "test.idx").lengths) == 8
    damage(data)
    reseal(data, "test")
    code, output = verify(data, capsys, "--sample", "0")
    assert code == 1 and said in output and "content differs" not in output, output


@pytest.mark.parametrize("block", [2, 6, 64, 4096])
def test_documents_that_straddle_blocks_are_followed(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("data_prep.verify.pairs.BLOCK_BYTES", block)
    monkeypatch.setattr("data_prep.verify.pairs.DOCUMENTS_AT_ONCE", 3)
    assert verify(data, capsys, "--sample", "0")[0] == 0
    ends = np.cumsum(read_index(data / "test.idx").lengths)
    for document in (0, 4, 7):
        set_id(data / "test.bin", int(ends[document]) - 1, 9)
    reseal(data, "test")
    code, output = verify(data, capsys, "--sample", "0")
    assert code == 1 and "3 documents do not end in EOD, number 0 first" in output, output


SHARD_DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bin cut": (lambda s: cut(s / "00002-train.bin", 2), r"00002-train.bin: \d+ bytes, its entry says \d+ \(truncated\)"),
    "byte flipped": (lambda s: flip(s / "00002-train.bin", 9), "00002-train.bin: content differs from its entry's hash"),
    "idx flipped": (lambda s: flip(s / "00002-train.idx", 40), "00002-train.idx: content differs"),
    "pairs swapped": (
        lambda s: swap_pairs(s / "00002-train", s / "00003-train"),
        "00003-train.bin: ",
    ),
    "entries swapped": (lambda s: swap(s / "00002.json", s / "00003.json"), "00002.json is the entry of unit 3"),
    "entry without file": (lambda s: (s / "00002-train.idx").unlink(), "00002-train.idx is missing"),
    "file without entry": (lambda s: (s / "00002.json").unlink(), "00002-train.bin has no entry"),
    "unit without entry": (lambda s: remove(*s.glob("00002*")), "1 of 5 units are not done: 2; do them"),
    "entry damaged": (lambda s: (s / "00002.json").write_text("{"), "00002.json is damaged"),
    "entry of another plan": (lambda s: edit_json(s / "00002.json", lambda e: e.update(plan="0")), "00002.json belongs to another plan"),
    "entry of no unit": (
        lambda s: shutil.copy(s / "00002.json", s / "00009.json"),
        "00009.json is the entry of a unit that the plan does not",
    ),
    "file of no unit": (lambda s: shutil.copy(s / "00002-train.bin", s / "00009-train.bin"), "00009-train.bin belongs to no unit"),
    "a stranger": (lambda s: (s / "note.txt").write_text("x"), "note.txt belongs to no unit"),
    "a split that no entry names": (
        lambda s: edit_json(s / "00002.json", take_train_out),
        "00002-train.bin is not named by its unit's entry",
    ),
    "rows altered": (
        lambda s: edit_json(s / "00002.json", lambda e: e.update(rows=e["rows"] + 1)),
        "00002.json is damaged .61 rows are not",
    ),
    "plan altered": (lambda s: edit_json(s.parent / "plan.json", lambda p: p["tokenizer"].update(eod_id=3)), "plan.json was altered"),
    "tokenizer gone": (lambda s: shutil.rmtree(s.parent / "tokenizer"), "no such folder: .*tokenizer"),
}


def take_train_out(entry: dict) -> None:  # type: ignore[type-arg]
    """An entry that is consistent without its train split."""
    train = entry["splits"].pop("train")
    entry["dropped"]["masked"] = train["documents"]


@pytest.mark.parametrize("case", SHARD_DAMAGE)
def test_fault_in_shards_is_found_and_named(shards: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage, said = SHARD_DAMAGE[case]
    damage(shards / "shards")
    code, output = verify(shards, capsys, "--sample", "5")
    assert code == 1 and re.search(f"^fault: .*{said}", output, re.MULTILINE), output
    faults = [line for line in output.splitlines() if line.startswith("fault: ")]
    assert all("--overwrite" in line or f"run --out {shards}" in line or "remove it" in line for line in faults), output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (lambda merged, encoded: [merged / "none"], "no such folder: .*none"),
        (lambda merged, encoded: [merged / "tokenizer"], "no manifest.json in"),
        (lambda merged, encoded: [merged, "--sample", "-1"], "--sample is -1; it must be at least 0"),
        (lambda merged, encoded: [merged, "--index-cache", merged / "none"], "no such folder: .*none"),
        (lambda merged, encoded: [encoded, "--index-cache", merged], "is not merged, so no index cache can belong to it"),
    ],
)
def test_a_mistake_is_one_line_and_2(merged: Path, encoded: Path, options: Callable[[Path, Path], list[object]], said: str) -> None:
    result = cli("verify", *options(merged, encoded))
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and re.search(said, result.stderr), result


def test_kept_shards_are_said_and_are_no_fault(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(shards, "--keep-shards") == 0
    code, output = verify(shards, capsys, "--sample", "3")
    assert code == 0 and f"not checked: {shards / 'shards'}: all of it is merged" in output, output


def test_run_writes_what_verify_passes(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert SHARES and verify(made, capsys)[0] == 0
