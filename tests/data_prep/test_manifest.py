"""Entries and manifests: what is written comes back, what is damaged is named in one line; and the sample digest is pretrain's."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.sources.rows import BadRow, Drop
from data_prep.store.entries import ranges, shortened, units_bytes
from data_prep.store.indexed import sample_digest
from data_prep.store.manifest import (
    PLACES_KEPT,
    Manifest,
    MergedEntry,
    Source,
    SplitEntry,
    TokenizerEntry,
    UnitEntry,
    UnitsEntry,
    read_entry,
    read_manifest,
)
from fem_common.errors import UserError

PAIR = SplitEntry(10, 500, 2000, "b" * 64, "i" * 64, 1000, 242)
ENTRY = UnitEntry(
    unit=7,
    plan="f" * 64,
    rows=23,
    dropped={"null_text": 2, "masked": 1},
    bad=(BadRow(4, Drop.NULL_TEXT), BadRow(9, Drop.NULL_TEXT, 'quoted " \ud800 and é')),
    splits={"train": PAIR, "test": PAIR},
    encoder="gigatoken 0.10.0",
)
MANIFEST = Manifest(
    tokenizer=TokenizerEntry("tokenizer", 320, 0, "t" * 64),
    dtype="uint16",
    splits={"train": MergedEntry(10, 500, 2000, "b" * 64, "i" * 64, 1000, 242, "1000:s")},
    source=Source(
        files=[{"path": "a.parquet", "kind": "parquet", "bytes": 99, "rows": 13, "fingerprint": "x"}],
        rows=13,
        dropped={"masked": 3},
        settings={"min_score": 2.5, "languages": ["en"]},
        encoder="gigatoken",
        fingerprint="f" * 64,
    ),
    units=UnitsEntry("units.jsonl", 2, "u" * 64),
)


def entry_file(folder: Path, value: Any) -> Path:
    path = folder / "data" / "shards" / "00007.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    assert read_entry(entry_file(tmp_path, ENTRY.as_json())) == ENTRY
    assert UnitEntry.from_json(json.loads(units_bytes([ENTRY]))) == ENTRY
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST.as_json()))
    assert read_manifest(tmp_path) == MANIFEST


def test_an_entry_is_the_same_text_however_it_came_about() -> None:
    other = UnitEntry(**{**vars(ENTRY), "dropped": {"masked": 1, "null_text": 2}, "splits": {"test": PAIR, "train": PAIR}})
    assert units_bytes([other]) == units_bytes([ENTRY])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda e: e.pop("rows"), "lacks 'rows'"),
        (lambda e: e.update(more=1), "has an unknown 'more'"),
        (lambda e: e.update(rows="23"), "rows: '23' is not a count"),
        (lambda e: e.update(rows=-23), "rows: -23 is not a count"),
        (lambda e: e.update(unit=True), "unit: True is not a count"),
        (lambda e: e.update(rows=24), "24 rows are not 20 documents and 3 drops"),
        (lambda e: e.update(plan=None), "plan: None is not text"),
        (lambda e: e.update(dropped=[]), "dropped: not an object"),
        (lambda e: e["dropped"].update(lost=0), "dropped: 'lost' is not a valid Drop"),
        (lambda e: e.update(bad={}), "not a list"),
        (lambda e: e["bad"][0].update(reason="x"), "'x' is not a valid Drop"),
        (lambda e: e["bad"].append({"place": 1, "reason": "empty_text", "message": ""}), "more bad rows are listed than were dropped"),
        (lambda e: e["splits"].update(dev=e["splits"]["train"]), "'dev' is none of train, valid, test"),
        (lambda e: e["splits"]["train"].pop("idx_bytes"), "splits: lacks 'idx_bytes'"),
        (lambda e: e["splits"]["train"].update(bin_sha256=1), "splits: bin_sha256: 1 is not text"),
        (lambda e: e["splits"]["train"].update(bin_sample="1000:s"), "splits: has an unknown 'bin_sample'"),
    ],
)
def test_a_damaged_entry_is_named_with_the_fix(tmp_path: Path, damage: Callable[[Any], object], said: str) -> None:
    value = ENTRY.as_json()
    damage(value)
    path = entry_file(tmp_path, value)
    with pytest.raises(UserError) as raised:
        read_entry(path)
    message = str(raised.value)
    assert message.startswith(f"{path} is damaged (") and said in message and f"run --out {tmp_path / 'data'}" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"'])
def test_what_is_no_entry_at_all_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="00007.json is damaged"):
        read_entry(entry_file(tmp_path, text))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda m: m.update(format=1), "has format 1; this data_prep reads format 2"),
        (lambda m: m.pop("format"), "is damaged"),
        (lambda m: m.pop("units"), "lacks 'units'"),
        (lambda m: m["splits"]["train"].pop("bin_sample"), "lacks 'bin_sample'"),
        (lambda m: m["tokenizer"].update(eod_id=-1), "eod_id: -1 is not a count"),
        (lambda m: m["source"].update(files=3), "files: not a list"),
        (lambda m: m["source"]["files"][0].pop("path"), "files: not path, kind"),
        (lambda m: m["source"]["files"][0].update(rows=None), "files: None is not a count"),
        (lambda m: m["source"].update(settings=[]), "settings: not an object"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: Callable[[Any], object], said: str) -> None:
    value = MANIFEST.as_json()
    damage(value)
    (tmp_path / "manifest.json").write_text(json.dumps(value))
    with pytest.raises(UserError) as raised:
        read_manifest(tmp_path)
    assert said in str(raised.value) and str(tmp_path / "manifest.json") in str(raised.value)


def test_a_folder_without_manifest_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no manifest.json in .*; write it with: python -m data_prep run"):
        read_manifest(tmp_path)
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(UserError, match=f"it is not complete; go on with: python -m data_prep run --out {tmp_path}"):
        read_manifest(tmp_path)


def test_places_are_bounded() -> None:
    rows = [{"place": place, "reason": "null_text", "message": ""} for place in range(PLACES_KEPT + 1)]
    value = ENTRY.as_json() | {"rows": 20 + len(rows), "dropped": {"null_text": len(rows)}, "bad": rows}
    with pytest.raises(ValueError, match="more bad rows are listed"):
        UnitEntry.from_json(value)
    assert len(UnitEntry.from_json(value | {"bad": rows[:-1]}).bad) == PLACES_KEPT


@pytest.mark.parametrize("size", [0, 1, 65536, 100_000, 4 << 20, (4 << 20) + 1, 12_345_678])
def test_the_sample_digest_is_pretrains_and_sees_another_file(tmp_path: Path, size: int) -> None:
    from pretrain.data.facts import _sample_digest

    path = tmp_path / "a.bin"
    raw = bytearray(random.Random(size).randbytes(size))
    path.write_bytes(raw)
    digest = sample_digest(path)
    assert digest == _sample_digest(path) and digest.startswith(f"{size}:")
    if size:
        path.write_bytes(bytes(reversed(raw)) if size > 1 else bytes([raw[0] ^ 1]))
        assert sample_digest(path) != digest


def test_numbers_as_people_write_them() -> None:
    assert ranges([]) == "" and ranges([4]) == "4" and ranges([5, 4, 1, 2, 3, 9, 11, 12]) == "1-5, 9, 11-12"
    long = ranges(range(0, 1000, 2))
    assert shortened("1, 2") == "1, 2" and len(shortened(long)) <= 205 and shortened(long).endswith(", ...")
