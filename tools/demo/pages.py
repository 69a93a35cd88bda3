"""Pages of the demo: the picture of both losses and, with ``--readme``, two documents.

``--readme`` writes the figures and pictures into README.md and docs/evaluation.md of the checkout,
between markers. The published figures should be reproducible with ``make demo``. Therefore
``--readme`` requires an idle machine and the default settings. The figures state the hashes of the
configuration and of the suite that produced them, which a test compares with the current ones.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from fem_common.config import plain
from fem_common.errors import ConfigError
from fem_common.files import sha256_json
from fem_common.plot import COLOURS, QUIET, new_figure, plain_axes, save, smooth
from pretrain.report.history import History
from tools.demo import report
from tools.demo.report import NAMES
from tools.evaluate.catalogue import find_tasks
from tools.evaluate.suite import load_suite

FEM, TRANSFORMER = COLOURS[:2]


def draw(fem: History, transformer: History, found: dict[str, Any], file: Path) -> None:
    """Write ``file`` as PNG: the losses of both models, and the step at which FEM was stopped.

    found: contents of report.json.
    """
    figure = new_figure((9, 6))
    axes = figure.subplots()
    models, run = found["models"], found["run"]
    entropy = found["unigram"]["heldout_entropy"]
    curves = (("transformer", transformer, TRANSFORMER, "s"), ("fem", fem, FEM, "o"))
    for key, history, colour, marker in curves:
        name, full = NAMES[key], models[key]["heldout_nats_per_token"]
        steps, losses = np.array(list(history.losses().items())).T
        axes.plot(steps, losses, color=colour, alpha=0.22, linewidth=0.8)
        smoothed = smooth(losses, max(1.0, fem.last_step / 40))
        label = f"{name}, training (smoothed; faint: each step)"
        axes.plot(steps, smoothed, color=colour, linewidth=1.9, label=label)
        line_style = {"linestyle": "", "marker": marker, "color": colour, "markersize": 8}
        where, values = np.reshape(history.validations, (-1, 2)).T
        label = f"{name}, held-out: a sample (open: the whole split, {full:.3f})"
        axes.plot(where, values, label=label, **line_style)
        # Slightly to the right of the last step, so that it does not cover the sample's markers.
        axes.plot(1.02 * steps[-1], full, markerfacecolor="white", **line_style)
    label = f"unigram entropy of the held-out text, {entropy:.2f}"
    axes.axhline(entropy, color=QUIET, linewidth=1.1, linestyle=":", label=label)
    label = "FEM stopped by SIGTERM (TP 2 × PP 2), resumed at DP 2"
    axes.axvline(run["stopped_at"], color=QUIET, linewidth=1.2, label=label)
    x = f"step ({run['batch_tokens']:,} tokens each)"
    plain_axes(axes, x, "loss, nats per token", grid="y")
    axes.xaxis.get_major_locator().set_params(integer=True)
    # Below the axes, where it covers no curve, whatever their length; one column per model.
    handles, labels = axes.get_legend_handles_labels()
    order = (0, 1, 4, 2, 3, 5)
    columns = [handles[place] for place in order], [labels[place] for place in order]
    style = {"ncols": 2, "fontsize": 8.5, "columnspacing": 1.0}
    figure.legend(*columns, frameon=False, loc="outside lower center", **style)
    title = (
        "Pretraining on Python's standard library:"
        f" {models['fem']['parameters'] / 1e6:.1f}M parameters,"
        f" {models['fem']['tokens_trained'] / 1e3:.0f}k tokens, {run['steps']} steps"
    )
    axes.set_title(title, loc="left", fontsize=10.5)
    save(figure, file)


COMMAND = "python -m tools.demo --readme"
PAGES = {"demo": "README.md", "evaluation": "docs/evaluation.md"}
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
            (out / "evaluation" / "table.md").read_text(encoding="utf-8"), found
        ),
    }
    for name, text in texts.items():
        before, after = _split(root, name)
        (root / PAGES[name]).write_text(f"{before}\n{text}\n{after}", encoding="utf-8")
    shutil.copyfile(out / "report.png", root / "docs" / "demo.png")
    shutil.copyfile(out / "evaluation" / "table.png", root / "docs" / "evaluation.png")


def demo_text(found: dict[str, Any]) -> str:
    """Return the text for README.md: picture, table, and the conditions of the measurement."""
    machine = found["machine"]
    lines = [
        [_size(found), "nats per token", "bits per byte", "parameters", "tokens/s"],
        *report.rows(found),
    ]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    made = (
        f"Picture and figures: `{COMMAND}`, {_configuration(found)}, {date.today().isoformat()}, "
        f"{machine['cores']} CPU cores ({platform.machine()}), Python {machine['python']}, "
        f"torch {machine['torch']}, on an idle machine. "
    )
    return _block(
        "![Training and held-out loss of the demo's two models](docs/demo.png)",
        "\n".join([head, "|---|---|---|---|---|", *body]),
        made + report.conditions(found),
    )


def _block(picture: str, table: str, conditions: str) -> str:
    return f"{picture}\n\n{table}\n\n{fill(conditions, 100)}"


def _size(found: dict[str, Any]) -> str:
    run, heldout = found["run"], found["models"]["fem"]["heldout_tokens"]
    steps = f"{run['steps']} steps of {run['batch_tokens']:,} tokens"
    return f"{steps}, {heldout:,} tokens held out"


def _configuration(found: dict[str, Any]) -> str:
    return f"configuration `{found['run']['configuration']}`"


def suite_hash() -> str:
    """Return a hash of the quick suite: its columns, and the definitions of its tasks."""
    suite = load_suite("quick")
    tasks = find_tasks(suite)
    content: list[Any] = []
    for column in suite.tasks:
        content += [plain(column), column.kind == "harness" and tasks.digest(column.task)]
    return sha256_json(content)[:12]


def evaluation_text(markdown: str, found: dict[str, Any]) -> str:
    """Return the text for docs/evaluation.md: the picture and the first table of the report.

    markdown: report of ``tools.evaluate``. found: contents of report.json.
    """
    table = re.search(r"(^\|.*\n)+", markdown, re.MULTILINE)
    assert table is not None
    return _block(
        "![The quick suite on the demo's two models](evaluation.png)",
        table[0].rstrip(),
        f"*`{COMMAND}`, {_configuration(found)}, suite `{suite_hash()}`, "
        f"{date.today().isoformat()}: six small tasks for the demo's two models ({_size(found)}). "
        "± and whiskers are one standard error; vermilion: better by more than the standard error "
        "of the difference.*",
    )


def _split(root: Path, name: str) -> tuple[str, str]:
    """Return the page's text until its opening marker, and its text from the closing marker.

    Both texts include the marker. Raises ConfigError if the page does not contain both markers in
    this order.
    """
    path = root / PAGES[name]
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ConfigError(
            f"--readme: {path} does not contain {begin} followed by {end}: "
            "run it in a checkout of the project"
        )
    return before + begin, end + after
