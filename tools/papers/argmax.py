"""FEM, appendix P: one layer must return the largest past value of every channel.

A layer that averages the values cannot do this.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fem_megatron.config import ModelConfig
from fem_megatron.state import Context
from tools.papers.experiment import Claim, Experiment, Size
from tools.papers.network import fem, layer, model_of, start
from tools.papers.training import Examples, Problem, regression

MARGIN = 1.0
PRIORS = {
    "softmax": "softmax",
    "linear": "linear",
    "GLA": "gla",
    "LRNN-decay": "lrnn_decay",
    "AFT": "aft",
    "Mamba": "mamba",
}
READS = {"mean": "", "F": "L", "F λ": "LT"}
ROWS: dict[str, dict[str, Any]] = {
    f"{prior} {read}": {**fem(mixer, letters), "mlp": "none"}
    for prior, mixer in PRIORS.items()
    for read, letters in READS.items()
}
CASES = ("T = 4", "T = 16", "T = 64")


def examples(count: int, tokens: int, width: int, generator: Generator) -> Examples:
    """Return normal values [count, tokens, width], one uniformly drawn token per channel increased
    by MARGIN, and the maximum of each channel.
    """
    values = torch.randn(count, tokens, width, generator=generator)
    winner = torch.randint(tokens, (count, 1, width), generator=generator)
    values.scatter_add_(1, winner, torch.full((count, 1, width), MARGIN))
    return values, values.amax(1)


class LastStep(nn.Module):
    """Model with one mixer that returns its output at the last position, [b, s, D] -> [b, D].

    The residual stream is subtracted from the output.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.mixer = layer(model.blocks()[0].mixer)
        start(self, model)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, D] to [b, D]."""
        stream = x.transpose(0, 1)
        return (self.mixer(stream, Context()) - stream)[-1]


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem, whose loss is the squared error.

    Its score ``index`` is the share of channels in which the value that is nearest to the output is
    the largest one.
    """
    tokens = int(case.removeprefix("T = "))
    generator = torch.Generator().manual_seed(1000 + seed)
    made = [
        examples(count, tokens, size.width, generator)
        for count in (size.train, size.test, size.test)
    ]
    torch.manual_seed(seed)
    task = regression(LastStep(model_of(size, ROWS[row])), *made)

    def scores(output: Tensor, inputs: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
        nearest = (inputs - output[:, None]).abs().argmin(1)
        return {"index": ((nearest == inputs.argmax(1)).sum(), output.numel())}

    return replace(task, scores=scores, score="index", root=False)


QUICK = Size(
    CASES[:2],
    tuple(ROWS),
    steps=400,
    batch=64,
    rates=(1e-2, 3e-2),
    train=12800,
    test=512,
    width=16,
    heads=4,
    init_std=0.1,
)
EXPERIMENT = Experiment(
    name="argmax",
    metric="index",
    rows=ROWS,
    sizes={
        "quick": QUICK,
        "full": replace(QUICK, cases=CASES, steps=10_000, train=64000, width=64, test=2048),
    },
    problem=problem,
    scale=100.0,
    claims=tuple(
        Claim(f"{prior} {read}", f"{prior} mean") for prior in PRIORS for read in ("F", "F λ")
    ),
    chance=lambda case, size: 1 / int(case.removeprefix("T = ")),
)
