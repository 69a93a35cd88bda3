"""File names in a data folder, and the plan of the work in it.

This module reads no inputs and no tokenizer.

OUT/plan.json                      inputs, settings, units and their fingerprint; written first
OUT/tokenizer/                     copy of the tokenizer
OUT/shards/00007.json              entry of unit 7; written after the unit's files
OUT/shards/00007-train.{bin,idx,ids,mask}   shards of unit 7 until the merge
OUT/{train,valid,test}.{bin,idx}   merged pairs
OUT/{train,valid,test}.ids         ids of their documents
OUT/{train,valid,test}.mask        tokens that count in the loss (only conversations)
OUT/units.jsonl                    entries of the units, in order
OUT/bad_rows.jsonl                 places of the bad rows, if any
OUT/manifest.json                  written last: the data is complete
OUT/.lock                          empty; locked by the process that writes in the folder
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_prep.encode.documents import Settings
from data_prep.prepared.records import read
from data_prep.sources import SourceFile, Span
from fem_common.errors import UserError
from fem_common.files import sha256_json, write_atomically
from fem_common.text import one_line

FORMAT = 2
PLAN = "plan.json"
TOKENIZER = "tokenizer"
SHARDS = "shards"
UNITS = "units.jsonl"
BAD_ROWS = "bad_rows.jsonl"
KINDS = ("bin", "idx", "ids", "mask")  # a split's files
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Unit:
    """Unit of work of a plan: a range of one input file that is encoded completely or repeated.

    file: index of the input file in the plan.
    start, stop: range [start, stop) of the file; its unit depends on the kind of file (see
    sources.Span).
    rows: number of rows, or None if unknown.
    text_bytes: UTF-8 bytes of text in the range.
    """

    number: int
    file: int
    start: int
    stop: int
    rows: int | None
    text_bytes: int

    @property
    def name(self) -> str:
        """Prefix of the names of the unit's files."""
        return f"{self.number:05d}"

    @property
    def span(self) -> Span:
        """Range of the file as a Span."""
        return Span(self.start, self.stop, self.rows, self.text_bytes)


@dataclass(frozen=True)
class Identity:
    """Properties of a tokenizer that determine the prepared data.

    ``sha256`` is the hash of tokenizer.json.
    """

    vocab_size: int
    eod_id: int
    sha256: str


@dataclass(frozen=True)
class Plan:
    """Plan of a data folder: inputs, settings, tokenizer and units.

    ``fingerprint`` is a hash of everything that determines the prepared data. ``unit_bytes`` is the
    target size of a unit in UTF-8 bytes of text.
    """

    fingerprint: str
    settings: Settings
    tokenizer: Identity
    files: tuple[SourceFile, ...]
    units: tuple[Unit, ...]
    unit_bytes: int = 0


@dataclass(frozen=True)
class _Plan:
    """Content of plan.json as parsed. Each unit is stored as a list without its number."""

    fingerprint: str
    settings: Any
    tokenizer: Identity
    files: tuple[SourceFile, ...]
    units: list[tuple[int, int, int, int | None, int]]
    unit_bytes: int


def entry_path(out: Path, unit: Unit) -> Path:
    """Return the path of a unit's entry (JSON), which is written after the unit's other files."""
    return out / SHARDS / f"{unit.name}.json"


def do_again(out: Path, entry: object = "it") -> str:
    """Return the advice to remove the entry of a unit and to encode the unit again."""
    return f"remove {entry} and do the unit again with: python -m data_prep run --out {out}"


def shard_prefix(out: Path, unit: Unit, split: str) -> Path:
    """Return the path of a unit's shard of a split, without its ending."""
    return out / SHARDS / f"{unit.name}-{split}"


def fingerprint_of(plan: Plan) -> str:
    """Return the hash of everything that determines the prepared data.

    This is the files in order, the boundaries of the units, the settings and the tokenizer.
    """
    return sha256_json(
        {
            "format": FORMAT,
            "files": [(file.kind, *file.content) for file in plan.files],
            "units": [(unit.file, unit.start, unit.stop) for unit in plan.units],
            "settings": plan.settings.deciding(),
            "tokenizer": asdict(plan.tokenizer),
        }
    )


def write_plan(out: Path, plan: Plan) -> None:
    """Write OUT/plan.json atomically. Each file and each unit is one line."""
    units = [list(asdict(unit).values())[1:] for unit in plan.units]
    files = [file.as_json() for file in plan.files]
    fields = {
        "format": FORMAT,
        **asdict(plan),
        "settings": plan.settings.as_json(),
        "files": files,
        "units": units,
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {_lines(value)}" for name, value in fields.items())
    write_atomically(out / PLAN, f"{{\n{lines}\n}}\n".encode("utf-8", "backslashreplace"))


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return (
        "[\n"
        + ",\n".join(f"    {json.dumps(item, ensure_ascii=False)}" for item in value)
        + "\n  ]"
    )


def read_plan(out: Path) -> Plan:
    """Read OUT/plan.json.

    Raises UserError if it is absent, damaged, altered or of another format.
    """
    path = out / PLAN
    if not path.is_file():
        raise UserError(
            f"no {PLAN} in {out}; make it with: python -m data_prep plan INPUT... "
            f"--tokenizer DIR --out {out}"
        )
    try:
        raw = json.loads(path.read_bytes())
        if isinstance(raw, dict) and raw.get("format", FORMAT) != FORMAT:
            raise UserError(
                f"{path} has format {raw['format']!r}; this data_prep reads format {FORMAT}"
            )
        plan = _plan(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({one_line(error)}); put it back, or plan again with --overwrite"
        ) from None
    if fingerprint_of(plan) != plan.fingerprint:
        what = f"what it says does not have the fingerprint {plan.fingerprint[:12]!r}"
        raise UserError(f"{path} was altered: {what}; put it back, or plan again with --overwrite")
    return plan


def _plan(raw: Any) -> Plan:
    if "format" not in read(dict[str, Any], raw):
        raise ValueError("lacks 'format'")
    plain: _Plan = read(_Plan, {name: value for name, value in raw.items() if name != "format"})
    try:
        settings: Settings = read(Settings, plain.settings)
    except UserError as error:
        raise ValueError(str(error)) from None
    units = tuple(Unit(number, *unit) for number, unit in enumerate(plain.units))
    if any(unit.file >= len(plain.files) for unit in units) or not units:
        raise ValueError("units: none, or one of a file that it does not name")
    return Plan(**vars(plain) | {"settings": settings, "units": units})
