"""CEM, table 3: regression of Gaussian-process samples with ten inputs by a model with one MLP.

CEM's MLP is compared at T = 1, 2, 4 and 8 steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import silu

from fem_megatron.mixers.cem.shape import CemMlpShape
from fem_megatron.shape import SwiGluShape
from fem_megatron.state import Context
from fem_megatron.update import rms_norm
from tools.papers.experiment import Claim, Experiment, Size, published
from tools.papers.network import layer, model_of, start
from tools.papers.training import Examples, Problem, regression

INPUTS, FEATURES = 10, 1024
PERIOD = 2.0
ORDERS = 8


def _rbf(shape: tuple[int, int], generator: Generator) -> Tensor:
    """Sample wave frequencies (random Fourier features) of the kernel exp(-d^2 / 2)."""
    return torch.randn(shape, generator=generator)


def _matern(shape: tuple[int, int], generator: Generator) -> Tensor:
    """Sample wave frequencies of the Matérn kernel (1 + sqrt(3) d) exp(-sqrt(3) d), nu = 3/2.

    They follow a multivariate t distribution with three degrees of freedom.
    """
    chi = torch.randn((shape[0], 3), generator=generator).square().mean(1, keepdim=True)
    return torch.randn(shape, generator=generator) / chi.sqrt()


def _periodic(shape: tuple[int, int], generator: Generator) -> Tensor:
    """Sample wave frequencies of the kernel exp(-sum over the inputs of sin^2(pi d / PERIOD) / 2).

    They are integer multiples of the base frequency, with weights from the modified Bessel
    functions I_k(1/4).
    """
    orders = torch.arange(-ORDERS, ORDERS + 1)
    points = (torch.arange(512) + 0.5) * math.pi / 512
    weights = ((points.cos() / 4).exp() * (orders[:, None] * points).cos()).mean(1).clamp_min(0)
    drawn = torch.multinomial(weights, shape[0] * shape[1], replacement=True, generator=generator)
    return 2 * math.pi / PERIOD * orders[drawn].view(shape)


def _rational_quadratic(shape: tuple[int, int], generator: Generator) -> Tensor:
    """Sample wave frequencies of the kernel 1 / (1 + d^2 / 2).

    They are normal with an exponentially distributed variance.
    """
    variance = -torch.log1p(-torch.rand((shape[0], 1), generator=generator))
    return torch.randn(shape, generator=generator) * variance.sqrt()


KERNELS: dict[str, Callable[[tuple[int, int], Generator], Tensor]] = {
    "RBF": _rbf,
    "Matern": _matern,
    "Periodic": _periodic,
    "Rational Quadratic": _rational_quadratic,
}
"""Kernel -> function that draws frequencies [features, inputs] of its spectrum, length scale 1."""


def examples(kernel: str, count: int, inputs: Generator, function: Generator) -> Examples:
    """Return points [count, INPUTS], uniform in the unit cube and then scaled to unit variance, and
    one sample of the process at them, [count, 1].

    The sample is a sum of FEATURES random waves whose expected covariance is the kernel, so any
    number of points is cheap. No noise.
    """
    points = torch.rand(count, INPUTS, generator=inputs)
    frequencies = KERNELS[kernel]((FEATURES, INPUTS), function)
    phases = 2 * math.pi * torch.rand(FEATURES, generator=function)
    waves = [
        (2 / FEATURES) ** 0.5 * (part @ frequencies.T + phases).cos().sum(1, keepdim=True)
        for part in points.split(4096)
    ]
    return (points - 0.5) * 12**0.5, torch.cat(waves)


class Plain(nn.Module):
    """MLP x + W silu(V RMSNorm(x))."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, _: Context) -> Tensor:
        """Map [..., D] to the same shape."""
        out: Tensor = x + self.down(silu(self.up(rms_norm(x, None, 1e-6))))
        return out


class Mlp(nn.Module):
    """Model from ten inputs to one output through the MLP variant of one row."""

    def __init__(self, size: Size, row: str) -> None:
        super().__init__()
        model = model_of(size, {"mlp": "cem", **ROWS[row]})
        assert size.inner is not None
        self.enter, self.leave = nn.Linear(INPUTS, size.width), nn.Linear(size.width, 1)
        self.mlp: nn.Module
        if row == "Plain":
            self.mlp = Plain(
                size.width, size.inner * 3 // 2
            )  # the same number of parameters as Gated
        else:
            self.mlp = layer(SwiGluShape.of(model) if row == "Gated" else CemMlpShape.of(model))
        start(self, model)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, INPUTS] to [b, 1]."""
        out: Tensor = self.leave(self.mlp(self.enter(x)[None], Context())[0])
        return out


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the regression problem of a kernel (the case) and an MLP variant (the row).

    The loss is the mean squared error. Each seed uses another sample of the process.
    """
    kernel, _, points = case.partition(" of ")
    train = int(points.removesuffix(" points")) if points else size.train
    made = []
    for part, count in enumerate((train, size.test, size.test)):
        where, function = (
            torch.Generator().manual_seed(3000 + 10 * seed + number) for number in (part, 9)
        )
        made.append(examples(kernel, count, where, function))
    torch.manual_seed(seed)
    return regression(Mlp(size, row), *made)


ROWS: dict[str, dict[str, Any]] = {"Plain": {}, "Gated": {}} | {
    f"CEM-T{steps}": {"cem": {"steps_mlp": steps, "preconditioner": "diagonal"}}
    for steps in (1, 2, 4, 8)
}
QUICK = Size(
    (*KERNELS, "RBF of 256 points"),
    tuple(ROWS),
    steps=1000,
    batch=128,
    rates=(3e-3, 1e-2),
    train=4096,
    test=1024,
    width=32,
    heads=1,
    inner=349,
    init_std=0.1,
)
EXPERIMENT = Experiment(
    name="gp",
    metric="rmse",
    also={"train_rmse": "Root mean squared error on training data:"},
    rows=ROWS,
    sizes={
        "quick": QUICK,
        "full": replace(
            QUICK,
            cases=tuple(KERNELS),
            steps=50_000,
            seeds=5,
            train=65536,
            test=8192,
        ),
    },
    problem=problem,
    falls=True,
    published=published("gp"),
    claims=(
        Claim("CEM-T2", "CEM-T1", tuple(KERNELS)),
        Claim("CEM-T1", "Plain", tuple(KERNELS)),
        Claim("CEM-T2", "Gated", tuple(KERNELS)),
    ),
)
