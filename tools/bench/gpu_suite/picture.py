"""One picture: forward + backward over what an operation is held against, by length. Only where matplotlib is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tools.bench.gpu_suite.plan import LENGTHS
from tools.bench.gpu_suite.results import Results
from tools.bench.workloads import WORKLOADS


def draw(results: Results, title: str, path: Path) -> bool:
    """Write the picture; False where there is nothing to draw, or nothing to draw with."""
    lines = {}
    for name in WORKLOADS:
        found = [(tokens, ratio[1]) for tokens in LENGTHS if (ratio := results.ratio(name, "auto", tokens))]
        if found:
            lines[name] = found
    if not lines or find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    for number, (name, found) in enumerate(lines.items()):
        axes.plot(*zip(*found, strict=True), marker="osD^vP*X"[number % 8], label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(LENGTHS, [f"{tokens // 1024}k" for tokens in LENGTHS])
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("forward + backward ÷ the fastest it is held against")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=130)
    return True
