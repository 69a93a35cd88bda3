"""Tests of plans, manifests and unit entries: round trips, one-line errors for invalid content,
sample digests equal to pretrain's.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from data_prep.prepared.entries import shortened, units_bytes
from data_prep.prepared.indexed import sample_digest
from data_prep.prepared.layout import read_plan
from data_prep.prepared.manifest import (
    PLACES_KEPT,
    SplitEntry,
    UnitEntry,
    read_entry,
    read_manifest,
)
from data_prep.sources.rows import BadRow, Drop
from fem_common.errors import UserError
from fem_common.text import ranges
from tests.data_prep import conftest as base
from tests.wording import Wording

DAMAGE = """
shards/00002.json: rows -23; rows 61; dropped.lost 0; bad.0.reason "x"; splits.dev {}
shards/00002.json: splits.train.bin_sample "1000:s"
manifest.json: format 1; tokenizer.eod_id -1; source.files 3; splits.train {}; source.settings []
plan.json: format 1; units []; units.0 [[1]]; units.0.0 9; settings.min_bytes -1; tokenizer.eod_id 9
"""

PAIR = SplitEntry(10, 500, 2000, "b" * 64, "i" * 64, 1000, 242)
BAD = (BadRow(4, Drop.NULL_TEXT), BadRow(9, Drop.NULL_TEXT, 'quoted " \ud800 and é'))
ENTRY = UnitEntry(
    7,
    "f" * 64,
    23,
    {"null_text": 2, "masked": 1},
    BAD,
    {"train": PAIR, "test": PAIR},
    "gigatoken 0.10.0",
)


def test_what_is_written_comes_back_as_the_same_text_however_it_came_about(shards: Path) -> None:
    for entry in (ENTRY, read_entry(shards / "shards" / "00001.json")):
        assert UnitEntry.from_json(json.loads(units_bytes([entry]))) == entry
    other = UnitEntry(
        **{
            **vars(ENTRY),
            "dropped": {"masked": 1, "null_text": 2},
            "splits": {"test": PAIR, "train": PAIR},
        }
    )
    assert units_bytes([other]) == units_bytes([ENTRY])
    rows = [
        {"place": place, "reason": "null_text", "message": ""} for place in range(PLACES_KEPT + 1)
    ]
    value = ENTRY.as_json() | {
        "rows": 20 + len(rows),
        "dropped": {"null_text": len(rows)},
        "bad": rows,
    }
    with pytest.raises(ValueError, match="more bad rows are listed"):
        UnitEntry.from_json(value)
    assert len(UnitEntry.from_json(value | {"bad": rows[:-1]}).bad) == PLACES_KEPT


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path (a tuple of keys) of each value within a JSON value."""
    keys: Iterable[Any] = ()
    if isinstance(value, dict):
        keys = value
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def changed(value: Any, place: tuple[Any, ...], wrong: list[Any]) -> Any:
    """Return a copy of a JSON value in which the value at ``place`` is ``wrong[0]``, or is removed
    if ``wrong`` is empty.
    """
    full = within = copy.deepcopy(value)
    for key in place[:-1]:
        within = within[key]
    if wrong:
        within[place[-1]] = wrong[0]
    else:
        del within[place[-1]]
    return full


WRONGS: list[Any] = [None, True, 6, -1, 1.5, 10**400, "x", [], {}, [[]], [None] * 5]
# Values that may be missing or have another type: they have no effect on the output, or `verify`
# checks them.
FREE = {
    *"files.*.path files.*.bytes files.*.rows files.*.text_bytes".split(),
    *"units.*.* unit_bytes bad.*".split(),
    "source.files.*",
}
FREE |= {f"splits.{name}{ids}" for name in ("train", "valid", "test") for ids in ("", ".ids")}
READ: dict[str, Callable[[Path], object]] = {
    "plan.json": lambda data: read_plan(data),
    "manifest.json": lambda data: read_manifest(data),
    "shards/00002.json": lambda data: read_entry(data / "shards" / "00002.json"),
}


@pytest.mark.parametrize("name", READ)
def test_any_wrong_shape_is_one_line_that_names_the_file(
    shards: Path, merged: Path, name: str
) -> None:
    """A file that is truncated, or in which a value is missing, unknown or of another type, gives
    an error of one line with its path.

    A plan's fingerprint also detects changed values of the right type.
    """
    shutil.copy(merged / "manifest.json", shards)
    read, path = READ[name], shards / name
    raw, value = path.read_bytes(), json.loads(path.read_bytes())
    spoilt: list[tuple[bytes, tuple[Any, ...]]] = [
        *((raw[:size], ()) for size in range(0, len(raw) - 2, 13)),
        (b"[" * 100_000, ()),
        (b"\xff" + raw, ()),
        (b"7", ()),
    ]
    for place in places(value):
        old = value
        for key in place:
            old = old[key]
        spoilt += [
            (json.dumps(changed(value, place, [wrong])).encode(), place)
            for wrong in WRONGS
            if type(wrong) is not type(old)
        ]
        spoilt += [
            (json.dumps(changed(value, place, [])).encode(), place),
            (json.dumps({**value, "more": 1}).encode(), place),
        ]
        if name == "plan.json" and isinstance(old, str | int):
            new = old + "x" if isinstance(old, str) else old + 1
            spoilt.append((json.dumps(changed(value, place, [new])).encode(), place))
    taken, report = set[str](), list[str]()
    for content, place in spoilt:
        path.write_bytes(content)
        try:
            read(shards)
            taken.add(".".join("*" if isinstance(key, int) else key for key in place))
        except UserError as error:
            report.append(str(error))
    assert (
        all(str(path) in output and "\n" not in output for output in report) and len(report) > 200
    )
    assert not {
        place
        for place in taken - FREE
        if not place.startswith(("source.settings", "source.dropped"))
    }, taken


@pytest.mark.parametrize("size", [0, 1, 65536, 100_000, 4 << 20, (4 << 20) + 1, 12_345_678])
def test_the_sample_digest_is_pretrains_and_sees_another_file(tmp_path: Path, size: int) -> None:
    from pretrain.data import facts

    path, raw = tmp_path / "a.bin", random.Random(size).randbytes(size)
    path.write_bytes(raw)
    digest = sample_digest(path)
    assert digest == facts.sample_digest(path) and digest.startswith(f"{size}:")
    path.write_bytes(raw[::-1] if size > 1 else bytes([byte ^ 1 for byte in raw]))
    assert (sample_digest(path) == digest) == (size == 0)


def test_numbers_as_people_write_them() -> None:
    assert (
        ranges([]) == ""
        and ranges([4]) == "4"
        and ranges([5, 4, 1, 2, 3, 9, 11, 12]) == "1-5, 9, 11-12"
    )
    long = ranges(range(0, 1000, 2))
    assert (
        shortened("1, 2") == "1, 2"
        and len(shortened(long)) <= 205
        and shortened(long).endswith(", ...")
    )


def test_what_is_reported_of_a_damaged_file(shards: Path, merged: Path, wording: Wording) -> None:
    shutil.copy(merged / "manifest.json", shards)
    for line in DAMAGE.strip().splitlines():
        name, changes = line.split(": ", 1)
        full = (shards / name).read_bytes()
        for change in changes.split("; "):
            base.spoil(shards, f"{name} set {change}")
            with pytest.raises(UserError) as error:
                READ[name](shards)
            wording(
                error.value,
                FINGERPRINT=json.loads((shards / "plan.json").read_bytes())["fingerprint"][:12],
            )
            (shards / name).write_bytes(full)
    (shards / "manifest.json").unlink()
    for folder in (shards, shards / "tokenizer"):
        with pytest.raises(UserError) as error:
            read_manifest(folder)
        wording(error.value)
