"""``python -m tools.tokens RUN_DIR --step N``: print the documents that a training step read.

Other options print the steps that read a document.

Errors are reported in one line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data_prep.prepared.document_ids import line_of, lines_at, numbers_of
from fem_common.cli import Parser, run
from fem_common.errors import ConfigError, convert_os_errors
from fem_common.text import aligned
from tools.tokens.order import Order, Piece, open_order
from tools.tokens.steps import RunRecord, read_run

COLUMNS = ("step", "sample", "seen", "source", "document", "from", "to", "counted", "id")
ABOUT = """Print the documents that a training step reads, or the steps that read a document.

Each line is a part of a document, with the columns

  step      the training step
  sample    position in the training order, from 0; with stages STAGE:position
  seen      True if the sample has already been trained on
  source    the .bin/.idx pair
  document  number of the document in its source, from 0
  from, to  tokens [from, to) of the document, EOD included
  counted   number of these tokens that count in the loss
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
    options = {name: getattr(given, name) for name in ("step", "sample", "find", "document")}
    option, value = next((name, value) for name, value in options.items() if value is not None)

    def print_rows() -> None:
        with convert_os_errors():
            rows = _rows(given.run_dir, option, value)
        if given.json:
            for row in rows:
                print(json.dumps(row, ensure_ascii=False))
        elif rows:
            print(*aligned([COLUMNS, *map(_cells, rows)], left=[3, 8]), sep="\n")
        else:
            print(f"{given.run_dir}: no step of the run reads this document")

    return run("tools.tokens", print_rows)


def _cells(row: dict[str, Any]) -> list[str]:
    return ["?" if row[name] is None else str(row[name]) for name in COLUMNS]


def _rows(run_dir: Path, option: str, value: Any) -> list[dict[str, Any]]:
    """Return the rows of the output for the step, sample or document that an option selects.

    Raises ConfigError.
    """
    records = read_run(run_dir)
    if option in ("step", "sample"):
        if option == "step":
            record, samples = _step(records, value)
        else:
            record, samples = _sample(records, value)
        order = _opened(run_dir, record)
        pieces = [piece for sample in samples for piece in order.pieces(sample)]
        return _output_rows(record, order, pieces)
    wanted = _named if option == "find" else _numbered
    rows: list[dict[str, Any]] = []
    faults: list[ConfigError] = []
    for record in records:
        try:
            order = _opened(run_dir, record)
            pieces = order.find(wanted(order, value))
        except ConfigError as error:  # a stage that has not begun, or that reads other sources
            faults.append(error)
            continue
        pieces = [piece for piece in pieces if piece.sample < record.steps.end]
        rows += _output_rows(record, order, pieces)
    if len(faults) == len(records):
        raise faults[0]
    for fault in faults:
        print(f"tools.tokens: a stage is left out: {fault}", file=sys.stderr)
    return rows


def _step(records: list[RunRecord], step: int) -> tuple[RunRecord, Iterable[int]]:
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


def _sample(records: list[RunRecord], text: str) -> tuple[RunRecord, Iterable[int]]:
    """Parse ``[STAGE:]I`` and return (record of the stage's sample order, [sample]).

    Raises ConfigError if the stage or the sample does not exist.
    """
    name, _, number = text.rpartition(":")
    by_name = {record.name: record for record in records}
    record = by_name.get(name)
    if record is None:
        wanted = "the run has no stages; give the position alone"
        if "" not in by_name:
            wanted = f"give STAGE:I, the stage one of {', '.join(by_name)}"
        raise ConfigError(f"--sample {text}: {wanted}")
    if not number.isdecimal() or int(number) >= record.steps.end:
        raise ConfigError(
            f"--sample {text}: the {'stage' if name else 'run'}'s samples are 0 to "
            f"{record.steps.end - 1}"
        )
    return record, [int(number)]


def _opened(run_dir: Path, record: RunRecord) -> Order:
    order = open_order(run_dir, record.parts, record.order_samples, record.contents_key)
    faults = dict.fromkeys(source.sibling_facts.fault for source in order.sources)
    for fault in filter(None, faults):
        print(
            f"tools.tokens: {fault}: ids and the ends of documents within a sample are unknown",
            file=sys.stderr,
        )
    return order


def _numbered(order: Order, document: int) -> dict[int, list[int]]:
    """Return source number -> [document]. Raises ConfigError if no source has the number."""
    most = max(int(source.documents.max()) for source in order.sources)
    if not 0 <= document <= most:
        raise ConfigError(f"--document {document}: the documents' numbers are 0 to {most}")
    return {number: [document] for number in range(len(order.sources))}


def _named(order: Order, name: str) -> dict[int, list[int]]:
    """Return source number -> numbers of the documents with this id. Raises ConfigError if none
    exists.
    """
    raw = os.fsencode(name)
    unknown = [source.prefix for source in order.sources if source.sibling_facts.ids is None]
    lines = {raw, line_of(raw)}
    found = dict[int, list[int]]()
    for number, source in enumerate(order.sources):
        ids = source.sibling_facts.ids
        if ids is not None:
            documents = {document for line in lines for document in numbers_of(ids, line)}
            found[number] = sorted(documents)
    if not any(found.values()):
        rest = ""
        if unknown:
            rest = (
                f"; no ids were recorded for {', '.join(unknown)}: use the document's number, with"
                " --document"
            )
        raise ConfigError(f"--find {name}: no document of the training data has this id{rest}")
    return found


def _output_rows(record: RunRecord, order: Order, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Return the rows of the output, one for each part of a document in a sample.

    A sample of a stage is written in the form that ``--sample`` accepts.
    """
    ids: list[dict[int, str]] = []
    for number, source in enumerate(order.sources):
        documents = {piece.document for piece in pieces if piece.source == number}
        file = source.sibling_facts.ids
        ids.append(lines_at(file, documents) if file and documents else {})
    rows = []
    steps = record.steps
    for sample, number, document, start, stop in pieces:
        shown = f"{record.name}:{sample}" if record.name else sample
        values = (
            steps.of(sample),
            shown,
            sample < steps.seen,
            order.sources[number].prefix,
            document,
            start,
            stop,
            order.sources[number].counted(document, start, stop),
            ids[number].get(document),
        )
        rows.append(dict(zip(COLUMNS, values, strict=True)))
    return rows


if __name__ == "__main__":
    sys.exit(main())
