"""plot: every picture there are fits for, with axes that say what they are, and a report that says all that the fit says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from fem_common.plot import DPI, png
from tests.tools.scaling.made_up import LAWS, fit_of, isoflop_table, rates_table
from tests.tools.scaling.run_folders import STUDY, write_study
from tools.scaling.__main__ import main
from tools.scaling.pictures import learning_rate, losses
from tools.scaling.results import StudyFit, save_fit
from tools.scaling.study import load_study
from tools.scaling.table import final_runs, write_table

VARIANTS = "".join(f"  {name}: [model.mixer={name}]\n" for name in list(LAWS)[:3])
THREE = STUDY.replace(STUDY[STUDY.index("  transformer:") : STUDY.index("shape:")], VARIANTS)


def results(folder: Path, table: pd.DataFrame, fit: StudyFit) -> tuple[Path, Path]:
    """(study file, results folder) of a study whose table and fit are these."""
    path = write_study(folder, text=THREE)
    study = load_study(path)
    write_table(table, study.runs_csv)
    save_fit(fit, study.fit_json)
    return path, Path(study.results)


@pytest.fixture(scope="module")
def three() -> tuple[pd.DataFrame, StudyFit]:
    table = isoflop_table(3, 2)
    return table, fit_of("hand", table)


def figures(table: pd.DataFrame, fit: StudyFit) -> dict[str, Any]:
    final = final_runs(table)
    draws: dict[str, Callable[[], Any]] = {
        "isoflop": lambda: losses.isoflop(fit, final),
        "frontier": lambda: losses.frontier(fit, final),
        "loss_compute": lambda: losses.loss_compute(fit, table),
        "residuals": lambda: losses.residuals(fit),
        "learning_rate": lambda: learning_rate.learning_rate(fit),
    }
    return {name: figure for name, draw in draws.items() if (figure := draw()) is not None}


SHAPES = {
    "one variant, one budget": (1, 1, "isoflop frontier loss_compute residuals"),
    "two variants, two budgets": (2, 2, "isoflop frontier loss_compute residuals"),
    "four variants, four budgets": (4, 4, "isoflop frontier loss_compute residuals"),
    "learning rates": (2, 0, "learning_rate"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_picture_can_be_read_alone(name: str) -> None:
    variants, budgets, wanted = SHAPES[name]
    table = isoflop_table(variants, budgets) if budgets else rates_table(variants)
    fit = fit_of("hand", table)
    found = figures(table, fit)
    assert " ".join(found) == wanted
    for picture, figure in found.items():
        figure.canvas.draw()
        shown = [axes for axes in figure.axes if axes.get_visible()]
        words = " ".join(text.get_text() for text in figure.findobj(Text))
        assert "hand" in words, f"{picture} says of which study it is"
        assert all(variant in words for variant in fit.variants), picture
        assert "nats a token" in words or "FLOPs" in words or "%" in words, picture
        if picture == "frontier":
            assert len(shown) == 2 * variants, "a wide band covers no other variant"
        outer = [axes for axes in shown if axes.get_xlabel()]
        assert outer and any(axes.get_ylabel() for axes in shown)
        for axes in outer:
            ticks = [tick.get_text() for tick in axes.get_xticklabels() if tick.get_text()]
            assert len(ticks) >= 2, f"{picture}: an axis has ticks that can be read"
        check_apart(picture, figure, shown)


def check_apart(picture: str, figure: Any, shown: list[Any]) -> None:
    """Titles, axis labels and legends are inside the picture, and apart from each other: what is written can be read."""
    texts = [*figure.texts, *(text for axes in shown for text in (axes._left_title, axes.xaxis.label, axes.yaxis.label))]
    boxes = [(text.get_text(), text.get_window_extent()) for text in [*texts, figure._suptitle] if text is not None and text.get_text()]
    boxes += [("legend", legend.get_window_extent()) for legend in figure.legends]
    for number, (text, box) in enumerate(boxes):
        inside = (
            figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 and figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1
        )
        assert inside, f"{picture}: {text!r} is cut off"
        for other, beside in boxes[number + 1 :]:
            assert text == other or not box.overlaps(beside), f"{picture}: {text!r} over {other!r}"


def test_the_verb_writes_all_that_the_fit_says(
    tmp_path: Path, three: tuple[pd.DataFrame, StudyFit], capsys: pytest.CaptureFixture[str]
) -> None:
    table, fit = three
    path, folder = results(tmp_path, table, fit)
    (folder / "learning_rate.png").write_bytes(b"of an earlier fit")
    (folder / "collected.json").write_text(json.dumps({"planned": 46, "complete": 45, "left_out": {"cem-x": "failed at step 3 of 9: NaN"}}))
    assert main(["plot", str(path)]) == 0
    told = capsys.readouterr().out
    names = {"isoflop.png", "frontier.png", "loss_compute.png", "residuals.png", "report.html", "summary.md"}
    assert {file.name for file in folder.iterdir()} == names | {"runs.csv", "fit.json", "collected.json"}
    for name in names:
        if name.endswith(".png"):
            height, width = imread(folder / name).shape[:2]
            assert width >= 6 * DPI and height >= 3 * DPI
    assert png(losses.isoflop(fit, final_runs(table))) == (folder / "isoflop.png").read_bytes(), "the same fit gives the same bytes"
    for text in (unescape((folder / "report.html").read_text()), (folder / "summary.md").read_text(), told):
        for comparison in fit.comparisons:
            assert comparison.words in text
    assert len(fit.comparisons) >= 2
    raw = (folder / "report.html").read_text()
    html = unescape(raw)
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", raw) and "<script" not in raw and "http" not in raw
    assert raw.count("data:image/png;base64,") == 4
    for run in final_runs(table)["run"]:
        assert run in html
    law = fit.variants["transformer"].parametric
    assert law is not None
    assert f"{law.E.value:.4g} ({law.E.low:.4g}–{law.E.high:.4g})" in html
    assert "transformer: by the parametric law the best size grows as C^0.452 (0.438–0.465)" in html  # 0.28 / 0.62, 3% either way
    for verb in ("plan", "run", "collect", "fit", "plot"):
        assert f"python -m tools.scaling {verb} study.yaml" in html
    assert str(tmp_path) not in html, "no machine's folders"
    least = final_runs(table).query("variant == 'cem' or variant == 'fem_gla'")["loss"].min()
    assert f"{least:.4f}" in html


def test_a_fit_of_another_table_is_refused(
    tmp_path: Path, three: tuple[pd.DataFrame, StudyFit], capsys: pytest.CaptureFixture[str]
) -> None:
    table, fit = three
    for changed, told in (
        (table.assign(loss=table["loss"] * 1.01), "has loss"),
        (table[table["run"] != table["run"].iloc[0]], "is not in"),
        (table[table["variant"] != "fem_gla"], "variant fem_gla is not in"),
    ):
        path, folder = results(tmp_path, changed, fit)
        assert main(["plot", str(path)]) == 2
        message = capsys.readouterr().err
        assert told in message and f"fit again: python -m tools.scaling fit {path}" in message and message.count("\n") == 1
        assert not list(folder.glob("*.png"))


def test_a_study_without_a_law_says_so(tmp_path: Path) -> None:
    table = isoflop_table(1, 1)
    whole = fit_of("hand", table)
    bare = StudyFit.from_json(whole.to_json())
    bare.variants["transformer"].notes.append("one budget alone")
    object.__setattr__(bare.variants["transformer"], "parametric", None)
    object.__setattr__(bare.variants["transformer"], "residuals", [])
    path, folder = results(tmp_path, table, bare)
    assert main(["plot", str(path)]) == 0
    assert not (folder / "residuals.png").exists() and not (folder / "frontier.png").exists()
    assert "No law was fitted" in (folder / "report.html").read_text()
    assert "transformer: one budget alone" in (folder / "summary.md").read_text()
