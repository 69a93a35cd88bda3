"""Ranks against a slow oracle, missing and unlike results, and the table as Markdown, JSON and on a terminal."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import ConfigError
from tests.tools.evaluate.result_files import suite, write, write_heldout
from tools.evaluate.report import as_json, console, main, markdown, number, report
from tools.evaluate.results import Score, ScoreError, read
from tools.evaluate.suite import Suite, SuiteTask
from tools.evaluate.table import Table, build, heldout, printed, ranks


def table_of(folder: Path, of: Suite | None = None) -> Table:
    return build(read([folder]), of)


def test_ranks_are_places_in_the_sorted_list() -> None:
    draw = random.Random(0)
    for _ in range(200):
        higher = draw.random() < 0.5
        values = [draw.choice([0.31, 0.3104, 0.312, 0.4, 0.1]) for _ in range(draw.randint(1, 8))]
        shown = [float(f"{value:.3f}") for value in values]
        order = sorted(shown, reverse=higher)
        assert ranks(values, higher) == [1 + order.index(value) for value in shown]


@pytest.mark.parametrize(("value", "places", "text"), [(0.0005, 3, "0.001"), (2.0625, 2, "2.06"), (6.625, 2, "6.63"), (0.1, 3, "0.100")])
def test_numbers_are_rounded_half_up_as_the_paper_does(value: float, places: int, text: str) -> None:
    assert str(printed(value, places)) == text


def test_a_missing_result_is_a_dash_and_its_column_ranks_nobody(tmp_path: Path) -> None:
    for model, arc, boolq in (("a", 0.3, 0.6), ("b", 0.2, 0.7), ("c", 0.1, None)):
        write(tmp_path, model, "arc", arc)
        if boolq is not None:
            write(tmp_path, model, "boolq", boolq)
    table = table_of(tmp_path, suite("arc", "boolq", "copa"))
    assert [column.name for column in table.ranked] == ["arc"]
    assert table.summary() == [(1.0, 1), (2.0, 0), (3.0, 0)]
    assert "c has no result of BOOLQ, COPA (–)." in table.notes
    assert "Ranks count the 1 of 3 columns that every model has and that compare." in table.notes
    assert _cells(markdown(table), "c")[2:] == ["0.100 ± 0.010", "–", "–", "3.00", "0"]
    write(tmp_path, "a", "lone", 0.3)
    assert "*" not in _cells(markdown(table_of(tmp_path)), "a")[4]  # the one result of its column is not the best of anything
    (copa,) = (line for line in console(table).splitlines() if line.startswith("COPA"))
    assert copa.split()[-3:] == ["–", "–", "–"]


def test_without_a_suite_columns_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("valid_256", "valid_64", "arc", "10x", "9x"):
        write(tmp_path, "a", name, 0.3)
    assert [column.name for column in table_of(tmp_path).columns] == ["9x", "10x", "arc", "valid_64", "valid_256"]


def test_lower_is_better_where_the_suite_says_so(tmp_path: Path) -> None:
    write(tmp_path, "a", "arc", 0.3)
    write(tmp_path, "b", "arc", 0.2)
    for model, loss in (("a", 3.0), ("b", 2.5)):
        write_heldout(tmp_path, model, {128: loss})
    table = table_of(tmp_path)
    assert table.summary() == [(1.5, 1), (1.5, 1)]
    rows = {model: _cells(markdown(table), model) for model in "ab"}
    assert rows["a"][2:4] == ["**0.300** ± 0.010", "<u>3.000</u> ± 0.010"]
    assert rows["b"][2:4] == ["<u>0.200</u> ± 0.010", "**2.500** ± 0.010"]


def test_all_that_tie_are_best_and_the_next_number_is_second(tmp_path: Path) -> None:
    for model, value in (("a", 0.3), ("b", 0.3004), ("c", 0.25), ("d", 0.1)):
        write(tmp_path, model, "arc", value, stderr=None)
    shown = markdown(table_of(tmp_path))
    assert [_cells(shown, model)[2] for model in "abcd"] == ["**0.300**", "**0.300**", "<u>0.250</u>", "0.100"]
    assert [_cells(shown, model)[3:] for model in "abcd"] == [["1.00", "1"], ["1.00", "1"], ["3.00", "0"], ["4.00", "0"]]


def test_one_model_alone_is_neither_ranked_nor_marked(tmp_path: Path) -> None:
    write(tmp_path, "a", "arc", 0.3)
    table = table_of(tmp_path)
    assert table.ranked == () and table.summary() == [None]
    shown = markdown(table)
    assert "Rank" not in shown and "**" not in shown
    assert "*" not in console(table) and "rank" not in console(table)


PARTS = {
    "murder": {"value": 0.75, "stderr": 0.04, "n": 100, "chance": 0.5},
    "places": {"value": 0.1, "stderr": 0.03, "n": 300, "chance": 0.2},
}


def test_rescaled_columns_and_their_average(tmp_path: Path) -> None:
    """MuSR: (50 + 0) / 2 = 25; IFEval's two, 40 and 20, count once, as 30; GPQA 0.4 is 20. Together 25."""
    write(tmp_path, "a", "gpqa", 0.4)
    write(tmp_path, "a", "musr", 0.2625, subtasks=PARTS, n=400, chance=None)
    for name, value in (("instruction", 0.4), ("prompt", 0.2)):
        write(tmp_path, "a", name, value, task="ifeval", chance=0.0, stderr=0.02)
    write(tmp_path, "a", "arc", 0.9)
    asked = [SuiteTask(task=task, name=name, label=name, rescale="leaderboard") for task, name in _OLL]
    table = table_of(tmp_path, Suite("small", "", (), (*asked, SuiteTask(task="arc", name="arc", label="arc"))))
    (row,) = table.rows
    assert {name: score.value for name, score in row.rescaled.items()} == pytest.approx(
        {"gpqa": 20.0, "musr": 25.0, "instruction": 40.0, "prompt": 20.0}
    )
    # 100 * 0.04 / 0.5 = 8 and 100 * 0.03 / 0.8 = 3.75; their average's error is sqrt(8^2 + 3.75^2) / 2.
    assert row.rescaled["musr"].stderr == pytest.approx(math.sqrt(64 + 3.75**2) / 2)
    assert row.average is not None and row.average.value == pytest.approx(25.0)
    assert row.average.stderr is None  # two numbers of the same answers
    (line,) = (line for line in markdown(table).splitlines() if "25.00 ± 4.42" in line)
    assert line.split("|")[-2].strip() == "25.00"  # the average, at the end
    assert re.search(r"^Leaderboard average, rescaled +25\.00$", console(table), re.M)
    assert as_json(table)["models"][0]["results"]["musr"]["rescaled"]["value"] == pytest.approx(25.0)
    assert as_json(table)["models"][0]["results"]["musr"]["value"] == 0.2625  # raw, too


_OLL = (("gpqa", "gpqa"), ("musr", "musr"), ("ifeval", "instruction"), ("ifeval", "prompt"))


def test_without_baseline_or_a_task_there_is_no_average(tmp_path: Path) -> None:
    write(tmp_path, "a", "gpqa", 0.4)
    write(tmp_path, "a", "musr", 0.4, chance=None)
    table = table_of(tmp_path, suite("gpqa", "musr", rescale="leaderboard"))
    assert table.rows[0].average is None
    assert "Not rescaled, since what guessing scores is not known: MUSR." in table.notes


def test_what_the_suite_asks_otherwise_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "a", "arc", 0.3, settings={"task": "arc"})
    for changes, told in (
        ({"metric": "acc_norm"}, "metric is acc, but the suite small asks for acc_norm"),
        ({"fewshot": 5}, "fewshot is 0, but the suite small asks for 5"),
        ({"task": "arc_easy", "name": "arc"}, "task is arc, but the suite small asks for arc_easy"),
        ({"subtask_chance": {"easy": 0.5}}, "no score of the sub-task easy"),
    ):
        with pytest.raises(ScoreError, match=told) as caught:
            table_of(tmp_path, suite("arc", **changes))
        assert str(file) in str(caught.value)


def test_what_is_left_out_and_what_is_twice_there_is_told(tmp_path: Path) -> None:
    for model in ("a", "b"):
        write(tmp_path, model, "arc", 0.3, model_key="same")
    write(tmp_path, "a", "extra", 0.3, model_key="same", version="lm-eval 0.4.12, task version 1.0")
    table = table_of(tmp_path, suite("arc"))
    assert table.notes == ("a and b are the same weights.", "Results that are no columns of this table are left out: extra.")
    assert any("more than one version" in note for note in table_of(tmp_path).notes)
    with pytest.raises(ScoreError, match="no results of the suite small: only of arc, extra"):
        table_of(tmp_path, suite("copa"))


def test_held_out_loss_of_other_tokens_is_shown_but_not_ranked(tmp_path: Path) -> None:
    write_heldout(tmp_path, "a", {128: 3.0, 256: 2.9}, tokens=1000)
    write_heldout(tmp_path, "b", {128: 2.0, 256: 1.9}, tokens=1500)
    write(tmp_path, "a", "arc", 0.3)
    write(tmp_path, "b", "arc", 0.2)
    table = table_of(tmp_path)
    assert [column.name for column in table.ranked] == ["arc"]
    assert any("bits a byte compare" in note for note in table.notes)
    assert "**1.900**" not in markdown(table)
    assert "2.000 ± 0.020 (0.667)" in markdown(table)
    points = heldout(table)["valid"]["b"]
    assert [(point.context, point.nats) for point in points] == [(128, Score(2.0, 0.02, 7)), (256, Score(1.9, 0.02, 7))]
    assert [point.bits_per_byte for point in points] == pytest.approx([2 / 3, 1.9 / 3])


@pytest.mark.parametrize(
    "change", [{"bytes": 7}, {"stride": 64}, {"per_document": True}, {"contexts": {}}], ids=["text", "stride", "documents", "lengths"]
)
def test_held_out_loss_of_other_text_is_shown_but_not_ranked(tmp_path: Path, change: dict[str, Any]) -> None:
    write_heldout(tmp_path, "a", {128: 3.0})
    file = write_heldout(tmp_path, "b", {128: 2.0})
    assert len(table_of(tmp_path).ranked) == 1
    raw = json.loads(file.read_text(encoding="utf-8"))["raw"]
    write_heldout(tmp_path, "b", {128: 2.0}, raw={**raw, **change})
    table = table_of(tmp_path)
    assert not table.ranked and any("their losses do not compare" in note for note in table.notes)
    write_heldout(tmp_path, "b", {128: 2.0}, n=8)
    assert not table_of(tmp_path).ranked


def test_what_was_asked_in_part_is_told(tmp_path: Path) -> None:
    write(tmp_path, "a", "arc", 0.3, settings={"limit": 5}, truncated=3)
    write(tmp_path, "a", "boolq", 0.3, settings={"limit": None}, truncated=0)
    notes = table_of(tmp_path).notes
    assert "Not the tasks' scores, but those of a part of their examples: ARC (the first 5 examples)." in notes
    assert "a: prompts that were longer than its context and lost their beginning: ARC 3." in notes


def test_a_terminal_is_never_too_narrow(tmp_path: Path) -> None:
    """Nine models of long names and twenty tasks in 120 columns: all numbers are there, none is cut."""
    models = [f"model-{index}-with-a-rather-long-name-of-its-own" for index in range(9)]
    for place, model in enumerate(models):
        for task in range(20):
            write(tmp_path, model, f"task_{task}", 0.1 + 0.001 * (20 * place + task))
    table = table_of(tmp_path, suite(*(f"task_{task}" for task in range(20)), *(f"absent_task_{task}" for task in range(20))))
    shown = console(table)
    assert max(map(len, shown.splitlines())) <= 120
    for place in range(9):
        for task in range(20):
            assert f"{0.1 + 0.001 * (20 * place + task):.3f}±0.010" in shown
    # The last model is the best everywhere: a star a task and one in the legend.
    assert shown.count("*") == 21
    assert shown.count("average rank") == shown.count("first, of 20") == math.ceil(9 / ((120 - len("Leaderboard average, rescaled")) // 30))


def test_a_name_cannot_break_the_markdown(tmp_path: Path) -> None:
    write(tmp_path, "a|b<c", "arc", 0.3)
    shown = markdown(table_of(tmp_path))
    assert "| a\\|b&lt;c |" in shown


def test_number() -> None:
    assert number(Score(0.31249, 0.01351)) == "0.312 ± 0.014"
    assert (number(Score(0.5)), number(None)) == ("0.500", "–")


def test_the_command_writes_it_all_and_merges_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "one", "a", "arc", 0.3)
    write(tmp_path / "two", "b", "arc", 0.4)
    write_heldout(tmp_path / "two", "b", {128: 3.0, 256: 2.9})
    out = tmp_path / "merged"
    assert main([str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(" " * 10) and "0.400±0.010*" in shown.out
    assert "wrote" not in shown.out and "heldout.png" in shown.err
    assert {file.name for file in out.iterdir()} == {"table.md", "results.json", "table.png", "heldout.png"}
    found = json.loads((out / "results.json").read_text(encoding="utf-8"), parse_constant=_no_constant)
    assert {row["model"]: row["average_rank"] for row in found["models"]} == {"a": 2.0, "b": 1.0}
    assert found["models"][1]["results"]["arc"]["value"] == 0.4
    (out / "b").mkdir()
    write(out, "b", "arc", 0.4)
    report(out, suite("arc"))
    assert not (out / "heldout.png").exists()  # of an earlier report: no such result now


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["absent"], "absent: no such folder of results"),
        (["empty"], "no results: evaluate a model first"),
        (["good", "--suite", "papr"], "did you mean paper?"),
        (["good", "good"], "--out DIR: say where"),
        (["bad"], "expected a finite number"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    write(Path("good"), "a", "arc", 0.3)
    write(Path("bad"), "a", "arc", math.nan)
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = int(str(stop.code))
    said = capsys.readouterr().err.splitlines()
    assert code == 2 and told in said[-1] and said[-1].startswith("tools.evaluate.report: error: ")
    assert not list(tmp_path.glob("*/table.md"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    write(tmp_path / "in", "a", "arc", 0.3)
    (tmp_path / "out").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match="out"):
        report(tmp_path / "out", None, [tmp_path / "in"])


def _cells(shown: str, model: str) -> list[str]:
    """The cells of the model's first row, the bars' empty ends included."""
    line = re.search(rf"^\| {model} \|.*$", shown, re.M)
    assert line is not None
    return [cell.strip() for cell in line[0].split("|")][:-1]


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")
