"""Study files: what is compared, at which sizes and lengths; the strict reader of their YAML. No
numpy, no torch.

The fields of `Study` are the keys and their documentation. ``planning`` creates the runs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fem_common.config import Node, load, read_values
from fem_common.errors import ConfigError
from fem_common.settings import setting

# For each choice of `FitConfig.parameters`, the column of the table that contains N, and its text.
SIZE_COLUMN = {"total": "parameters", "non_embedding": "non_embedding_parameters"}
SIZE_WORDS = {
    "total": "parameters",
    "non_embedding": "parameters without embedding and output layer",
}
APPROACHES = ("isoflop", "parametric")


def _keyed(node: Node, key: str) -> Node:
    """Convert the scalars of a list to mappings ``{key: scalar}``."""
    if not isinstance(node.value, list):
        return node
    items = [
        item if isinstance(item.value, dict) else Node({key: item}, item.where, "map")
        for item in node.value
    ]
    return replace(node, value=items)


def _sizes(node: Node) -> Node:
    """Convert widths, or ``{parameters: [...]}``, to mappings."""
    if isinstance(node.value, dict) and set(node.value) == {"parameters"}:
        return _keyed(node.value["parameters"], "parameters")
    return _keyed(node, "width")


@dataclass(frozen=True)
class FitConfig:
    """Settings of `tools.scaling.fits`; the defaults are those of the papers."""

    approaches: tuple[str, ...] = setting(
        APPROACHES,
        "Laws to fit: isoflop (approach 2 of Hoffmann et al.), parametric (approach 3).",
        APPROACHES,
    )
    parameters: str = setting(
        "total",
        "N of the laws: all parameters (as in Hoffmann et al.), or those outside the embedding.",
        tuple(SIZE_COLUMN),
    )
    interval: float = setting(0.9, "Level of all intervals.", above=0, below=1)
    resamples: int = setting(500, "Bootstrap resamples.", least=50)
    huber_delta: float = setting(
        1e-3,
        "Residual of the log loss at which the Huber loss changes from square to linear.",
        above=0,
        below=1,
    )
    seed: int = setting(1, "Seed of the bootstrap.", least=0)


STUDIES = Path("runs") / "studies"
TABLE, FIT = "runs.csv", "fit.json"  # files in the results of a study
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
VARIANT = re.compile(r"[A-Za-z][\w.]*")
FEWEST_SIZES = 3  # fewest sizes of a budget: a parabola has three coefficients
# Keys that the plan sets for every run -> key of the study that determines them.
PLANNED = {
    "name": "name",
    "run_dir": "directory",
    "train.seed": "seeds",
    "train.eval_interval": "validations",
    **dict.fromkeys(("train.steps", "train.tokens"), "budgets"),
    **dict.fromkeys(
        ("optimizer.warmup_steps", "optimizer.warmup_tokens", "optimizer.warmup_fraction"),
        "warmup, or warmup_steps",
    ),
    **dict.fromkeys(
        (
            f"model.{key}"
            for key in ("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size")
        ),
        "sizes",
    ),
    "parallel.world_size": "cluster.processes",
}
MLP_WIDTH = "model.ffn_hidden_size"
"""A variant may set it, for example to compare MLPs with equal numbers of parameters."""


@dataclass(frozen=True)
class ShapeRule:
    """Rule from a width to a complete shape; explicit numbers of a size have precedence."""

    head_size: int = setting(
        64, "Width of a head: heads = width / head_size, which must be a whole number.", above=0
    )
    aspect_ratio: float = setting(
        64.0, "layers = width / aspect_ratio, rounded to the nearest whole number.", above=0
    )
    min_layers: int = setting(2, "Fewest layers.", above=0)
    ffn_ratio: float = setting(
        8 / 3,
        "Inner width of the MLP over width, rounded up to a multiple of ffn_multiple.",
        above=0,
    )
    ffn_multiple: int = setting(64, "Divisor of the MLP's inner width.", above=0)


@dataclass(frozen=True)
class Size:
    """One size: a width, or a number of parameters for which the nearest width of the rule is
    searched.
    """

    width: int | None = setting(None, "Width of the residual stream.", above=0)
    layers: int | None = setting(None, "Layers; null: by the rule.", above=0)
    heads: int | None = setting(None, "Heads; null: by the rule.", above=0)
    ffn: int | None = setting(None, "Inner width of the MLP; null: by the rule.", above=0)
    parameters: float | None = setting(
        None,
        "Instead of a width: non-embedding parameters of the baseline; the nearest width is used.",
        above=0,
    )

    @property
    def label(self) -> str:
        """Text that describes the size: its width, or its number of parameters."""
        return (
            f"width {self.width}" if self.width is not None else f"{self.parameters:g} parameters"
        )


@dataclass(frozen=True)
class Budget:
    """Training compute for several sizes."""

    flops: float = setting(0.0, "Training FLOPs of a run.", above=0)
    sizes: tuple[Size, ...] = setting(
        (), "Sizes of this budget; empty: those of the study.", expand=_sizes
    )


@dataclass(frozen=True)
class Cluster:
    """Assumptions for the expected hours of the plan."""

    processes: int = setting(1, "Processes per run, the world size.", above=0)
    at_once: int = setting(1, "Runs at the same time.", above=0)
    tflops: float | None = setting(
        None,
        "Assumed sustained model TFLOP/s of a process; null: the plan contains no hours.",
        above=0,
    )
    name: str = setting("", "Name of the machine in the text of the plan.")


@dataclass(frozen=True)
class Study:
    """A scaling-law study. ``path`` is its file; ``base``, ``directory`` and ``results`` are
    resolved paths.
    """

    name: str = setting("", "Name of the study; empty: the name of the file.")
    base: str = setting(
        "", "Run configuration that all runs share; relative to the folder of the study.", path=True
    )
    directory: str = setting(
        "",
        "Folder of the run directories; empty: runs/studies/NAME. Relative to the working"
        " directory.",
        path=True,
    )
    results: str = setting(
        "",
        "Folder in which collect, fit and plot write; empty: results/ in directory. Relative to the"
        " working directory.",
        path=True,
    )
    published: str = setting(
        "",
        "Folder of a table and a fit that are read if results has no table. Relative to the working"
        " directory.",
        path=True,
    )
    settings: tuple[str, ...] = setting((), "Settings section.key=value of all runs.")
    variants: dict[str, tuple[str, ...]] = setting(
        dict, "Variants to compare: name -> settings. The first one is the baseline."
    )
    shape: ShapeRule = setting(ShapeRule, "Rule that derives a shape from a width.")
    sizes: tuple[Size, ...] = setting(
        (),
        "Sizes: widths, or mappings; or {parameters: [...]}, targets for the rule.",
        expand=_sizes,
    )
    budgets: tuple[Budget, ...] = setting(
        (),
        "Training FLOPs, each for every size; an item {flops, sizes} has separate sizes.",
        expand=partial(_keyed, key="flops"),
    )
    tokens: tuple[float, ...] = setting(
        (), "Instead of budgets: training tokens of every size.", above=0
    )
    tokens_per_parameter: tuple[float, ...] = setting(
        (),
        "Instead of budgets: training tokens per parameter of the baseline of that size; the same"
        " for all variants.",
        above=0,
    )
    learning_rates: tuple[float, ...] | None = setting(
        None,
        "Peak learning rates; every run is trained with each of them. null: the rate of the variant"
        " or the base.",
        above=0,
    )
    seeds: tuple[int, ...] = setting(
        (1,), "Values of train.seed; every run is repeated with each of them.", least=0, below=2**32
    )
    warmup: float = setting(
        0.05, "Linear warm-up, as a share of the steps of a run.", least=0, below=1
    )
    warmup_steps: int | None = setting(
        None, "Linear warm-up in steps, instead of warmup; the same for all runs.", least=0
    )
    trunks: bool = setting(
        False,
        "Of the runs that differ only in length, the longest is trained completely, and the others"
        " are forks of it from the start of their decay: their losses equal those of uninterrupted"
        " runs bit for bit. Requires optimizer.schedule=wsd and warmup_steps.",
    )
    min_steps: int = setting(50, "Fewest steps of a run.", above=0)
    max_epochs: float = setting(4.0, "Largest number of passes over the training data.", above=0)
    validations: int = setting(
        5, "Validations per run, evenly spaced, the last one at the end.", above=0
    )
    cluster: Cluster = setting(Cluster, "Assumptions for the expected hours.")
    fit: FitConfig = setting(FitConfig, "Settings of `fit`.")
    path: str = setting(
        "",
        "Set by `load_study`.",
        check=lambda _: "it is set to the path of the study; leave it out",
    )

    @property
    def baseline(self) -> str:
        """The variant that the others are compared with."""
        return next(iter(self.variants))

    @property
    def least_steps(self) -> int:
        """Fewest steps of a run, so that its warm-up has at least one step."""
        if self.warmup_steps is not None:
            return max(self.min_steps, self.warmup_steps + 1)
        return max(self.min_steps, math.ceil(1 / self.warmup) if self.warmup else 1)

    def warmup_of(self, steps: int) -> int:
        """Return the warm-up steps of a run with ``steps`` steps."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return math.floor(self.warmup * steps + 0.5)

    @property
    def runs_csv(self) -> Path:
        """Table that `fit` and `plot` read; `collect` writes it to the results."""
        return self._read(TABLE)

    @property
    def fit_json(self) -> Path:
        """Fit that `plot` and `recommend` read; `fit` writes it to the results."""
        return self._read(FIT)

    def _read(self, name: str) -> Path:
        """Return the path of file ``name`` in the results folder or in the published folder.

        The published one is returned only if the study has one and its results folder contains
        neither the file nor a table.
        """
        results = Path(self.results)
        own = not self.published or (results / name).exists() or (results / TABLE).exists()
        return (results if own else Path(self.published)) / name


def add_study(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a verb that works on a study's results."""
    parser.add_argument("study", type=Path, metavar="STUDY.yaml", help="the study")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="FOLDER",
        help="read and write only in this folder (default: the results of the study in runs/)",
    )


def study_of(arguments: argparse.Namespace) -> Study:
    """Return the study named by the arguments of `add_study`. Raises as `load_study`."""
    study = load_study(arguments.study)
    if arguments.results is None:
        return study
    return replace(study, results=str(arguments.results), published="")


def load_study(path: str | Path) -> Study:
    """Read and check a study file; no run is planned.

    Raises ConfigError (an unknown key, a value with a wrong type or in contradiction to another),
    StorageError.
    """
    path = Path(path)
    if "model" in read_values(path):
        raise ConfigError(
            f"{path} is the configuration of a run, not a study; name a study, such as"
            " configs/studies/cpu_small.yaml"
        )
    study = load(Study, path)
    name = study.name or path.stem
    directory = study.directory or str(STUDIES / name)
    base = os.path.normpath(path.parent / study.base) if study.base else ""
    results = study.results or str(Path(directory) / "results")
    study = replace(
        study, name=name, base=base, directory=directory, results=results, path=str(path)
    )
    try:
        _check(study)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return study


# --- checks of several fields; errors contain the keys, and the caller adds the file --------------


def _check(study: Study) -> None:
    if not NAME.fullmatch(study.name):
        raise ConfigError(
            f"name = {study.name!r}: it is the name of a folder: use only letters, digits, ., -"
            " and _"
        )
    if not study.base:
        raise ConfigError(
            "base is missing: set the run configuration that all runs share, such as base:"
            " ../run/demo.yaml"
        )
    _check_variants(study)
    _check_lists(study)
    _check_lengths(study)
    if not study.sizes and not all(budget.sizes for budget in study.budgets):
        raise ConfigError("sizes is empty: give widths, such as [128, 192, 256, 384]")
    _check_sizes("sizes", study.sizes)
    for number, budget in enumerate(study.budgets):
        sizes = budget.sizes or study.sizes
        _check_sizes(f"budgets.{number}.sizes", budget.sizes)
        if len(sizes) < FEWEST_SIZES:
            raise ConfigError(
                f"budgets.{number}: {budget.flops:g} FLOPs has {len(sizes)} sizes, but a parabola"
                f" needs at least {FEWEST_SIZES}; add sizes, or give tokens instead of budgets"
            )


def _check_variants(study: Study) -> None:
    if not study.variants:
        raise ConfigError(
            "variants is empty: give the variants to compare, such as {transformer:"
            " [model.mixer=transformer]}"
        )
    for variant, words in study.variants.items():
        if not isinstance(variant, str) or not VARIANT.fullmatch(variant):
            raise ConfigError(
                f"variants: {variant!r} is part of the names of runs: use a letter, then only"
                " letters, digits, . and _"
            )
        _check_words(study, f"variants.{variant}", words)
    _check_words(study, "settings", study.settings)


def _check_words(study: Study, key: str, words: Sequence[str]) -> None:
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"{key}: '{word}' is not of the form section.key=value")
        if name in PLANNED and not (name == MLP_WIDTH and key.startswith("variants.")):
            raise ConfigError(
                f"{key}: {name} is set for every run by the plan; set {PLANNED[name]} of the study"
                " instead"
            )
        if name == "optimizer.lr" and study.learning_rates is not None:
            raise ConfigError(
                f"{key}: optimizer.lr and learning_rates are both given; keep one of them"
            )
    repeated = _repeated(word.partition("=")[0] for word in words)
    if repeated is not None:
        raise ConfigError(f"{key}: {repeated} is given twice")


def _check_lists(study: Study) -> None:
    if not study.seeds:
        raise ConfigError("seeds is empty: give at least one, such as [1]")
    if not study.fit.approaches:
        raise ConfigError(f"fit.approaches is empty: give {' or '.join(APPROACHES)}")
    if study.learning_rates is not None and not study.learning_rates:
        raise ConfigError("learning_rates is empty: give rates, or null for those of the variants")


def _check_lengths(study: Study) -> None:
    """Check that exactly one key defines the lengths of the runs, and that no length occurs
    twice.
    """
    ways = [key for key in ("budgets", "tokens", "tokens_per_parameter") if getattr(study, key)]
    if len(ways) != 1:
        problem = "none of budgets, tokens and tokens_per_parameter is given"
        if ways:
            problem = f"{' and '.join(ways)} are both given"
        raise ConfigError(f"{problem}: exactly one of them must set the length of the runs")
    if study.trunks and study.warmup_steps is None:
        raise ConfigError(
            "trunks: a warm-up as a share of the steps differs between runs; give it in steps, such"
            " as warmup_steps: 100"
        )
    lists: dict[str, Sequence[float]] = {
        "tokens": study.tokens,
        "tokens_per_parameter": study.tokens_per_parameter,
        "learning_rates": study.learning_rates or (),
        "budgets": [budget.flops for budget in study.budgets],
        "seeds": study.seeds,
    }
    for key, values in lists.items():
        repeated = _repeated(values)
        if repeated is not None:
            raise ConfigError(
                f"{key}: {repeated:g} is given twice, so two runs would be the same; give it once"
            )


def _check_sizes(key: str, sizes: tuple[Size, ...]) -> None:
    for number, size in enumerate(sizes):
        if (size.width is None) == (size.parameters is None):
            raise ConfigError(f"{key}.{number}: give a width, or parameters instead")
        if size.parameters is not None and size != Size(parameters=size.parameters):
            raise ConfigError(
                f"{key}.{number}: parameters lets the rule choose the shape; give a width together"
                " with layers, heads or ffn"
            )
    repeated = _repeated(sizes)
    if repeated is not None:
        raise ConfigError(
            f"{key}: {repeated.label} is given twice, so two runs would be the same; give it once"
        )


def _repeated(values: Iterable[Any]) -> Any:
    """Return the first repeated value, or None."""
    seen = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None
