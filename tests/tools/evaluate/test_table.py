"""Tests of ranks against the FEM paper's count and a slow oracle, of missing and incompatible
results, and of all forms of the table.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import ConfigError
from tests.tools.evaluate.result_files import suite, write, write_heldout
from tests.tools.refusals import Refused
from tests.wording import Wording
from tools.evaluate.report import as_json, console, main, markdown, number, report
from tools.evaluate.results import Score, ScoreError, read
from tools.evaluate.suite import SUITES, Suite, SuiteTask, load_suite
from tools.evaluate.table import Table, build, heldout, printed, summary

PAPER: dict[str, Any] = json.loads((SUITES / "paper_table_2.json").read_text(encoding="utf-8"))


def table_of(folder: Path, of: Suite | None = None) -> Table:
    return build(read([folder]), of)


def as_printed(found: tuple[float, int] | None) -> tuple[str, int] | None:
    return None if found is None else (str(printed(found[0], 2)), found[1])


def cells(shown: str, model: str) -> list[str]:
    """Return the cells of the model's first row, from the first score."""
    line = re.search(rf"^\| {model} \|.*$", shown, re.M)
    assert line is not None
    return [cell.strip() for cell in line[0].split("|")][2:-1]


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", PAPER["groups"], ids=lambda group: group["name"])
def test_both_columns_of_the_papers_table_2_come_out_of_its_scores(
    group: dict[str, Any], tmp_path: Path
) -> None:
    """All nineteen rows: average rank and #Top1, from the numbers and from result files."""
    rows = group["rows"]
    wanted = {row["model"]: (row["avg_rank"], row["top1"]) for row in rows}
    found = summary([row["scores"] for row in rows], [True] * len(PAPER["columns"]))
    assert dict(zip(wanted, map(as_printed, found), strict=True)) == wanted
    for row in rows:
        for name, score in zip(PAPER["columns"], row["scores"], strict=True):
            write(tmp_path, row["model"], name, score)
    table = table_of(tmp_path, suite(*PAPER["columns"]))
    assert {
        row.model: as_printed(one) for row, one in zip(table.rows, table.summary(), strict=True)
    } == wanted


def test_the_papers_scores_are_below_ours(tmp_path: Path) -> None:
    paper = load_suite("paper")
    for task in paper.tasks[7:9]:
        write(tmp_path, "ours", task.name, 0.25, task=task.task, metric=task.metric)
    shown = markdown(table_of(tmp_path, paper))
    assert shown.index("| ours |") < shown.index("## Published scores")
    for group in PAPER["groups"]:
        for row in group["rows"]:
            scores = [f"{score:.3f}" for score in row["scores"]]
            assert cells(shown[shown.index(group["name"]) :], re.escape(row["model"])) == [
                *scores,
                row["avg_rank"],
                str(row["top1"]),
            ]


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [(0.0005, 3, "0.001"), (2.0625, 2, "2.06"), (6.625, 2, "6.63"), (0.1, 3, "0.100")],
)
def test_numbers_are_rounded_half_up_as_the_paper_does(
    value: float, places: int, text: str
) -> None:
    assert str(printed(value, places)) == text


# --- tables ---------------------------------------------------------------------------------------


def test_a_missing_result_is_a_dash_and_its_column_ranks_nobody(
    tmp_path: Path, wording: Wording
) -> None:
    for model, arc, boolq in (("a", 0.3, 0.6), ("b", 0.2, 0.7), ("c", 0.1, None)):
        write(tmp_path, model, "arc", arc)
        if boolq is not None:
            write(tmp_path, model, "boolq", boolq)
    table = table_of(tmp_path, suite("arc", "boolq", "copa"))
    assert [column.name for column in table.ranked] == ["arc"]
    assert table.summary() == [(1.0, 1), (2.0, 0), (3.0, 0)]
    assert cells(markdown(table), "c") == ["0.100 ± 0.010", "–", "–", "3.00", "0"]
    wording(markdown(table))
    wording(console(table))
    write(tmp_path, "a", "lone", 0.3)
    # The only result of a column is not marked as the best.
    assert "*" not in cells(markdown(table_of(tmp_path)), "a")[2]


def test_bits_per_byte_have_a_table_in_which_less_is_better(tmp_path: Path) -> None:
    """Results of earlier versions have none; held-out loss has its own table."""
    for model, score, value in (("a", 0.3, 1.5), ("b", 0.4, 1.25), ("old", 0.2, None)):
        raw = {"bits_per_byte,none": value, "bits_per_byte_stderr,none": 0.125}
        write(tmp_path, model, "arc", score, raw=raw if value else {})
        write(tmp_path, model, "old_task", score)
        write_heldout(tmp_path, model, {128: 3.0})
    table = table_of(tmp_path)
    shown = markdown(table)
    bits = shown[shown.index("## Bits per byte") : shown.index("## Held-out loss")]
    assert "ARC<br>bits/byte, 0-shot" in bits and "VALID" not in bits
    assert cells(bits, "a") == ["<u>1.500</u> ± 0.125", "–", "–", "–"]
    assert cells(bits, "b")[:2] == ["**1.250** ± 0.125", "–"]
    assert cells(bits, "old") == ["–", "–", "–", "–"]
    assert re.search(
        r"^ARC \(bits/byte, 0-shot\) +1.500±0.125  +1.250±0.125\* +–$", console(table), re.M
    )
    found = [row["results"]["arc"]["bits_per_byte"] for row in as_json(table)["models"]]
    assert found == [{"value": 1.5, "stderr": 0.125}, {"value": 1.25, "stderr": 0.125}, None]


def test_without_a_suite_columns_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("valid_256", "valid_64", "arc", "10x", "9x"):
        write(tmp_path, "a|b<c", name, 0.3)
    assert [column.name for column in table_of(tmp_path).columns] == [
        "9x",
        "10x",
        "arc",
        "valid_64",
        "valid_256",
    ]
    assert "| a\\|b&lt;c |" in markdown(table_of(tmp_path)), "a name cannot break the Markdown"


def test_best_and_second_are_marked_where_there_are_several(tmp_path: Path) -> None:
    """All ties are best; lower is better if the suite defines it; a single model is neither ranked
    nor marked.
    """
    write(tmp_path / "alone", "a", "arc", 0.3)
    alone = table_of(tmp_path / "alone")
    assert alone.ranked == () and alone.summary() == [None]
    assert not re.search(r"Rank|\*\*", markdown(alone))
    assert not re.search(r"\*|rank", console(alone))
    for model, value, loss in (
        ("a", 0.3, 3.0),
        ("b", 0.3004, 2.5),
        ("c", 0.25, 4.0),
        ("d", 0.1, 5.0),
    ):
        write(tmp_path / "four", model, "arc", value, stderr=None)
        write_heldout(tmp_path / "four", model, {128: loss})
    shown = markdown(table_of(tmp_path / "four"))
    assert [cells(shown, model)[0] for model in "abcd"] == [
        "**0.300**",
        "**0.300**",
        "<u>0.250</u>",
        "0.100",
    ]
    losses = ["<u>3.000</u> ± 0.010", "**2.500** ± 0.010", "4.000 ± 0.010", "5.000 ± 0.010"]
    assert [cells(shown, model)[1] for model in "abcd"] == losses
    assert [cells(shown, model)[2:] for model in "abcd"] == [
        ["1.50", "1"],
        ["1.00", "2"],
        ["3.00", "0"],
        ["4.00", "0"],
    ]


def test_rescaled_columns_and_their_average(tmp_path: Path) -> None:
    """MuSR: (50 + 0) / 2 = 25; IFEval's two, 40 and 20, count once, as 30; GPQA 0.4 is 20. Together
    25.
    """
    parts: dict[str, Any] = {"murder": {"value": 0.75, "stderr": 0.04, "n": 100, "chance": 0.5}}
    parts["places"] = {"value": 0.1, "stderr": 0.03, "n": 300, "chance": 0.2}
    write(tmp_path, "a", "gpqa", 0.4)
    write(tmp_path, "a", "musr", 0.2625, subtasks=parts, n=400, chance=None)
    for name, value in (("instruction", 0.4), ("prompt", 0.2)):
        write(tmp_path, "a", name, value, task="ifeval", chance=0.0, stderr=0.02)
    write(tmp_path, "a", "arc", 0.9)
    names = {"gpqa": "gpqa", "musr": "musr", "instruction": "ifeval", "prompt": "ifeval"}
    requested = [
        SuiteTask(task=task, name=name, label=name, rescale="leaderboard")
        for name, task in names.items()
    ]
    table = table_of(
        tmp_path,
        Suite("small", "", (), (*requested, SuiteTask(task="arc", name="arc", label="arc"))),
    )
    (row,) = table.rows
    rescaled = {name: score.value for name, score in row.rescaled.items()}
    assert rescaled == pytest.approx(
        {"gpqa": 20.0, "musr": 25.0, "instruction": 40.0, "prompt": 20.0}
    )
    # 100 * 0.04 / 0.5 = 8 and 100 * 0.03 / 0.8 = 3.75; the error of their average is
    # sqrt(8^2 + 3.75^2) / 2.
    assert row.rescaled["musr"].stderr == pytest.approx(math.sqrt(64 + 3.75**2) / 2)
    assert row.average is not None and row.average.value == pytest.approx(25.0)
    # The average has no error, because two of its scores use the same answers.
    assert row.average.stderr is None
    (line,) = (line for line in markdown(table).splitlines() if "25.00 ± 4.42" in line)
    assert line.split("|")[-2].strip() == "25.00"  # the last column is the average
    assert re.search(r"^Leaderboard average, rescaled +25\.00$", console(table), re.M)
    shown = as_json(table)["models"][0]["results"]["musr"]
    # The file contains the raw score, too.
    assert shown["rescaled"]["value"] == pytest.approx(25.0) and shown["value"] == 0.2625
    write(tmp_path, "a", "musr", 0.4, chance=None)  # the score of guessing is unknown
    unknown = table_of(tmp_path, suite("gpqa", "musr", rescale="leaderboard"))
    assert unknown.rows[0].average is None
    assert any("the score of guessing is not known: MUSR" in note for note in unknown.notes)


def test_what_the_suite_asks_otherwise_is_refused(tmp_path: Path, raised: Refused) -> None:
    write(tmp_path, "a", "arc", 0.3, settings={"task": "arc"})
    requested: list[dict[str, Any]] = [
        {"metric": "acc_norm"},
        {"fewshot": 5},
        {"task": "arc_easy", "name": "arc"},
        {"subtask_chance": {"easy": 0.5}},
    ]
    for changes in requested:
        raised(table_of, tmp_path, suite("arc", **changes), error=ScoreError)
    raised(table_of, tmp_path, suite("copa"), error=ScoreError)


def test_what_is_left_out_twice_there_or_evaluated_in_part_is_reported(
    tmp_path: Path, wording: Wording
) -> None:
    for model in ("a", "b"):
        write(tmp_path, model, "arc", 0.3, model_key="same", settings={"limit": 5}, truncated=3)
    write(tmp_path, "a", "extra", 0.3, model_key="same", version="lm-eval 0.4.12, task version 1.0")
    for table in (table_of(tmp_path, suite("arc")), table_of(tmp_path)):
        wording("\n".join(table.notes))


def test_held_out_loss_of_other_tokens_or_text_is_shown_but_not_ranked(tmp_path: Path) -> None:
    for model, loss, score in (("a", 3.0, 0.3), ("b", 2.0, 0.2)):
        write(tmp_path, model, "arc", score)
        file = write_heldout(tmp_path, model, {128: loss, 256: loss - 0.1})
    assert len(table_of(tmp_path).ranked) == 2
    raw = json.loads(file.read_text(encoding="utf-8"))["raw"]
    two = {128: 2.0, 256: 1.9}
    changes: list[dict[str, Any]] = [
        {"bytes": 7},
        {"stride": 64},
        {"per_document": True},
        {"contexts": {}},
    ]
    for change in changes:
        write_heldout(tmp_path, "b", two, raw={**raw, **change})
        table = table_of(tmp_path)
        assert len(table.ranked) == 1
        assert any("their losses are not comparable" in note for note in table.notes)
    write_heldout(tmp_path, "b", two, n=8)
    assert len(table_of(tmp_path).ranked) == 1
    write_heldout(tmp_path, "b", two, tokens=1500)
    table = table_of(tmp_path)
    assert [column.name for column in table.ranked] == ["arc"]
    assert any("bits per byte are comparable" in note for note in table.notes)
    assert "**1.900**" not in markdown(table) and "2.000 ± 0.020 (0.667)" in markdown(table)
    points = heldout(table)["valid"]["b"]
    assert [(point.context, point.nats) for point in points] == [
        (128, Score(2.0, 0.02, 7)),
        (256, Score(1.9, 0.02, 7)),
    ]
    assert [point.bits_per_byte for point in points] == pytest.approx([2 / 3, 1.9 / 3])


def test_numbers_have_their_error_if_it_is_known() -> None:
    assert (number(Score(0.31249, 0.01351)), number(Score(0.5)), number(None)) == (
        "0.312 ± 0.014",
        "0.500",
        "–",
    )


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_it_all_and_merges_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "one", "a", "arc", 0.3)
    write(tmp_path / "two", "b", "arc", 0.4)
    write_heldout(tmp_path / "two", "b", {128: 3.0, 256: 2.9})
    out = tmp_path / "merged"
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(" " * 10)
    assert "0.400±0.010*" in shown.out
    assert "wrote" not in shown.out
    assert "heldout.png" in shown.err
    assert {file.name for file in out.iterdir()} == {
        "table.md",
        "results.json",
        "table.png",
        "heldout.png",
    }
    text = (out / "results.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert not re.search("NaN|Infinity", text), "which are not JSON"
    assert {row["model"]: row["average_rank"] for row in found["models"]} == {"a": 2.0, "b": 1.0}
    assert found["models"][1]["results"]["arc"]["value"] == 0.4
    write(out, "b", "arc", 0.4)
    report(out, suite("arc"))
    # Left from an earlier report; the new report has no data for this picture.
    assert not (out / "heldout.png").exists()
    (tmp_path / "file").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match="file"):
        report(tmp_path / "file", None, [tmp_path / "one"])


def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write(Path("good"), "a", "arc", 0.3)
    write(Path("bad"), "a", "arc", math.nan)
    for arguments in ("absent", "empty", "good --suite papr", "good good", "bad"):
        refused(main, "tools.evaluate.report", *arguments.split())
    assert not list(tmp_path.glob("*/table.md"))
