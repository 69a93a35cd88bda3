"""The pictures show the numbers: every dot, whisker and line is where its result is. How they look is for eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fem_common.plot import png
from tests.tools.evaluate.result_files import suite, write, write_heldout
from tools.evaluate import picture
from tools.evaluate.results import read
from tools.evaluate.table import build, heldout

VALUES = {"well": (0.6, 0.31), "middling": (0.5, 0.26), "poor": (0.4, 0.32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for model, (arc, boolq) in VALUES.items():
        write(tmp_path, model, "arc", arc)
        write(tmp_path, model, "boolq", boolq, chance=0.4)
        write_heldout(tmp_path, model, {128: 4.0 - arc, 256: 3.5 - arc, 1024: 3.0 - arc})
    return tmp_path


def test_a_panel_a_column_a_dot_a_model(folder: Path) -> None:
    table = build(read([folder]), suite("arc", "boolq", "copa", group="Questions"))
    panels = _panels(picture.scores(table))
    assert list(panels) == ["ARC", "BOOLQ", "COPA"]
    for place, label in enumerate(("ARC", "BOOLQ")):
        dots = _dots(panels[label])
        # By average rank: well 1.5, poor 2, middling 2.5.
        assert [x for _, x, _ in dots] == [VALUES[model][place] for model in ("well", "poor", "middling")]
        assert [y for y, _, _ in dots] == [0, 1, 2]
        assert [colour == picture.BEST for *_, colour in dots] == [label == "ARC" and x == 0.6 for _, x, _ in dots]  # 0.32 and 0.31 tie
        whiskers = [tuple(float(f"{x:.3f}") for x, _ in path.vertices) for bars in panels[label].collections for path in bars.get_paths()]
        assert whiskers == [(round(x - 0.01, 3), round(x + 0.01, 3)) for _, x, _ in dots]
    assert [text.get_text() for text in panels["ARC"].get_yticklabels()] == ["well", "poor", "middling"]
    assert not _dots(panels["COPA"])
    assert [text.get_text() for text in panels["COPA"].texts].count("–") == 3


def test_guessing_is_drawn_where_it_is_near_and_told_where_not(folder: Path) -> None:
    panels = _panels(picture.scores(build(read([folder]), suite("arc", "boolq"))))
    for label, chance in (("ARC", 0.25), ("BOOLQ", 0.4)):
        drawn = [line.get_xdata()[0] for line in panels[label].lines if line.get_linestyle() == "--"]
        low, high = panels[label].get_xlim()
        assert drawn == [chance] and low < chance < high
    for model in VALUES:
        write(folder, model, "boolq", 0.95, chance=0.5)
    far = _panels(picture.scores(build(read([folder]), suite("boolq"))))["BOOLQ"]
    assert not [line for line in far.lines if line.get_linestyle() == "--"]
    assert "‹ guessing 0.5" in [text.get_text() for text in far.texts]


@pytest.mark.parametrize(
    ("scores", "error", "won"),
    [((0.0, 0.0), 0.0, False), ((0.5, 0.486), 0.01, False), ((0.5, 0.485), 0.01, True), ((0.338, 0.337), None, True)],
    ids=["equal", "less than the difference's error", "more", "exact"],
)
def test_a_tie_is_no_win_and_the_axis_has_the_digits(scores: tuple[float, float], error: float | None, won: bool, tmp_path: Path) -> None:
    """The standard error of a difference of two scores with 0.01 each is 0.0141; no tick is where no score can be, none is rounded."""
    for model, score in zip("ab", scores, strict=True):
        write(tmp_path, model, "arc", score, stderr=error, chance=0.0)
    axes = _panels(picture.scores(build(read([tmp_path]), suite("arc"))))["ARC"]
    assert [colour == picture.BEST for *_, colour in _dots(axes)] == [won, False]
    ticks = list(zip(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()], strict=True))
    assert len(ticks) > 1 and min(at for at, _ in ticks) >= 0
    assert all(float(text) == pytest.approx(at, rel=1e-9) and len(text.partition(".")[2]) >= 2 for at, text in ticks)
    low, high = axes.get_xlim()
    assert low < min(scores) <= max(scores) < high


def test_held_out_loss_over_the_context(folder: Path) -> None:
    figure = picture.heldout(heldout(build(read([folder]), None)))
    assert figure is not None
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines if not str(line.get_label()).startswith("_")}
    shown = {str(bars.get_label()): list(zip(*bars.lines[0].get_data(), strict=True)) for bars in axes.containers}
    assert shown == {
        model: [(128, pytest.approx(4.0 - arc)), (256, pytest.approx(3.5 - arc)), (1024, pytest.approx(3.0 - arc))]
        for model, (arc, _) in VALUES.items()
    }
    assert len({bars.lines[0].get_color() for bars in axes.containers}) == 3
    assert not lines.keys() - shown.keys()


def test_no_curve_of_one_length(tmp_path: Path) -> None:
    write_heldout(tmp_path, "a", {128: 3.0})
    assert picture.heldout(heldout(build(read([tmp_path]), None))) is None


@pytest.mark.parametrize(("models", "columns"), [(1, 3), (12, 2)])
def test_any_number_of_models_is_a_png(tmp_path: Path, models: int, columns: int) -> None:
    for model in range(models):
        for column in range(columns):
            write(tmp_path, f"model {model}", f"task_{column}", 0.3, stderr=None)
        write_heldout(tmp_path, f"model {model}", {128: 3.0, 256: 2.9})
    table = build(read([tmp_path]), None)
    curves = picture.heldout(heldout(table))
    for figure in (picture.scores(table), curves):
        content = png(figure)
        assert content.startswith(b"\x89PNG")
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert width > 500 and height > 150
    assert curves is not None
    looks = {(bars.lines[0].get_color(), bars.lines[0].get_marker(), bars.lines[0].get_linestyle()) for bars in curves.axes[0].containers}
    assert len(looks) == models


def _panels(figure: Any) -> dict[str, Any]:
    return {axes.get_title(loc="left").strip(): axes for axes in figure.axes if axes.get_visible()}


def _dots(axes: Any) -> list[tuple[float, float, str]]:
    """(place, value, colour) of each."""
    return [(bars.lines[0].get_ydata()[0], bars.lines[0].get_xdata()[0], bars.lines[0].get_color()) for bars in axes.containers]
