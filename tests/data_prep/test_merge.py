"""merge: shards in order are what one writer would have written; nothing that is not whole is ever there under a final name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.store.indexed import IndexedWriter
from data_prep.store.layout import read_plan
from data_prep.store.manifest import read_manifest
from data_prep.store.staging import Lock
from tests.data_prep.conftest import ROOT, merged_hashes, read_split, snapshot, write_parquet
from tests.data_prep.units_made import edit_json, encode_units, entry_of, merge, plan_folder, rows_with_faults

UNITS = 9
PAIRS = {f"{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx")}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus with bad rows, in nine row groups."""
    return write_parquet(tmp_path_factory.mktemp("rows") / "rows.parquet", rows_with_faults(250), row_group_size=30)


@pytest.fixture(scope="module")
def encoded(tmp_path_factory: pytest.TempPathFactory, rows: Path, tokenizer: Path) -> Path:
    """All units done, nothing merged."""
    return encode_units(plan_folder(tmp_path_factory.mktemp("encoded") / "data", [rows], tokenizer, "--unit-mb", "0.001"))


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, encoded: Path) -> Path:
    """The same, merged without interruption."""
    out = Path(shutil.copytree(encoded, tmp_path_factory.mktemp("merged") / "data"))
    assert merge(out) == 0
    return out


@pytest.fixture
def data(tmp_path: Path, encoded: Path) -> Path:
    return Path(shutil.copytree(encoded, tmp_path / "data"))


def test_shards_merged_are_one_writers_files(tmp_path: Path, encoded: Path, merged: Path) -> None:
    assert len(read_plan(encoded).units) == UNITS
    for split in ("train", "valid", "test"):
        writer = IndexedWriter(tmp_path / split, "uint16")
        for number in range(UNITS):
            if split in entry_of(encoded, number).splits:
                documents = read_split(encoded / "shards", f"{number:05d}-{split}")
                writer.add(np.concatenate([np.array(ids, np.uint32) for ids in documents]), np.array([len(ids) for ids in documents]))
        written = writer.finish()
        said = read_manifest(merged).splits[split]
        assert written.documents == said.documents and written.bin_sha256 == said.bin_sha256 and written.idx_sha256 == said.idx_sha256
        for kind in ("bin", "idx"):
            assert (merged / f"{split}.{kind}").read_bytes() == (tmp_path / f"{split}.{kind}").read_bytes()


@pytest.mark.parametrize("unit_mb", ["0.004", "100"])
def test_merged_bytes_do_not_depend_on_the_unit_size(tmp_path: Path, rows: Path, tokenizer: Path, merged: Path, unit_mb: str) -> None:
    out = encode_units(plan_folder(tmp_path / "out", [rows], tokenizer, "--unit-mb", unit_mb))
    assert len(read_plan(out).units) < UNITS and merge(out) == 0
    assert merged_hashes(out) == merged_hashes(merged)


def test_the_folder_after_a_merge(encoded: Path, merged: Path, rows: Path) -> None:
    names = {path.name for path in merged.iterdir()}
    assert names == {*PAIRS, "manifest.json", "plan.json", "units.jsonl", "bad_rows.jsonl", "tokenizer", ".lock"}
    manifest, entries = json.loads((merged / "manifest.json").read_text()), [entry_of(encoded, number) for number in range(UNITS)]
    dropped = manifest["source"]["dropped"]
    assert set(dropped) == {"null_text", "null_id"} and all(dropped.values())
    documents = sum(entry["documents"] for entry in manifest["splits"].values())
    assert manifest["source"]["rows"] == documents + sum(dropped.values()) == len(rows_with_faults(250)) and documents == 250
    assert [json.loads(line) for line in (merged / "units.jsonl").read_text().splitlines()] == [entry.as_json() for entry in entries]
    (file,) = manifest["source"]["files"]
    assert file["path"] == str(rows) and file["rows"] == manifest["source"]["rows"] and file["bytes"] == rows.stat().st_size
    assert manifest["source"]["fingerprint"] == read_plan(merged).fingerprint


def test_merging_again_changes_nothing(merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(merged)
    assert merge(merged) == 0 and "unchanged" in capsys.readouterr().out
    assert snapshot(merged) == before


def test_kept_shards_go_with_a_merge_that_does_not_keep_them(data: Path, merged: Path) -> None:
    shards = snapshot(data / "shards")
    assert merge(data, "--keep-shards") == 0
    assert snapshot(data / "shards") == shards and merged_hashes(data) == merged_hashes(merged)
    assert merge(data, "--keep-shards") == 0 and snapshot(data / "shards") == shards
    assert merge(data) == 0 and snapshot(data) == snapshot(merged)


def besides_bad_rows(out: Path) -> dict[str, bytes]:
    """Every file but the list of bad rows, which is written before anything is refused."""
    return {name: content for name, content in snapshot(out).items() if name != "bad_rows.jsonl"}


def refused(out: Path, capsys: pytest.CaptureFixture[str], *options: str, code: int = 2) -> str:
    """What merge says when it refuses; nothing has got a final name, and the shards are as they were."""
    before = besides_bad_rows(out)
    capsys.readouterr()
    assert merge(out, *options) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert besides_bad_rows(out) == before
    return said


def test_missing_units_are_named_with_their_tasks(data: Path, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 3, 4, 7):
        (data / "shards" / f"{number:05d}.json").unlink()
    said = refused(data, capsys)
    assert f"4 of {UNITS} units are not done: 2-4, 7; do them with: python -m data_prep run --out {data}" in said
    assert "2-4, 7 (of 5 tasks, those of 2-4)" in refused(data, capsys, "--tasks", "5")
    encode_units(data, (2, 3, 4, 7))
    assert merge(data) == 0 and snapshot(data) == snapshot(merged)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda s: flip(s / "00004-train.bin", 70), "00004-train.bin is damaged"),
        (lambda s: (s / "00004-train.bin").write_bytes((s / "00004-train.bin").read_bytes()[:-2]), "00004-train.bin is damaged"),
        (lambda s: flip(s / "00004-train.idx", 36), "00004-train.idx is damaged"),
        (lambda s: (s / "00004-train.idx").unlink(), "00004-train.idx is missing"),
        (lambda s: (s / "00004-train.bin").unlink(), "00004-train.bin is missing"),
        (lambda s: shutil.copy(s / "00003-train.bin", s / "00004-train.bin"), "00004-train.bin is damaged"),
        (lambda s: (s / "00004.json").write_text("{"), "00004.json is damaged"),
        (lambda s: shutil.copy(s / "00003.json", s / "00004.json"), "00004.json is the entry of unit 3"),
        (lambda s: edit_json(s / "00004.json", lambda e: e.update(plan="0" * 64)), "00004.json belongs to another plan"),
        (lambda s: edit_json(s / "00004.json", lambda e: e.update(rows=e["rows"] - 1, dropped={})), "00004.json (is damaged|accounts for)"),
        (
            lambda s: edit_json(s / "00004.json", lambda e: e["splits"]["train"].update(tokens=7)),
            "00004-train.idx holds .* not what its entry",
        ),
    ],
)
def test_a_damaged_shard_is_named_and_doing_what_is_said_mends_it(
    data: Path, merged: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data / "shards")
    message = refused(data, capsys)
    assert re.search(said, message), message
    assert f"do the unit again with: python -m data_prep run --out {data}" in message
    assert "remove it" in message or f"remove {data / 'shards' / '00004.json'}" in message
    (data / "shards" / "00004.json").unlink()
    encode_units(data, [4])
    assert merge(data) == 0 and snapshot(data) == snapshot(merged)


def test_too_many_bad_rows_end_in_1_and_raising_the_limit_merges(data: Path, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(data)
    for limit in ("0", "0.1%"):
        assert main(["merge", str(data), "--max-bad", limit]) == 1
        assert "rows are bad" in capsys.readouterr().err
        assert besides_bad_rows(data) == before
    bad = sum(json.loads((merged / "manifest.json").read_text())["source"]["dropped"].values())
    assert main(["merge", str(data), "--max-bad", str(bad - 1)]) == 1
    assert main(["merge", str(data), "--max-bad", str(bad)]) == 0
    assert snapshot(data) == snapshot(merged)


def test_an_empty_split_is_an_error(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = write_parquet(tmp_path / "nothing.parquet", [("a", None), ("b", "")])
    out = encode_units(plan_folder(tmp_path / "none", [nothing], tokenizer, "--valid-percent", "0", "--test-percent", "0"))
    assert "'train' would be empty" in refused(out, capsys)


def test_a_disk_too_small_is_said_before_anything_is_copied(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(data)
    monkeypatch.setattr("data_prep.verbs.merge.shutil.disk_usage", lambda path: usage._replace(free=5000))
    assert "and 5 kB are free; make room" in refused(data, capsys, code=1)


def test_a_full_disk_is_one_line_and_loses_nothing(data: Path, merged: Path) -> None:
    size = (merged / "train.bin").stat().st_size // 2
    code = f"""
import resource, sys
from data_prep.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
sys.exit(main(sys.argv[1:]))
"""
    before = snapshot(data)
    command = [sys.executable, "-c", code, "merge", str(data), "--max-bad", "100%"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and "make room" in result.stderr, result
    assert besides_bad_rows(data) == before
    assert merge(data) == 0 and snapshot(data) == snapshot(merged)


def test_one_merge_at_a_time(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Lock(data):
        assert "another data_prep process" in refused(data, capsys, code=75)


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_of_the_shards_folder_only_what_units_wrote_is_removed(data: Path, rows: Path, tokenizer: Path, options: list[str]) -> None:
    """By merge, and by ``--overwrite`` with another plan."""
    ours = [".00003~host.example~4026531836~77/train.bin", ".00004.json~host.example~4026531836~77", "123456.json", "00099-test.idx"]
    foreign = ["mine.parquet", "00001-train.bin.bak", "00001-other.bin", "7.json", ".hidden", ".mine~host~1~2", "folder/00001.json"]
    for name in (*ours, *foreign):
        (data / "shards" / name).parent.mkdir(exist_ok=True)
        (data / "shards" / name).write_text(name)
    if options:
        plan_folder(data, [rows], tokenizer, "--unit-mb", "7", *options)
    else:
        assert merge(data) == 0
    assert snapshot(data / "shards") == {name: name.encode() for name in foreign}


# Merges where locks do not work; at one of its calls, a second merge comes and goes, which is to be told of nothing amiss.
BESIDE = """
import errno, fcntl, os, subprocess, sys
def no_lock(*_):
    if sys.argv[1] == "none":
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
fcntl.flock = no_lock
from data_prep.__main__ import main
name, left = sys.argv[2], [int(sys.argv[3])]
call = getattr(os, name)
def meeting(*arguments, **options):
    left[0] -= 1
    if left[0] == -1:
        second = subprocess.run([sys.executable, "-c", os.environ["BESIDE"], sys.argv[1], name, "1000", *sys.argv[4:]], capture_output=True)
        assert second.returncode == 0, second
        print("met")
    return call(*arguments, **options)
setattr(os, name, meeting)
sys.exit(main(sys.argv[4:]))
"""


@pytest.mark.parametrize(
    ("lock", "call", "number"),
    [("none", "fsync", 3), ("none", "replace", 4), ("of this node alone", "fsync", 9), ("of this node alone", "replace", 1)],
)
def test_merges_at_once_without_a_working_lock_leave_the_data_whole(data: Path, merged: Path, lock: str, call: str, number: int) -> None:
    command = [sys.executable, "-c", BESIDE, lock, call, str(number), "merge", str(data), "--max-bad", "100%"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, "BESIDE": BESIDE})
    assert "met" in result.stdout, result
    errors = [line for line in result.stderr.splitlines() if "cannot be locked" not in line]
    # Refused as busy, or by a file that the other has moved away, depending on how far it was.
    assert (result.returncode, len(errors)) in ((0, 0), (2, 1), (75, 1)), result
    assert snapshot(data) == snapshot(merged)


def test_data_of_an_earlier_plan_goes_when_the_new_is_whole(data: Path, merged: Path) -> None:
    """As after plan --overwrite was killed: final names and a manifest that are another plan's."""
    shutil.copy(merged / "train.bin", data / "test.bin")
    shutil.copy(merged / "manifest.json", data / "manifest.json")
    edit_json(data / "manifest.json", lambda manifest: manifest["source"].update(fingerprint="0" * 64))
    assert merge(data) == 0 and snapshot(data) == snapshot(merged)


def test_a_split_of_an_earlier_plan_that_the_new_has_not_goes(tmp_path: Path, rows: Path, tokenizer: Path, merged: Path) -> None:
    out = encode_units(plan_folder(tmp_path / "out", [rows], tokenizer, "--valid-percent", "10", "--test-percent", "0"))
    for kind in ("bin", "idx"):
        shutil.copy(merged / f"test.{kind}", out)
    assert merge(out) == 0
    assert set(merged_hashes(out)) == {f"{split}.{kind}" for split in ("train", "valid") for kind in ("bin", "idx")}


def test_a_merged_file_that_changed_its_size_is_named(tmp_path: Path, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Path(shutil.copytree(merged, tmp_path / "out"))
    (out / "valid.idx").write_bytes(b"")
    assert "valid.idx is not the" in refused(out, capsys)
