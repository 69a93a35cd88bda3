"""``coord-check``: train each width for a few steps and check that the size of every activation is
independent of the width.

This is the promise of muP (arXiv 2203.03466), checked in the model that the run builds, with its
optimizer. Exit code 0: flat within 2x; 1: not. With ``--compare`` the verdict is muP's, and the
standard parametrization is shown for comparison.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fem_common.config import read_values
from fem_common.errors import ConfigError
from fem_common.plot import QUIET, colour_of, plain_axes, png
from fem_common.text import aligned, counted, markdown_table
from fem_megatron.catalogue import describe, mixer_names
from fem_megatron.config import ModelConfig
from pretrain.config import RunConfig, load_run
from pretrain.data.facts import any_on_disk
from pretrain.validate import prepare, validate
from tools.scaling.pictures import headed, legend_below, log_axis, marked, titled_figure
from tools.scaling.planned_runs import shaped
from tools.scaling.study import Study, load_study
from tools.scaling.table import write_file

if TYPE_CHECKING:
    import numpy as np

WIDTHS = "64,128,256,512"
LONGEST, SEQUENCES, VOCABULARY = 128, 4, 512
# One process with the peak learning rate from the first step on: a warm-up would hide the effect
# of a step.
OWN = (
    f"train.precision=fp32 train.global_batch_size={SEQUENCES} optimizer.schedule=constant"
    " optimizer.warmup_steps=0 optimizer.warmup_tokens=null optimizer.decay_steps=null"
    " optimizer.decay_tokens=null optimizer.min_lr=0"
).split()
FORCED = (
    "train.tokens=null train.recompute=none parallel.world_size=1"
    " parallel.tensor_model_parallel_size=1 parallel.pipeline_model_parallel_size=1"
    " parallel.virtual_pipeline_model_parallel_size=null parallel.sequence_parallel=false"
    " parallel.overlap_grad_reduce=false parallel.overlap_param_gather=false evaluate.interval=0"
    " evaluate.at_end=false log.device=null"
).split()
NO_DATA = ("data.train=[]", "data.valid=[]", "data.test=[]")
# Sizes that are scaled in proportion to the width of the run.
PROPORTIONAL = (
    "num_attention_heads num_query_groups ffn_hidden_size fem.value_size fem.conditioner_size"
    " delta.heads delta.key_size delta.value_size mamba2.inner_size"
).split()


@dataclass(frozen=True)
class Case:
    """One model to check: its name, its run file and the settings that override the file.

    ``counts``: whether its verdict affects the exit code. ``study``: the study whose shape rule
    gives the shape at each width; None scales the run's own shape.
    """

    name: str
    base: Path
    words: tuple[str, ...]
    counts: bool = True
    study: Study | None = None

    def config(self, width: int, steps: int) -> RunConfig:
        """Return the run at ``width`` with the settings of the check. Raises ConfigError (no such
        shape, or an invalid run), StorageError.
        """
        run = load_run(self.base, [*OWN, *self.words])
        given = any(word.partition("=")[0].strip() == "data.seq_length" for word in self.words)
        length = () if given else (f"data.seq_length={min(run.data.seq_length, LONGEST)}",)
        forced = [
            *FORCED,
            f"train.steps={steps}",
            f"train.micro_batch_size={run.train.global_batch_size}",
        ]
        shape = (
            _shape(run.model, width) if self.study is None else _shape_of_study(self.study, width)
        )
        words = [*OWN, *length, *self.words, *forced, *shape]
        config = load_run(self.base, words)
        for name in mixer_names(config.model):
            if describe(name).package is not None:
                raise ConfigError(
                    f"model.mixer: {name} is a layer of another package, which muP and this check"
                    " do not support; leave it out"
                )
        if any_on_disk(config):
            return prepare(config, 1).config
        if config.model.vocab_size is None:
            config = load_run(self.base, [*words, f"model.vocab_size={VOCABULARY}"])
        validate(config, 1)
        return config


def _shape(model: ModelConfig, width: int) -> list[str]:
    """Return the run's shape at another width: the size of heads and the number of layers stay;
    widths scale proportionally.
    """
    words = [f"model.hidden_size={width}"]
    for key in PROPORTIONAL:
        size = attrgetter(key)(model)
        if not isinstance(size, int):
            continue
        if key.endswith(("heads", "num_query_groups")) and size * width % model.hidden_size:
            step = model.hidden_size // math.gcd(size, model.hidden_size)
            near = max(1, round(width / step)) * step
            raise ConfigError(
                f"--widths: {width} gives no whole number for model.{key} with the run's size of a"
                f" head ({size} at model.hidden_size = {model.hidden_size}); the nearest valid"
                f" width: {near}"
            )
        words.append(f"model.{key}={round(size * width / model.hidden_size)}")
    return words


def _shape_of_study(study: Study, width: int) -> list[str]:
    """Return settings for the study's shape at ``width``, except that all widths have the same
    depth.

    The number of layers is that of the study's first size, or else of the base run.
    """
    layers = study.sizes[0].layers if study.sizes else None
    shape = shaped(study.shape, width).words
    words = [word for word in shape if not word.startswith("model.num_layers=")]
    return words if layers is None else [*words, f"model.num_layers={layers}"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "file",
        type=Path,
        metavar="FILE.yaml",
        help=(
            "a run configuration, or a study, of which each variant is checked with its shape rule"
        ),
    )
    parser.add_argument(
        "--mixer",
        action="append",
        default=[],
        metavar="M,..",
        help="check these mixers instead of the file's",
    )
    parser.add_argument(
        "--widths",
        metavar="N,..",
        help=f"widths to check (default: the widths of the study, or {WIDTHS})",
    )
    parser.add_argument(
        "--steps", type=int, default=10, metavar="N", help="optimizer steps (default: 10)"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=2,
        metavar="N",
        help="number of initialisations to average over (default: 2)",
    )
    parser.add_argument(
        "--random",
        action="store_true",
        help="draw tokens from Zipf's law even if the data of the run exists",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="check both muP and the standard parametrization; the exit code depends on muP only",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder of the results (default: runs/coord-check/NAME)",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace those of the file",
    )


def main(arguments: argparse.Namespace) -> int:
    """Check, print the tables, and write coordinates.csv, coordinates.md and the pictures. Return 0
    if everything judged is flat, else 1.

    Raises ConfigError (the file, a width or a setting is invalid), StorageError.
    """
    study = load_study(arguments.file) if "base" in read_values(arguments.file) else None
    widths = _widths(arguments.widths, study)
    steps, seeds = arguments.steps, arguments.seeds
    for name, value in (("--steps", steps), ("--seeds", seeds)):
        if value < 1:
            raise ConfigError(f"{name} {value}: must be at least 1")
    words = (*arguments.words, *(NO_DATA if arguments.random else ()))
    requested = cases(study or arguments.file, arguments.mixer, words, arguments.compare)
    out = arguments.out or Path("runs") / "coord-check" / arguments.file.stem
    # Read the configurations of all cases and widths before the first one is trained.
    planned = []
    for case in requested:
        planned.append((case, {width: case.config(width, steps) for width in widths}))
    from fem_megatron.megatron.upstream import import_megatron

    import_megatron()
    from tools.scaling import activations

    flat = True
    records = []
    with activations.one_process(planned[0][1][widths[0]]):
        for case, configs in planned:
            found = _measure(case, configs, steps, seeds)
            records += found
            flat &= _print_verdict(found) or not case.counts
    _write(out, records)
    return 0 if flat else 1


def _widths(text: str | None, study: Study | None) -> list[int]:
    """Return the requested widths, else the study's, else WIDTHS."""
    if text is None:
        sizes = study.sizes if study else ()
        stated = [str(size.width) for size in sizes if size.width is not None]
        text = ",".join(stated) if len(stated) > 1 else WIDTHS
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) for part in parts):
        raise ConfigError(
            f"--widths {text}: expected whole numbers separated by commas, such as 64,128,256"
        )
    widths = sorted({int(part) for part in parts})
    if len(widths) < 2:
        raise ConfigError(
            f"--widths {text}: one width is not enough to measure growth; give two or more"
        )
    return widths


def cases(
    source: Study | Path, mixers: Sequence[str], words: tuple[str, ...], compare: bool
) -> list[Case]:
    """Return the models to check: a run or a study's base with each mixer, each variant of the
    study, or the run itself.

    With ``compare``: each in the standard parametrization and under muP. Raises ConfigError (the
    file is invalid), StorageError.
    """
    study = source if isinstance(source, Study) else None
    base = Path(source.base) if isinstance(source, Study) else source
    shared = study.settings if study else ()
    variants: dict[str, tuple[str, ...]] = {}
    for part in mixers:
        for name in map(str.strip, part.split(",")):
            variants[name] = (f"model.mixer={name}",)
    if not variants and study:
        variants = study.variants
    elif not variants:
        variants = {load_run(base, words).model.mixer: ()}
    found = [
        Case(name, base, (*shared, *given, *words), study=study) for name, given in variants.items()
    ]
    if not compare:
        return found
    both = []
    for case in found:
        # The base sizes of muP are refused without muP, so remove them.
        standard = [word for word in case.words if not word.startswith("model.mup.")]
        standard += ["model.mup={}", "model.parametrization=standard"]
        both.append(replace(case, words=tuple(standard), counts=False))
        both.append(replace(case, words=(*case.words, "model.parametrization=mup")))
    return both


def _measure(case: Case, configs: dict[int, RunConfig], steps: int, seeds: int) -> list[Record]:
    from tools.scaling import activations

    one = next(iter(configs.values()))
    tokens, source = _tokens(one)
    mup: str = one.model.parametrization
    if mup == "mup":
        mup = f"mup, base width {one.model.mup.base_hidden_size}"
    print(
        f"\n{case.name}, {mup}: {one.model.num_layers} layers, {steps} steps at a learning rate of"
        f" {one.optimizer.lr:g} on one batch of {one.train.global_batch_size} x"
        f" {one.data.seq_length} tokens, {source}; mean of {counted(seeds, 'seed')}",
        flush=True,
    )
    found = []
    started = time.monotonic()
    for config in configs.values():
        for seed in range(one.train.seed, one.train.seed + seeds):
            seeded = replace(config, train=replace(config.train, seed=seed))
            found += activations.measure(case.name, seeded, tokens, steps)
    print(f"trained in {time.monotonic() - started:.0f} s\n", flush=True)
    return found


def _tokens(config: RunConfig) -> tuple[np.ndarray, str]:
    """Return the tokens of the batch, and a description of their source."""
    from tools.diagnose.from_checkpoint import first_tokens
    from tools.scaling.activations import zipf_tokens

    count = config.train.global_batch_size * (config.data.seq_length + 1)
    if not any_on_disk(config):
        assert config.model.vocab_size is not None
        words = f"drawn by Zipf's law from {config.model.vocab_size}"
        if config.data.train:
            words += " (the data of the run does not exist)"
        return zipf_tokens(count, config.model.vocab_size), words
    prefix = Path(config.data.train[0].prefix)
    found = first_tokens(prefix, count)
    if len(found) < count:
        raise ConfigError(
            f"data.train.0.prefix = {prefix}: {len(found)} tokens, but a batch needs {count}; set"
            " train.global_batch_size=1"
        )
    return found, f"the first of {prefix}"


def _print_verdict(records: Sequence[Record]) -> bool:
    """Print the table and the verdict of a case; return True if all judged quantities are flat."""
    verdicts = judge(records)
    print(table(verdicts))
    found, first = worst(verdicts), records[0]
    print(
        f"{first.variant}, {first.parametrization}: {'flat' if found.flat else 'NOT flat'} within"
        f" {LIMIT:g}x; largest deviation: {found.site}, {found.quantity}: {found.ratio:.2f} over"
        f" widths {found.widths[0]}-{found.widths[-1]} ({found.words})"
    )
    return found.flat


def _write(out: Path, records: Sequence[Record]) -> None:
    variants = {record.variant for record in records}
    contents = {
        "coordinates.csv": as_csv(records).encode(),
        "coordinates.md": summary(records).encode(),
    }
    for variant, own in itertools.groupby(records, attrgetter("variant")):
        name = "coordinates.png" if len(variants) == 1 else f"coordinates_{variant}.png"
        contents[name] = png(coordinates(list(own)))
    for name, content in contents.items():
        write_file(out / name, content)
    print(f"\nwrote {out}: {', '.join(contents)}")


# --- verdicts -------------------------------------------------------------------------------------
# Tensor Programs V (arXiv 2203.03466), appendix D.1: under muP no activation, and no change of it
# by training, grows or vanishes with the width.


LIMIT = 2.0
"""Largest ratio between two widths that counts as flat."""


@dataclass(frozen=True)
class Record:
    """Measurement of one site of one model at one step.

    variant: a mixer's name, or a study's variant. step: number of optimizer steps done. site:
    ``embedding``, ``layer_03/mixer``, ``layer_03/mlp``, ``residual`` or ``logits``; a layer's
    numbers are those of its addition to the residual stream. scale: root mean square of the
    activation over batch, tokens and channels. change: the same of the activation's difference from
    step 0.
    """

    variant: str
    parametrization: str
    width: int
    seed: int
    step: int
    site: str
    scale: float
    change: float


@dataclass(frozen=True)
class Verdict:
    """Verdict on how one quantity (scale or change) of one site depends on the width at the last
    step.

    values: means over the seeds, one per width. judged: False if theory allows the quantity to
    change with the width.
    """

    site: str
    quantity: str
    widths: tuple[int, ...]
    values: tuple[float, ...]
    judged: bool

    @property
    def ratio(self) -> float:
        """Largest value divided by the smallest; infinite if one is not finite or is zero."""
        if not all(math.isfinite(value) for value in self.values) or min(self.values) <= 0:
            return math.inf
        return max(self.values) / min(self.values)

    @property
    def exponent(self) -> float:
        """Slope of log value over log width by least squares; NaN if the ratio is infinite."""
        if math.isinf(self.ratio):
            return math.nan
        return statistics.linear_regression(
            [*map(math.log, self.widths)], [*map(math.log, self.values)]
        ).slope

    @property
    def flat(self) -> bool:
        """True if the largest value is at most ``LIMIT`` times the smallest."""
        return self.ratio <= LIMIT

    @property
    def words(self) -> str:
        """Text of the verdict for the table. It is in brackets if the quantity is not judged."""
        if not all(math.isfinite(value) for value in self.values):
            text = "not finite"
        elif math.isinf(self.ratio):
            text = "does not move" if self.quantity == "change" else "zero"
        elif self.flat:
            text = "flat"
        else:
            text = f"{'grows' if self.exponent > 0 else 'shrinks'} as width^{self.exponent:.2f}"
        return text if self.judged else f"({text})"


def judge(records: Sequence[Record]) -> list[Verdict]:
    """Return the verdicts on the scale and the change of every site, in the order of the sites.

    ``records`` belong to one variant under one parametrization. The scale of the logits is shown
    but not judged: under muP their initial weights decrease with the width, so logits start near
    zero. The effect of training on the logits is their change, which is judged.
    """
    last = max(record.step for record in records)
    at_end = [record for record in records if record.step == last]
    widths = tuple(sorted({record.width for record in at_end}))
    sites = dict.fromkeys(record.site for record in at_end)
    found = []
    for site, quantity in itertools.product(sites, QUANTITIES):
        values = []
        for width in widths:
            own = [one for one in at_end if (one.site, one.width) == (site, width)]
            values.append(sum(getattr(one, quantity) for one in own) / len(own))
        judged = (site, quantity) != ("logits", "scale")
        found.append(Verdict(site, quantity, widths, tuple(values), judged))
    return found


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the judged verdict with the largest ratio."""
    return max(
        (verdict for verdict in verdicts if verdict.judged), key=lambda verdict: verdict.ratio
    )


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as text, one row per quantity of a site, one column per width."""
    rows = [("site", "", *map(str, verdicts[0].widths), "max/min", "exponent", "verdict")]
    for verdict in verdicts:
        numbers = [f"{value:.4g}" for value in verdict.values]
        numbers += [f"{verdict.ratio:.2f}", f"{verdict.exponent:+.2f}"]
        rows.append((verdict.site, verdict.quantity, *numbers, verdict.words))
    return "\n".join(aligned(rows, left=(0, 1, len(rows[0]) - 1)))


def summary(records: Sequence[Record]) -> str:
    """Return the worst judged ratio of each variant as Markdown, one column per parametrization."""
    columns = list(dict.fromkeys(record.parametrization for record in records))
    rows = []
    for variant in dict.fromkeys(record.variant for record in records):
        cells = [f"`{variant}`"]
        for name in columns:
            key = (variant, name)
            own = [one for one in records if (one.variant, one.parametrization) == key]
            ratio = worst(judge(own)).ratio if own else math.nan
            cells.append(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}")
        rows.append(cells)
    return markdown_table(["variant", *columns], rows) + "\n"


def as_csv(records: Sequence[Record]) -> str:
    """Return all records as CSV, with the shortest digits from which each number is read back
    exactly.
    """
    return str(pd.DataFrame(records).to_csv(index=False, lineterminator="\n", na_rep="nan"))


BLOCKS = 3  # number of blocks in the picture: the first, the middle and the last one
LINES = ("-", (0, (5, 2)), (0, (1, 1.5)))  # line styles of these blocks
QUANTITIES = {"scale": "RMS", "change": "RMS of the change since step 0"}
NAMES = {"mup": "muP", "standard": "standard parametrization"}


def coordinates(records: Sequence[Record]) -> Any:
    """Return a figure of one variant's records at their last step, one column per parametrization.

    All panels share their axes, so that slopes are comparable. Lines with a value that is zero or
    not finite are omitted.
    """
    verdicts = {}
    for name in NAMES:
        group = [record for record in records if record.parametrization == name]
        if group:
            verdicts[name] = judge(group)
    styles = _styles(shown_sites(records))
    steps = max(record.step for record in records)
    title = (
        f"Coordinate check of {records[0].variant}: activations after {steps} steps by width,"
        f" relative to those at the smallest width\nflat: all widths within {LIMIT:g}x of each"
        f" other; grey: within {LIMIT:g}x of the smallest width"
    )
    figure = titled_figure(
        (max(7.0, 5.0 * len(verdicts)), 7.0 + 0.23 * math.ceil(len(styles) / 4)), title, 10.5
    )
    grid = figure.subplots(len(QUANTITIES), len(verdicts), squeeze=False, sharex=True, sharey=True)
    for column, (name, found) in enumerate(verdicts.items()):
        for row, (quantity, words) in enumerate(QUANTITIES.items()):
            axes = grid[row, column]
            some = [verdict for verdict in found if verdict.quantity == quantity]
            _panel(axes, [verdict for verdict in some if verdict.site in styles], styles)
            most = worst(some)
            verdict = f"at most x {most.ratio:.2f}" if math.isfinite(most.ratio) else most.words
            verdict_text = (
                f"{'flat' if most.flat else 'not flat'}: {verdict} ({in_words(most.site)})"
            )
            headed(axes, f"{NAMES[name]}, {words}\n{verdict_text}")
            plain_axes(
                axes,
                "width of the model" if row else "",
                f"relative to width {found[0].widths[0]}" if not column else "",
            )
    low, high = grid[0, 0].get_ylim()
    log_axis(grid[0, 0].yaxis, low, high, "number")
    widths = next(iter(verdicts.values()))[0].widths
    grid[0, 0].set_xticks(widths, [str(width) for width in widths])
    labels = []
    for site in styles:
        label = in_words(site)
        if site == "logits":
            label += " (pale: not judged)"
        labels.append(label)
    handles = [marked(linewidth=1.4, markersize=4.5, **style) for style in styles.values()]
    legend_below(figure, handles, labels, 4)
    return figure


def shown_sites(records: Sequence[Record]) -> list[str]:
    """Return the sites that the figure shows, in order. Only the first, the middle and the last
    block of a deep model are shown.
    """
    sites = list(dict.fromkeys(record.site for record in records))
    blocks = list(dict.fromkeys(site.partition("/")[0] for site in sites if "/" in site))
    if len(blocks) > BLOCKS:
        blocks = [blocks[0], blocks[len(blocks) // 2], blocks[-1]]
    return [site for site in sites if "/" not in site or site.partition("/")[0] in blocks]


def in_words(site: str) -> str:
    """Convert ``layer_03/iteration_01/mixer`` to "layer 3, iteration 1: mixer"."""
    *place, part = site.split("/")
    words = [f"{word.rpartition('_')[0]} {int(word.rpartition('_')[2])}" for word in place]
    return f"{', '.join(words)}: {part}" if words else part


def _styles(sites: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the style of each site: colour and marker by its kind, line style by its block."""
    kinds = list(dict.fromkeys(site.rpartition("/")[2] for site in sites))
    blocks = list(dict.fromkeys(site.partition("/")[0] for site in sites if "/" in site))
    styles = {}
    for site in sites:
        kind = kinds.index(site.rpartition("/")[2])
        line = LINES[blocks.index(site.partition("/")[0]) % len(LINES)] if "/" in site else "-"
        styles[site] = {**colour_of(kind), "linestyle": line}
    return styles


def _panel(axes: Any, verdicts: Sequence[Verdict], styles: dict[str, dict[str, Any]]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.axhspan(1 / LIMIT, LIMIT, color=QUIET, alpha=0.10, linewidth=0)
    for verdict in verdicts:
        if math.isfinite(verdict.ratio):
            over = [value / verdict.values[0] for value in verdict.values]
            style = {**styles[verdict.site], "alpha": 1.0 if verdict.judged else 0.35}
            axes.plot(verdict.widths, over, linewidth=1.4, markersize=4.5, **style)
