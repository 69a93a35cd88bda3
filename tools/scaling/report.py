"""The words and tables of a study's report: what was asked, the runs, the laws with their intervals, the statements; as HTML and Markdown.

Everything is said by the fit; nothing is computed here but sums, and the optimum at the largest budget.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from fem_common.errors import ConfigError

from .collecting import Collected
from .laws import Estimate
from .results import StudyFit, VariantFit, optimal
from .study import Size, Study

_CAPTIONS = {
    "isoflop": "Held-out loss against model size at equal training compute. Each curve is a parabola in log N through the runs of one "
    "budget; its minimum is the best size for that compute. A minimum outside the sizes measured is open and makes no law.",
    "frontier": "Best model size and training tokens against compute, a row a variant. Points and coloured lines: minima of the isoFLOP "
    "parabolas and the power law through them, with its band; grey: those of the others. Dashed: the optimum by the parametric law.",
    "loss_compute": "Held-out loss against training compute of all variants. Points: finished runs. Faint lines: validations on the way, "
    "at a learning rate not yet decayed, so they lie above what a run of that length would reach.",
    "residuals": "Each run's loss against its variant's parametric law, in percent. A trend with size or budget says that the law has the "
    "wrong form here; the grey band is the typical distance.",
    "learning_rate": "Held-out loss against the peak learning rate at each size, and the optimum against size. A minimum at the smallest "
    "or largest rate is no optimum: the best rate lies there or beyond.",
}
_EXPONENTS = ("E", "A", "B", "alpha", "beta", "a", "b")


@dataclass(frozen=True)
class Listing:
    """A table of text: its title, its header, its rows."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """All that the report says. ``asked``: pairs of a word and what it is; ``left_out``: runs that are not in the table, with reasons."""

    study: str
    asked: tuple[tuple[str, str], ...]
    statements: tuple[str, ...]
    laws: tuple[Listing, ...]
    best: Listing
    runs: Listing
    left_out: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    interval: str
    commands: tuple[str, ...]


def report_of(study: Study, fit: StudyFit, table: pd.DataFrame, collected: Collected | None, words: Sequence[str]) -> Report:
    """The report of a fitted study; ``words`` are the study's file and, where they were named, its results, as a reader would type them."""
    final = table[table["final"]]
    laws = (_parametric(fit), _isoflop(fit), _optima(fit, final), _multipliers(fit), _left_out(fit), _rates(fit))
    commands = [(verb, words[:1]) for verb in ("plan", "run")] + [(verb, words) for verb in ("collect", "fit", "plot")]
    return Report(
        study=fit.study,
        asked=tuple(_asked(study, fit, table, collected)),
        statements=tuple(_statements(fit)),
        laws=tuple(law for law in laws if law.rows),
        best=_best(fit, final),
        runs=_runs(final),
        left_out=tuple(collected.left_out.items()) if collected is not None else (),
        notes=(*fit.notes, *(f"{name}: {note}" for name, variant in fit.variants.items() for note in variant.notes)),
        interval=f"{fit.interval:.0%}",
        commands=tuple(f"python -m tools.scaling {verb} {' '.join(said)}" for verb, said in commands),
    )


def render_html(report: Report, pictures: dict[str, bytes]) -> str:
    """The report as one HTML file that needs nothing else."""
    images = [(name, base64.b64encode(content).decode(), _CAPTIONS[name]) for name, content in pictures.items()]
    return _templates().get_template("report.html.j2").render(report=report, images=images)


def render_summary(report: Report, pictures: Sequence[str]) -> str:
    """The main table, the statements and the pictures beside it as Markdown."""
    return _templates().get_template("summary.md.j2").render(report=report, images=[(name, _CAPTIONS[name]) for name in pictures])


def _templates() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


# --- numbers as text -----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """Four significant digits; a power of ten beyond 1e5 and below 1e-3."""
    return (
        f"{value:.3e}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")
        if abs(value) >= 1e5 or 0 < abs(value) < 1e-3
        else f"{value:.4g}"
    )


def estimate(value: Estimate | None, text: Callable[[float], str] = number) -> str:
    """A number with its interval: 0.49 (0.45–0.53); – where there is none."""
    if value is None:
        return "–"
    if value.low is None or value.high is None:
        return f"{text(value.value)} (no interval)"
    between = " to " if value.value < 0 else "–"
    return f"{text(value.value)} ({text(value.low)}{between}{text(value.high)})"


def _exponent(value: float) -> str:
    return f"{value:.3f}"


# --- the sections --------------------------------------------------------------------------------------------------------------


def _asked(study: Study, fit: StudyFit, table: pd.DataFrame, collected: Collected | None) -> Iterator[tuple[str, str]]:
    final = table[table["final"]]
    for number_of, (variant, words) in enumerate(study.variants.items()):
        role = ", the baseline" if number_of == 0 and len(study.variants) > 1 else ""
        yield f"variant {variant}{role}", " ".join(words) or "the base run as it is"
    yield "base run", Path(study.base).name
    if study.settings:
        yield "settings of all runs", " ".join(study.settings)
    yield "sizes", ", ".join(_size(size) for size in study.sizes) or "given with the budgets"
    lengths: dict[str, Sequence[float]] = {
        "training compute, FLOPs": [budget.flops for budget in study.budgets],
        "training tokens": study.tokens,
        "training tokens a parameter of the baseline": study.tokens_per_parameter,
        "peak learning rates": study.learning_rates or (),
    }
    for what, values in lengths.items():
        if values:
            yield what, ", ".join(number(value) for value in values)
    yield "seeds", ", ".join(map(str, study.seeds))
    planned = f" of {collected.planned} planned" if collected is not None else ""
    yield "finished runs", f"{len(final)}{planned}"
    yield "training tokens of all runs", number(float(final["tokens"].sum()))
    yield "training compute of all runs", f"{number(float(final['flops'].sum()))} FLOPs"
    hours = float(final["wall_seconds"].sum()) / 3600
    if hours > 0:
        yield "time in steps of all runs", f"{hours:.3g} hours"
    yield "N of the laws", "all parameters" if fit.parameters == "total" else "parameters without embedding and output layer"
    yield "data, tokenizer", f"{final['data'].iloc[0] or 'not told'}, {final['tokenizer'].iloc[0] or 'not told'}"


def _size(size: Size) -> str:
    return f"width {size.width}" if size.width is not None else f"{number(size.parameters or 0.0)} parameters"


def _statements(fit: StudyFit) -> Iterator[str]:
    """Comparisons first, then each variant's frontier."""
    yield from (comparison.words for comparison in fit.comparisons)
    for name, variant in fit.variants.items():
        if variant.isoflop is not None and variant.isoflop.n_opt is not None and variant.isoflop.d_opt is not None:
            n, d = variant.isoflop.n_opt.exponent, variant.isoflop.d_opt.exponent
            yield f"{name}: {_frontier('isoFLOP minima', n, d)}"
        if variant.parametric is not None:
            a, b = variant.parametric.a, variant.parametric.b
            yield f"{name}: {_frontier('parametric law', a, b)}"
        rates = variant.learning_rate
        if rates is not None and rates.by_parameters is not None:
            yield f"{name}: the best peak learning rate goes as N^{estimate(rates.by_parameters.exponent, _exponent)}."


def _frontier(by: str, n: Estimate, d: Estimate) -> str:
    return f"by the {by} the best size grows as C^{estimate(n, _exponent)}, the best tokens as C^{estimate(d, _exponent)}."


def _parametric(fit: StudyFit) -> Listing:
    rows = []
    for name, variant in fit.variants.items():
        law = variant.parametric
        if law is not None:
            exponents = (estimate(getattr(law, key), number if key in "EAB" else _exponent) for key in _EXPONENTS)
            rows.append((name, *exponents, f"{100 * law.noise:.2g}%", str(law.points), f"{law.resamples - law.failed} of {law.resamples}"))
    header = (
        "variant",
        "E, nats a token",
        "A",
        "B",
        "α",
        "β",
        "a: N ∝ C^a",
        "b: D ∝ C^b",
        "typical distance",
        "runs",
        "resamples converged",
    )
    return Listing("Parametric law L = E + A/N^α + B/D^β", header, tuple(rows))


def _isoflop(fit: StudyFit) -> Listing:
    rows = []
    for name, variant in fit.variants.items():
        for parabola in variant.isoflop.parabolas if variant.isoflop is not None else ():
            inside = "inside" if parabola.inside else "outside the sizes measured: no optimum"
            values = (estimate(parabola.n_opt), estimate(parabola.d_opt), estimate(parabola.loss)) if parabola.inside else ("–", "–", "–")
            rows.append((name, number(parabola.budget), *values, inside, str(len(parabola.runs))))
    header = ("variant", "budget, FLOPs", "best N", "best D, tokens", "loss there, nats a token", "minimum", "sizes")
    return Listing("Minima of the isoFLOP parabolas", header, tuple(rows))


def _optima(fit: StudyFit, final: pd.DataFrame) -> Listing:
    rows = []
    largest = float(final["budget"].max()) if final["budget"].notna().all() else float(final["flops"].max())
    for name, variant in fit.variants.items():
        for method in ("isoflop", "parametric"):
            best = _optimum(variant, largest, method)
            if best is not None:
                rows.append((name, "isoFLOP minima" if method == "isoflop" else "parametric law", *best))
    header = ("variant", "by", "best N", "best D, tokens", "loss, nats a token")
    return Listing(f"Least loss at {number(largest)} FLOPs, the largest compute measured", header, tuple(rows))


def _optimum(variant: VariantFit, flops: float, method: str) -> tuple[str, str, str] | None:
    try:
        best = optimal(variant, flops, method)
    except ConfigError:
        return None
    return estimate(best.n), estimate(best.d), estimate(Estimate(best.loss.mean, best.loss.low, best.loss.high))


def _multipliers(fit: StudyFit) -> Listing:
    rows = []
    for entry in fit.comparisons:
        by = "isoFLOP minima" if entry.method == "isoflop" else "parametric law"
        at = [(number(value.flops), number(value.loss), estimate(value.ratio, _exponent)) for value in entry.multipliers]
        if entry.overall is not None:
            at.append(("all", "", estimate(entry.overall, _exponent)))
        rows += [(entry.variant, by, *values) for values in at]
    baseline = fit.comparisons[0].baseline if fit.comparisons else ""
    header = ("variant", "by", f"{baseline}'s FLOPs", "loss reached, nats a token", f"share of {baseline}'s FLOPs; below 1 is better")
    return Listing("Compute for the same loss", header, tuple(rows))


def _left_out(fit: StudyFit) -> Listing:
    rows = [
        (
            name,
            number(entry.budget),
            str(entry.runs),
            f"{100 * entry.mean_error:.2g}%",
            f"{100 * entry.worst_error:.2g}% ({entry.worst_run})",
        )
        for name, variant in fit.variants.items()
        for entry in variant.left_out
    ]
    header = ("variant", "budget left out, FLOPs", "runs predicted", "mean error", "worst error")
    return Listing("Parametric law fitted without one budget, and how well it predicts that budget", header, tuple(rows))


def _rates(fit: StudyFit) -> Listing:
    rows = []
    for name, variant in fit.variants.items():
        for entry in variant.learning_rate.optima if variant.learning_rate is not None else ():
            rate = f"at the edge, {number(entry.rate.value)}: no optimum" if entry.edge else estimate(entry.rate)
            rows.append((name, number(entry.parameters), rate, number(entry.loss), ", ".join(number(value) for value in entry.rates)))
    header = ("variant", "parameters", "best peak learning rate", "loss there, nats a token", "rates measured")
    return Listing("Learning rates", header, tuple(rows))


def _best(fit: StudyFit, final: pd.DataFrame) -> Listing:
    """The least loss measured, a row a length (budget, else tokens), a column a variant."""
    by_budget = bool(final["budget"].notna().all())
    column = "budget" if by_budget else "tokens"
    rows = []
    for length, group in final.groupby(column):
        cells = []
        for name in fit.variants:
            runs = group[group["variant"] == name]
            if not len(runs):
                cells.append("–")
                continue
            least = runs.loc[runs["loss"].idxmin()]
            cells.append(f"{least['loss']:.4f} (N = {number(float(least['parameters']))})")
        rows.append((number(float(length)), *cells))
    header = ("training FLOPs" if by_budget else "training tokens", *fit.variants)
    return Listing("Least held-out loss measured, nats a token", header, tuple(rows))


def _runs(final: pd.DataFrame) -> Listing:
    rows = [_run_row(row) for _, row in final.iterrows()]
    header = (
        "run",
        "variant",
        "parameters",
        "without embedding",
        "tokens",
        "tokens a parameter",
        "FLOPs",
        "learning rate",
        "loss",
        "hours",
    )
    return Listing("Runs", header, tuple(rows))


def _run_row(row: Any) -> tuple[str, ...]:
    n, d = int(row["parameters"]), int(row["tokens"])
    inner = "–" if pd.isna(row["non_embedding_parameters"]) else f"{int(row['non_embedding_parameters']):,}"
    rate = "–" if pd.isna(row["learning_rate"]) else f"{row['learning_rate']:.4g}"
    hours = "–" if pd.isna(row["wall_seconds"]) else f"{row['wall_seconds'] / 3600:.3g}"
    return row["run"], row["variant"], f"{n:,}", inner, f"{d:,}", f"{d / n:.3g}", number(row["flops"]), rate, f"{row['loss']:.4f}", hours
