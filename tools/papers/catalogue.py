"""``list``: every experiment of the four papers, its requirements and cost, and whether it can run
on this machine. The module does not import torch.

list [--json]
"""

from __future__ import annotations

import argparse
import json
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.config import read_values
from fem_common.errors import UserError
from fem_common.text import did_you_mean
from fem_megatron.shape import located

RUNS = Path("runs/papers")
DATA = RUNS / "data"  # data files that the user has downloaded


@dataclass(frozen=True)
class Entry:
    """One experiment of a paper.

    module: the "module:name" of its `Experiment`, or None if this tool cannot run it. why: the
    reason in this case, or the alternative. quick, full: estimated cost of the quick size, in
    minutes of one idle core, and of the paper's size. deviations: settings of the full form that
    are not the paper's, with the reason; "-" if it cannot be run.
    """

    name: str
    paper: str
    about: str
    needs: str
    quick: str
    full: str
    deviations: str
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
    """Print the list and return 0."""
    if arguments.json:
        for entry in ENTRIES:
            print(
                json.dumps({**asdict(entry), "runs": entry.module is not None}, ensure_ascii=False)
            )
        return 0
    for entry in ENTRIES:
        print(f"{entry.name} ({entry.paper})")
        costs = f"quick: {entry.quick} (minutes on one core); full: {entry.full} (both estimated)"
        lines = [entry.about, f"needs {entry.needs}; {costs}"]
        if entry.module is None:
            lines.append(f"not run by this tool: {entry.why}")
        lines.append(f"deviations of the full form from the paper: {entry.deviations}")
        for line in lines:
            print(textwrap.fill(line, 100, initial_indent="  ", subsequent_indent="    "))
    return 0
