"""Report of the suite: a Markdown page, a picture, and the short table that is printed last.

Every ratio names its baseline.
"""

from __future__ import annotations

import itertools
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fem_common.plot import COLOURS, colour_of, new_figure, plain_axes, save
from fem_common.text import first_few
from tools.bench import runner
from tools.bench.engines import figures
from tools.bench.gpu_suite.plan import LENGTHS, TOKENS_A_CALL
from tools.bench.gpu_suite.results import Outcome, Record, Results
from tools.bench.whole_model import MODELS, PACKED, SCALES
from tools.bench.workloads import WORKLOADS

SHORT = 4096
MOST_NAMES = 4  # task names that are listed for one reason
DRY = (
    "**Dry run**: small sizes, to show that everything can be called. "
    "No number here is a benchmark."
)


def report(record: Record, results: Results) -> str:
    """Return the complete Markdown page."""
    last = record.sessions[-1]
    times = "; ".join(f"{session['minutes']:g} minutes" for session in record.sessions)
    parts = [
        "# GPU benchmarks",
        DRY if last["dry"] else "",
        f"{runner.sentence(last['machine'])}; {times}. bfloat16; medians; "
        "how: docs/benchmarks/README.md.",
        _roofs(results),
        *(() if last["dry"] else ("## Targets", targets(results))),
        "## Correctness",
        correctness(results),
        "## The trainer",
        trainer(results),
        "## compute-sanitizer",
        sanitizer(results),
        "## Training throughput, by the trainer's own engine",
        throughput(results),
        "## Operations",
        operations(results),
        "## FEM's attention and standard attention, engine by engine",
        engines(results),
        "## Whole models, a training step",
        models(results),
        "## Engines, a training step on one rank",
        figures.table(results.engines) if results.engines else "None was timed.",
        "## Gaps",
        _gaps(record),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def short(results: Results, *, dry: bool = False) -> str:
    """Return the text that is printed last.

    It contains the targets (not for a dry run), each operation at 4096 tokens, and the large
    models.
    """
    lines = []
    for name in WORKLOADS:
        found = results.ops.get((name, "auto", SHORT))
        if found is not None:
            ratio, best = results.ratio(name, "auto", SHORT), results.best(name, SHORT)
            lines.append(
                [
                    name,
                    _ms(found.both.seconds),
                    f"{ratio[1]:.2f}" if ratio else "",
                    best[0] if best else "",
                ]
            )
    parts = [] if dry else [targets(results)]
    if results.throughput:
        parts.append(throughput(results))
    if lines:
        parts.append(runner.table([f"{SHORT} tokens, fwd + bwd", "ms", "÷", "baseline"], lines))
    rows = _model_rows(results, ("1.3B", "340M", *PACKED))
    if rows:
        parts.append(runner.table(MODEL_COLUMNS, rows))
    return "\n\n".join(parts)


def targets(results: Results) -> str:
    """Return a table of all targets with bound and measurement."""
    words = {True: "met", False: "not met", None: "not measured"}
    rows = []
    for target in results.targets():
        bound = f"{'at least' if target.at_least else 'at most'} {target.bound:.2f}"
        rows.append(
            [
                target.what,
                bound,
                "" if target.value is None else f"{target.value:.3f}",
                words[target.met],
            ]
        )
    return runner.table(["target", "bound", "measured", ""], rows)


def correctness(results: Results) -> str:
    """Return a table of the worst result of each operation, implementation and dtype.

    The columns include the error of this result against float64, and its bound.
    """
    rows = []
    for (op, implementation, dtype), findings in _by_side(results).items():
        last = max(findings, key=_share)
        wrong = sum(not finding["good"] for finding in findings)
        verdict = f"{wrong} OUT OF BOUNDS" if wrong else "in bounds"
        where = f"{last['case']}: {last['result']}"
        rows.append(
            [
                op,
                implementation,
                dtype,
                str(len(findings)),
                f"{last['error']:.1e}",
                f"{last['bound']:.1e}",
                where,
                verdict,
            ]
        )
    columns = [
        "operation",
        "implementation",
        "type",
        "results",
        "worst error",
        "bound",
        "where",
        "",
    ]
    table = _table(columns, rows, "Nothing was checked.")
    failed = "\n".join(
        f"- FAILED {outcome.task.name}: {outcome.gap}"
        for outcome in results.failed
        if outcome.task.kind == "correctness"
    )
    return "\n\n".join(filter(None, (table, failed)))


def _by_side(results: Results) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for finding in results.findings:
        found.setdefault((finding["op"], finding["implementation"], finding["dtype"]), []).append(
            finding
        )
    return found


def _share(finding: dict[str, Any]) -> float:
    """Return a checked result's error divided by its bound; infinity if the error is NaN."""
    error = finding["error"]
    return float(error / finding["bound"]) if error == error else math.inf


def trainer(results: Results) -> str:
    """Return a table of the trainer's runs, with their agreement with other runs."""
    rows = []
    for outcome in results.of_kind("train"):
        rows.append([outcome.task.name, *_run_cells(outcome), f"{outcome.seconds:.0f}"])
    return _table(["run", "", "losses compared", "s"], rows, "No run was made.")


def _run_cells(outcome: Outcome) -> tuple[str, str]:
    if outcome.gap is not None:
        return f"FAILED: {outcome.gap}", ""
    verdict = "WRONG" if outcome.wrong else "good"
    found = outcome.result
    if "worst" not in found:
        return verdict, ""
    if found["equal"]:
        return verdict, "equal to the bit"
    return verdict, f"difference {found['worst']:.1e}, bound {found['bound']:.0e}"


def sanitizer(results: Results) -> str:
    """Return the number of checked cases for each tool, and a line for each case with a report."""
    lines = []
    count: dict[str, int] = {}
    for outcome in results.of_kind("sanitize"):
        count[outcome.task.tool] = count.get(outcome.task.tool, 0) + 1
        if outcome.failed:
            lines.append(f"- FAILED {outcome.task.name}: {outcome.gap}")
        elif outcome.wrong:
            reported = outcome.result["reported"] or ["a result is out of bounds"]
            lines.append(
                f"- {outcome.task.name}: {len(reported)} reports, the first: {reported[0]}"
            )
    if not count:
        return "It did not run."
    clean = "; ".join(f"{tool}: {number} cases" for tool, number in count.items())
    return "\n".join([f"{clean}; {len(lines)} with a report.", *lines])


def throughput(results: Results) -> str:
    """Return a table of the Megatron engine's speed on models of full size."""
    return figures.table(results.throughput) if results.throughput else "None was measured."


def operations(results: Results) -> str:
    """Return a table of all timed implementations of all operations, with a row per length."""
    rows = []
    for name, workload in WORKLOADS.items():
        for implementation in dict.fromkeys(how for what, how, _ in results.ops if what == name):
            for tokens in results.lengths(name, implementation):
                side = results.ops[name, implementation, tokens]
                best = results.best(name, tokens)
                ratio = results.ratio(name, implementation, tokens)
                roofs = results.roofs
                size = workload.size(tokens, TOKENS_A_CALL)
                row = [
                    name,
                    f"{size.heads} x {size.key}/{size.value}",
                    f"{size.batch} x {tokens}",
                    implementation,
                ]
                row += [_ms(side.forward.seconds), _ms(side.both.seconds), f"{side.spread:.1%}"]
                if ratio and best:
                    row += [*(f"{part:.2f}" for part in ratio), best[0]]
                else:
                    row += ["", "", ""]
                seconds = side.both.seconds
                flops, moved = side.flops[1], side.bytes[1]
                of_matmul = of_copy = ""
                if roofs and flops:
                    of_matmul = f"{flops / seconds / roofs['matmul_flops']:.0%}"
                if roofs:
                    of_copy = f"{moved / seconds / roofs['copy_bytes']:.0%}"
                row += [of_matmul, of_copy]
                rows.append(row)
    columns = [
        "operation",
        "heads x d_k/d_v",
        "batch x tokens",
        "implementation",
        "forward, ms",
        "fwd + bwd, ms",
        "spread",
    ]
    columns += [
        "forward ÷",
        "fwd + bwd ÷",
        "baseline (the fastest of its kind here)",
        "of matmul",
        "of copy",
    ]
    return _table(columns, rows, "Nothing was timed.")


def engines(results: Results) -> str:
    """Return a table of FEM's attention relative to standard attention by the same engine.

    An engine is an implementation of attention. Standard attention has the key and value widths
    (d_k, 2 d_v).
    """
    rows = []
    for name, workload in WORKLOADS.items():
        if workload.op != "fem_attention":
            continue
        for tokens in LENGTHS:
            for engine, ratio, own in results.same_engine(name, tokens):
                rows.append([name, str(tokens), engine, _ms(own.both.seconds), f"{ratio:.3f}"])
    columns = ["operation", "tokens", "engine", "fwd + bwd, ms", "÷ standard, the same engine"]
    return _table(columns, rows, "None was timed.")


MODEL_COLUMNS = [
    "model",
    "batch",
    "step, ms",
    "tokens/s",
    "÷ Transformer",
    "÷ joined",
    "MFU",
    "peak, GB",
    "recomputes",
]


def models(results: Results) -> str:
    """Return a table of all complete models."""
    return _table(MODEL_COLUMNS, _model_rows(results, tuple(SCALES)), "None was timed.")


def _model_rows(results: Results, scales: tuple[str, ...]) -> list[list[str]]:
    rows = []
    for scale, variant, recompute in itertools.product(scales, MODELS, (False, True)):
        found = results.models.get((scale, variant, recompute))
        if found is None:
            continue
        ratio = results.model_ratio(scale, variant, recompute=recompute)
        packed = results.packed_ratio(scale, variant)
        share = results.utilisation(scale, variant, recompute=recompute)
        rows.append(
            [
                f"{scale} {variant}",
                f"{found.batch} x {SCALES[scale].tokens}",
                _ms(found.step.seconds),
                f"{found.tokens_per_second:,.0f}",
                f"{ratio:.2f}" if ratio else "",
                f"{packed:.2f}" if packed else "",
                f"{share:.1%}" if share else "",
                f"{found.peak_bytes / 1e9:.1f}",
                "yes" if found.recompute else "",
            ]
        )
    return rows


def _roofs(results: Results) -> str:
    if results.roofs is None:
        return ""
    matmul, copy = results.roofs["matmul_flops"], results.roofs["copy_bytes"]
    return (
        f"Measured roofs: bf16 matrix product {matmul / 1e12:,.0f} TFLOP/s; "
        f"copy {copy / 1e9:,.0f} GB/s, read and written."
    )


def _gaps(record: Record) -> str:
    lines = [f"- {what} cannot run here: {why}" for what, why in record.cannot.items()]
    alike: dict[str, list[str]] = {}
    for outcome in record.outcomes.values():
        if outcome.gap is not None:
            alike.setdefault(str(outcome.gap), []).append(outcome.task.name)
    for why, names in alike.items():
        lines.append(f"- {first_few(names, MOST_NAMES, '; ')}: {why}")
    if record.left_out:
        why = (
            "without an outcome, for lack of time or because the suite was ended "
            f"({len(record.left_out)})"
        )
        lines.append(f"- {why}: {first_few(record.left_out, 40, '; ')}")
    if record.damaged:
        lines.append(f"- {record.damaged} lines of the record cannot be read")
    return "\n".join(lines) or "None."


def _table(columns: list[str], rows: list[list[str]], otherwise: str) -> str:
    """Return a table, or the text ``otherwise`` if it has no rows."""
    return runner.table(columns, rows) if rows else otherwise


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.1 else f"{1000 * seconds:.1f}"


def draw(results: Results, title: str, path: Path) -> bool:
    """Write the picture of errors relative to their bounds, and of ratios to baselines by length.

    Return False, without a picture, if results or matplotlib are missing.
    """
    ratios = {}
    for name in WORKLOADS:
        found = []
        for tokens in LENGTHS:
            ratio = results.ratio(name, "auto", tokens)
            if ratio:
                found.append((tokens, ratio[1]))
        if found:
            ratios[name] = found
    sides = _by_side(results)
    if not (ratios or sides) or find_spec("matplotlib") is None:
        return False
    figure = new_figure((11, 5.5))
    axes = figure.subplots(1, bool(ratios) + bool(sides), squeeze=False)[0]
    if sides:
        _draw_errors(axes[0], sides)
    if ratios:
        _draw_ratios(axes[-1], ratios)
    figure.suptitle(title, fontsize=9)
    save(figure, path)
    return True


# Range of the drawn errors, as shares of the bound; values outside are drawn at its ends.
ERRORS_FROM, ERRORS_TO = 1e-3, 1e2


def _draw_errors(axes: Any, sides: dict[tuple[str, str, str], list[dict[str, Any]]]) -> None:
    """Draw a row per operation, with a mark for the worst error of each implementation and dtype.

    sides: (operation, implementation, dtype) -> findings.
    """
    ops = list(dict.fromkeys(op for op, _, _ in sides))
    for number, dtype in enumerate(dict.fromkeys(dtype for _, _, dtype in sides)):
        found = [
            (op, max(map(_share, findings)))
            for (op, _, kind), findings in sides.items()
            if kind == dtype
        ]
        places = [ops.index(op) + 0.2 * (number - 0.5) for op, _ in found]
        shares = [min(max(share, ERRORS_FROM), ERRORS_TO) for _, share in found]
        axes.plot(
            shares,
            places,
            linestyle="none",
            marker="o",
            markersize=4,
            alpha=0.7,
            label=dtype,
            color=colour_of(number)["color"],
        )
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(ERRORS_FROM / 1.5, ERRORS_TO * 1.5)
    axes.set_yticks(range(len(ops)), ops, fontsize=8)
    axes.invert_yaxis()
    plain_axes(axes, "worst error of an implementation ÷ its bound", "", grid="x")
    axes.legend(loc="lower right", fontsize=8)


def _draw_ratios(axes: Any, ratios: dict[str, list[tuple[int, float]]]) -> None:
    for number, (name, found) in enumerate(ratios.items()):
        again = number >= len(COLOURS)  # the colours repeat
        axes.plot(
            *zip(*found, strict=True),
            label=name,
            linestyle="--" if again else "-",
            **colour_of(number),
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(LENGTHS, [f"{tokens // 1024}k" for tokens in LENGTHS])
    plain_axes(axes, "tokens of a sequence", "forward + backward ÷ the fastest baseline")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7)
