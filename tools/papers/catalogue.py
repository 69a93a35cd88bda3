"""``list``: every experiment of the four papers, what it needs, what it costs, and whether it can run here. Torch-free.

list [--json]
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fem_common.cli import Parser
from fem_common.errors import UserError
from fem_common.text import aligned, did_you_mean

RUNS = Path("runs/papers")
FEM, SECOND, CEM, HYPERSET = "Free Energy Mixer", "Transformers as Intrinsic Optimizers", "Causal Energy Minimization", "Hyper-SET"


@dataclass(frozen=True)
class Entry:
    """One experiment. module: where it is written, None where it cannot run; why: what is missing then, or what to use instead.

    quick: what the quick form costs on two cores. full: the paper's sizes.
    """

    name: str
    paper: str
    about: str
    needs: str
    quick: str
    full: str
    module: str | None = None
    why: str = ""


ENTRIES = (
    Entry("argmax", FEM, "appendix P: the largest value in every channel", "nothing", "3 minutes", "a CPU's hours", "tools.papers.argmax"),
    Entry(
        "mad",
        FEM,
        "table 1: MAD's six tasks, 23 rows",
        "nothing",
        "10 minutes",
        "20,000 steps a trial: a GPU",
        "tools.papers.mad",
    ),
    Entry(
        "lis",
        SECOND,
        "section 5: longest increasing subsequence",
        "nothing",
        "4 minutes",
        "120,000 steps a trial: a GPU",
        "tools.papers.lis",
    ),
    Entry("gp", CEM, "table 3: Gaussian processes of ten inputs", "nothing", "2 minutes", "a CPU's hours", "tools.papers.gp"),
    Entry(
        "fem-language",
        FEM,
        "table 2: 1.3B and 340M parameters",
        "FineWeb-Edu, network",
        "-",
        "8 GPUs for days",
        None,
        "python -m pretrain configs/run/fem_sm_1.3b_100bt.yaml, then tools.evaluate",
    ),
    Entry("fem-forecast", FEM, "time series: ETT, Weather, Solar", "the data's CSV files", "-", "a GPU's hours", None, "not written yet"),
    Entry("fem-images", FEM, "DeiT on images", "ImageNet, network", "-", "8 GPUs for days", None, "not written yet"),
    Entry(
        "cem-language",
        CEM,
        "figures 2-5: 86M to 256M parameters",
        "SlimPajama, network",
        "-",
        "a GPU's days",
        None,
        "python -m tools.scaling run configs/studies/cem_lr.yaml does its learning rates",
    ),
    Entry("sudoku", HYPERSET, "Sudoku; energies, ranks and angles by iteration", "nothing", "-", "a GPU's hours", None, "not written yet"),
    Entry(
        "hyperset-images",
        HYPERSET,
        "CIFAR-10, CIFAR-100, ImageNet-100",
        "the data sets, network",
        "-",
        "a GPU's hours",
        None,
        "not written yet",
    ),
    Entry(
        "masked-images", HYPERSET, "masked images of ImageNet-100", "the data set, network", "-", "a GPU's days", None, "not written yet"
    ),
)
NAMES = tuple(entry.name for entry in ENTRIES if entry.module)


def experiment_of(name: str) -> Any:
    """The `Experiment` of this name. Raises UserError where there is none, or it cannot run."""
    entry = next((entry for entry in ENTRIES if entry.name == name), None)
    if entry is None:
        raise UserError(f"{name}: no experiment has this name; {did_you_mean(name, NAMES)}")
    if entry.module is None:
        raise UserError(f"{name} cannot be run by this tool: {entry.why}")
    return import_module(entry.module).EXPERIMENT


def add_arguments(parser: Parser) -> None:
    """The verb's command line."""
    parser.add_argument("--json", action="store_true", help="a JSON object a line")


def main(arguments: argparse.Namespace) -> int:
    """Print the table: 0."""
    if arguments.json:
        for entry in ENTRIES:
            print(json.dumps({**asdict(entry), "runs": entry.module is not None}, ensure_ascii=False))
        return 0
    rows = [("name", "paper", "what", "needs", "quick, two cores (estimated)", "full (estimated)", "runs here")]
    for entry in ENTRIES:
        here = "yes" if entry.module else f"no: {entry.why}"
        rows.append((entry.name, entry.paper, entry.about, entry.needs, entry.quick, entry.full, here))
    print(*aligned(rows), sep="\n")
    return 0
