"""data_prep: the entries of a plan's units taken together: which are missing, and what they say of the whole.

Reads entries and units.jsonl; no shard and no input is opened here.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from data_prep.drops import Drop
from data_prep.errors import UserError
from data_prep.indexed import dtype_name
from data_prep.layout import TOKENIZER, UNITS, Plan, Unit, entry_path
from data_prep.manifest import Manifest, MergedEntry, Source, TokenizerEntry, UnitEntry, UnitsEntry, read_entry


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as people write them: ``1, 3-5, 9``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)


def shortened(text: str, longest: int = 200) -> str:
    """A list as text, cut between two of its members where it is longer than a line bears."""
    return text if len(text) <= longest else text[: text.rindex(", ", 0, longest)] + ", ..."


def entry_fault(out: Path, plan: Plan, unit: Unit, entry: UnitEntry) -> str | None:
    """Why an entry is not the one that the plan asks of a unit, with the fix; None where it is."""
    path = entry_path(out, unit)
    again = f"remove it and do the unit again with: python -m data_prep run --out {out}"
    if entry.plan != plan.fingerprint:
        return f"{path} belongs to another plan; {again}"
    if entry.unit != unit.number:
        return f"{path} is the entry of unit {entry.unit}; {again}"
    if unit.rows is not None and entry.rows != unit.rows:
        return f"{path} accounts for {entry.rows} rows, the plan for {unit.rows}; {again}"
    return None


def read_entries(out: Path, plan: Plan, tasks: int | None = None) -> list[UnitEntry]:
    """The entries of all units, in order. Raises UserError where one is missing (and names its task of so many ``tasks``) or another's."""
    entries, missing = [], []
    for unit in plan.units:
        try:
            entry = read_entry(entry_path(out, unit))
        except FileNotFoundError:
            missing.append(unit.number)
            continue
        fault = entry_fault(out, plan, unit, entry)
        if fault:
            raise UserError(fault)
        entries.append(entry)
    if missing:
        raise UserError(missing_units(out, plan, missing, tasks))
    return entries


def missing_units(out: Path, plan: Plan, missing: Sequence[int], tasks: int | None = None) -> str:
    """What to say of units that are not done, and how to do them."""
    whose = f" (of {tasks} tasks, those of {ranges({number % tasks for number in missing})})" if tasks else ""
    total = len(plan.units)
    how = f"do them with: python -m data_prep run --out {out}"
    return f"{out}: {len(missing)} of {total} units are not done: {shortened(ranges(missing))}{whose}; {how}"


def units_bytes(entries: Iterable[UnitEntry]) -> bytes:
    """units.jsonl: an entry a line, in the units' order."""
    return "".join(json.dumps(entry.as_json()) + "\n" for entry in entries).encode()


def read_units(folder: Path, manifest: Manifest) -> list[UnitEntry]:
    """DIR/units.jsonl. Raises UserError where it is missing, damaged or not the manifest's."""
    path = folder / manifest.units.file
    if not path.is_file():
        raise UserError(f"{path} is missing")
    raw = path.read_bytes()
    if hashlib.sha256(raw).hexdigest() != manifest.units.sha256:
        raise UserError(f"{path}: content differs from the manifest's hash")
    try:
        entries = [UnitEntry.from_json(json.loads(line)) for line in raw.splitlines()]
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if [entry.unit for entry in entries] != list(range(manifest.units.count)):
        raise UserError(f"{path}: not the entries of units 0 to {manifest.units.count - 1}, one a line")
    return entries


def dropped_rows(entries: Iterable[UnitEntry]) -> dict[str, int]:
    """Rows dropped, by reason, in the reasons' fixed order."""
    total: Counter[str] = Counter()
    for entry in entries:
        total.update(entry.dropped)
    return {str(reason): total[reason] for reason in Drop if total[reason]}


def manifest_of(plan: Plan, entries: Sequence[UnitEntry], splits: dict[str, MergedEntry]) -> Manifest:
    """The manifest of merged units. A file's rows are those that its units read."""
    rows: Counter[int] = Counter()
    for unit, entry in zip(plan.units, entries, strict=True):
        rows[unit.file] += entry.rows
    wanted = ("path", "kind", "bytes", "rows", "fingerprint")
    files = [{name: getattr(file, name) for name in wanted} | {"rows": rows[number]} for number, file in enumerate(plan.files)]
    tokenizer = TokenizerEntry(TOKENIZER, plan.tokenizer.vocab_size, plan.tokenizer.eod_id, plan.tokenizer.sha256)
    encoders = ", ".join(sorted({entry.encoder for entry in entries}))
    source = Source(files, rows.total(), dropped_rows(entries), plan.settings.as_json(), encoders, plan.fingerprint)
    units = UnitsEntry(UNITS, len(entries), hashlib.sha256(units_bytes(entries)).hexdigest())
    return Manifest(tokenizer, dtype_name(tokenizer.vocab_size), splits, source, units)
