"""``fit`` as a person calls it: what it prints and writes, and what it says of bad tables."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from tools.scaling.__main__ import main
from tools.scaling.fits.points import NotConverged
from tools.scaling.results import load_fit

from .laws_known import runs

STUDY = """\
base: anything.yaml
results: {results}
variants: {{transformer: [model.mixer=transformer], fem_softmax: [model.mixer=fem_softmax]}}
sizes: [64, 128, 192]
budgets: [3.0e+11, 1.0e+12]
fit: {{resamples: 50{more}}}
"""


def study(folder: Path, more: str = "") -> Path:
    file = folder / "small.yaml"
    file.write_text(STUDY.format(results=folder / "results", more=more))
    return file


def table(noise: float = 0.002) -> pd.DataFrame:
    """Two variants' runs in the columns that a foreign table needs; the second learns as with 1/0.8 of the FLOPs."""
    frames = []
    for seed, (variant, share) in enumerate({"transformer": 1.0, "fem_softmax": 0.8}.items()):
        some = runs(noise, seed, budgets=(1e18, 1e19, 1e20, 1e21), sizes=5, span=4.0, share=share)
        columns = {"parameters": some.n.round(), "tokens": some.d.round(), "flops": some.c, "budget": some.budget, "loss": some.loss}
        frames.append(pd.DataFrame({"variant": variant, **columns}))
    return pd.concat(frames, ignore_index=True)


def fit(folder: Path, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str], more: str = "") -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``fit`` on a table."""
    frame.to_csv(folder / "table.csv", index=False)
    code = main(["fit", str(study(folder, more)), "--table", str(folder / "table.csv")])
    said = capsys.readouterr()
    return code, said.out, said.err


def refused(folder: Path, frame: pd.DataFrame, capsys: pytest.CaptureFixture[str], more: str = "") -> str:
    """The one line that a refusal is; nothing is printed beside it and nothing written."""
    code, out, err = fit(folder, frame, capsys, more)
    assert (code, out) == (2, "")
    assert not (folder / "results").exists()
    assert err.startswith("tools.scaling: error: ") and err.count("\n") == 1, err
    return err


def test_a_table_becomes_laws_a_comparison_and_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = fit(tmp_path, table(), capsys)
    assert code == 0
    written = load_fit(tmp_path / "results" / "fit.json")
    assert list(written.variants) == ["transformer", "fem_softmax"]
    law = written.variants["transformer"].parametric
    assert law and f"{law.E.value:.3f} ({law.E.low:.3f}–{law.E.high:.3f})" in out
    assert len(written.comparisons) == 2
    for comparison in written.comparisons:
        assert comparison.words in out
        assert comparison.overall and comparison.overall.value == pytest.approx(0.8, rel=0.05)
    heads = [line for line in out.splitlines() if line.startswith(("variant", "transformer", "fem_softmax  "))]
    assert len({line.index("  ", len("fem_softmax")) for line in heads}) == 1  # columns stand below each other
    assert len(written.variants["transformer"].left_out) == 4
    again = (tmp_path / "results" / "fit.json").read_bytes()
    assert fit(tmp_path, table(), capsys)[0] == 0
    assert (tmp_path / "results" / "fit.json").read_bytes() == again


def test_a_published_table_is_read_until_there_is_an_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a study published is read and never written, unless --results names it; fit, plot and recommend find the same files."""
    monkeypatch.chdir(tmp_path)
    published, results = tmp_path / "published", tmp_path / "results"
    published.mkdir()
    table().to_csv(published / "runs.csv", index=False)
    path = study(tmp_path)
    path.write_text(path.read_text() + f"published: {published}\n")
    assert main(["fit", str(path)]) == 0 and main(["plot", str(path)]) == 0
    assert {file.name for file in published.iterdir()} == {"runs.csv"}
    own = {file.name: file.read_bytes() for file in results.iterdir()}
    assert {"fit.json", "isoflop.png", "summary.md"} <= set(own)
    assert f"read: {published / 'runs.csv'}\nwritten: {results / 'fit.json'}" in capsys.readouterr().out

    (published / "fit.json").write_bytes(own["fit.json"])
    assert main(["plot", str(path), "--results", str(published)]) == 0
    assert (published / "isoflop.png").read_bytes() == own["isoflop.png"]
    assert "tools.scaling plot small.yaml --results published`" in (published / "summary.md").read_text()
    assert {file.name: file.read_bytes() for file in results.iterdir()} == own

    table(0.003).to_csv(results / "runs.csv", index=False)  # now there is an own table, and the published fit is none of it
    (results / "fit.json").unlink()
    capsys.readouterr()
    for verb in (["plot"], ["recommend", "--flops", "1e22"]):
        assert main([verb[0], str(path), *verb[1:]]) == 2
        assert str(results / "fit.json") in capsys.readouterr().err


def test_a_budget_with_two_sizes_is_refused_and_the_way_out_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = table()
    first = frame[(frame["budget"] == 1e19) & (frame["variant"] == "transformer")].index
    frame = frame.drop(first[2:]).reset_index(drop=True)
    line = refused(tmp_path, frame, capsys)
    assert "table.csv: transformer: budget 1e+19 FLOPs has 2 sizes" in line and "approaches: [parametric]" in line
    assert fit(tmp_path, frame, capsys, ", approaches: [parametric]")[0] == 0


def test_a_law_that_does_not_converge_is_a_note_beside_one_that_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made not to converge: the parabolas stand, no number of the other law is given, and alone it is the end of the fit."""

    def never(*_: object) -> None:
        raise NotConverged("the parametric fit does not converge: 1 of 12 starts")

    monkeypatch.setattr("tools.scaling.fitting.fit_parametric", never)
    code, out, _ = fit(tmp_path, table(), capsys)
    assert code == 0
    assert "note: transformer: the parametric fit does not converge: 1 of 12 starts; it is left out" in out
    written = load_fit(tmp_path / "results" / "fit.json").variants["transformer"]
    assert written.isoflop is not None and written.parametric is None
    (tmp_path / "results" / "fit.json").unlink()
    (tmp_path / "results").rmdir()
    assert "does not converge" in refused(tmp_path, table().drop(columns="budget"), capsys)
