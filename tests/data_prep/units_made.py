"""Folders whose units are encoded here, in this process: what merge and verify start from, without run and its workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from data_prep.__main__ import main
from data_prep.encode.encoders import make
from data_prep.encode.tokenizer import load_folder
from data_prep.encode.unit import Engine
from data_prep.store.layout import read_plan
from data_prep.store.manifest import UnitEntry
from tests.data_prep.conftest import SHARES, make_documents

Rows = list[tuple[str | None, str | None]]


def rows_with_faults(number: int, seed: int = 11) -> Rows:
    """Documents, and now and then a row that is none."""
    rows: Rows = []
    for place, document in enumerate(make_documents(number, 40, seed)):
        rows.append(document)
        if place % 37 == 5:
            rows += [(f"null-{place}", None), (None, "no id")][: 1 + place % 2]
    return rows


def plan_folder(out: Path, inputs: Iterable[Path], tokenizer: Path, *options: str) -> Path:
    """A folder with a plan, nothing done."""
    shares = () if "--valid-percent" in options else SHARES
    assert main(["plan", *map(str, inputs), "--tokenizer", str(tokenizer), "--out", str(out), *shares, *options]) == 0
    return out


def encode_units(out: Path, numbers: Iterable[int] | None = None) -> Path:
    """Do units of a folder's plan, all where none are named."""
    plan = read_plan(out)
    engine = Engine(out, plan, make(load_folder(out / "tokenizer"), "hf"))
    for number in range(len(plan.units)) if numbers is None else numbers:
        engine.encode_unit(plan.units[number], lambda read, tally: None)
    return out


def merge(out: Path, *options: str) -> int:
    """``merge``, with every bad row accepted."""
    return main(["merge", str(out), "--max-bad", "100%", *options])


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_units(folder: Path, change: Callable[[list[dict[str, Any]]], object], *, sealed: bool = True) -> None:
    """Change units.jsonl; ``sealed``: and the manifest's hash of it."""
    path = folder / "units.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if sealed:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        edit_json(folder / "manifest.json", lambda manifest: manifest["units"].update(sha256=digest, count=len(lines)))


def entry_of(out: Path, number: int) -> UnitEntry:
    """A unit's entry."""
    return UnitEntry.from_json(json.loads((out / "shards" / f"{number:05d}.json").read_text()))
