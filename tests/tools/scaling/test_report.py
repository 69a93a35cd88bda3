"""Tests of ``fit`` and ``plot`` as commands, on synthetic tables and on the published studies:
output, files and refusals.
"""

from __future__ import annotations

import base64
import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.image import imread
from matplotlib.text import Text

from fem_common.plot import DPI
from tests.test_house import ROOT
from tests.tools.scaling.studies import table, write
from tests.wording import Wording
from tools.scaling.__main__ import main
from tools.scaling.fits.points import NotConverged
from tools.scaling.results import load_fit
from tools.scaling.table import read_table, write_table
from tools.scaling.verbs.plot import figures

PUBLISHED = {
    "cpu_small": "isoflop frontier loss_compute residuals",
    "mup_transfer_cpu": "learning_rate",
    "muon_cpu": "learning_rate",
}


def made(folder: Path, frame: pd.DataFrame | None = None, **changed: Any) -> tuple[Path, Path]:
    """Return a study, and its results' folder with this table."""
    results, fit = folder / "results", {"resamples": 50} | changed.pop("fit", {})
    path = write(folder, fit=fit, results=str(results), **changed)
    write_table(table() if frame is None else frame, results / "runs.csv")
    return path, results


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the single line of a refusal after checking that no other output exists."""
    capsys.readouterr()
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tools.scaling: error: ") and err.count("\n") == 1, err
    return err


def drawn(path: Path, results: Path) -> dict[str, bytes]:
    """Run plot and return the content of each picture by its name."""
    assert main(["plot", str(path)]) == 0
    return {file.stem: file.read_bytes() for file in results.glob("*.png")}


# --- made-up tables -------------------------------------------------------------------------------


def test_a_table_becomes_laws_a_comparison_pictures_and_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``plot`` deletes pictures of an earlier fit, lists incomplete runs, and contains no folders
    of this machine.
    """
    path, results = made(tmp_path)
    (results / "learning_rate.png").write_bytes(b"of an earlier fit")
    (results / "collected.json").write_text(
        '{"planned": 46, "complete": 45, "left_out": {"cem-x": "failed at step 3 of 9: NaN"}}'
    )
    assert main(["fit", str(path)]) == 0
    out, fit = capsys.readouterr().out, load_fit(results / "fit.json")
    law = fit.variants["transformer"].parametric
    assert law and f"{law.E.value:.4g} ({law.E.low:.4g}–{law.E.high:.4g})" in out
    assert len(fit.comparisons) == 2 and len(fit.variants["transformer"].left_out) == 4
    for comparison in fit.comparisons:
        assert comparison.words in out
        assert comparison.overall and comparison.overall.value == pytest.approx(0.8, rel=0.05)
    again = (results / "fit.json").read_bytes()
    assert main(["fit", str(path)]) == 0 and (results / "fit.json").read_bytes() == again

    pictures, again_drawn = (drawn(path, results) for _ in range(2))
    assert set(pictures) == set(PUBLISHED["cpu_small"].split())
    assert again_drawn == pictures, "the same fit gives the same bytes"
    for name in pictures:
        height, width = imread(results / f"{name}.png").shape[:2]
        assert width >= 6 * DPI and height >= 3 * DPI
    html = (results / "report.html").read_text()
    assert "not complete, cem-x: failed at step 3 of 9: NaN" in html and "40 of 46 planned" in html
    assert not any(word in html for word in (str(tmp_path), "<script", "http"))
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!data:)""", html)
    assert [base64.b64decode(code) for code in re.findall(r"base64,([^\"]*)", html)] == [
        pictures[name] for name in PUBLISHED["cpu_small"].split()
    ]
    write_table(table().assign(loss=table()["loss"] * 1.01), results / "runs.csv")
    assert "has loss" in refused(capsys, "plot", str(path))


def test_a_foreign_table_is_fitted_and_what_no_law_fits_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes do not define a parabola, and the suggested remedy works. A law that does not
    converge is a note if another does.
    """
    foreign = table()[table()["final"]][
        ["variant", "parameters", "tokens", "flops", "budget", "loss"]
    ]
    path, results = made(tmp_path, fit={"approaches": ["isoflop"]})
    (results / "runs.csv").unlink()
    words = ("fit", str(path), "--table", str(tmp_path / "table.csv"))
    foreign.to_csv(tmp_path / "table.csv", index=False)
    assert main(list(words)) == 0
    (results / "fit.json").rename(tmp_path / "fit.json")
    first = foreign[(foreign["budget"] == 1e19) & (foreign["variant"] == "transformer")].index
    foreign.drop(first[2:]).to_csv(tmp_path / "table.csv", index=False)
    line = refused(capsys, *words)
    assert "table.csv: transformer: budget 1e+19 FLOPs has 2 sizes" in line
    assert "approaches: [parametric]" in line
    made(tmp_path, fit={"approaches": ["parametric"]})
    assert main(list(words)) == 0

    def never(*_: object) -> None:
        raise NotConverged("the parametric fit does not converge: 1 of 12 starts")

    monkeypatch.setattr("tools.scaling.verbs.fit.fit_parametric", never)
    assert "does not converge" in refused(capsys, *words)
    path, results = made(tmp_path)
    assert main(["fit", str(path)]) == 0
    assert (
        "note: transformer: the parametric fit does not converge: 1 of 12 starts; it is left out"
        in capsys.readouterr().out
    )
    found = load_fit(results / "fit.json").variants["transformer"]
    assert found.isoflop is not None and found.parametric is None


def test_a_fit_of_another_table_is_refused_and_one_without_a_law_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    one = table()[(table()["variant"] == "transformer") & (table()["budget"] == 1e18)]
    path, results = made(tmp_path, one)
    assert main(["fit", str(path)]) == 0
    for changed in (one[one["run"] != one["run"].iloc[0]], one.assign(variant="cem")):
        write_table(changed, results / "runs.csv")
        wording(refused(capsys, "plot", str(path)))
        assert not list(results.glob("*.png"))
    write_table(one, results / "runs.csv")
    assert set(drawn(path, results)) == {"isoflop"}
    assert "No law was fitted" in (results / "report.html").read_text()
    assert (
        "transformer: the parametric law has 5 parameters, but only 5 runs exist"
        in (results / "summary.md").read_text()
    )


def test_a_published_table_is_read_until_there_is_an_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published results are read and never written, unless --results names them; fit, plot and
    recommend find the same files.
    """
    monkeypatch.chdir(tmp_path)
    published = tmp_path / "published"
    path, results = made(tmp_path, published=str(published), fit={"approaches": ["isoflop"]})
    results.rename(published)
    assert main(["fit", str(path)]) == 0 and main(["plot", str(path)]) == 0
    assert {file.name for file in published.iterdir()} == {"runs.csv"}
    own = {file.name: file.read_bytes() for file in results.iterdir()}
    assert (
        f"read: {published / 'runs.csv'}\nwritten: {results / 'fit.json'}"
        in capsys.readouterr().out
    )
    (published / "fit.json").write_bytes(own["fit.json"])
    assert main(["plot", str(path), "--results", str(published)]) == 0
    assert (published / "isoflop.png").read_bytes() == own["isoflop.png"]
    assert {file.name: file.read_bytes() for file in results.iterdir()} == own
    # The study now has its own table, so the published fit does not belong to it.
    write_table(table(0.003), results / "runs.csv")
    (results / "fit.json").unlink()
    for verb in (["plot", str(path)], ["recommend", str(path), "--flops", "1e22"]):
        assert str(results / "fit.json") in refused(capsys, *verb)


# --- the published studies ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_report_is_what_its_table_and_its_fit_state(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every table, number and statement of the tracked report, except the bytes of pictures, which
    depend on matplotlib's version.
    """
    monkeypatch.chdir(ROOT)
    tracked, folder = ROOT / "docs" / "studies" / name, tmp_path / name
    shutil.copytree(
        tracked,
        folder,
        ignore=lambda _, names: [file for file in names if file.endswith((".md", ".html", ".png"))],
    )
    assert main(["plot", f"configs/studies/{name}.yaml", "--results", str(folder)]) == 0
    for file in ("summary.md", "report.html"):
        ours = re.sub(r"base64,[^\"]*", "", (folder / file).read_text())
        theirs = re.sub(r"base64,[^\"]*", "", (tracked / file).read_text())
        assert ours == theirs.replace(f"--results docs/studies/{name}", f"--results {name}")


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_picture_can_be_read_alone(name: str) -> None:
    """It names the study, its variants and its units; titles, axis labels and legends are inside it
    and do not overlap.
    """
    tracked = ROOT / "docs" / "studies" / name
    fit = load_fit(tracked / "fit.json")
    found = figures(fit, read_table(tracked / "runs.csv"))
    assert " ".join(found) == PUBLISHED[name]
    for picture, figure in found.items():
        figure.canvas.draw()
        shown = [axes for axes in figure.axes if axes.get_visible()]
        words = " ".join(text.get_text() for text in figure.findobj(Text))
        assert name in words and all(variant in words for variant in fit.variants), picture
        assert "nats per token" in words or "FLOPs" in words or "%" in words, picture
        outer = [axes for axes in shown if axes.get_xlabel()]
        assert outer and any(axes.get_ylabel() for axes in shown)
        for axes in outer:
            ticks = [tick for tick in axes.get_xticklabels() if tick.get_text()]
            assert len(ticks) >= 2, f"{picture}: an axis has ticks that can be read"
        texts = [*figure.texts, figure._suptitle]
        for axes in shown:
            texts += [axes._left_title, axes.xaxis.label, axes.yaxis.label]
        boxes = [
            (text.get_text(), text.get_window_extent())
            for text in texts
            if text is not None and text.get_text()
        ]
        boxes += [("legend", legend.get_window_extent()) for legend in figure.legends]
        page = figure.bbox.padded(1)
        for (text, box), (other, other_box) in itertools.combinations(boxes, 2):
            for part in (box, other_box):
                assert page.x0 <= part.x0 and part.x1 <= page.x1, f"{picture}: {text!r}, {other!r}"
                assert page.y0 <= part.y0 and part.y1 <= page.y1, f"{picture}: {text!r}, {other!r}"
            assert text == other or not box.overlaps(other_box), (
                f"{picture}: {text!r} over {other!r}"
            )
