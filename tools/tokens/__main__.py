"""``python -m tools.tokens RUN_DIR --step N``: print the documents that a training step read.

Other options print the steps that read a document.

Errors are reported in one line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from data_prep.prepared.document_ids import line_of, lines_at, numbers_of
from fem_common.cli import Parser, run
from fem_common.errors import ConfigError, files_told
from fem_common.text import aligned
from tools.tokens.order import Order, Piece, open_order
from tools.tokens.steps import RunRecord, read_run

COLUMNS = ("step", "sample", "seen", "source", "document", "from", "to", "id")
ABOUT = """Print the documents that a training step reads, or the steps that read a document.

Each line is a part of a document, with the columns

  step      the training step
  sample    position in the training order, from 0; with stages STAGE:position
  seen      True if the sample has already been trained on
  source    the .bin/.idx pair
  document  number of the document in its source, from 0
  from, to  tokens [from, to) of the document, EOD included
  id        the document's id from PREFIX.ids; ? if data_prep did not record ids, or if they are in
            a store

All data is read from RUN_DIR, the run's index cache, and the .idx and .ids files next to the data;
no file is changed. The label of a sample's last token and padding are not counted. Validation data
is not covered."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, print the rows and return the exit code."""
    parser = Parser(prog="python -m tools.tokens", description=ABOUT)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--step", type=int, metavar="N", help="a step of the run, from 1 on, done or to come"
    )
    what.add_argument(
        "--sample",
        metavar="[STAGE:]I",
        help="a position in the training order, from 0 on; each stage has its own order",
    )
    what.add_argument(
        "--find",
        metavar="ID",
        help="print all steps of the run, past and future, that read the document with this id",
    )
    what.add_argument(
        "--document",
        type=int,
        metavar="N",
        help="like --find, for the document with this number (in each source)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per line; null: unknown"
    )
    given = parser.parse_args(arguments)

    def tell() -> None:
        with files_told():
            rows = _rows(given)
        if given.json:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False))
        elif rows:
            shown = [
                ["?" if row[name] is None else str(row[name]) for name in COLUMNS] for row in rows
            ]
            print(*aligned([COLUMNS, *shown], left=[3, 7]), sep="\n")
        else:
            print(f"{given.run_dir}: no step of the run reads this document")

    return run("tools.tokens", tell)


def _rows(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of the output for the selected step, sample or document.

    Raises ConfigError.
    """
    records = read_run(given.run_dir)
    if given.find is None and given.document is None:
        record, samples = (
            _step(records, given.step) if given.step is not None else _sample(records, given.sample)
        )
        order = _opened(given.run_dir, record)
        return _told(record, order, [piece for sample in samples for piece in order.pieces(sample)])
    rows, faults = list[dict[str, Any]](), list[ConfigError]()
    for record in records:
        try:
            order = _opened(given.run_dir, record)
            pieces = order.find(_wanted(order, given))
        except ConfigError as error:  # a stage that has not begun, or that reads other sources
            faults.append(error)
            continue
        rows += _told(record, order, [piece for piece in pieces if piece.sample < record.steps.end])
    if len(faults) == len(records):
        raise faults[0]
    for fault in faults:
        print(f"tools.tokens: a stage is left out: {fault}", file=sys.stderr)
    return rows


def _step(records: list[RunRecord], step: int) -> tuple[RunRecord, range]:
    """Return (record of the sample order that contains the step, samples that the step reads).

    Raises ConfigError if the run has no such step.
    """
    for record in records:
        if step in record.steps.numbers:
            return record, record.steps.samples(step)
    raise ConfigError(
        f"--step {step}: the run's steps are {records[0].steps.numbers[0]} to "
        f"{records[-1].steps.numbers[-1]}"
    )


def _sample(records: list[RunRecord], text: str) -> tuple[RunRecord, list[int]]:
    """Parse ``[STAGE:]I`` and return (record of the stage's sample order, [sample]).

    Raises ConfigError if the stage or the sample does not exist.
    """
    name, _, number = text.rpartition(":")
    record = next((record for record in records if record.name == name), None)
    if record is None:
        names = ", ".join(record.name for record in records)
        wanted = (
            f"give STAGE:I, the stage one of {names}"
            if names
            else "the run has no stages; give the position alone"
        )
        raise ConfigError(f"--sample {text}: {wanted}")
    if not number.isdecimal() or int(number) >= record.steps.end:
        raise ConfigError(
            f"--sample {text}: the {'stage' if name else 'run'}'s samples are 0 to "
            f"{record.steps.end - 1}"
        )
    return record, [int(number)]


def _opened(run_dir: Path, record: RunRecord) -> Order:
    order = open_order(run_dir, record.parts, record.order_samples, record.contents_key)
    for fault in dict.fromkeys(
        source.beside.fault for source in order.sources if source.beside.fault
    ):
        print(
            f"tools.tokens: {fault}: ids and the ends of documents within a sample are unknown",
            file=sys.stderr,
        )
    return order


def _wanted(order: Order, given: argparse.Namespace) -> dict[int, list[int]]:
    """Return source number -> document numbers for the arguments ``--document`` or ``--find``.

    Raises ConfigError if no document matches.
    """
    if given.document is not None:
        most = max(int(source.documents.max()) for source in order.sources)
        if not 0 <= given.document <= most:
            raise ConfigError(
                f"--document {given.document}: the documents' numbers are 0 to {most}"
            )
        return {number: [given.document] for number in range(len(order.sources))}
    raw = os.fsencode(given.find)
    unknown = [source.prefix for source in order.sources if source.beside.ids is None]
    lines = {raw, line_of(raw)}
    found = dict[int, list[int]]()
    for number, source in enumerate(order.sources):
        ids = source.beside.ids
        if ids is not None:
            documents = {document for line in lines for document in numbers_of(ids, line)}
            found[number] = sorted(documents)
    if not any(found.values()):
        rest = (
            f"; no ids were recorded for {', '.join(unknown)}: "
            "use the document's number, with --document"
            if unknown
            else ""
        )
        raise ConfigError(
            f"--find {given.find}: no document of the training data has this id{rest}"
        )
    return found


def _told(record: RunRecord, order: Order, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Return the rows of the output, one for each part of a document in a sample.

    A sample of a stage is written in the form that ``--sample`` accepts.
    """
    ids: list[dict[int, str]] = []
    for number, source in enumerate(order.sources):
        documents = {piece.document for piece in pieces if piece.source == number}
        ids.append(
            lines_at(source.beside.ids, documents) if source.beside.ids and documents else {}
        )
    rows, steps = [], record.steps
    seen = steps.seen
    for sample, number, document, start, stop in pieces:
        shown = f"{record.name}:{sample}" if record.name else sample
        row = (
            steps.of(sample),
            shown,
            sample < seen,
            order.sources[number].prefix,
            document,
            start,
            stop,
            ids[number].get(document),
        )
        rows.append(dict(zip(COLUMNS, row, strict=True)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
