"""Second-order attention, section 5: the length of the longest increasing subsequence of a sequence
of numbers.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Generator, Tensor, nn

from tools.papers.experiment import Claim, Experiment, Size
from tools.papers.language import SECOND as ROWS
from tools.papers.network import Last, Network, Positions, model_of
from tools.papers.parts import ReluMlp
from tools.papers.training import Examples, Problem, classification

LARGEST = 2
"""Number of different values, as a multiple of the length of the sequence."""
ATTENTION, MLP = "alone", "with MLP"


def cases(*lengths: int, widths: tuple[int | None, ...] = (None,)) -> tuple[str, ...]:
    """Return the names of the cases with these lengths, without and with MLPs, for each width.

    None: the width of the size.
    """
    return tuple(
        f"L = {length} {kind}" + ("" if width is None else f", d = {width}")
        for kind in (ATTENTION, MLP)
        for width in widths
        for length in lengths
    )


def parts(case: str) -> tuple[int, str, int | None]:
    """Return (sequence length, kind, width) from the name of a case.

    The kind is ATTENTION or MLP. The width is None if it is the size's.
    """
    name, _, width = case.removeprefix("L = ").partition(", d = ")
    length, kind = name.split(" ", 1)
    return int(length), kind, int(width) if width else None


def examples(count: int, length: int, generator: Generator) -> Examples:
    """Return numbers followed by a query token, [count, length + 1]; and the length of the longest
    increasing subsequence, [count].
    """
    numbers = torch.randint(LARGEST * length, (count, length), generator=generator)
    return torch.cat((numbers, torch.full((count, 1), LARGEST * length)), 1), longest_increasing(
        numbers
    )


def longest_increasing(numbers: Tensor) -> Tensor:
    """Map [b, n] to [b], by the lengths of the subsequences that end at each position."""
    ending = torch.ones_like(numbers)
    for place in range(1, numbers.shape[1]):
        below = numbers[:, :place] < numbers[:, place : place + 1]
        ending[:, place] = 1 + (ending[:, :place] * below).amax(1)
    return ending.amax(1)


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem: three layers over token embeddings and absolute sinusoidal positions.

    The answer, a length, is predicted at the last token.
    """
    length, kind, width = parts(case)
    if width is not None:
        size = replace(size, width=width, inner=4 * width)
    generator = torch.Generator().manual_seed(2000 + seed)
    made = [examples(count, length, generator) for count in (size.train, size.test, size.test)]
    torch.manual_seed(seed)
    mlp = {"mlp": ReluMlp} if kind == MLP else None
    model = model_of(size, {**ROWS[row], "rope": False, "mlp": "swiglu" if mlp else "none"})
    inputs = Positions(
        nn.Embedding(LARGEST * length + 1, size.width), length + 1, size.width, sines=size.init_std
    )
    head = nn.Sequential(Last(size.width), nn.Linear(size.width, length + 1))
    return classification(Network(model, inputs, head, mlp), *made)


def most_frequent(case: str, size: Size) -> float:
    """Return the accuracy of always answering the most frequent length."""
    length, _, _ = parts(case)
    _, answers = examples(size.test, length, torch.Generator().manual_seed(2))
    return float(answers.bincount().max()) / len(answers)


QUICK = Size(
    cases(10, 20)[:3],
    ("MHA", "MHA2nd1st", "Att2nd1st"),
    steps=800,
    batch=64,
    rates=(3e-3, 1e-2),
    train=25600,
    test=1024,
    width=32,
    heads=4,
    layers=3,
    inner=128,
    init_std=0.1,
    weight_decay=0.01,
)
FULL = Size(
    cases(10, 20, 30, 40, widths=(32, 64, 128, 256)),
    tuple(ROWS),
    steps=0,
    epochs=300,
    batch=128,
    rates=(1e-4,),
    train=51200,
    test=5120,
    width=256,
    heads=8,
    layers=3,
    inner=1024,
    init_std=0.02,
    weight_decay=0.01,
    averaged=5,
    constant=True,
    warmup=0.0,
)
"""Appendix A.9; it states no schedule of the learning rate."""
EXPERIMENT = Experiment(
    name="lis",
    metric="accuracy",
    rows=ROWS,
    sizes={"quick": QUICK, "full": FULL},
    problem=problem,
    scale=100.0,
    claims=(Claim("MHA2nd1st", "MHA"),),
    chance=most_frequent,
)
