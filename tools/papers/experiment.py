"""Definition of an experiment: its rows, cases, sizes and claims, and the record of its trials.
The module does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fem_common.config import read_values
from fem_common.errors import ConfigError
from fem_common.files import sha256_json

if TYPE_CHECKING:
    from tools.papers.training import Problem


# Fields of `Size` that older results do not have; their defaults are the older behaviour.
LATER = ("betas", "l2", "floor", "constant", "averaged", "epochs")


@dataclass(frozen=True)
class Size:
    """Size of the trials of an experiment; ``--quick`` and the full form are two of these.

    rates: AdamW's learning rates, each tried with the first seed; the best on validation data is
    used for the other seeds. warmup: share of the steps in which the rate increases; it then
    decreases to ``floor`` along a cosine, or is constant with ``constant``. clip: largest gradient
    norm, None: no limit. l2: the weight decay is part of the gradient (Adam) instead of a separate
    step (AdamW). averaged: number of last epochs whose test scores are averaged. epochs: of the
    training data, instead of steps. train, test: examples (validation: as many as test). length:
    of a sequence, unless the case defines it. inner: the MLP's width, None: 8/3 of the width.
    """

    cases: tuple[str, ...]
    rows: tuple[str, ...]
    steps: int
    batch: int
    rates: tuple[float, ...]
    train: int
    test: int
    width: int
    heads: int
    layers: int = 1
    seeds: int = 3
    length: int = 0
    inner: int | None = None
    init_std: float = 0.02
    weight_decay: float = 0.0
    warmup: float = 0.1
    clip: float | None = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    l2: bool = False
    floor: float = 0.0
    constant: bool = False
    averaged: int = 1
    epochs: int = 0

    def key(self) -> str:
        """Hash of all settings that affect the result of a trial.

        Row, case, rate and seed are not included, nor is the selection of rows, cases, rates and
        seeds, nor are settings of LATER with their defaults.
        """
        settings = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("cases", "rows", "rates", "seeds")
            and not (name in LATER and value == getattr(Size, name))
        }
        return sha256_json(settings)[:12]


@dataclass(frozen=True)
class Claim:
    """An order that the paper reports: ``above`` is better than ``below`` in each of ``cases``
    (empty: in all).
    """

    above: str
    below: str
    cases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Experiment:
    """One table of a paper; its title and remarks are in experiments.yaml.

    metric: the reported score, on test data unless its name begins with ``train_``. falls: smaller
    is better. scale: factor for tables. also: further scores with separate tables, name ->
    description. curves: values recorded per iteration, likewise. published: (case, row) -> the
    paper's number in the units of the table. means: column that is a mean -> its cases. chance:
    case -> score of guessing. enough: mean score from which two rows count as equal. problem:
    (case, row, size, seed) -> the training problem.
    """

    name: str
    metric: str
    rows: Mapping[str, Any]
    sizes: Mapping[str, Size]
    problem: Callable[[str, str, Size, int], Problem]
    falls: bool = False
    scale: float = 1.0
    also: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[tuple[str, str], float] = field(default_factory=dict)
    means: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    chance: Callable[[str, Size], float] | None = None
    enough: float = math.inf

    @property
    def cases(self) -> tuple[str, ...]:
        """Cases of all sizes: any may be run at any size."""
        return tuple(dict.fromkeys(case for size in self.sizes.values() for case in size.cases))


@cache
def texts() -> dict[str, Any]:
    """Return experiment -> title, remarks and published numbers, from experiments.yaml."""
    return read_values(Path(__file__).with_name("experiments.yaml"))


def published(name: str) -> dict[tuple[str, str], float]:
    """Return (case, row) -> the paper's number. name: of the experiment."""
    text = texts()[name]
    found = {}
    for row, values in text["rows"].items():
        for case, value in zip(text["cases"], values, strict=True):
            found[case, row] = value
    return found


@dataclass(frozen=True)
class Trial:
    """One training run of an experiment; its fields identify its result."""

    case: str
    row: str
    rate: float
    seed: int
    size: str


Results = dict[Trial, dict[str, Any]]


def gather(folder: Path) -> Results:
    """Return the trials in all ``results*.jsonl`` of a folder, including those of an array's tasks.
    Raises ConfigError.
    """
    results: Results = {}
    for path in sorted(folder.glob("results*.jsonl")):
        results |= read_results(path)
    return results


def read_results(path: Path) -> Results:
    """Return the trials in a file of JSON lines; {} if it does not exist. An incomplete last line
    is ignored.

    Raises:
        ConfigError: another line is not a trial.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    results: Results = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            trial = Trial(**{name: record.pop(name) for name in Trial.__dataclass_fields__})
        except (ValueError, KeyError, AttributeError, TypeError):
            if not line.endswith("\n"):
                break
            raise ConfigError(
                f"{path}, line {number}: not a trial of this tool; repair the line or remove it"
            ) from None
        results[trial] = record
    return results


def line_of(trial: Trial, record: Mapping[str, Any]) -> str:
    """Return the trial's line of the file."""
    return json.dumps({**asdict(trial), **record}) + "\n"


@dataclass(frozen=True)
class Outcome:
    """Results of one experiment at one size. kind: name of the size, ``quick`` or ``full``."""

    experiment: Experiment
    kind: str
    size: Size
    results: Results

    @property
    def name(self) -> str:
        """Name of the experiment and of the size, as in the names of files."""
        return f"{self.experiment.name}-{self.kind}"

    @property
    def rows(self) -> list[str]:
        """Rows of the experiment that have a result."""
        return [row for row in self.experiment.rows if any(row == one.row for one in self.results)]

    @property
    def cases(self) -> list[str]:
        """Cases of the experiment that have a result."""
        known = self.experiment.cases
        return [case for case in known if any(case == one.case for one in self.results)]

    @property
    def columns(self) -> list[str]:
        """Columns of a table: the cases, then the means of which every case has a result."""
        cases = self.cases
        means = self.experiment.means.items()
        return cases + [name for name, parts in means if all(part in cases for part in parts)]

    def best_rate(self, case: str, row: str) -> float | None:
        """Return the learning rate that is best on validation data with the first seed.

        Returns None until all rates were tried. A diverged trial counts as the worst.
        """
        rates, falls = self.size.rates, self.experiment.falls
        worst = math.inf if falls else -math.inf
        tried = [self.results.get(Trial(case, row, rate, 0, self.size.key())) for rate in rates]
        found = []
        for record in tried:
            if record is None:
                return None
            value = record["validation"]
            found.append(worst if value is None else value)
        return rates[found.index(min(found) if falls else max(found))]

    def by_seed(self, case: str, row: str) -> dict[int, dict[str, Any]]:
        """Return seed -> record of the trials with the best rate, in order of the seeds.

        Diverged trials are omitted. The result is empty if `best_rate` is None. For a mean, scores
        are means over its cases, and a seed needs a result in each of them.
        """
        if case in self.experiment.means:
            parts = [self.by_seed(part, row) for part in self.experiment.means[case]]
            names = [self.experiment.metric, *self.experiment.also]
            return {
                seed: {name: fmean(part[seed][name] for part in parts) for name in names}
                for seed in parts[0]
                if all(seed in part for part in parts)
            }
        rate = self.best_rate(case, row)
        if rate is None:
            return {}
        found = {}
        for seed in range(self.size.seeds):
            record = self.results.get(Trial(case, row, rate, seed, self.size.key()))
            if record is not None and record["validation"] is not None:
                found[seed] = record
        return found

    def values(self, case: str, row: str, metric: str | None = None) -> list[float]:
        """Return a score of `by_seed` in the units of the table, by default the experiment's."""
        metric = metric or self.experiment.metric
        return [
            self.experiment.scale * record[metric] for record in self.by_seed(case, row).values()
        ]


# Quantiles of Student's t at 97.5 % for 1, 2, ... degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def interval(values: Iterable[float]) -> tuple[float, float]:
    """Return the mean, and half the width of its 95% confidence interval by Student's t.

    The half width is infinite for one value.
    """
    found = list(values)
    mean, freedom = fmean(found), len(found) - 1
    if not freedom:
        return mean, float("inf")
    spread = (sum((value - mean) ** 2 for value in found) / freedom / len(found)) ** 0.5
    return mean, spread * T_975[min(freedom, len(T_975)) - 1]
