"""Report of the data_prep benchmark: the figures and their targets, as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tools.bench import runner
from tools.bench.data_prep.breakdown import Breakdown
from tools.bench.data_prep.corpus import Corpus
from tools.bench.data_prep.encoding import Comparison, Scaling
from tools.bench.data_prep.index import DOCUMENTS, Indexing
from tools.bench.data_prep.peers import BASELINE, FALLBACK, OURS, PEER
from tools.bench.data_prep.processes import Spread

OVER_BASELINE, OVER_PEER, FALLBACK_OVER_BASELINE, TWO_WORKERS = 5.0, 6.0, 1.0, 1.8
INDEX_CPU, INDEX_BYTES, READS = 30.0, 4e9, 20_000.0
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


class Verdict(StrEnum):
    """Result of comparing a figure with its target.

    NOTE: the measurement on this machine is not conclusive.
    """

    PASS = "pass"
    FAIL = "FAIL"
    NOTE = "note"


@dataclass(frozen=True)
class Figure:
    """Measured figure and its target: at least ``least``, or at most ``most``.

    remark: text shown next to the verdict.
    conclusive: False if the measurement on this machine cannot decide the verdict.
    """

    what: str
    value: Spread
    least: float | None = None
    most: float | None = None
    unit: str = ""
    remark: str = ""
    conclusive: bool = True

    @property
    def verdict(self) -> Verdict:
        """Verdict on the median of the rounds: NOTE if not conclusive; NaN is a FAIL."""
        if not self.conclusive:
            return Verdict.NOTE
        good = (self.least is None or self.value.median >= self.least) and (
            self.most is None or self.value.median <= self.most
        )
        return Verdict.PASS if good else Verdict.FAIL


@dataclass
class Results:
    """All measurements of a run.

    reads, items: calls per CPU second in each pass (see `tools.bench.data_prep.reading`).
    """

    corpora: list[Corpus] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    scaling: Scaling | None = None
    indexing: list[Indexing] = field(default_factory=list)
    reads: list[float] = field(default_factory=list)
    items: list[float] = field(default_factory=list)
    breakdowns: list[Breakdown] = field(default_factory=list)

    def figures(self) -> list[Figure]:
        """Return all measured figures that have a target."""
        found = [figure for comparison in self.comparisons for figure in _encoding(comparison)]
        if self.scaling is not None:
            found.append(_scaling(self.scaling))
        if self.indexing:
            found += _indexing(self.indexing)
        if self.reads:
            found.append(
                Figure(
                    "random samples of 4096 tokens read from the mapped .bin",
                    Spread.of(self.reads),
                    least=READS,
                    unit="/s",
                )
            )
        return found

    @property
    def faults(self) -> list[str]:
        """Return a line for each pipeline whose bytes differ from the baseline's."""
        return [
            f"{comparison.corpus}, {comparison.tokenizer}: other bytes than the baseline's: {name}"
            for comparison in self.comparisons
            for name in comparison.differing
        ]


def _encoding(comparison: Comparison) -> list[Figure]:
    where = f"{comparison.corpus}, {comparison.tokenizer}"
    return [
        Figure(
            f"{where}: ours ÷ one call per document",
            comparison.ratio(OURS, BASELINE),
            least=OVER_BASELINE,
            unit="x",
        ),
        Figure(
            f"{where}: ours ÷ datatrove", comparison.ratio(OURS, PEER), least=OVER_PEER, unit="x"
        ),
        Figure(
            f"{where}: Hugging Face fallback ÷ one call per document",
            comparison.ratio(FALLBACK, BASELINE),
            least=FALLBACK_OVER_BASELINE,
            unit="x",
        ),
    ]


def _scaling(scaling: Scaling) -> Figure:
    remark = ""
    if not scaling.idle:
        others = "an unknown number of" if scaling.others is None else f"{scaling.others:.2f}"
        remark = (
            f"not an idle machine: {scaling.cores} cores, of which others used {others}; "
            f"load average {scaling.load:.1f}"
        )
    return Figure(
        "two workers ÷ one (wall time)",
        Spread.of(scaling.speedups),
        least=TWO_WORKERS,
        unit="x",
        remark=remark,
        conclusive=scaling.idle,
    )


def _indexing(rounds: Sequence[Indexing]) -> list[Figure]:
    """Return the figures of the index's CPU time and memory.

    Targets are given for FineWeb-Edu's number of documents. The target of CPU time, and the part of
    the memory target that exceeds the memory of start-up, are scaled by the number of documents.
    """
    share = rounds[0].documents / DOCUMENTS
    base = max(indexing.startup.peak_bytes for indexing in rounds)
    most = base + share * (INDEX_BYTES - base)
    what = (
        f"index of {rounds[0].documents / 1e6:g}M documents, {rounds[0].tokens / 1e9:.3g}B tokens"
    )
    scaled = "" if share == 1 else f"target scaled from {DOCUMENTS / 1e6:.0f}M documents"
    startup = Spread.of([indexing.startup.cpu for indexing in rounds]).median
    cpu = Spread.of([indexing.whole.cpu - startup for indexing in rounds])
    peak = Spread.of([indexing.whole.peak_bytes / 1e9 for indexing in rounds])
    return [
        Figure(f"{what}: CPU", cpu, most=INDEX_CPU * share, unit="s", remark=scaled),
        Figure(f"{what}: peak memory", peak, most=most / 1e9, unit="GB", remark=scaled),
    ]


# --- Markdown -----------------------------------------------------------------------------------


def figures_table(figures: Sequence[Figure]) -> str:
    """Return a table of all figures with their range over the rounds, target and verdict."""
    rows = []
    for figure in figures:
        value = figure.value
        between = (
            f"{_number(value.least)} to {_number(value.most)}" if value.rounds > 1 else "one round"
        )
        target = (
            f"≥ {_number(figure.least)}"
            if figure.least is not None
            else f"≤ {_number(figure.most or 0.0)}"
        )
        verdict = f"{figure.verdict}{'; ' + figure.remark if figure.remark else ''}"
        rows.append(
            [
                figure.what,
                f"{_number(value.median)} {figure.unit}",
                between,
                f"{target} {figure.unit}",
                verdict,
            ]
        )
    return runner.table(["figure", "median", "over the rounds", "target", ""], rows)


def sides_table(comparisons: Sequence[Comparison]) -> str:
    """Return a table of the speed, start-up and memory of every pipeline."""
    rows = []
    for comparison in comparisons:
        for side in comparison.sides:
            rate = Spread.of(side.rates)
            cells = [
                f"{rate.median:.2f}",
                f"±{rate.share / 2:.1%}" if rate.rounds > 1 else "",
                f"{Spread.of(side.startup).median:.2f}",
            ]
            same = "no" if side.name in comparison.differing else "yes"
            rows.append(
                [
                    f"{comparison.corpus}, {comparison.tokenizer}",
                    side.name,
                    *cells,
                    f"{side.peak_bytes / 1e6:.0f}",
                    same,
                ]
            )
    header = [
        "corpus, tokenizer",
        "pipeline",
        "MB per CPU s",
        "half its range",
        "start-up, CPU s",
        "peak, MB",
        "same bytes",
    ]
    return runner.table(header, rows)


def breakdown_table(breakdowns: Sequence[Breakdown]) -> str:
    """Return a table of one worker's CPU seconds by step, in percent."""
    steps = list(dict.fromkeys(step for breakdown in breakdowns for step in breakdown.seconds))
    rows = []
    for breakdown in breakdowns:
        total = sum(breakdown.seconds.values())
        shares = [f"{breakdown.seconds.get(step, 0.0) / total:.1%}" for step in steps]
        rows.append(
            [
                f"{breakdown.corpus}, {breakdown.tokenizer}",
                f"{breakdown.text_bytes / 1e6 / total:.1f}",
                *shares,
            ]
        )
    return runner.table(["corpus, tokenizer", "MB per CPU s", *steps], rows)


def render(results: Results) -> str:
    """Return the complete report."""
    figures = results.figures()
    parts = [figures_table(figures)] if figures else []
    if results.comparisons:
        parts += [sides_table(results.comparisons)]
    if results.breakdowns:
        parts += ["A worker's steps, in one process:", breakdown_table(results.breakdowns)]
    if results.items:
        rate = _number(Spread.of(results.items).median)
        parts += [
            "GPTDataset's own samples (text, labels, positions and loss mask as tensors): "
            f"{rate} a CPU second."
        ]
    texts = [f"- {corpus.name}: {_describe(corpus)}." for corpus in results.corpora]
    tokens = [
        f"{each.corpus}, {each.tokenizer} {each.bytes_per_token:.2f}"
        for each in results.comparisons
    ]
    return "\n\n".join(
        [
            *parts,
            "\n".join(texts),
            *([f"Bytes of text a token: {'; '.join(tokens)}."] if tokens else []),
        ]
    )


def _describe(corpus: Corpus) -> str:
    sizes = f"median {corpus.median_bytes:,.0f} bytes, mean {corpus.mean_bytes:,.0f}"
    return (
        f"{corpus.what}; {corpus.text_bytes / 1e6:.0f} MB in {corpus.documents:,} documents "
        f"({sizes})"
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def write_table(path: Path, report: str) -> None:
    """Write the report between the markers BEGIN and END of the page ``path``.

    Raises ValueError if the markers are missing.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} lacks the marks {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{report}\n{END}{after}", encoding="utf-8")
