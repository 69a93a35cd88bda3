"""``list``: every experiment of the four papers, its requirements and cost, and whether it can run
on this machine. The module does not import torch.

list [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.config import read_values
from fem_common.errors import UserError
from fem_common.text import aligned, did_you_mean
from fem_megatron.shape import located

RUNS = Path("runs/papers")
DATA = RUNS / "data"  # data files that the user has downloaded


@dataclass(frozen=True)
class Entry:
    """One experiment of a paper.

    module: the "module:name" of its `Experiment`, or None if this tool cannot run it. why: the
    reason in this case, or the alternative. quick, full: estimated cost of the quick size, in
    minutes of one idle core, and of the paper's size.
    """

    name: str
    paper: str
    about: str
    needs: str
    quick: str
    full: str
    module: str | None = None
    why: str = ""


ENTRIES = tuple(
    Entry(name, **values)
    for name, values in read_values(Path(__file__).with_name("catalogue.yaml")).items()
)
NAMES = tuple(entry.name for entry in ENTRIES if entry.module)


def experiment_of(name: str) -> Any:
    """Return the `Experiment` of this name. Raises UserError if it does not exist or cannot run."""
    entry = next((entry for entry in ENTRIES if entry.name == name), None)
    if entry is None:
        raise UserError(f"{name}: no experiment has this name; {did_you_mean(name, NAMES)}")
    if entry.module is None:
        raise UserError(f"{name} cannot be run by this tool: {entry.why}")
    return located(entry.module)


def add_arguments(parser: Parser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def main(arguments: argparse.Namespace) -> int:
    """Print the table and return 0."""
    if arguments.json:
        for entry in ENTRIES:
            print(
                json.dumps({**asdict(entry), "runs": entry.module is not None}, ensure_ascii=False)
            )
        return 0
    heads = ("quick, minutes on one core (estimated)", "full (estimated)", "can be run")
    rows = [("name", "paper", "content", "needs", *heads)]
    for entry in ENTRIES:
        here = "yes" if entry.module else f"no: {entry.why}"
        rows.append(
            (entry.name, entry.paper, entry.about, entry.needs, entry.quick, entry.full, here)
        )
    print(*aligned(rows), sep="\n")
    return 0
