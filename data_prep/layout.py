"""data_prep: the names in a data folder, and the plan that says what is done in it. Reads no input and knows no tokenizer.

OUT/plan.json                      inputs, settings, units and their fingerprint: written first
OUT/tokenizer/                     a copy of the tokenizer
OUT/shards/00007.json              what unit 7 wrote; there only when its files are
OUT/shards/00007-train.{bin,idx}   until they are merged
OUT/{train,valid,test}.{bin,idx}   the merged pairs
OUT/units.jsonl                    the units' entries, in order
OUT/bad_rows.jsonl                 where the bad rows are, if there are any
OUT/manifest.json                  written last: the data is complete
OUT/.lock                          empty: who works here holds it
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.errors import UserError
from data_prep.files import write_whole

FORMAT = 2
PLAN = "plan.json"
TOKENIZER = "tokenizer"
SHARDS = "shards"
UNITS = "units.jsonl"
BAD_ROWS = "bad_rows.jsonl"
MANIFEST = "manifest.json"
SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Unit:
    """What is done, and done again after a kill, as a whole: span [start, stop) of file number ``file`` of the plan (see sources.Span)."""

    number: int
    file: int
    start: int
    stop: int
    rows: int | None
    text_bytes: int

    @property
    def name(self) -> str:
        """How its files begin."""
        return f"{self.number:05d}"


@dataclass(frozen=True)
class Plan:
    """What is to be made.

    ``fingerprint`` identifies all that decides the bytes; ``settings``: documents.Settings as JSON; ``tokenizer``: vocab_size, eod_id and
    sha256; ``files``: sources.SourceFile as JSON; ``unit_bytes``: UTF-8 bytes of text a unit was cut for.
    """

    fingerprint: str
    settings: dict[str, Any]
    tokenizer: dict[str, Any]
    files: tuple[dict[str, Any], ...]
    units: tuple[Unit, ...]
    unit_bytes: int = 0


def entry_path(out: Path, unit: Unit) -> Path:
    """Where a unit's entry is, once its files are there."""
    return out / SHARDS / f"{unit.name}.json"


def shard_prefix(out: Path, unit: Unit, split: str) -> Path:
    """A unit's part of a split, without .bin and .idx."""
    return out / SHARDS / f"{unit.name}-{split}"


def write_plan(out: Path, plan: Plan) -> None:
    """Write OUT/plan.json, whole or not at all; a file and a unit take a line each."""
    units = [list(asdict(unit).values())[1:] for unit in plan.units]
    fields = {"format": FORMAT, **asdict(plan), "units": units}
    lines = ",\n".join(f"  {json.dumps(name)}: {_lines(value)}" for name, value in fields.items())
    write_whole(out / PLAN, f"{{\n{lines}\n}}\n".encode("utf-8", "backslashreplace"))


def _lines(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return json.dumps(value, ensure_ascii=False)
    return "[\n" + ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n  ]"


def read_plan(out: Path) -> Plan:
    """OUT/plan.json. Raises UserError where it is absent, damaged or of another format."""
    path = out / PLAN
    if not path.is_file():
        raise UserError(f"no {PLAN} in {out}; make it with: python -m data_prep plan INPUT... --tokenizer DIR --out {out}")
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != FORMAT:
            raise UserError(f"{path} has format {raw['format']!r}; this data_prep reads format {FORMAT}")
        units = tuple(Unit(number, *unit) for number, unit in enumerate(raw["units"]))
        return Plan(raw["fingerprint"], raw["settings"], raw["tokenizer"], tuple(raw["files"]), units, raw["unit_bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); plan again with --overwrite") from None
