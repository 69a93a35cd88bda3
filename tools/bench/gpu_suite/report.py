"""The results as Markdown, and the short table that is printed last. Every ratio names what it is held against."""

from __future__ import annotations

import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fem_common.plot import colour_of, new_figure, plain_axes, save
from tools.bench import runner
from tools.bench.engines import figures
from tools.bench.gpu_suite.plan import LENGTHS, TOKENS_A_CALL, Task
from tools.bench.gpu_suite.pool import Outcome
from tools.bench.gpu_suite.results import Results
from tools.bench.whole_model import PACKED, SCALES, VARIANTS
from tools.bench.workloads import WORKLOADS

SHORT = 4096
MOST_NAMES = 4  # of tasks with the same gap


def report(results: Results, machine: dict[str, Any], cannot: dict[str, str], left_out: list[Task], seconds: float) -> str:
    """The whole page."""
    gaps = [outcome for outcome in results.outcomes if outcome.gap is not None]
    parts = [
        "# GPU benchmarks",
        f"{runner.sentence(machine)}; {seconds / 60:.1f} minutes. bfloat16; medians; how: docs/benchmarks/README.md.",
        _roofs(results),
        "## Targets",
        targets(results),
        "## Correctness",
        correctness(results),
        "## Operations",
        operations(results),
        "## FEM's attention and standard attention, engine by engine",
        engines(results),
        "## Whole models, a training step",
        models(results),
        "## Engines, a training step on one rank",
        figures.table(results.engines) if results.engines else "None was timed.",
        "## Gaps",
        _gaps(gaps, cannot, left_out),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def short(results: Results) -> str:
    """What is printed last: the targets, each operation at 4096 tokens, the large models."""
    lines = []
    for name in WORKLOADS:
        found = results.ops.get((name, "auto", SHORT))
        if found is not None:
            ratio, best = results.ratio(name, "auto", SHORT), results.best(name, SHORT)
            lines.append([name, _ms(found.both), f"{ratio[1]:.2f}" if ratio else "", best[0] if best else ""])
    parts = [targets(results)]
    if lines:
        parts.append(runner.table([f"{SHORT} tokens, fwd + bwd", "ms", "÷", "held against"], lines))
    rows = _model_rows(results, ("1.3B", "340M", *PACKED))
    if rows:
        parts.append(runner.table(MODEL_COLUMNS, rows))
    return "\n\n".join(parts)


def targets(results: Results) -> str:
    """Each target, its bound, what was measured."""
    words = {True: "met", False: "not met", None: "not measured"}
    rows = []
    for target in results.targets():
        bound = f"{'at least' if target.at_least else 'at most'} {target.bound:.2f}"
        rows.append([target.what, bound, "" if target.value is None else f"{target.value:.3f}", words[target.met]])
    return runner.table(["target", "bound", "measured", ""], rows)


def correctness(results: Results) -> str:
    """The worst result of each operation, implementation and type: its error against float64 and what it may be."""
    worst: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for finding in results.findings:
        worst.setdefault((finding["op"], finding["implementation"], finding["dtype"]), []).append(finding)
    rows = []
    for (op, implementation, dtype), findings in worst.items():
        # Not finite counts as infinitely far out.
        last = max(findings, key=lambda each: each["error"] / each["bound"] if each["error"] == each["error"] else float("inf"))
        wrong = sum(not finding["good"] for finding in findings)
        verdict = f"{wrong} OUT OF BOUNDS" if wrong else "in bounds"
        where = f"{last['case']}: {last['result']}"
        rows.append([op, implementation, dtype, str(len(findings)), f"{last['error']:.1e}", f"{last['bound']:.1e}", where, verdict])
    table = runner.table(["operation", "implementation", "type", "results", "worst error", "bound", "where", ""], rows)
    failed = "\n".join(f"- FAILED {outcome.task.name}: {outcome.gap}" for outcome in results.failed)
    return "\n\n".join(filter(None, (table if rows else "Nothing was checked.", failed)))


def operations(results: Results) -> str:
    """Every timed implementation at every length."""
    rows = []
    for name, workload in WORKLOADS.items():
        for implementation in dict.fromkeys(how for what, how, _ in results.ops if what == name):
            for tokens in results.lengths(name, implementation):
                side, best = results.ops[name, implementation, tokens], results.best(name, tokens)
                ratio, roofs = results.ratio(name, implementation, tokens), results.roofs
                size = workload.size(tokens, TOKENS_A_CALL)
                row = [name, f"{size.heads} x {size.key}/{size.value}", f"{size.batch} x {tokens}", implementation]
                row += [_ms(side.forward), _ms(side.both), f"{side.spread:.1%}"]
                row += [*(f"{part:.2f}" for part in ratio), best[0]] if ratio and best else ["", "", ""]
                row.append(f"{side.flops / side.both / roofs['matmul_flops']:.0%}" if roofs and side.flops else "")
                row.append(f"{side.bytes / side.both / roofs['copy_bytes']:.0%}" if roofs else "")
                rows.append(row)
    columns = ["operation", "heads x d_k/d_v", "batch x tokens", "implementation", "forward, ms", "fwd + bwd, ms", "spread"]
    columns += ["forward ÷", "fwd + bwd ÷", "held against (the fastest of its kind here)", "of matmul", "of copy"]
    return runner.table(columns, rows) if rows else "Nothing was timed."


def engines(results: Results) -> str:
    """FEM's attention by each engine over standard attention of (d_k, 2 d_v) by the same engine."""
    rows = []
    for name, workload in WORKLOADS.items():
        if workload.op != "fem_attention":
            continue
        for tokens in LENGTHS:
            for engine, ratio, own in results.same_engine(name, tokens):
                rows.append([name, str(tokens), engine, _ms(own.both), f"{ratio:.3f}"])
    return runner.table(["operation", "tokens", "engine", "fwd + bwd, ms", "÷ standard, the same engine"], rows) if rows else ""


MODEL_COLUMNS = ["model", "batch", "step, ms", "tokens/s", "÷ Transformer", "÷ joined", "MFU", "peak, GB", "recomputes"]


def models(results: Results) -> str:
    """Every whole model."""
    rows = _model_rows(results, tuple(SCALES))
    return runner.table(MODEL_COLUMNS, rows) if rows else "None was timed."


def _model_rows(results: Results, scales: tuple[str, ...]) -> list[list[str]]:
    rows = []
    for scale, variant, recompute in itertools.product(scales, VARIANTS, (False, True)):
        found = results.models.get((scale, variant, recompute))
        if found is None:
            continue
        ratio, packed = results.model_ratio(scale, variant, recompute=recompute), results.packed_ratio(scale, variant)
        share = results.utilisation(scale, variant, recompute=recompute)
        seconds = found["step"]["seconds"]
        row = [f"{scale} {variant}", f"{found['batch']} x {SCALES[scale].tokens}", _ms(seconds), f"{found['tokens'] / seconds:,.0f}"]
        row += [f"{ratio:.2f}" if ratio else "", f"{packed:.2f}" if packed else "", f"{share:.1%}" if share else ""]
        rows.append([*row, f"{found['peak_bytes'] / 1e9:.1f}", "yes" if found["recompute"] else ""])
    return rows


def _roofs(results: Results) -> str:
    if results.roofs is None:
        return ""
    matmul, copy = results.roofs["matmul_flops"], results.roofs["copy_bytes"]
    return f"Measured roofs: bf16 matrix product {matmul / 1e12:,.0f} TFLOP/s; copy {copy / 1e9:,.0f} GB/s, read and written."


def _gaps(gaps: list[Outcome], cannot: dict[str, str], left_out: list[Task]) -> str:
    lines = [f"- {what} cannot run here: {why}" for what, why in cannot.items()]
    alike: dict[str, list[str]] = {}
    for outcome in gaps:
        alike.setdefault(str(outcome.gap), []).append(outcome.task.name)
    for why, names in alike.items():
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        lines.append(f"- {'; '.join(names[:MOST_NAMES])}{more}: {why}")
    if left_out:
        lines.append(f"- left out for want of time ({len(left_out)}): {'; '.join(task.name for task in left_out)}")
    return "\n".join(lines) or "None."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.1 else f"{1000 * seconds:.1f}"


def draw(results: Results, title: str, path: Path) -> bool:
    """Write the picture; False where there is nothing to draw, or nothing to draw with."""
    lines = {}
    for name in WORKLOADS:
        found = [(tokens, ratio[1]) for tokens in LENGTHS if (ratio := results.ratio(name, "auto", tokens))]
        if found:
            lines[name] = found
    if not lines or find_spec("matplotlib") is None:
        return False
    figure = new_figure((9, 5.5))
    axes = figure.add_subplot()
    for number, (name, found) in enumerate(lines.items()):
        axes.plot(*zip(*found, strict=True), label=name, **colour_of(number))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{tokens // 1024}k" for tokens in LENGTHS])
    plain_axes(axes, "tokens of a sequence", "forward + backward ÷ the fastest it is held against")
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=8)
    save(figure, path)
    return True
