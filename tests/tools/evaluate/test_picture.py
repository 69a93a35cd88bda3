"""The pictures show the numbers: every dot, whisker and line is where its result is. How they look is for eyes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fem_common.plot import png
from tests.tools.evaluate.result_files import suite, write, write_heldout
from tools.evaluate import picture
from tools.evaluate.results import read
from tools.evaluate.suite import Suite
from tools.evaluate.table import build, heldout

VALUES = {"well": (0.6, 0.31), "middling": (0.5, 0.26), "poor": (0.4, 0.32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for model, (arc, boolq) in VALUES.items():
        write(tmp_path, model, "arc", arc)
        write(tmp_path, model, "boolq", boolq, chance=0.4)
        write_heldout(tmp_path, model, {128: 4.0 - arc, 256: 3.5 - arc, 1024: 3.0 - arc})
    return tmp_path


def panels(folder: Path, of: Suite) -> dict[str, Any]:
    figure = picture.scores(build(read([folder]), of))
    return {axes.get_title(loc="left").strip(): axes for axes in figure.axes if axes.get_visible()}


def dots(axes: Any) -> list[tuple[float, float, str]]:
    """(place, value, colour) of each."""
    return [(bars.lines[0].get_ydata()[0], bars.lines[0].get_xdata()[0], bars.lines[0].get_color()) for bars in axes.containers]


def texts(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.texts]


def guessing(axes: Any) -> list[float]:
    return [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]


def test_a_panel_a_column_a_dot_a_model(folder: Path) -> None:
    """By average rank, 1.5, 2 and 2.5; guessing is drawn where it is near, and told where not."""
    found = panels(folder, suite("arc", "boolq", "copa", group="Questions"))
    assert list(found) == ["ARC", "BOOLQ", "COPA"]
    for place, (label, chance) in enumerate((("ARC", 0.25), ("BOOLQ", 0.4))):
        axes, values = found[label], [VALUES[model][place] for model in ("well", "poor", "middling")]
        assert [(y, x) for y, x, _ in dots(axes)] == list(enumerate(values))
        assert [colour == picture.BEST for *_, colour in dots(axes)] == [label == "ARC" and x == 0.6 for x in values]  # 0.32 and 0.31 tie
        whiskers = [[round(x, 3) for x, _ in path.vertices] for bars in axes.collections for path in bars.get_paths()]
        assert whiskers == [[round(x - 0.01, 3), round(x + 0.01, 3)] for x in values]
        low, high = axes.get_xlim()
        assert guessing(axes) == [chance] and low < chance < high
    assert [text.get_text() for text in found["ARC"].get_yticklabels()] == ["well", "poor", "middling"]
    assert not dots(found["COPA"]) and texts(found["COPA"]).count("–") == 3
    for model in VALUES:
        write(folder, model, "boolq", 0.95, chance=0.5)
    far = panels(folder, suite("boolq"))["BOOLQ"]
    assert not guessing(far) and "‹ guessing 0.5" in texts(far)


@pytest.mark.parametrize(
    ("scores", "error", "won"),
    [((0.0, 0.0), 0.0, False), ((0.5, 0.486), 0.01, False), ((0.5, 0.485), 0.01, True), ((0.338, 0.337), None, True)],
    ids=["equal", "less than the difference's error", "more", "exact"],
)
def test_a_tie_is_no_win_and_the_axis_has_the_digits(scores: tuple[float, float], error: float | None, won: bool, tmp_path: Path) -> None:
    """The standard error of a difference of two scores with 0.01 each is 0.0141; no tick is where no score can be, none is rounded."""
    for model, score in zip("ab", scores, strict=True):
        write(tmp_path, model, "arc", score, stderr=error, chance=0.0)
    axes = panels(tmp_path, suite("arc"))["ARC"]
    assert [colour == picture.BEST for *_, colour in dots(axes)] == [won, False]
    ticks = list(zip(axes.get_xticks(), [label.get_text() for label in axes.get_xticklabels()], strict=True))
    assert len(ticks) > 1 and min(at for at, _ in ticks) >= 0
    assert all(float(text) == pytest.approx(at, rel=1e-9) and len(text.partition(".")[2]) >= 2 for at, text in ticks)
    low, high = axes.get_xlim()
    assert low < min(scores) <= max(scores) < high


def test_held_out_loss_over_the_context(folder: Path, tmp_path: Path) -> None:
    figure = picture.heldout(heldout(build(read([folder]), None)))
    assert figure is not None
    shown = {str(bars.get_label()): list(zip(*bars.lines[0].get_data(), strict=True)) for bars in figure.axes[0].containers}
    curve = ((128, 4.0), (256, 3.5), (1024, 3.0))
    assert shown == {model: [(length, pytest.approx(loss - arc)) for length, loss in curve] for model, (arc, _) in VALUES.items()}
    write_heldout(tmp_path / "short", "a", {128: 3.0})
    assert picture.heldout(heldout(build(read([tmp_path / "short"]), None))) is None, "no curve of one length"


@pytest.mark.parametrize(("models", "columns"), [(1, 3), (12, 2)])
def test_any_number_of_models_is_a_png(tmp_path: Path, models: int, columns: int) -> None:
    for model in range(models):
        for column in range(columns):
            write(tmp_path, f"model {model}", f"task_{column}", 0.3, stderr=None)
        write_heldout(tmp_path, f"model {model}", {128: 3.0, 256: 2.9})
    table = build(read([tmp_path]), None)
    curves: Any = picture.heldout(heldout(table))
    for figure in (picture.scores(table), curves):
        content = png(figure)
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert content.startswith(b"\x89PNG") and width > 500 and height > 150
    lines = [bars.lines[0] for bars in curves.axes[0].containers]
    assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == models
