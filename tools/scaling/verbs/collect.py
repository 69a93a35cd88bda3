"""``collect``: write the losses of a study's runs into one table, from run directories or an export
of Weights & Biases. The module does not import torch.

    collect STUDY.yaml [--wandb EXPORT.jsonl] [--partial] [--out FILE] [--results FOLDER]

Writes runs.csv in the study's results, with one row per validation of a run, and collected.json,
which lists missing runs. If runs are missing, failed or unfinished, they are reported and no file
is written, unless --partial is given. Runs whose losses are not comparable are refused: different
data, tokenizer, or a configuration that differs from the study's plan.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from fem_common.errors import ConfigError
from pretrain.config import load_run
from tools.scaling.planned_runs import PlannedRun, plan_study
from tools.scaling.records import (
    DataIdentity,
    Record,
    after_trunk,
    data_identity,
    difference_from_plan,
    heldout_tokens,
    read_directory,
    read_export,
    table_rows,
)
from tools.scaling.study import TABLE, Study, add_study, study_of
from tools.scaling.table import as_table, check_table, write_file, write_table

COLLECTED = "collected.json"
_NAMED = 10  # largest number of incomplete runs that are listed individually


class Found(NamedTuple):
    """A planned run with a record, and the identity of its data."""

    planned: PlannedRun
    record: Record
    data: DataIdentity


@dataclass(frozen=True)
class Collected:
    """Content of collected.json: numbers of planned and complete runs, and the reason for each run
    that is not complete.
    """

    planned: int
    complete: int
    left_out: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    add_study(parser)
    parser.add_argument(
        "--wandb",
        type=Path,
        metavar="EXPORT.jsonl",
        help="an export of Weights & Biases, for runs without a run directory on this machine",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="write the table even if runs are missing; collected.json lists them",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="path of the table, .csv or .parquet (default: runs.csv in the results of the study)",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the table and return 0, or 1 if runs are missing. Raises ConfigError, StorageError."""
    study = study_of(arguments)
    out = arguments.out or Path(study.results) / TABLE
    if out.suffix not in (".csv", ".parquet"):
        raise ConfigError(f"--out {out}: expected a path that ends with .csv or .parquet")
    planned = plan_study(study)
    found, left_out = find_runs(study, planned, arguments.wandb)
    collected = Collected(
        len(planned), sum(not entry.record.unfinished for entry in found), left_out
    )
    if left_out:
        lines = [f"{len(left_out)} of {len(planned)} runs are not complete:"]
        lines += [f"  {name}: {why}" for name, why in list(left_out.items())[:_NAMED]]
        lines += [f"  and {len(left_out) - _NAMED} more"] if len(left_out) > _NAMED else []
        if not arguments.partial:
            run = (
                f"python -m tools.scaling run {arguments.study} (it skips the complete runs in"
                f" {study.directory})"
            )
            lines.append(
                f"tools.scaling: no table was written. Train the missing runs: {run}, or collect"
                " the complete ones with --partial"
            )
        print("\n".join(lines), file=sys.stdout if arguments.partial else sys.stderr)
        if not arguments.partial:
            return 1
    if not collected.complete:
        raise ConfigError(
            f"{study.path}: none of its {len(planned)} runs is complete, so no table can be written"
        )
    table = as_table(
        [row for entry in found for row in table_rows(entry.record, entry.planned, entry.data)]
    )
    check_table(table, out)
    write_table(table, out)
    write_file(out.with_name(COLLECTED), (json.dumps(asdict(collected), indent=1) + "\n").encode())
    print(
        f"wrote {out}: {len(table)} validations of {table['run'].nunique()} runs,"
        f" {collected.complete} of them complete"
    )
    for note in _notes(found):
        print(f"note: {note}")
    return 0


def find_runs(
    study: Study, planned: Iterable[PlannedRun], export: Path | None
) -> tuple[list[Found], dict[str, str]]:
    """Return (runs with a record, in the order of the plan; name -> reason for incomplete runs).

    A run directory has precedence over a line of the export. Raises ConfigError (a run differs from
    the study's plan, has no losses, or its data is unknown), StorageError.
    """
    exported = read_export(export) if export is not None else {}

    def left(name: str) -> Record | None:
        return read_directory(Path(study.directory) / name) or exported.get(name)

    found, left_out = [], {}
    for run in planned:
        folder, record = Path(study.directory) / run.name, left(run.name)
        if record is None:
            left_out[run.name] = f"not begun: {folder} does not exist" + (
                ", and the export does not contain it" if export else ""
            )
            continue
        difference = difference_from_plan(load_run(study.base, run.settings), record.config)
        if difference is not None:
            key, wanted, held = difference
            raise ConfigError(
                f"{record.place}: it was trained with {key} = {json.dumps(held)}, but {study.path}"
                f" now plans {json.dumps(wanted)}; undo the change of the study, or move the run"
                " away and run it again"
            )
        record = after_trunk(record, run, left(run.trunk) if run.trunk else None)
        if record is None:
            left_out[run.name] = f"a fork of {run.trunk}, which has no record"
            continue
        if record.unfinished:
            left_out[run.name] = record.unfinished
        else:
            record.check()
        if record.unfinished and not record.validations:
            continue
        try:
            data = data_identity(record.config, record.directory)
        except ConfigError as error:
            raise ConfigError(f"{record.place}: {error}") from None
        found.append(Found(run, record, data))
    return found, left_out


def _notes(found: list[Found]) -> list[str]:
    """Return notes for the reader of the table."""
    notes, first = [], found[0]
    ours = heldout_tokens(first.record.config)
    other = next((entry for entry in found if heldout_tokens(entry.record.config) != ours), None)
    if other is not None:
        notes.append(
            f"held-out losses were measured on samples of different sizes: {ours:,} tokens in"
            f" {first.planned.name}, {heldout_tokens(other.record.config):,} in"
            f" {other.planned.name}; set train.eval_batches so that they agree"
        )
    if not first.data.tokenizer:
        notes.append(
            "the tokenizer of the runs is not recorded, so it is not checked that they share one"
        )
    return notes


def read_collected(table: Path) -> Collected | None:
    """Return the collected.json of a table, or None if ``collect`` did not write the table. Raises
    ConfigError if it is damaged.
    """
    file = table.with_name(COLLECTED)
    if not file.is_file():
        return None
    try:
        return Collected(**json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise ConfigError(
            f"{file}: not a file of collect; write it again: python -m tools.scaling collect"
            " STUDY.yaml"
        ) from None
