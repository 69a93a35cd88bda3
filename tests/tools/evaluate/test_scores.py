"""Rescaling against the leaderboard's own examples, numbers counted by hand and simulation; result files that must not become a table."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.tools.evaluate.result_files import write
from tools.evaluate.results import Score, ScoreError, leaderboard, mean, read, rescale
from tools.evaluate.suite import load_suite


def test_the_leaderboards_worked_examples() -> None:
    # "Scores Normalization": GPQA 0.6 is 46.67; MuSR 0.7, 0.4, 0.6 over 0.5, 0.2, 1/3 is 40, 25, 40, together 35.
    assert rescale(Score(0.6, chance=0.25)).value == pytest.approx(46.67, abs=0.005)
    musr = [Score(0.7, chance=0.5), Score(0.4, chance=0.2), Score(0.6, chance=1 / 3)]
    assert [rescale(part).value for part in musr] == pytest.approx([40.0, 25.0, 40.0])
    assert leaderboard(Score(0.5667), musr).value == pytest.approx(35.0)


@pytest.mark.parametrize(
    ("value", "chance", "expected"),
    [
        (0.109, 0.1, 1.0),  # MMLU-Pro: 0.009 of 0.9
        (0.09, 0.1, 0.0),  # below guessing is 0, not negative
        (0.1, 0.1, 0.0),
        (1.0, 0.25, 100.0),
        (0.326, 0.0, 32.6),  # IFEval: a share as a percentage
    ],
)
def test_counted_by_hand(value: float, chance: float, expected: float) -> None:
    assert rescale(Score(value, chance=chance)).value == pytest.approx(expected)


def test_subtasks_below_chance_count_as_zero_before_the_average() -> None:
    # 0.3 of two choices is 0, not -40; 0.6 of five is 50.
    found = leaderboard(Score(0.45), [Score(0.3, chance=0.5), Score(0.6, chance=0.2)])
    assert found.value == pytest.approx(25.0)


def test_where_one_baseline_holds_for_all_the_tasks_own_score_is_rescaled() -> None:
    """GPQA's sets have 198, 546 and 448 questions: its score is theirs by size, and stays so."""
    sets = [Score(0.35, chance=0.25, n=198), Score(0.25, chance=0.25, n=546), Score(0.2, chance=0.25, n=448)]
    own = sum(part.value * (part.n or 0) for part in sets) / 1192
    assert leaderboard(Score(own, chance=0.25), sets).value == pytest.approx(100 * max(0.0, own - 0.25) / 0.75)
    unknown = [Score(part.value, n=part.n) for part in sets]
    assert leaderboard(Score(0.4, chance=0.25), unknown).value == pytest.approx(20.0)


def test_without_a_baseline_nothing_is_rescaled() -> None:
    with pytest.raises(ValueError, match="guessing"):
        leaderboard(Score(0.4), [])
    with pytest.raises(ValueError, match="guessing"):
        leaderboard(Score(0.4, chance=0.25), [Score(0.4, chance=0.5), Score(0.4)])


def test_standard_errors_are_those_of_repeated_measurements() -> None:
    """The rescaled average of three sub-tasks, measured 20000 times: its spread is the standard error."""
    draw = np.random.default_rng(0)
    truth, chances, counts = np.array([0.7, 0.5, 0.6]), np.array([0.5, 0.2, 1 / 3]), np.array([250, 256, 250])
    found = draw.binomial(counts, truth, size=(20_000, 3)) / counts
    errors = np.sqrt(truth * (1 - truth) / counts)
    scores = [leaderboard(Score(0.0), [Score(*part) for part in zip(row, errors, counts, chances, strict=True)]) for row in found]
    # A spread from 20000 draws is itself known to 1 / sqrt(40000) = 0.5 %; none of the draws falls below its baseline.
    assert np.std([score.value for score in scores]) == pytest.approx(scores[0].stderr, rel=0.02)
    assert scores[0].stderr == pytest.approx(100 * math.sqrt(sum((errors / (1 - chances)) ** 2)) / 3)
    assert scores[0].n == 756


def test_an_unknown_standard_error_stays_unknown() -> None:
    assert mean([Score(0.25, 0.1), Score(0.5, None)]) == Score(0.375, None)
    assert rescale(Score(0.5, None, chance=0.0)).stderr is None


def test_the_papers_suite_has_the_baselines_of_the_harness_own_choices() -> None:
    """BBH: 1 / number of answers in the harness's files (the leaderboard's, 11 shapes, 19 counts of objects); MuSR: the leaderboard's."""
    found = importlib.util.find_spec("lm_eval")
    assert found is not None and found.submodule_search_locations
    folder = Path(found.submodule_search_locations[0]) / "tasks/leaderboard/bbh_mc"
    chances = {}
    for file in folder.glob("[!_]*.yaml"):
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
        chances[raw["task"]] = 1 / len(raw["doc_to_choice"])
    tasks = {task.label: task for task in load_suite("paper").tasks}
    assert len(chances) == 24
    assert tasks["BBH"].subtask_chance == pytest.approx(chances)
    assert 1 / tasks["BBH"].subtask_chance["leaderboard_bbh_object_counting"] == pytest.approx(19)
    assert 1 / tasks["BBH"].subtask_chance["leaderboard_bbh_geometric_shapes"] == pytest.approx(11)
    short = {name.removeprefix("leaderboard_musr_"): chance for name, chance in tasks["MuSR"].subtask_chance.items()}
    assert short == pytest.approx({"murder_mysteries": 0.5, "object_placements": 0.2, "team_allocation": 1 / 3})
    assert {label: tasks[label].chance for label in ("MMLU-P", "GPQA", "MATH", "IFE-I", "IFE-P")} == {
        "MMLU-P": 0.1,
        "GPQA": 0.25,
        "MATH": 0.0,
        "IFE-I": 0.0,
        "IFE-P": 0.0,
    }


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    part = {"value": 0.5, "stderr": None, "n": 10, "chance": 0.2}
    file = write(tmp_path, "fem", "arc", 0.31, subtasks={"easy": part}, fewshot=None)
    (result,) = read([tmp_path])
    assert (result.file, result.name, result.model, result.metric, result.fewshot) == (file, "arc", "fem", "acc", None)
    assert result.score == Score(0.31, 0.01, 100, 0.25)
    assert result.subtasks == {"easy": Score(0.5, None, 10, 0.2)}
    assert result.higher_is_better


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"value": math.nan}, "value = nan: expected a finite number"),
    "infinite error": ({"stderr": math.inf}, "stderr = inf: expected a finite number"),
    "negative error": ({"stderr": -0.1}, "stderr = -0.1"),
    "percent": ({"value": 31.0}, "value = 31: expected a share"),
    "null": ({"value": None}, "value is null"),
    "text": ({"value": "0.31"}, "value = '0.31': expected a finite number"),
    "true": ({"value": True}, "value = True: expected a finite number"),
    "sure guess": ({"chance": 1.0}, "chance = 1: expected a share"),
    "no metric": ({"metric": ""}, "metric = '': expected a text"),
    "half an example": ({"n": 1.5}, "n = 1.5: expected a whole number"),
    "half a prompt": ({"truncated": 0.5}, "truncated = 0.5: expected a whole number"),
    "other format": ({"format": 2}, "format 2, expected 1"),
    "sub-task": ({"subtasks": {"easy": {"value": math.nan}}}, "subtasks.easy.value = nan"),
    "sub-tasks": ({"subtasks": {"easy": 0.5}}, "subtasks: expected a mapping"),
}


@pytest.mark.parametrize("changes", WRONG)
def test_a_number_that_is_none_is_told_with_its_file(tmp_path: Path, changes: str) -> None:
    values, told = WRONG[changes]
    file = write(tmp_path, "fem", "arc", **{"value": 0.31, **values})
    _refused([tmp_path], str(file), told)


@pytest.mark.parametrize(("content", "told"), [("{", "not JSON"), ("[]", "not a result"), ('{"format": 1}', "has no 'model'")])
def test_other_files_are_told(tmp_path: Path, content: str, told: str) -> None:
    file = write(tmp_path, "fem", "arc", 0.31)
    file.write_text(content, encoding="utf-8")
    _refused([tmp_path], str(file), told)


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "limit": ({"n": 50}, "the number of examples is 50 for other"),
    "few-shot": ({"fewshot": 5}, "fewshot is 5 for other"),
    "version": ({"version": "lm-eval 0.4.12, task version 1.0"}, "version is lm-eval 0.4.12"),
    "metric": ({"metric": "acc_norm"}, "metric is acc_norm for other"),
    "task": ({"settings": {"task": "arc_de"}}, "task is arc_de for other"),
    "the task's text": ({"settings": {"task_digest": "b"}}, "task_digest is b for other"),
    "seed": ({"settings": {"seed": 1}}, "seed is 1 for other"),
    "baseline": ({"chance": 0.5}, "what guessing scores is 0.5 for other"),
}


@pytest.mark.parametrize("changes", UNLIKE)
def test_models_that_were_asked_unlike_things_do_not_meet_in_a_column(tmp_path: Path, changes: str) -> None:
    values, told = UNLIKE[changes]
    write(tmp_path, "fem", "arc", 0.31)
    write(tmp_path, "fem", "other_task", 0.31, **values)  # another column: no matter
    read([tmp_path])
    write(tmp_path, "other", "arc", 0.31, **values)
    _refused([tmp_path], "arc: " + told, "evaluate both alike")


def test_one_name_is_one_model(tmp_path: Path) -> None:
    write(tmp_path, "fem", "arc", 0.31)
    write(tmp_path, "fem", "boolq", 0.6, model_key="of the next checkpoint")
    _refused([tmp_path], "different weights", "both of a model called fem")


def test_folders_are_merged(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, "fem", "arc", 0.31)
    write(tmp_path / "b", "fem", "boolq", 0.6)
    write(tmp_path / "b", "other", "arc", 0.4)
    found = read([tmp_path / "a", tmp_path / "b"])
    assert [(result.model, result.name, result.score.value) for result in found] == [
        ("fem", "arc", 0.31),
        ("fem", "boolq", 0.6),
        ("other", "arc", 0.4),
    ]
    write(tmp_path / "b", "fem", "arc", 0.32)
    _refused([tmp_path / "a", tmp_path / "b"], "give other numbers for the same model and task")
    write(tmp_path / "b", "fem", "arc", 0.31, model_key="other")
    _refused([tmp_path / "a", tmp_path / "b"], "different weights")


def test_what_is_unfinished_is_no_result(tmp_path: Path) -> None:
    write(tmp_path, "fem", "arc", 0.31)
    (tmp_path / "fem" / ".valid.partial.json").write_text("{}", encoding="utf-8")
    (tmp_path / "results.json").write_text("{}", encoding="utf-8")
    assert [result.name for result in read([tmp_path])] == ["arc"]


def _refused(folders: list[Path], *told: str) -> None:
    with pytest.raises(ScoreError) as caught:
        read(folders)
    message = str(caught.value)
    assert all(text in message for text in told), message
    assert "\n" not in message
