"""Tests of merge: ordered shards equal the output of a single writer, and files with final names
are always complete.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.prepared.indexed import IndexedWriter
from data_prep.prepared.layout import read_plan
from data_prep.prepared.manifest import read_entry, read_manifest
from tests.data_prep import conftest as base
from tests.wording import Wording

PAIRS = {
    f"{split}.{kind}" for split in ("train", "valid", "test") for kind in ("bin", "idx", "ids")
}


def test_shards_merged_are_one_writers_files_and_all_is_accounted_for(
    tmp_path: Path, encoded: Path, merged: Path, rows: Path
) -> None:
    entries = [read_entry(encoded / "shards" / f"{number:05d}.json") for number in range(5)]
    for split in ("train", "valid", "test"):
        writer = IndexedWriter(tmp_path / split, "uint16")
        for entry in entries:
            if split in entry.splits:
                documents = base.read_split(encoded / "shards", f"{entry.unit:05d}-{split}")
                writer.add(
                    np.concatenate([np.array(ids, np.uint32) for ids in documents]),
                    np.array([len(ids) for ids in documents]),
                )
        written, output = writer.finish(), read_manifest(merged).splits[split]
        assert (
            written.documents == output.documents
            and written.bin_sha256 == output.bin_sha256
            and written.idx_sha256 == output.idx_sha256
        )
    assert base.merged_hashes(merged) == base.merged_hashes(tmp_path)
    names = "manifest.json plan.json units.jsonl bad_rows.jsonl tokenizer .lock".split()
    assert {path.name for path in merged.iterdir()} == {*PAIRS, *names}
    manifest = base.manifest_of(merged)
    source = manifest["source"]
    assert set(source["dropped"]) == {"null_text", "null_id"}
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 250
    rows_in_all = 250 + sum(source["dropped"].values())
    assert source["rows"] == rows_in_all == len(base.rows_with_faults(250))
    assert [json.loads(line) for line in (merged / "units.jsonl").read_text().splitlines()] == [
        entry.as_json() for entry in entries
    ]
    (file,) = source["files"]
    assert (file["path"], file["rows"], file["bytes"]) == (
        str(rows),
        source["rows"],
        rows.stat().st_size,
    )
    assert source["fingerprint"] == read_plan(merged).fingerprint


def test_merging_again_changes_nothing_but_removes_shards_that_a_kill_left(
    data: Path, encoded: Path, merged: Path
) -> None:
    base.copied(encoded / "shards", data / "shards")
    for _ in range(2):
        assert "unchanged" in base.done("merge", data) and base.snapshot(data) == base.snapshot(
            merged
        )


def test_ids_of_some_units_alone_are_not_merged_and_data_without_ids_stays_readable(
    shards: Path, merged: Path
) -> None:
    """The folder's first units were encoded before ids were recorded."""
    base.edit_json(
        shards / "shards" / "00001.json",
        lambda entry: [part.pop("ids") for part in entry["splits"].values()],
    )
    output = base.done("merge", shards, "--max-bad 100%")
    assert (
        f"{shards}: no document ids for train, valid, test: units 1 were encoded before" in output
    )
    assert not list(shards.rglob("*.ids")) and base.merged_hashes(shards) == base.merged_hashes(
        merged
    )
    assert "ids" not in base.manifest_of(shards)["splits"]["train"]
    assert base.cli("verify", shards).returncode == 0 and "unchanged" in base.done("merge", shards)
    shutil.copy(merged / "train.ids", shards)  # possibly of other data
    assert "train.ids is not in the manifest; remove it" in base.cli("verify", shards).stdout


def refused(out: Path, *options: object, code: int = 2) -> str:
    """Return the error of a merge that must fail and change no file except the list of bad rows."""

    def kept() -> dict[str, bytes]:
        return {
            name: content
            for name, content in base.snapshot(out).items()
            if name != "bad_rows.jsonl"
        }

    before = kept()
    output = base.refused("merge", out, "--max-bad 100%", *options, code=code)
    assert kept() == before
    return output


def test_missing_units_are_named_with_their_tasks(shards: Path) -> None:
    for number in (1, 2, 3):
        (shards / "shards" / f"{number:05d}.json").unlink()
    assert (
        f"3 of 5 units are not done: 1-3; do them with: python -m data_prep run --out {shards}"
        in refused(shards)
    )
    assert "1-3 (of 3 tasks, those of 0-2)" in refused(shards, "--tasks 3")


DAMAGE = """
00004-train.bin: flip 70; cut 2; gone; copy 00003-train.bin
00004-train.idx: flip 36; gone
00004-train.ids: flip 3; gone
00004.json: write {; copy 00003.json; set plan "0"; set rows 3; set splits.train.tokens 7
"""


def test_a_damaged_shard_is_named_and_following_the_message_repairs_it(
    shards: Path, merged: Path, wording: Wording
) -> None:
    full = base.snapshot(shards)
    for line in DAMAGE.strip().splitlines():
        file, changes = line.split(": ", 1)
        for how in changes.split("; "):
            base.spoil(shards / "shards", f"{file} {how}")
            output = refused(shards)
            assert f"do the unit again with: python -m data_prep run --out {shards}" in output
            assert "remove it" in output or f"remove {shards / 'shards' / '00004.json'}" in output
            wording(f"{file} {how}: {output}", DATA=shards)
            base.restore(shards, full)
    (shards / "shards" / "00004.json").unlink()
    base.merge(base.encode_units(shards, [4]))
    assert base.snapshot(shards) == base.snapshot(merged)


def test_too_many_bad_rows_end_in_1_and_raising_the_limit_merges(
    shards: Path, merged: Path
) -> None:
    bad = sum(base.manifest_of(merged)["source"]["dropped"].values())
    for limit in ("0", "0.1%", bad - 1):
        result = base.cli("merge", shards, f"--max-bad {limit}")
        assert (
            result.returncode == 1
            and "rows are bad" in result.stderr
            and not (shards / "manifest.json").exists()
        )
    base.done("merge", shards, f"--max-bad {bad}")
    assert base.snapshot(shards) == base.snapshot(merged)


def test_an_empty_split_and_a_disk_too_small_are_reported_before_anything_is_copied(
    tmp_path: Path, shards: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = base.write_parquet(tmp_path / "nothing.parquet", [("a", None), ("b", "")])
    assert "'train' would be empty" in refused(
        base.encode_units(base.plan_folder(tmp_path / "none", [nothing], tokenizer, base.ALL_TRAIN))
    )
    usage = shutil.disk_usage(shards)._replace(free=5000)
    monkeypatch.setattr("data_prep.verbs.merge.shutil.disk_usage", lambda path: usage)
    assert "and 5 kB are free; free disk space" in refused(shards, code=1)


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_of_the_shards_folder_only_what_units_wrote_is_removed(
    shards: Path, rows: Path, tokenizer: Path, options: list[str]
) -> None:
    """Both merge and ``--overwrite`` with another plan remove only the files of units."""
    ours = (
        ".00003~host.example~4026531836~77/train.bin .00004.json~host.example~4026531836~77 "
        "123456.json 00099-test.idx"
    ).split()
    foreign = (
        "mine.parquet 00001-train.bin.bak 00001-other.bin 7.json .hidden .mine~host~1~2 "
        "folder/00001.json"
    ).split()
    for name in (*ours, *foreign):
        (shards / "shards" / name).parent.mkdir(exist_ok=True)
        (shards / "shards" / name).write_text(name)
    if options:
        base.plan_folder(shards, [rows], tokenizer, "--unit-mb 7", *options)
    else:
        base.merge(shards)
    assert base.snapshot(shards / "shards") == {name: name.encode() for name in foreign}


def test_data_of_an_earlier_plan_goes_when_the_new_is_whole(
    tmp_path: Path, shards: Path, merged: Path, rows: Path, tokenizer: Path
) -> None:
    """The state is that after a killed plan --overwrite: final names and a manifest of another
    plan, and an obsolete split.
    """
    fewer = base.encode_units(
        base.plan_folder(tmp_path / "out", [rows], tokenizer, "--valid-percent 10 --test-percent 0")
    )
    for folder in (shards, fewer):
        for name in ("test.bin", "test.idx", "test.ids", "manifest.json"):
            shutil.copy(merged / name, folder)
        base.spoil(folder, 'manifest.json set source.fingerprint "0"')
        base.merge(folder)
    assert base.snapshot(shards) == base.snapshot(merged)
    of_test = {name for name in PAIRS if name.startswith("test")}
    assert PAIRS & {path.name for path in fewer.iterdir()} == PAIRS - of_test
    (fewer / "valid.idx").write_bytes(b"")
    assert "valid.idx is not the" in refused(fewer)
