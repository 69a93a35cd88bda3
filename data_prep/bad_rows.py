"""data_prep: how many bad rows are too many, and where they are. Reads units' entries, never the inputs."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_prep.drops import Drop
from data_prep.errors import UserError
from data_prep.files import write_whole
from data_prep.layout import BAD_ROWS, Plan
from data_prep.manifest import UnitEntry
from data_prep.sources import locate

DEFAULT = "0.1%"
PRINTED = 20


@dataclass(frozen=True)
class MaxBad:
    """Bad rows that are still accepted: ``number`` of them, or percent of all rows where ``percent``."""

    number: float
    percent: bool

    def allows(self, dropped: Counter[Drop], rows: int) -> bool:
        """Whether these bad rows of so many are accepted; at the limit they are. What was cut off may be any number: it takes 100%."""
        if self.percent and self.number == 100:
            return True
        return not dropped[Drop.CUT_OFF] and dropped.total() <= (self.number * rows / 100 if self.percent else self.number)


def parse_max_bad(text: str) -> MaxBad:
    """``12`` (rows) or ``0.1%`` (of all rows). Raises UserError."""
    percent = text.endswith("%")
    try:
        number = float(text[:-1]) if percent else int(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf or (percent and number > 100):
        raise UserError(f"--max-bad is {text!r}; give a number of rows, such as 100, or a share of them, such as 0.1%")
    return MaxBad(number, percent)


def add_max_bad_argument(parser: argparse.ArgumentParser) -> None:
    """``--max-bad``, for the verbs that end a job."""
    parser.add_argument(
        "--max-bad",
        default=DEFAULT,
        metavar="N|N%",
        help="end with exit code 1 and their places where more rows than this are bad: null, not UTF-8, unreadable ... (default: 0.1%%); "
        "a truncated stream, of which nothing tells how many rows it lost, passes at 100%% alone",
    )


def accept_bad_rows(out: Path, plan: Plan, entries: Iterable[UnitEntry], max_bad: str) -> bool:
    """Write the bad rows' places to OUT/bad_rows.jsonl (no such file where there are none); whether there are few enough.

    Where there are not, says so on stderr with the first places. Raises UserError where ``max_bad`` is neither a number nor a share.
    """
    limit = parse_max_bad(max_bad)
    rows, dropped, places = 0, Counter[Drop](), []
    for entry in entries:
        rows += entry.rows
        dropped.update({Drop(reason): number for reason, number in entry.dropped.items() if not Drop(reason).asked_for})
        places += list(_places(plan, entry))
    path = out / BAD_ROWS
    if not dropped:
        path.unlink(missing_ok=True)
        return True
    write_whole(path, "".join(json.dumps(place, ensure_ascii=False) + "\n" for place in places).encode("utf-8", "backslashreplace"))
    if limit.allows(dropped, rows):
        return True
    reasons = ", ".join(f"{dropped[reason]:,} {reason}" for reason in Drop if dropped[reason])
    verdict = f"{dropped.total():,} of {rows:,} rows are bad ({reasons})"
    if dropped[Drop.CUT_OFF]:
        verdict += ", and how many more were cut off with a damaged stream nothing tells: fetch it again, or accept all with --max-bad 100%"
    else:
        verdict += f", more than --max-bad {max_bad} allows: mend the inputs, or give the command again with a higher --max-bad"
    print(f"data_prep: error: {verdict}; their places are in {path}", file=sys.stderr)
    places.sort(key=lambda place: place["reason"] != Drop.CUT_OFF)
    for place in places[:PRINTED]:
        message = f" ({place['message']})" if place["message"] else ""
        print(f"  {place['file']}, {place['at']} {place['place']}: {place['reason']}{message}", file=sys.stderr)
    if len(places) > PRINTED:
        print(f"  ... and {len(places) - PRINTED:,} more in {path}", file=sys.stderr)
    return False


def _places(plan: Plan, entry: UnitEntry) -> Iterator[dict[str, Any]]:
    file = plan.files[plan.units[entry.unit].file]
    at = "row" if file.kind == "parquet" else "byte"
    for row in entry.bad:
        path, place = locate(file, row.place) if file.parts else (file.path, row.place)
        yield {"file": path, "at": at, "place": place, "reason": str(row.reason), "message": row.message, "unit": entry.unit}
