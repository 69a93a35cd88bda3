"""Texts and tables of a study's report: the question, the runs, the laws with intervals, the
statements; as HTML and Markdown.

All values come from the fit; only sums and the optimum at the largest budget are computed in this
module.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd

from fem_common.errors import ConfigError
from tools.scaling.laws import Estimate
from tools.scaling.results import StudyFit, optimal
from tools.scaling.study import SIZE_WORDS, Study
from tools.scaling.verbs.collect import Collected

_CAPTIONS = {
    "isoflop": (
        "Held-out loss against model size at equal training compute. Each curve is a parabola in"
        " log N through the runs of one budget; its minimum is the best size for that compute."
        " Minima outside the measured sizes are open circles and are not part of the law."
    ),
    "frontier": (
        "Best model size and training tokens against compute, one row per variant. Points and"
        " coloured lines: minima of the isoFLOP parabolas and the power law through them, with its"
        " interval; grey: the other variants. Dashed: the optimum of the parametric law."
    ),
    "loss_compute": (
        "Held-out loss against training compute of all variants. Points: finished runs. Faint"
        " lines: validations during training, before the learning rate has decayed, so they are"
        " higher than the final loss of a run of that length."
    ),
    "residuals": (
        "Each run's loss against its variant's parametric law, in percent. A trend with size or"
        " budget means that the law has the wrong form for the data; the grey band is the typical"
        " distance."
    ),
    "learning_rate": (
        "Held-out loss against the peak learning rate at each size, and the optimum against size. A"
        " minimum at the smallest or largest rate is not an optimum: the best rate is this rate or"
        " a more extreme one."
    ),
}


class Listing(NamedTuple):
    """A table of text: its title, its header with | between the columns, and its rows."""

    title: str
    columns: str
    rows: Sequence[tuple[str, ...]]

    @property
    def header(self) -> list[str]:
        """The titles of the columns."""
        return self.columns.split("|")


Report = dict[str, Any]
_BY = {"isoflop": "isoFLOP minima", "parametric": "parametric law"}


def report_of(
    study: Study,
    fit: StudyFit,
    table: pd.DataFrame,
    collected: Collected | None,
    words: Sequence[str],
) -> Report:
    """Return the values of the report's templates for a fitted study.

    ``words``: the command-line arguments shown in the report's commands: the study's file, and
    ``--results`` with its folder if given.
    """
    final = table[table["final"]]
    commands = [(verb, words[:1]) for verb in ("plan", "run")] + [
        (verb, words) for verb in ("collect", "fit", "plot")
    ]
    return {
        "study": fit.study,
        "asked": list(_request_rows(study, fit, final, collected)),
        "statements": list(statements(fit)),
        "laws": listings(fit, final),
        "best": _best(fit, final),
        "runs": _runs(final),
        "left_out": list(collected.left_out.items()) if collected is not None else [],
        "notes": notes(fit),
        "interval": f"{fit.interval:.0%}",
        "commands": [
            f"python -m tools.scaling {verb} {' '.join(arguments)}" for verb, arguments in commands
        ],
    }


def render_html(report: Report, pictures: dict[str, bytes]) -> str:
    """Return the report as one self-contained HTML file."""
    images = [
        (name, base64.b64encode(content).decode(), _CAPTIONS[name])
        for name, content in pictures.items()
    ]
    return _template("report.html.j2").render(report=report, images=images)


def render_summary(report: Report, pictures: Sequence[str]) -> str:
    """Return the main table, the statements and references to the pictures as Markdown."""
    return _template("summary.md.j2").render(
        report=report, images=[(name, _CAPTIONS[name]) for name in pictures]
    )


def _template(name: str) -> jinja2.Template:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    ).get_template(name)


# --- numbers as text ------------------------------------------------------------------------------


def number(value: float) -> str:
    """Format with four significant digits; as a power of ten above 1e5 and below 1e-3."""
    if not (abs(value) >= 1e5 or 0 < abs(value) < 1e-3):
        return f"{value:.4g}"
    return f"{value:.3e}".replace("e+", "e").replace("e0", "e").replace("e-0", "e-")


def estimate(value: Estimate | None, text: Callable[[float], str] = number) -> str:
    """Format a number with its interval, for example 0.49 (0.45–0.53), and None as –."""
    return "–" if value is None else value.text(text, " (no interval)")


# --- sections -------------------------------------------------------------------------------------


def _request_rows(
    study: Study, fit: StudyFit, final: pd.DataFrame, collected: Collected | None
) -> Iterator[tuple[str, str]]:
    for number_of, (variant, words) in enumerate(study.variants.items()):
        role = ", the baseline" if number_of == 0 and len(study.variants) > 1 else ""
        yield f"variant {variant}{role}", " ".join(words) or "the base run without changes"
    yield "base run", Path(study.base).name
    if study.settings:
        yield "settings of all runs", " ".join(study.settings)
    yield "sizes", ", ".join(size.label for size in study.sizes) or "given with the budgets"
    lengths: dict[str, Sequence[float]] = {
        "training compute, FLOPs": [budget.flops for budget in study.budgets],
        "training tokens": study.tokens,
        "training tokens per parameter of the baseline": study.tokens_per_parameter,
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
    size = SIZE_WORDS[fit.parameters]
    yield "N of the laws", f"all {size}" if fit.parameters == "total" else size
    data, tokenizer = (final[key].iloc[0] or "unknown" for key in ("data", "tokenizer"))
    yield "data, tokenizer", f"{data}, {tokenizer}"


def statements(fit: StudyFit) -> Iterator[str]:
    """Yield the report's sentences: the comparisons with the baseline, then each variant's
    frontier.
    """
    yield from (comparison.words for comparison in fit.comparisons)
    for name, variant in fit.variants.items():
        exponents = {}
        found = variant.isoflop
        if found is not None and found.n_opt is not None and found.d_opt is not None:
            exponents["isoflop"] = found.n_opt.exponent, found.d_opt.exponent
        if variant.parametric is not None:
            exponents["parametric"] = variant.parametric.a, variant.parametric.b
        for method, both in exponents.items():
            n, d = (estimate(one, "{:.3f}".format) for one in both)
            yield (
                f"{name}: by the {_BY[method]} the best size grows as C^{n}, the best number of"
                f" tokens as C^{d}."
            )
        rates = variant.learning_rate
        if rates is not None and rates.by_parameters is not None:
            yield (
                f"{name}: the best peak learning rate scales as"
                f" N^{estimate(rates.by_parameters.exponent, '{:.3f}'.format)}."
            )


def notes(fit: StudyFit) -> list[str]:
    """Return the notes of the fit and of its variants."""
    return [
        *fit.notes,
        *(f"{name}: {note}" for name, variant in fit.variants.items() for note in variant.notes),
    ]


def listings(fit: StudyFit, final: pd.DataFrame | None = None) -> list[Listing]:
    """Return the tables of all fits; with the ``final`` runs also the optima at the largest
    measured compute.
    """
    optima = [_optima(fit, final)] if final is not None else []
    rest = [_multipliers(fit), _left_out(fit), _rates(fit)]
    laws = [_parametric(fit), _isoflop(fit), *optima, *rest]
    return [law for law in laws if law.rows]


def _parametric(fit: StudyFit) -> Listing:
    rows = []
    for name, law in fit.fitted("parametric").items():
        values = [estimate(one, number) for one in (law.E, law.A, law.B)]
        values += [estimate(one, "{:.3f}".format) for one in (law.alpha, law.beta, law.a, law.b)]
        rows.append(
            (
                name,
                *values,
                f"{100 * law.noise:.2g}%",
                str(law.points),
                f"{law.resamples - law.failed} of {law.resamples}",
            )
        )
    header = (
        "variant|E, nats per token|A|B|α|β|a: N ∝ C^a|b: D ∝ C^b|typical distance|runs|resamples"
        " converged"
    )
    return Listing("Parametric law L = E + A/N^α + B/D^β", header, rows)


def _isoflop(fit: StudyFit) -> Listing:
    rows = []
    for name, found in fit.fitted("isoflop").items():
        for parabola in found.parabolas:
            if parabola.inside:
                minimum = (parabola.n_opt, parabola.d_opt, parabola.loss)
                values = [estimate(one) for one in minimum]
                inside = "inside"
            else:
                values = ["–"] * 3
                inside = "outside the measured sizes: no optimum"
            rows.append((name, number(parabola.budget), *values, inside, str(len(parabola.runs))))
    header = "variant|budget, FLOPs|best N|best D, tokens|loss, nats per token|minimum|sizes"
    return Listing("Minima of the isoFLOP parabolas", header, rows)


def _optima(fit: StudyFit, final: pd.DataFrame) -> Listing:
    rows = []
    compute = final["budget"] if final["budget"].notna().all() else final["flops"]
    largest = float(compute.max())
    for name, variant in fit.variants.items():
        for method, words in _BY.items():
            with suppress(ConfigError):  # the variant lacks this law
                best = optimal(variant, largest, method)
                rows.append((name, words, *(estimate(one) for one in (best.n, best.d, best.loss))))
    title = f"Lowest loss at {number(largest)} FLOPs, the largest measured compute"
    return Listing(title, "variant|by|best N|best D, tokens|loss, nats per token", rows)


def _multipliers(fit: StudyFit) -> Listing:
    rows = []
    for entry in fit.comparisons:
        at = [(number(value.flops), number(value.loss), value.ratio) for value in entry.multipliers]
        if entry.overall is not None:
            at.append(("all", "", entry.overall))
        for flops, loss, ratio in at:
            text = estimate(ratio, "{:.3f}".format)
            rows.append((entry.variant, _BY[entry.method], flops, loss, text))
    baseline = fit.comparisons[0].baseline if fit.comparisons else ""
    header = (
        f"variant|by|FLOPs of {baseline}|loss reached, nats per token|share of the FLOPs of"
        f" {baseline}; below 1 is better"
    )
    return Listing("Compute for the same loss", header, rows)


def _left_out(fit: StudyFit) -> Listing:
    rows = []
    for name, variant in fit.variants.items():
        for one in variant.left_out:
            mean = f"{100 * one.mean_error:.2g}%"
            worst = f"{100 * one.worst_error:.2g}% ({one.worst_run})"
            rows.append((name, number(one.budget), str(one.runs), mean, worst))
    title = "Parametric law fitted without one budget, and its prediction errors for that budget"
    header = "variant|budget left out, FLOPs|runs predicted|mean error|worst error"
    return Listing(title, header, rows)


def _rates(fit: StudyFit) -> Listing:
    rows = []
    for name, found in fit.fitted("learning_rate").items():
        for entry in found.optima:
            rate = estimate(entry.rate)
            if entry.edge:
                rate = f"at the edge, {number(entry.rate.value)}: no optimum"
            numbers = number(entry.parameters), rate, number(entry.loss)
            rows.append((name, *numbers, ", ".join(map(number, entry.rates))))
    header = "variant|parameters|best peak learning rate|loss, nats per token|measured rates"
    return Listing("Learning rates", header, rows)


def _known(value: Any, form: str) -> str:
    return "–" if pd.isna(value) else format(value, form)


def _best(fit: StudyFit, final: pd.DataFrame) -> Listing:
    """Return the lowest measured loss, one row per length (budget, else tokens), one column per
    variant.
    """
    by_budget = bool(final["budget"].notna().all())
    rows = []
    for length, group in final.groupby("budget" if by_budget else "tokens"):
        cells = dict.fromkeys(fit.variants, "–")
        # The last row of a variant, which has the lowest loss, replaces the others.
        for _, run in group.sort_values("loss", ascending=False, kind="stable").iterrows():
            cells[run["variant"]] = f"{run['loss']:.4f} (N = {number(float(run['parameters']))})"
        rows.append((number(float(length)), *(cells[name] for name in fit.variants)))
    header = "|".join(["training FLOPs" if by_budget else "training tokens", *fit.variants])
    return Listing("Lowest measured held-out loss, nats per token", header, rows)


def _runs(final: pd.DataFrame) -> Listing:
    rows = []
    for _, run in final.iterrows():
        n, d = int(run["parameters"]), int(run["tokens"])
        inner = _known(run["non_embedding_parameters"], ",")
        rate = _known(run["learning_rate"], ".4g")
        hours = _known(run["wall_seconds"] / 3600, ".3g")
        sizes = (f"{n:,}", inner, f"{d:,}", f"{d / n:.3g}", number(run["flops"]))
        rows.append((run["run"], run["variant"], *sizes, rate, f"{run['loss']:.4f}", hours))
    header = (
        "run|variant|parameters|without embedding|tokens|tokens per parameter|FLOPs|learning"
        " rate|loss|hours"
    )
    return Listing("Runs", header, rows)
