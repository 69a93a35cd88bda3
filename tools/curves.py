"""``python -m tools.curves RUN...``: draw the progress of training runs in one picture.

The picture shows loss, gradient norm, learning rate and tokens per second, from the runs'
metrics.jsonl. The runs may be in progress.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fem_common.cli import Parser, run
from fem_common.errors import ConfigError
from fem_common.plot import COLOURS, MARKERS, QUIET, new_figure, plain_axes, save, smooth
from fem_common.progress import Progress
from fem_common.text import count, first_few
from pretrain.config import load_run
from pretrain.report.history import METRICS, History
from pretrain.report.progress_file import read_progress
from pretrain.run_directory import read_fork
from pretrain.training_stages import parts_of

DESCRIPTION = """Draw loss (training: smoothed, over the faint single steps; validation: markers),
gradient norm, learning rate and tokens per second of one or several runs in one picture. Stops,
resumes, forks, stages and spikes are marked. A run in progress is drawn up to its last step."""
POINTS = 1000  # most points of a curve; a longer run is drawn by means over equal ranges of steps
SMOOTHING = 1 / 40  # standard deviation of the smoothing, as a share of the curve
ACTIVE = ("starting", "running")
KEPT = "the picture shows the last steps that were read"
QUANTITIES = {
    "grad_norm": "gradient norm",
    "lr": "learning rate",
    "tokens_per_second": "tokens per second",
}


@dataclass(frozen=True)
class Curves:
    """The history of one run, and the events that the picture marks.

    name: shown in the legend.
    boundaries: last step before each stage after the first one -> name of the stage.
    fork: the step at which the run forked from another run, and that run's name; or None.
    state: the state in progress.json; None if it is missing.
    """

    name: str
    history: History
    boundaries: dict[int, str]
    fork: tuple[int, str] | None
    state: str | None

    @classmethod
    def read(cls, folder: Path, name: str) -> Curves:
        """Read the files of the run directory ``folder``."""
        boundaries = {}
        if (folder / "config.yaml").is_file():
            parts = parts_of(load_run(folder / "config.yaml", ()))
            boundaries = {part.begin_step: part.name for part in parts if part.begin_step}
        forked = read_fork(folder)
        progress = read_progress(folder)
        return cls(
            name,
            History.read(folder),
            boundaries,
            (forked["step"], Path(forked["parent"]).name) if forked else None,
            progress["state"] if progress else None,
        )

    @property
    def first(self) -> int:
        """The first step that was logged."""
        return int(self.history.steps[0]["step"])

    def column(self, key: str) -> Any:
        """Return the values of all steps as a float64 array; null becomes NaN."""
        values = [entry.get(key) for entry in self.history.steps]
        return np.array([math.nan if value is None else value for value in values], float)

    def places(self, steps: Sequence[int], by_tokens: bool) -> Any:
        """Return the places of steps on the horizontal axis."""
        if not by_tokens:
            return np.array(steps, float)
        return np.interp(steps, self.column("step"), self.column("consumed_tokens"))

    def curve(self, key: str, by_tokens: bool) -> tuple[Any, Any]:
        """Return (places, values) of a quantity, as means over at most `POINTS` ranges of steps."""
        size = -(-len(self.history.steps) // POINTS)
        begins = np.arange(0, len(self.history.steps), size)
        counts = np.diff(np.append(begins, len(self.history.steps)))
        places = self.column("consumed_tokens" if by_tokens else "step")
        means = [np.add.reduceat(each, begins) / counts for each in (places, self.column(key))]
        return means[0], means[1]

    def rewinds(self) -> list[tuple[int, int]]:
        """Return the entries of `History.returns` that passed over samples, after a spike."""
        passed_over = {entry["step"]: entry.get("passed_over", 0) for entry in self.history.steps}
        return [
            (step, earlier)
            for step, earlier in self.history.returns
            if passed_over.get(earlier + 1, 0) > passed_over.get(earlier, 0)
        ]

    def spikes(self) -> list[int]:
        """Return the steps whose update was skipped, and those after which training rewound."""
        skipped = [entry["step"] for entry in self.history.steps if entry.get("skipped")]
        return sorted({*skipped, *(step for step, _ in self.rewinds())})

    def summary(self) -> str:
        """Return the run's name, its last step and losses, and its state."""
        last = self.history.steps[-1]
        parts = [f"step {last['step']:,}", f"loss {last['loss']:.3f}"]
        if self.history.validations:
            parts.append(f"validation {self.history.validations[-1][1]:.3f}")
        return f"{self.name}: " + ", ".join(filter(None, (*parts, self.state)))

    def events(self) -> list[tuple[int, str]]:
        """Return (step, label) of stops, resumes, forks and stages, in the order of the steps."""
        rewinds = self.rewinds()
        killed = [each for each in self.history.returns if each not in rewinds]
        lost = {earlier: last for last, earlier in killed}
        found = [(step, f"stage {name}") for step, name in self.boundaries.items()]
        for step in dict.fromkeys([*lost, *self.history.resumes]):
            stopped = f"stopped at {lost[step]:,}, " if step in lost else "stopped and "
            found.append((step, f"{stopped}resumed at {step:,}"))
        if self.fork:
            found.append((self.fork[0], f"fork of {self.fork[1]}"))
        return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture, print its path and return the exit code."""
    parser = Parser(prog="tools.curves", description=DESCRIPTION)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run directory")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.png",
        help="default: curves.png in the run directory, or in the common folder of the runs",
    )
    parser.add_argument(
        "--follow",
        type=float,
        nargs="?",
        const=10.0,
        metavar="SECONDS",
        help="draw the picture again every SECONDS (default: 10) until no run is in progress",
    )
    given = parser.parse_args(arguments)
    if given.out and given.out.suffix != ".png":
        parser.error(f"--out {given.out}: the picture is a PNG, so its name must end in .png")
    if given.follow is not None and not given.follow > 0:
        parser.error(f"--follow {given.follow:g}: give a number of seconds above 0")
    return run("tools.curves", lambda: _draw(given.runs, given.out, given.follow), kept=KEPT)


def _draw(runs: list[Path], out: Path | None, follow: float | None) -> None:
    """Write the picture, once or until no run is in progress, and report it at the end."""
    folders = [_run_directory(path, may_be_empty=follow is not None) for path in runs]
    common = Path(os.path.commonpath([folder.absolute() for folder in folders]))
    names = [str(folder.absolute().relative_to(common)) for folder in folders]
    if len(folders) == 1:
        names = [common.name]
    if out is None:
        shown = common.relative_to(Path.cwd()) if common.is_relative_to(Path.cwd()) else common
        out = shown / "curves.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    with Progress(None, "pictures", "tools.curves", quiet=follow is None, every=0) as progress:
        while True:
            curves = [Curves.read(*pair) for pair in zip(folders, names, strict=True)]
            drawn = [one for one in curves if one.history.steps]
            if drawn:
                draw(drawn, out)
            if follow is None or all(one.state not in ACTIVE for one in curves):
                break
            steps = ", ".join(f"{one.name} at step {one.history.last_step:,}" for one in curves)
            progress.advance(note=f"{out}: {steps}")
            time.sleep(follow)
    print("\n".join([f"wrote {out}", *(f"  {one.summary()}" for one in drawn)]))


def _run_directory(path: Path, *, may_be_empty: bool) -> Path:
    """Return the run directory that ``path`` names.

    ``path`` may be a folder whose ``checkpoints`` is a link to those of a run, as `make demo`
    writes it. Raises ConfigError if no step was logged, unless ``may_be_empty`` is True and the run
    is in progress.
    """
    linked = (path / "checkpoints").resolve().parent
    found = next((folder for folder in (path, linked) if (folder / METRICS).is_file()), None)
    if found is not None and History.read(found).steps:
        return found
    progress = read_progress(path)
    if progress and progress["state"] in ACTIVE:
        if may_be_empty:
            return path
        raise ConfigError(f"{path}: the first step is not finished: add --follow, or wait")
    below = sorted(str(file.parent) for file in path.glob(f"*/{METRICS}"))
    hint = f"did you mean {first_few(below, 3)}?" if below else "name the run_dir of a training run"
    raise ConfigError(f"{path}: there is no {METRICS} with a step; {hint}")


def draw(runs: list[Curves], file: Path) -> None:
    """Write ``file`` as PNG; each run has at least one step.

    The horizontal axis is the step, or tokens if the runs have steps of different sizes.
    """
    figure = new_figure((10, 7.5))
    grid = figure.add_gridspec(2, 3, height_ratios=(1.7, 1))
    loss = figure.add_subplot(grid[0, :])
    small = [figure.add_subplot(grid[1, column], sharex=loss) for column in range(3)]
    by_tokens = len({round(one.column("consumed_tokens")[0] / one.first) for one in runs}) > 1
    for number, one in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        _draw_loss(loss, one, by_tokens, colour, MARKERS[number % len(MARKERS)])
        for axes, key in zip(small, QUANTITIES, strict=True):
            axes.plot(*one.curve(key, by_tokens), color=colour, linewidth=1.2)
        quiet = QUIET if len(runs) == 1 else colour
        for step, label in one.events():
            place = one.places([step], by_tokens)[0]
            for axes in (loss, *small):
                axes.axvline(place, color=quiet, linewidth=0.9, linestyle="--", zorder=1)
            if len(runs) == 1:  # the labels of several runs would cover each other
                _label(loss, place, label, quiet)
    if len(runs) > 1 and any(one.events() for one in runs):
        loss.plot([], [], "--", color=QUIET, label="stop and resume, fork, or next stage")
    loss.set_ylim(*_limits(runs))
    loss.legend(frameon=False, fontsize=9)
    title = "Loss in training (smoothed; faint: each step) and in validation (markers)"
    loss.set_title(title, loc="left", fontsize=10.5)
    for axes, title in zip(small, QUANTITIES.values(), strict=True):
        axes.set_title(title, loc="left", fontsize=10)
    for axes in (loss, *small):
        plain_axes(axes, "tokens" if by_tokens else "step")
        axes.xaxis.set_major_formatter(_short)
    loss.set_ylabel("nats per token")
    loss.xaxis.get_major_locator().set_params(nbins=5, integer=True)
    if any((one.column("grad_norm") > 0).any() for one in runs):
        small[0].set_yscale("log")
        small[0].yaxis.get_minor_locator().set_params(subs=(2, 5))
        small[0].yaxis.set_minor_formatter(_short)
    for axes in small:
        axes.yaxis.set_major_formatter(_short)
    for axes in small[1:]:
        axes.set_ylim(bottom=0)
    save(figure, file)


def _draw_loss(axes: Any, one: Curves, by_tokens: bool, colour: str, marker: str) -> None:
    """Draw the losses of one run and the places of its spikes."""
    where, losses = one.curve("loss", by_tokens)
    axes.plot(where, losses, color=colour, alpha=0.25, linewidth=0.8)
    smoothed = smooth(losses, max(1.0, len(losses) * SMOOTHING))
    axes.plot(where, smoothed, color=colour, linewidth=1.9, label=one.summary())
    if one.history.validations:
        steps, values = zip(*one.history.validations, strict=True)
        axes.plot(one.places(steps, by_tokens), values, marker, color=colour, markersize=6)
    spikes = one.spikes()
    if spikes:
        label = f"{one.name}: spikes or skipped steps ({len(spikes)})"
        top = axes.get_xaxis_transform()  # y in parts of the height
        places = one.places(spikes, by_tokens)
        axes.plot(
            places, np.full(len(places), 0.985), "x", color=colour, transform=top, label=label
        )


def _short(value: float, _: object = None) -> str:
    """Format a number for an axis."""
    return count(value) if value >= 10 else f"{value:g}"


def _label(axes: Any, place: float, text: str, colour: str) -> None:
    """Write the label of an event along its line, at the top of the axes."""
    axes.text(
        place,
        0.97,
        text,
        transform=axes.get_xaxis_transform(),
        rotation=90,
        ha="right",
        va="top",
        fontsize=7.5,
        color=colour,
    )


def _limits(runs: list[Curves]) -> tuple[float, float]:
    """Return the limits of the loss axis, which cut off spikes above the first losses."""
    losses = [one.column("loss") for one in runs]
    finite = np.concatenate([values[np.isfinite(values)] for values in losses])
    validations = [value for one in runs for _, value in one.history.validations]
    values = np.concatenate([finite, [value for value in validations if math.isfinite(value)]])
    if not len(values):
        return 0.0, 1.0
    first = max((values[0] for values in losses if math.isfinite(values[0])), default=0.0)
    high = max(first, float(np.quantile(values, 0.995)))
    low = float(values.min())
    margin = 0.05 * max(high - low, 1e-3)
    return low - margin, high + margin


if __name__ == "__main__":
    sys.exit(main())
