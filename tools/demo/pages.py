"""Pages of the demo: the picture of both losses and, with ``--readme``, two documents.

``--readme`` writes the figures and pictures into README.md and docs/evaluation.md of the checkout,
between markers. The published figures should be reproducible with ``make demo``. Therefore
``--readme`` requires an idle machine and the default settings.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from fem_common.errors import ConfigError
from fem_common.plot import COLOURS, QUIET, new_figure, plain_axes, save
from tools.demo.report import History

FEM, TRANSFORMER = COLOURS[:2]


def smooth(values: np.ndarray, width: float) -> np.ndarray:
    """Return the values smoothed by local linear regression with Gaussian weights.

    width: standard deviation of the weights, in steps.

    Unlike a moving average, this adds no lag and does not bend the ends of the curve.
    """
    steps = np.arange(len(values))
    result = np.empty(len(values))
    for step in steps:
        weight = np.exp(-0.5 * ((steps - step) / width) ** 2)
        _, level = (
            np.polyfit(steps - step, values, 1, w=np.sqrt(weight))
            if len(values) > 2
            else (0.0, values[step])
        )
        result[step] = level
    return result


def draw(fem: History, transformer: History, found: dict[str, Any], file: Path) -> None:
    """Write ``file`` as PNG: the losses of both models and their difference.

    found: contents of report.json.
    """
    figure = new_figure((9, 6.6))
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    width = max(1.0, fem.last_step / 40)
    curves = (
        ("transformer", "Transformer", transformer, TRANSFORMER, "s", (0, (4, 1.5))),
        ("fem", "FEM-softmax", fem, FEM, "o", "-"),
    )
    for key, name, history, colour, marker, style in curves:
        steps, losses = np.array(list(history.losses().items())).T
        above.plot(steps, losses, color=colour, alpha=0.22, linewidth=0.8)
        label = f"{name}, training (smoothed; faint: each step)"
        above.plot(
            steps, smooth(losses, width), color=colour, linewidth=1.9, linestyle=style, label=label
        )
        if history.validations:
            where, values = zip(*history.validations, strict=True)
            look = {
                "linestyle": "",
                "marker": marker,
                "color": colour,
                "markeredgecolor": "white",
                "markersize": 8,
            }
            above.plot(
                where, values, label=f"{name}, held-out: a sample (open: the whole split)", **look
            )
        # Slightly to the right of the last step, so that it does not cover the sample's markers.
        whole = found["models"][key]["heldout_nats_per_token"]
        open_marker = {"color": "white", "markeredgecolor": colour}
        above.plot(
            [1.02 * steps[-1]],
            [whole],
            linestyle="",
            marker=marker,
            markeredgewidth=1.8,
            markersize=8,
            **open_marker,
        )
    _mark(above, below, found)
    _difference(below, fem, transformer, width)
    plain_axes(above, "", "loss, nats per token", grid="y")
    plain_axes(
        below,
        f"step ({found['run']['batch_tokens']:,} tokens each)",
        "FEM − Transformer,\nsame batch",
        grid="y",
    )
    above.legend(frameon=False, loc="upper right", fontsize=9)
    models, run = found["models"], found["run"]
    above.set_title(
        "Pretraining on Python's standard library: "
        f"{models['fem']['parameters'] / 1e6:.1f}M parameters, "
        f"{models['fem']['tokens_trained'] / 1e3:.0f}k tokens, {run['steps']} steps\n"
        "Loss on the whole held-out split at the end: "
        f"FEM-softmax {models['fem']['heldout_nats_per_token']:.3f}, "
        f"Transformer {models['transformer']['heldout_nats_per_token']:.3f} nats per token",
        loc="left",
        fontsize=10.5,
    )
    save(figure, file)


def _mark(above: Any, below: Any, found: dict[str, Any]) -> None:
    """Mark the unigram entropy of the held-out text, and the step at which FEM was stopped.

    above, below: axes of the losses and of their difference.
    """
    run, entropy = found["run"], found["unigram"]["heldout_entropy"]
    look = {"textcoords": "offset points", "fontsize": 9, "color": QUIET, "ha": "right"}
    above.axhline(entropy, color=QUIET, linewidth=1.1, linestyle=":")
    above.annotate(
        f"unigram entropy of the held-out text {entropy:.2f}",
        (run["steps"], entropy),
        xytext=(0, 4),
        **look,
    )
    for axes in (above, below):
        axes.axvline(run["stopped_at"], color=QUIET, linewidth=1.2)
    stop = (
        f"FEM stopped by SIGTERM at step {run['stopped_at']}\n"
        "(TP 2 × PP 2, 4 ranks), resumed at DP 2"
    )
    above.annotate(
        stop,
        (run["stopped_at"], 0.03),
        xycoords=("data", "axes fraction"),
        xytext=(-6, 0),
        va="bottom",
        **look,
    )


def _difference(axes: Any, fem: History, transformer: History, width: float) -> None:
    """Draw FEM's training loss minus the Transformer's on the same batch."""
    ours, theirs = fem.losses(), transformer.losses()
    steps = sorted(ours.keys() & theirs.keys())
    gaps = np.array([ours[step] - theirs[step] for step in steps])
    axes.axhline(0.0, color=QUIET, linewidth=0.9)
    axes.plot(steps, gaps, color=FEM, alpha=0.22, linewidth=0.8)
    axes.plot(steps, smooth(gaps, width), color=FEM, linewidth=1.9)
    axes.annotate(
        "below 0: FEM is better",
        (0.995, 0.04),
        xycoords="axes fraction",
        fontsize=9,
        color=QUIET,
        ha="right",
    )


COMMAND = "python -m tools.demo --readme"
PAGES = {"demo": "README.md", "evaluation": "docs/evaluation.md"}
NAMES = {"fem": "FEM-softmax", "transformer": "Transformer"}
IDLE = 0.5  # load per core above which other programs would change the demo's tokens/s


def check(root: Path, settings: Sequence[str]) -> None:
    """Check the conditions of ``--readme``: an idle machine and the default settings.

    Raises ConfigError if one of them is not met, before the demo starts.
    """
    if settings:
        raise ConfigError(
            f"--readme publishes the demo with its default settings: leave out {settings[0]}"
        )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > IDLE * cores:
        raise ConfigError(
            f"--readme: the machine is busy (load {load:.1f} on {cores} cores), which would change "
            "the measured speed: wait until it is idle"
        )
    for name, page in PAGES.items():
        _split(root, name)
        if not os.access(root / page, os.W_OK):
            raise ConfigError(f"--readme: {root / page} is not writable")


def write(root: Path, out: Path, found: dict[str, Any]) -> None:
    """Write README.md and docs/evaluation.md of the checkout ``root``, and their pictures.

    out: folder of the demo. ``out/evaluation`` must contain the evaluation of its models.
    found: contents of report.json.
    """
    texts = {
        "demo": demo_text(found),
        "evaluation": evaluation_text(
            (out / "evaluation" / "table.md").read_text(encoding="utf-8")
        ),
    }
    for name, text in texts.items():
        before, after = _split(root, name)
        (root / PAGES[name]).write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
    shutil.copyfile(out / "report.png", root / "docs" / "demo.png")
    shutil.copyfile(out / "evaluation" / "table.png", root / "docs" / "evaluation.png")


def demo_text(found: dict[str, Any]) -> str:
    """Return the text for README.md: picture, table, and the conditions of the measurement."""
    run, models, parity, alone, machine = (
        found[key] for key in ("run", "models", "parity", "unigram", "machine")
    )
    rows = [
        f"| {name} | {models[key]['heldout_nats_per_token']:.3f} | "
        f"{models[key]['heldout_bits_per_byte']:.3f} | "
        f"{models[key]['parameters'] / 1e6:.2f}M | {models[key]['tokens_per_second']:,.0f} |"
        for key, name in NAMES.items()
    ]
    difference = max(parity["logit_difference"].values())
    tokens, heldout = models["fem"]["tokens_trained"], models["fem"]["heldout_tokens"]
    return "\n".join(
        [
            "![Training and held-out loss of the demo's two models](docs/demo.png)",
            "",
            f"| {run['steps']} steps of {run['batch_tokens']:,} tokens, "
            f"{heldout:,} tokens held out | nats per token | bits per byte | "
            "parameters | tokens/s |",
            "|---|---|---|---|---|",
            *rows,
            f"| the text's own unigram entropy | {alone['heldout_entropy']:.3f} | "
            f"{alone['bits_per_byte']:.3f} | | |",
            "",
            fill(
                f"Picture and figures: `{COMMAND}`, {date.today().isoformat()}, "
                f"{machine['cores']} CPU cores ({platform.machine()}), Python {machine['python']}, "
                f"torch {machine['torch']}. tokens/s: the median step of both models at DP 2 with "
                "one thread per rank, on an idle machine. One seed and "
                f"{tokens / 1e6:.2f}M tokens: this shows that both train, not which is better at "
                f"scale. Losses of the {parity['resume_steps']} steps after the change of layout "
                "agree with the old layout's to "
                f"{parity['resume_relative_loss_difference']:.1e}; "
                "exported logits equal Megatron's "
                + (f"to {difference:.1e}." if difference else "to the last bit."),
                100,
            ),
        ]
    )


def evaluation_text(report: str) -> str:
    """Return the text for docs/evaluation.md: the picture and the first table of the report.

    report: Markdown report of ``tools.evaluate``.
    """
    lines = report.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    last = next(
        (number for number in range(first, len(lines)) if not lines[number].startswith("|")),
        len(lines),
    )
    return "\n".join(
        [
            "![The quick suite on the demo's two models](evaluation.png)",
            "",
            *lines[first:last],
            "",
            fill(
                f"*Six small tasks for the demo's two models: `{COMMAND}`, "
                f"{date.today().isoformat()}. ± and whiskers are one standard error; vermilion: "
                "better by more than the standard error of the difference.*",
                100,
            ),
        ]
    )


def _split(root: Path, name: str) -> tuple[str, str]:
    """Return the page's text until its opening marker, and its text from the closing marker.

    Both texts include the marker. Raises ConfigError if the page does not contain both markers in
    this order.
    """
    path, begin, end = root / PAGES[name], f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ConfigError(
            f"--readme: {path} does not contain {begin} followed by {end}: "
            "run it in a checkout of the project"
        )
    return before + begin, end + after
