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
from fem_common.errors import UserError
from fem_common.text import aligned, did_you_mean
from fem_megatron.shape import located

RUNS = Path("runs/papers")
DATA = RUNS / "data"  # data files that the user has downloaded
FEM, SECOND, CEM, HYPERSET = (
    "Free Energy Mixer",
    "Transformers as Intrinsic Optimizers",
    "Causal Energy Minimization",
    "Hyper-SET",
)


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


GPU, CIFAR = "hours on a GPU", "nothing; for CIFAR its files or a network"
ENTRIES = (
    Entry(
        "argmax",
        FEM,
        "appendix P: the largest value in every channel",
        "nothing",
        "5",
        "a CPU's hours",
        "tools.papers.argmax:EXPERIMENT",
    ),
    Entry(
        "mad",
        FEM,
        "table 1: MAD's six tasks, 23 rows; quick: four tasks",
        "nothing",
        "90",
        GPU,
        "tools.papers.mad:EXPERIMENT",
    ),
    Entry(
        "fem-images",
        FEM,
        "table 3: the DeiT architecture on digits, CIFAR",
        CIFAR,
        "3",
        GPU,
        "tools.papers.images:FEM_IMAGES",
    ),
    Entry(
        "fem-forecast",
        FEM,
        "table 4: six data sets, four horizons",
        "nothing; for the full form its files",
        "3",
        GPU,
        "tools.papers.forecast:EXPERIMENT",
    ),
    Entry(
        "lis",
        SECOND,
        "section 5: longest increasing subsequence",
        "nothing",
        "4",
        GPU,
        "tools.papers.lis:EXPERIMENT",
    ),
    Entry(
        "second-language",
        SECOND,
        "small language models, compared with MHA",
        "nothing",
        "8",
        GPU,
        "tools.papers.language:SECOND_LANGUAGE",
    ),
    Entry(
        "gp",
        CEM,
        "table 3: Gaussian processes of ten inputs",
        "nothing",
        "3",
        "a CPU's hours",
        "tools.papers.gp:EXPERIMENT",
    ),
    Entry(
        "cem-language",
        CEM,
        "figures 2-5 at a small size, compared with Llama",
        "nothing",
        "20",
        GPU,
        "tools.papers.language:CEM_LANGUAGE",
    ),
    Entry(
        "sudoku",
        HYPERSET,
        "figures 3, 5, 6: Sudoku, energies, ranks",
        "nothing",
        "15",
        GPU,
        "tools.papers.sudoku:EXPERIMENT",
    ),
    Entry(
        "hyperset-images",
        HYPERSET,
        "tables 1, 3: digits, CIFAR",
        CIFAR,
        "10",
        GPU,
        "tools.papers.images:HYPERSET_IMAGES",
    ),
    Entry(
        "masked-digits",
        HYPERSET,
        "table 2 in pixel space: digits",
        "nothing",
        "10",
        "-",
        "tools.papers.masked:EXPERIMENT",
    ),
    Entry(
        "fem-language-1.3b",
        FEM,
        "table 2: 1.3B and 340M parameters",
        "FineWeb-Edu",
        "-",
        "8 GPUs for days",
        None,
        "python -m pretrain configs/run/fem_sm_1.3b_100bt.yaml, then tools.evaluate",
    ),
    Entry(
        "cem-language-86m",
        CEM,
        "figures 2-5: 86M to 162M parameters",
        "SlimPajama",
        "-",
        "8 GPUs for hours",
        None,
        "python -m pretrain configs/run/cem_86m.yaml and llama_86m.yaml; train.tokens=86_350_000"
        " optimizer.warmup_tokens=4_300_000 for a twentieth of the tokens;"
        " configs/studies/cem_lr.yaml for the rates",
    ),
    Entry(
        "imagenet-100",
        HYPERSET,
        "tables 1, 4: ImageNet-100",
        "its files or a network",
        "-",
        GPU,
        "tools.papers.images:IMAGENET_100",
    ),
    Entry(
        "imagenet",
        FEM,
        "table 3: DeiT-Tiny and -Small",
        "ImageNet's files",
        "-",
        "8 GPUs for days",
        None,
        "this tool trains in one process and lacks DeiT's augmentation",
    ),
    Entry(
        "masked-images",
        HYPERSET,
        "table 2: ImageNet-100",
        "ImageNet's files, MaskGIT's VQ-GAN, LPIPS, FID",
        "-",
        "4 GPUs for days",
        None,
        "its tokenizer and two of its metrics are third-party networks, whose weights no package"
        " contains",
    ),
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
    rows = [
        (
            "name",
            "paper",
            "content",
            "needs",
            "quick, minutes on one core (estimated)",
            "full (estimated)",
            "can be run",
        )
    ]
    for entry in ENTRIES:
        here = "yes" if entry.module else f"no: {entry.why}"
        rows.append(
            (entry.name, entry.paper, entry.about, entry.needs, entry.quick, entry.full, here)
        )
    print(*aligned(rows), sep="\n")
    return 0
