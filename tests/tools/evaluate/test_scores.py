"""Tests of rescaling against the leaderboard's examples, manual counts and simulation; and of
result files that must not form a table.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.tools.evaluate.result_files import write
from tests.tools.refusals import Refused
from tools.evaluate.results import Score, ScoreError, leaderboard, mean, read, rescale


@pytest.mark.parametrize(
    ("value", "chance", "expected"),
    [
        (0.6, 0.25, 46.67),  # GPQA, from the leaderboard's page "Scores Normalization"
        (0.109, 0.1, 1.0),  # MMLU-Pro: 0.009 of 0.9
        (0.09, 0.1, 0.0),  # a score below guessing is 0, not negative
        (0.1, 0.1, 0.0),
        (1.0, 0.25, 100.0),
        (0.326, 0.0, 32.6),  # IFEval: a share as a percentage
    ],
)
def test_rescaled_by_hand(value: float, chance: float, expected: float) -> None:
    assert rescale(Score(value, chance=chance)).value == pytest.approx(expected, abs=0.005)


def test_subtasks_of_different_baselines_are_rescaled_before_the_average() -> None:
    """MuSR from the same page: 0.7, 0.4, 0.6 over 0.5, 0.2, 1/3 is 40, 25, 40, together 35; 0.3 of
    two choices is 0, not -40.
    """
    musr = [Score(0.7, chance=0.5), Score(0.4, chance=0.2), Score(0.6, chance=1 / 3)]
    assert leaderboard(Score(0.5667), musr).value == pytest.approx(35.0)
    assert leaderboard(
        Score(0.45), [Score(0.3, chance=0.5), Score(0.6, chance=0.2)]
    ).value == pytest.approx(25.0)
    # GPQA's sets have 198, 546 and 448 questions and the same baseline, so its score is their mean,
    # weighted by size.
    sets = [
        Score(0.35, chance=0.25, n=198),
        Score(0.25, chance=0.25, n=546),
        Score(0.2, chance=0.25, n=448),
    ]
    own = sum(part.value * (part.n or 0) for part in sets) / 1192
    assert leaderboard(Score(own, chance=0.25), sets).value == pytest.approx(
        100 * max(0.0, own - 0.25) / 0.75
    )
    assert leaderboard(
        Score(0.4, chance=0.25), [Score(part.value, n=part.n) for part in sets]
    ).value == pytest.approx(20.0)
    for score, parts in (
        (Score(0.4), []),
        (Score(0.4, chance=0.25), [Score(0.4, chance=0.5), Score(0.4)]),
    ):
        with pytest.raises(ValueError, match="guessing"):  # rescaling requires a baseline
            leaderboard(score, parts)


def test_standard_errors_are_those_of_independent_measurements() -> None:
    """For the rescaled average of two sub-tasks: 100 * 0.03 / 0.5 = 6 and 100 * 0.064 / 0.8 = 8. An
    unknown one stays unknown.
    """
    found = leaderboard(Score(0.0), [Score(0.7, 0.03, 250, 0.5), Score(0.5, 0.064, 256, 0.2)])
    assert found.stderr == pytest.approx(math.sqrt(6**2 + 8**2) / 2) and found.n == 506
    assert mean([Score(0.25, 0.1), Score(0.5, None)]) == Score(0.375, None)
    assert rescale(Score(0.5, None, chance=0.0)).stderr is None


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    """Unfinished results and the report's own file are not results."""
    part = {"value": 0.5, "stderr": None, "n": 10, "chance": 0.2}
    file = write(tmp_path, "fem", "arc", 0.31, subtasks={"easy": part}, fewshot=None)
    for other in ("fem/.valid.partial.json", "results.json"):
        (tmp_path / other).write_text("{}", encoding="utf-8")
    (result,) = read([tmp_path])
    assert (result.file, result.name, result.model, result.metric, result.fewshot) == (
        file,
        "arc",
        "fem",
        "acc",
        None,
    )
    assert result.score == Score(0.31, 0.01, 100, 0.25) and result.higher_is_better
    assert result.subtasks == {"easy": Score(0.5, None, 10, 0.2)}


WRONG: list[dict[str, Any]] = [
    *({"value": value} for value in (math.nan, 31.0, None, "0.31", True)),
    *({"stderr": value} for value in (math.inf, -0.1)),
    *({"chance": 1.0}, {"metric": ""}, {"n": 1.5}, {"truncated": 0.5}, {"format": 2}),
    *({"subtasks": {"easy": value}} for value in ({"value": math.nan}, 0.5)),
]


def test_a_number_that_is_none_is_reported_with_its_file(tmp_path: Path, raised: Refused) -> None:
    for changes in WRONG:
        write(tmp_path, "fem", "arc", **{"value": 0.31, **changes})
        raised(read, [tmp_path], error=ScoreError)
    for content in ("{", "[]", '{"format": 1}'):
        (tmp_path / "fem" / "arc.json").write_text(content, encoding="utf-8")
        raised(read, [tmp_path], error=ScoreError)


UNLIKE: list[dict[str, Any]] = [
    {"n": 50},
    {"fewshot": 5},
    {"version": "lm-eval 0.4.12, task version 1.0"},
    {"metric": "acc_norm"},
    {"chance": 0.5},
    *(
        {"settings": {key: value}}
        for key, value in (("task", "arc_de"), ("task_digest", "b"), ("seed", 1))
    ),
]


def test_models_that_were_evaluated_differently_do_not_meet_in_a_column(
    tmp_path: Path, raised: Refused
) -> None:
    write(tmp_path, "fem", "arc", 0.31)
    for changes in UNLIKE:
        # A result in another column does not matter.
        write(tmp_path, "fem", "other_task", 0.31, **changes)
        read([tmp_path])
        file = write(tmp_path, "other", "arc", 0.31, **changes)
        raised(read, [tmp_path], error=ScoreError)
        file.unlink()
    write(tmp_path, "fem", "boolq", 0.6, model_key="of the next checkpoint")
    raised(read, [tmp_path], error=ScoreError)


def test_folders_are_merged(tmp_path: Path, raised: Refused) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, "fem", "arc", 0.31)
    write(tmp_path / "b", "fem", "boolq", 0.6)
    write(tmp_path / "b", "other", "arc", 0.4)
    both = [tmp_path / "a", tmp_path / "b"]
    report = [(result.model, result.name, result.score.value) for result in read(both)]
    assert report == [("fem", "arc", 0.31), ("fem", "boolq", 0.6), ("other", "arc", 0.4)]
    write(tmp_path / "b", "fem", "arc", 0.32)
    raised(read, both, error=ScoreError)
    write(tmp_path / "b", "fem", "arc", 0.31, model_key="other")
    raised(read, both, error=ScoreError)
