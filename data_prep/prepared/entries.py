"""Reading and checking of the unit entries of a plan, with totals and the resulting manifest.

An entry is the record of a finished unit. This module reads the entry files and units.jsonl. It
opens no shard and no input.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.prepared.indexed import dtype_name
from data_prep.prepared.layout import BAD_ROWS, TOKENIZER, UNITS, Plan, Unit, do_again, entry_path
from data_prep.prepared.manifest import (
    Input,
    Manifest,
    MergedEntry,
    Source,
    TokenizerEntry,
    UnitEntry,
    UnitsEntry,
    read_entry,
)
from data_prep.sources import locate
from data_prep.sources.rows import Drop, by_reason, listed
from fem_common.errors import UserError
from fem_common.files import write_atomically
from fem_common.text import ranges


def shortened(text: str, longest: int = 200) -> str:
    """Truncate a comma-separated list to about ``longest`` characters, between two items."""
    return text if len(text) <= longest else text[: text.rindex(", ", 0, longest)] + ", ..."


def sound_entry(out: Path, plan: Plan, unit: Unit) -> UnitEntry:
    """Read the entry of a unit, check it against the plan, and return it.

    Raises FileNotFoundError if the unit is not done, and UserError if the entry does not match the
    plan.
    """
    path = entry_path(out, unit)
    entry, fault = read_entry(path), ""
    if entry.plan != plan.fingerprint:
        fault = "belongs to another plan"
    elif entry.unit != unit.number:
        fault = f"is the entry of unit {entry.unit}"
    elif unit.rows not in (None, entry.rows):
        fault = f"accounts for {entry.rows} rows, the plan for {unit.rows}"
    elif any((part.mask is None) == plan.settings.messages for part in entry.splits.values()):
        fault = "has a mask of the loss, or lacks it, unlike the plan"
    if fault:
        raise UserError(f"{path} {fault}; {do_again(out)}")
    return entry


def units_done(out: Path, plan: Plan) -> tuple[list[UnitEntry], list[int], list[str]]:
    """Return (valid entries, numbers of missing units, error texts of invalid entries).

    The entries are in the order of the units. A unit is missing if it has no entry.
    """
    entries = []
    missing = []
    faults = []
    for unit in plan.units:
        try:
            entries.append(sound_entry(out, plan, unit))
        except FileNotFoundError:
            missing.append(unit.number)
        except UserError as error:
            faults.append(str(error))
    return entries, missing, faults


def read_entries(out: Path, plan: Plan, tasks: int | None = None) -> list[UnitEntry]:
    """Return the entries of all units, in order.

    Raises UserError if an entry is missing or does not match the plan. If ``tasks``, the number of
    tasks among which the units were divided, is given, the error names the tasks of the missing
    units.
    """
    entries, missing, faults = units_done(out, plan)
    if faults or missing:
        raise UserError(faults[0] if faults else missing_units(out, plan, missing, tasks))
    return entries


def missing_units(out: Path, plan: Plan, missing: Sequence[int], tasks: int | None = None) -> str:
    """Return the error text for units that are not done, with the command that completes them."""
    whose = (
        f" (of {tasks} tasks, those of {ranges({number % tasks for number in missing})})"
        if tasks
        else ""
    )
    total = len(plan.units)
    how = f"do them with: python -m data_prep run --out {out}"
    return (
        f"{out}: {len(missing)} of {total} units are not done: "
        f"{shortened(ranges(missing))}{whose}; {how}"
    )


def units_bytes(entries: Iterable[UnitEntry]) -> bytes:
    """Return the content of units.jsonl: one entry per line, in the order of the units."""
    return "".join(json.dumps(entry.as_json()) + "\n" for entry in entries).encode()


def read_units(folder: Path, manifest: Manifest) -> list[UnitEntry]:
    """Return the entries of all units from units.jsonl in ``folder``.

    Raises UserError if the file is missing, damaged or does not match the manifest.
    """
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
        raise UserError(
            f"{path}: not the entries of units 0 to {manifest.units.count - 1}, one a line"
        )
    return entries


def dropped_rows(entries: Iterable[UnitEntry]) -> dict[str, int]:
    """Return the number of dropped rows for each reason, in a fixed order of the reasons."""
    total: Counter[str] = Counter()
    for entry in entries:
        total.update(entry.dropped)
    return by_reason(total)


def manifest_of(
    plan: Plan, entries: Sequence[UnitEntry], splits: dict[str, MergedEntry]
) -> Manifest:
    """Return the manifest of merged units.

    The number of rows of an input file is the sum over the file's units.
    """
    rows: Counter[int] = Counter()
    for unit, entry in zip(plan.units, entries, strict=True):
        rows[unit.file] += entry.rows
    files = [
        Input(file.path, file.kind, file.bytes, rows[number], file.fingerprint)
        for number, file in enumerate(plan.files)
    ]
    tokenizer = TokenizerEntry(TOKENIZER, **asdict(plan.tokenizer))
    encoders = ", ".join(sorted({entry.encoder for entry in entries}))
    source = Source(
        files,
        rows.total(),
        dropped_rows(entries),
        plan.settings.as_json(),
        encoders,
        plan.fingerprint,
    )
    units = UnitsEntry(UNITS, len(entries), hashlib.sha256(units_bytes(entries)).hexdigest())
    return Manifest(tokenizer, dtype_name(tokenizer.vocab_size), splits, source, units)


DEFAULT = "0.1%"
PRINTED = 20


@dataclass(frozen=True)
class MaxBad:
    """Limit of accepted bad rows (option ``--max-bad``).

    ``number`` is a percentage of all rows if ``percent``, else a number of rows.
    """

    number: float
    percent: bool

    def allows(self, dropped: Counter[Drop], rows: int) -> bool:
        """Return True if the bad rows, counted by reason in ``dropped``, do not exceed the limit.

        ``rows`` is the number of all rows. Rows that were cut off with a damaged stream are
        accepted only at 100%, because their number is unknown.
        """
        if self.percent and self.number == 100:
            return True
        return not dropped[Drop.CUT_OFF] and dropped.total() <= (
            self.number * rows / 100 if self.percent else self.number
        )


def parse_max_bad(text: str) -> MaxBad:
    """Parse ``12`` (a number of rows) or ``0.1%`` (of all rows).

    Raises UserError for any other text.
    """
    percent = text.endswith("%")
    try:
        number = float(text[:-1]) if percent else int(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (percent and number > 100):
        raise UserError(
            f"--max-bad is {text!r}; give a number of rows, such as 100, or a share of them, "
            "such as 0.1%"
        )
    return MaxBad(number, percent)


def add_max_bad_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--max-bad``, for the verbs that merge."""
    parser.add_argument(
        "--max-bad",
        default=DEFAULT,
        metavar="N|N%",
        help="accepted bad rows (null, not UTF-8, unreadable ...); with more, exit with code 1 and "
        "list their places (default: 0.1%%); "
        "a truncated stream, which loses an unknown number of rows, is accepted only at 100%%",
    )


def accept_bad_rows(out: Path, plan: Plan, entries: Iterable[UnitEntry], max_bad: str) -> bool:
    """Write OUT/bad_rows.jsonl, and return True if ``max_bad`` allows the number of bad rows.

    The file contains the places of the bad rows. If no row is bad, the file is removed. If the
    number is not accepted, an error and the first places are printed to stderr. Raises UserError if
    ``max_bad`` is neither a number nor a percentage.
    """
    limit = parse_max_bad(max_bad)
    rows = 0
    dropped = Counter[Drop]()
    places = []
    for entry in entries:
        rows += entry.rows
        for reason, number in entry.dropped.items():
            if not Drop(reason).requested:
                dropped[Drop(reason)] += number
        places += list(_places(plan, entry))
    path = out / BAD_ROWS
    if not dropped:
        path.unlink(missing_ok=True)
        return True
    lines = "".join(json.dumps(place, ensure_ascii=False) + "\n" for place in places)
    write_atomically(path, lines.encode("utf-8", "backslashreplace"))
    if limit.allows(dropped, rows):
        return True
    verdict = f"{dropped.total():,} of {rows:,} rows are bad ({listed(by_reason(dropped))})"
    if dropped[Drop.CUT_OFF]:
        verdict += (
            ", and a damaged stream lost an unknown number of further rows: fetch it again, or "
            "accept all with --max-bad 100%"
        )
    else:
        verdict += (
            f", more than --max-bad {max_bad} allows: fix the inputs, or run the command again "
            "with a higher --max-bad"
        )
    print(f"data_prep: error: {verdict}; their places are in {path}", file=sys.stderr)
    places.sort(key=lambda place: place["reason"] != Drop.CUT_OFF)
    for place in places[:PRINTED]:
        message = f" ({place['message']})" if place["message"] else ""
        print(
            f"  {place['file']}, {place['at']} {place['place']}: {place['reason']}{message}",
            file=sys.stderr,
        )
    if len(places) > PRINTED:
        print(f"  ... and {len(places) - PRINTED:,} more in {path}", file=sys.stderr)
    return False


def _places(plan: Plan, entry: UnitEntry) -> Iterator[dict[str, Any]]:
    file = plan.files[plan.units[entry.unit].file]
    at = "row" if file.kind in ("parquet", "arrow") else "byte"
    for row in entry.bad:
        path, place = locate(file, row.place) if file.parts else (file.path, row.place)
        yield {
            "file": path,
            "at": at,
            "place": place,
            "reason": str(row.reason),
            "message": row.message,
            "unit": entry.unit,
        }
