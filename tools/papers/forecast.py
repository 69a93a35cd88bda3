"""FEM, table 4: forecasts of time series by FEM, softmax attention, GLA, AFT and DLinear.

The benchmark's files are read from runs/papers/data. A synthetic equivalent of ETT, hourly with
daily and weekly periods, is generated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from fem_common.errors import UserError
from fem_common.text import counted
from tools.papers.catalogue import DATA
from tools.papers.experiment import Claim, Experiment, Size, published
from tools.papers.images import STACKED
from tools.papers.network import Network, Positions, fem, model_of, start
from tools.papers.training import Examples, Problem, regression

HOURS = 24 * 30


@dataclass(frozen=True)
class Set:
    """Description of a data set: number of series, ends of training and validation, and file."""

    series: int
    training: int
    validation: int
    points: int
    dated: bool = True  # the file has a line of names, and each line starts with a date
    suffix: str = "csv"
    source: str = "download it from https://github.com/zhouhaoyi/ETDataset (folder ETT-small)"


def _of_months(hours: int) -> Set:
    """Return the split of an ETT set whose training part has ``hours`` points.

    The validation part and the test part each have a third of this number.
    """
    return Set(7, hours, hours * 4 // 3, hours * 5 // 3)


def _of_all(series: int, points: int, **given: Any) -> Set:
    """Return the benchmark's split of other sets: 70 % training, the last 20 % test."""
    return Set(series, int(points * 0.7), points - int(points * 0.2), points, **given)


_AUTOFORMER = "download it as described in https://github.com/thuml/Autoformer"
SETS = {
    **{name: _of_months(12 * HOURS) for name in ("ETTh1", "ETTh2")},
    **{name: _of_months(48 * HOURS) for name in ("ETTm1", "ETTm2")},
    "weather": _of_all(21, 52_696, source=_AUTOFORMER),
    "solar_AL": _of_all(
        137,
        52_560,
        dated=False,
        suffix="txt",
        source="download it from https://github.com/laiguokun/multivariate-time-series-data",
    ),
    "synthetic": _of_months(4 * HOURS),
}
HORIZONS = (96, 192, 336, 720)
PATCH = 16
SPREAD = 1e-5
MEAN = 25  # window of DLinear's moving average


def synthetic(points: int, generator: Generator) -> Tensor:
    """Return [points, 7]: daily and weekly waves with an amplitude and phase per series, on a
    mean-reverting random walk, and noise.
    """
    hours, count = torch.arange(points)[:, None], SETS["synthetic"].series
    phase, size = (torch.rand(4, count, generator=generator) for _ in range(2))
    waves = [
        (2 * math.pi * (hours / period + phase[n])).sin() * size[n]
        for n, period in enumerate((24, 12, 168, 84))
    ]
    noise = torch.randn(points, count, generator=generator)
    walk = torch.zeros(points, count)
    for n in range(1, points):
        walk[n] = 0.98 * walk[n - 1] + 0.1 * noise[n]
    return torch.stack(waves).sum(0) + walk + 0.2 * torch.randn(points, count, generator=generator)


def series(name: str) -> Tensor:
    """Return the data set's series, float32 [points, series], without dates. Raises UserError if
    its file is missing or differs.
    """
    this = SETS[name]
    if name == "synthetic":
        return synthetic(this.points, Generator().manual_seed(5))
    import pandas

    file = DATA / f"{name}.{this.suffix}"
    try:
        found = pandas.read_csv(file, header=0 if this.dated else None, encoding="latin-1").iloc[
            : this.points, int(this.dated) :
        ]
        if found.shape != (this.points, this.series):
            known = (
                f"{found.shape[0]} lines of {counted(found.shape[1], 'series')}; {name} needs at"
                f" least {this.points} lines of {this.series}"
            )
            raise UserError(f"{file}: {known}")
        return torch.tensor(found.to_numpy("float32"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file}: {getattr(error, 'strerror', None) or error}; {this.source}"
        ) from None


def windows(case: str, size: Size) -> list[Examples]:
    """Return training, validation and test data: past points [n, size.length] and targets [n,
    horizon].

    Each series is used separately, normalised to mean 0 and standard deviation 1 in the training
    part. The first size.train and size.test windows are used; 0 means all.
    """
    name, horizon = case.rsplit(" ", 1)
    length = size.length
    full = series(name)
    first, second = SETS[name].training, SETS[name].validation
    # The clamp handles constant series.
    full = (full - full[:first].mean(0)) / full[:first].std(0).clamp(min=SPREAD)
    made = []
    parts = (
        (0, first, size.train),
        (first - length, second, size.test),
        (second - length, len(full), size.test),
    )
    for begin, end, most in parts:
        cut = full[begin:end].unfold(0, length + int(horizon), 1)
        cut = cut.flatten(0, 1)[: most or None]  # [n, length + horizon]
        made.append((cut[:, :length], cut[:, length:]))
    return made


class Patches(nn.Module):
    """Input layer that maps [b, length] to [b, length / PATCH, D] by one linear layer per patch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(PATCH, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the embedded patches in order."""
        made: Tensor = self.into(x.unfold(1, PATCH, PATCH))
        return made


class Relative(nn.Module):
    """Forecast model that normalises each series by its mean and deviation, then restores them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, length] to [b, horizon]."""
        mean, spread = x.mean(1, keepdim=True), x.std(1, keepdim=True) + SPREAD
        made: Tensor = self.inner((x - mean) / spread)
        return made * spread + mean


class DLinear(nn.Module):
    """A linear layer on the moving average over MEAN points, and one on the remainder (Zeng et al.
    2023).
    """

    def __init__(self, length: int, horizon: int) -> None:
        super().__init__()
        self.trend, self.rest = nn.Linear(length, horizon), nn.Linear(length, horizon)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, length] to [b, horizon]."""
        wide = torch.cat((x[:, :1].expand(-1, MEAN // 2), x, x[:, -1:].expand(-1, MEAN // 2)), 1)
        trend = wide.unfold(1, MEAN, 1).mean(-1)
        made: Tensor = self.trend(trend) + self.rest(x - trend)
        return made


ROWS: dict[str, dict[str, Any]] = {
    "DLinear": {},
    **STACKED,
    "FEM-Mamba": {"mixer": "fem_mamba"},
    "AFT": fem("aft", ""),
    "FEM-AFT": {"mixer": "fem_aft"},
}


def problem(case: str, row: str, size: Size, seed: int) -> Problem:
    """Return the problem: bidirectional layers over the patches of one series.

    The forecast is computed from all patches. The seed affects only weights and the order of data.
    """
    data, horizon = windows(case, size), int(case.rsplit(" ", 1)[1])
    torch.manual_seed(seed)
    if row == "DLinear":
        network: nn.Module = DLinear(size.length, horizon)
        start(network, model_of(size, {}))
    else:
        count = size.length // PATCH
        head = nn.Sequential(
            nn.RMSNorm(size.width), nn.Flatten(), nn.Linear(count * size.width, horizon)
        )
        inputs = Positions(Patches(size.width), count, size.width)
        network = Relative(Network(model_of(size, {**ROWS[row], "causal": False}), inputs, head))

    def scores(output: Tensor, _: Tensor, targets: Tensor) -> dict[str, tuple[Tensor, int]]:
        error, count = (output - targets).double(), targets.numel()
        return {"mse": (error.square().sum(), count), "mae": (error.abs().sum(), count)}

    return replace(regression(network, *data), scores=scores, score="mse", root=False)


QUICK = Size(
    ("synthetic 96",),
    ("DLinear", *STACKED),
    steps=300,
    batch=64,
    rates=(1e-3, 3e-3),
    train=0,
    test=1500,
    width=32,
    heads=4,
    layers=2,
    length=192,
    init_std=0.1,
)
FULL = replace(
    QUICK,
    test=0,
    rows=tuple(ROWS),
    cases=tuple(f"{name} {horizon}" for name in tuple(SETS)[:-1] for horizon in HORIZONS),
    steps=20_000,
    rates=(1e-4, 5e-4),
    width=128,
    heads=8,
    layers=3,
    length=512,
    init_std=0.02,
)
EXPERIMENT = Experiment(
    name="fem-forecast",
    metric="mse",
    rows=ROWS,
    sizes={"quick": QUICK, "full": FULL},
    problem=problem,
    falls=True,
    also={"mae": "Mean absolute error:"},
    published={  # means over the horizons
        (f"{name} {horizon}", row): number
        for (name, row), number in published("fem-forecast").items()
        for horizon in HORIZONS
    },
    claims=(
        Claim("FEM-SM", "softmax"),
        Claim("FEM-GLA", "GLA"),
        Claim("FEM-AFT", "AFT"),
        Claim("FEM-SM", "DLinear"),
    ),
)
