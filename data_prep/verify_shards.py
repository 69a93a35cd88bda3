"""data_prep: shards that are not merged yet, each against its unit's entry, and each entry against the plan. Opens no input."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.errors import UserError
from data_prep.indexed import dtype_name
from data_prep.layout import SHARDS, Plan, Unit, entry_path, shard_prefix
from data_prep.manifest import UnitEntry, read_entry
from data_prep.splits import SPLITS
from data_prep.units import entry_fault, missing_units
from data_prep.verify_pairs import Ids, pair_faults

SHARD = re.compile(rf"(\d+)-({'|'.join(SPLITS)})\.(?:bin|idx)")
ENTRY = re.compile(r"(\d+)\.json")


def read_units_done(out: Path, plan: Plan) -> tuple[list[UnitEntry], list[str]]:
    """The sound entries that are there, and the faults of the others; units without an entry are one fault."""
    entries, faults, missing = [], [], []
    for unit in plan.units:
        try:
            entry = read_entry(entry_path(out, unit))
        except FileNotFoundError:
            missing.append(unit.number)
            continue
        except UserError as error:
            faults.append(str(error))
            continue
        if fault := entry_fault(out, plan, unit, entry):
            faults.append(fault)
        else:
            entries.append(entry)
    if missing:
        faults.append(missing_units(out, plan, missing))
    return entries, faults


def shard_faults(out: Path, plan: Plan, entries: list[UnitEntry], advance: Callable[[int], None]) -> Iterator[str]:
    """Faults of the shards that the entries name, and files that none names."""
    vocab_size, eod_id = plan.tokenizer.vocab_size, plan.tokenizer.eod_id
    ids = Ids(dtype_name(vocab_size), eod_id, vocab_size)
    for entry in entries:
        unit = plan.units[entry.unit]
        for name, part in entry.splits.items():
            for fault in pair_faults(shard_prefix(out, unit, name), part, "its entry", ids, advance):
                yield f"{fault}; {_again(out, unit)}"
    yield from _strays(out, plan, {entry.unit: entry for entry in entries})


def _again(out: Path, unit: Unit) -> str:
    return f"remove {entry_path(out, unit)} and do the unit again with: python -m data_prep run --out {out}"


def _strays(out: Path, plan: Plan, entries: dict[int, UnitEntry]) -> Iterator[str]:
    known = {unit.name: unit for unit in plan.units}
    for path in sorted((out / SHARDS).glob("[!.]*")):
        if match := ENTRY.fullmatch(path.name):
            if match[1] not in known:
                yield f"{path} is the entry of a unit that the plan does not have; remove it"
        elif not (match := SHARD.fullmatch(path.name)) or match[1] not in known:
            yield f"{path} belongs to no unit of the plan; remove it"
        elif not entry_path(out, known[match[1]]).is_file():
            yield f"{path} has no entry, so its unit is not done; do it with: python -m data_prep run --out {out}"
        elif (entry := entries.get(known[match[1]].number)) and match[2] not in entry.splits:
            yield f"{path} is not named by its unit's entry; {_again(out, known[match[1]])}"
