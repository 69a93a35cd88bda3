"""The pictures show the numbers: every dot, whisker and line is at its result. Appearance is not
tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tools.evaluate.result_files import suite, write, write_heldout
from tools.evaluate import picture
from tools.evaluate.results import read
from tools.evaluate.table import build, heldout

VALUES = {"well": (0.6, 0.31), "middling": (0.5, 0.26), "poor": (0.4, 0.32)}


def panels(folder: Path, *names: str, group: str = "") -> dict[str, Any]:
    figure = picture.scores(build(read([folder]), suite(*names, group=group)))
    return {axes.get_title(loc="left").strip(): axes for axes in figure.axes if axes.get_visible()}


def dots(axes: Any) -> list[tuple[float, float, bool]]:
    """Return (position, value, whether it is the best) for each dot."""
    lines = [bars.lines[0] for bars in axes.containers]
    return [
        (line.get_ydata()[0], line.get_xdata()[0], line.get_color() == picture.BEST)
        for line in lines
    ]


def guessing(axes: Any) -> list[float]:
    return [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def test_a_panel_a_column_a_dot_a_model(tmp_path: Path) -> None:
    """By average rank, 1.5, 2 and 2.5; guessing is drawn if it is near, else written; 0.32 and 0.31
    tie.
    """
    for model, (arc, boolq) in VALUES.items():
        write(tmp_path, model, "arc", arc)
        write(tmp_path, model, "boolq", boolq, chance=0.4)
        write(tmp_path, model, "far", 0.95, chance=0.5)
    found = panels(tmp_path, "arc", "boolq", "copa", group="Questions")
    assert list(found) == ["ARC", "BOOLQ", "COPA"]
    for place, (label, chance) in enumerate((("ARC", 0.25), ("BOOLQ", 0.4))):
        axes = found[label]
        values = [VALUES[model][place] for model in ("well", "poor", "middling")]
        assert dots(axes) == [(y, x, x == 0.6) for y, x in enumerate(values)]
        whiskers = []
        for bars in axes.collections:
            for path in bars.get_paths():
                whiskers.append([round(x, 3) for x, _ in path.vertices])
        assert whiskers == [[round(x - 0.01, 3), round(x + 0.01, 3)] for x in values]
        assert guessing(axes) == [chance] and axes.get_xlim()[0] < chance < axes.get_xlim()[1]
    assert [text.get_text() for text in found["ARC"].get_yticklabels()] == [
        "well",
        "poor",
        "middling",
    ]
    assert not dots(found["COPA"])
    assert [text.get_text() for text in found["COPA"].texts].count("–") == 3
    write(tmp_path / "one", "alone", "arc", 0.5)
    only = panels(tmp_path / "one", "arc")["ARC"]
    assert [text.get_text() for text in only.get_yticklabels()] == ["alone"]
    write(tmp_path / "one", "alone", "arc", 0.5, raw={"bits_per_byte,none": 1.5})
    # The panel of bits per byte is the later one of the same title.
    assert dots(panels(tmp_path / "one", "arc")["ARC"])[0][:2] == (0, 1.5)
    far = panels(tmp_path, "far")["FAR"]
    assert not guessing(far) and "‹ guessing 0.5" in [text.get_text() for text in far.texts]


@pytest.mark.parametrize(
    ("scores", "error", "won"),
    [
        ((0.0, 0.0), 0.0, False),
        ((0.5, 0.486), 0.01, False),
        ((0.5, 0.485), 0.01, True),
        ((0.338, 0.337), None, True),
    ],
    ids=["equal", "less than the difference's error", "more", "exact"],
)
def test_a_tie_is_no_win_and_the_axis_has_the_digits(
    scores: tuple[float, float], error: float | None, won: bool, tmp_path: Path
) -> None:
    """The standard error of a difference of two scores with 0.01 each is 0.0141; ticks are only at
    possible scores and are not rounded.
    """
    for model, score in zip("ab", scores, strict=True):
        write(tmp_path, model, "arc", score, stderr=error, chance=0.0)
    axes = panels(tmp_path, "arc")["ARC"]
    assert [best for *_, best in dots(axes)] == [won, False]
    ticks = list(
        zip(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()], strict=True)
    )
    assert len(ticks) > 1 and min(at for at, _ in ticks) >= 0
    assert all(
        float(text) == pytest.approx(at, rel=1e-9) and len(text.partition(".")[2]) >= 2
        for at, text in ticks
    )
    assert axes.get_xlim()[0] < min(scores) <= max(scores) < axes.get_xlim()[1]


def test_held_out_loss_over_the_context(tmp_path: Path) -> None:
    """One line per model with a distinct style; none for a single length."""
    for model in range(12):
        write_heldout(
            tmp_path,
            f"m{model:02}",
            {length: loss - 0.1 * model for length, loss in ((128, 4.0), (256, 3.5), (1024, 3.0))},
        )
    figure = picture.heldout(heldout(build(read([tmp_path]), None)))
    assert figure is not None
    shown = {str(bars.get_label()): bars.lines[0] for bars in figure.axes[0].containers}
    assert shown["m02"].get_xdata().tolist() == [128, 256, 1024]
    assert shown["m02"].get_ydata().tolist() == pytest.approx([3.8, 3.3, 2.8])
    assert (
        len(
            {(line.get_color(), line.get_marker(), line.get_linestyle()) for line in shown.values()}
        )
        == len(shown)
        == 12
    )
    write_heldout(tmp_path / "short", "a", {128: 3.0})
    assert picture.heldout(heldout(build(read([tmp_path / "short"]), None))) is None
