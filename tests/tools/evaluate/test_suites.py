"""Tests of the paper's suite against the harness's YAML files, the examples of the quick one, and
messages for invalid suites.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from tests.tools.evaluate.tiny import suite_file, task_folder
from tests.tools.refusals import Refused
from tools.evaluate.catalogue import Tasks, find_tasks, named_in
from tools.evaluate.suite import SUITES, Suite, load_suite

# The header of the paper's Table 2, and the few-shot counts of Appendix L.
TABLE = """
MMLU-P acc 5, GPQA acc_norm 0, BBH acc_norm 3, MATH exact_match 4, MuSR acc_norm 0, IFE-I inst_level_strict_acc 0,
IFE-P prompt_level_strict_acc 0, ARC-C acc_norm 0, ARC-E acc_norm 0, HS acc_norm 0, PIQA acc_norm 0, BoolQ acc 0, WinoG acc 0, COPA acc 0,
OBQA acc_norm 0, SciQ acc_norm 0
"""  # noqa: E501


@pytest.fixture(scope="module")
def paper() -> tuple[Suite, Tasks]:
    suite = load_suite("paper")
    return suite, find_tasks(suite)


def test_the_papers_columns_are_the_harness_tasks(paper: tuple[Suite, Tasks]) -> None:
    suite, tasks = paper
    assert [f"{task.label} {task.metric} {task.fewshot}" for task in suite.tasks] == re.split(
        r",\s+", TABLE.strip()
    )
    assert [task.group for task in suite.tasks] == ["Open LLM Leaderboard"] * 7 + [
        "General Ability"
    ] * 9
    assert [task.rescale for task in suite.tasks] == ["leaderboard"] * 7 + ["none"] * 9
    for task in suite.tasks:
        for leaf in tasks.leaves[task.task]:
            assert leaf.fewshot == task.fewshot and task.metric in leaf.metrics, leaf.name
            # Version 4 and later of datasets run no loading scripts.
            assert leaf.data is not None and "trust_remote_code" not in leaf.data.options
    # Few-shot tasks use the first examples of a fixed list, as the leaderboard does, not random
    # ones.
    for name in ("leaderboard_mmlu_pro", "leaderboard_bbh", "leaderboard_math_hard"):
        assert {leaf.config["fewshot_config"]["sampler"] for leaf in tasks.leaves[name]} == {
            "first_n"
        }


def test_what_guessing_scores(paper: tuple[Suite, Tasks]) -> None:
    """BBH: 1 / number of answers in the harness's files (the leaderboard's, 11 shapes, 19 counts of
    objects); MuSR: the leaderboard's.
    """
    suite, tasks = paper
    by_label = {task.label: task for task in suite.tasks}
    bbh = {
        leaf.name: 1 / len(leaf.config["doc_to_choice"]) for leaf in tasks.leaves["leaderboard_bbh"]
    }
    assert by_label["BBH"].subtask_chance == pytest.approx(bbh) and len(bbh) == 24
    assert bbh["leaderboard_bbh_object_counting"] == 1 / 19
    assert bbh["leaderboard_bbh_geometric_shapes"] == 1 / 11
    assert set(by_label["MuSR"].subtask_chance) == {
        leaf.name for leaf in tasks.leaves["leaderboard_musr"]
    }
    short = {
        name.removeprefix("leaderboard_musr_"): chance
        for name, chance in by_label["MuSR"].subtask_chance.items()
    }
    assert short == pytest.approx(
        {"murder_mysteries": 0.5, "object_placements": 0.2, "team_allocation": 1 / 3}
    )
    chances = {"MMLU-P": 0.1, "GPQA": 0.25, "MATH": 0.0, "IFE-I": 0.0, "IFE-P": 0.0}
    assert {label: by_label[label].chance for label in chances} == chances


def test_tasks_are_those_that_the_harness_finds_by_itself(paper: tuple[Suite, Tasks]) -> None:
    """Only folders found by a search of the first lines are read; a task with the same name
    elsewhere would be a different one.
    """
    suite, tasks = paper
    wanted = {task.task for task in suite.tasks}
    names = [name for name, _ in named_in(tasks.folder) if name in wanted]
    assert sorted(names) == sorted(wanted)
    manager = TaskManager(
        include_path=[str(tasks.folder / "arc"), str(tasks.folder / "leaderboard")],
        include_defaults=False,
    )
    assert manager.task_index["arc_challenge"].cfg == tasks.manager.task_index["arc_challenge"].cfg


def test_the_digest_sees_what_a_task_asks(tmp_path: Path) -> None:
    def digests(folder: Path) -> list[str]:
        suite = load_suite(
            str(suite_file(folder / "s.yaml", "task: tiny_choices", "task: tiny_words"))
        )
        found = find_tasks(suite)
        return [found.digest(task.task) for task in suite.tasks]

    rows = task_folder(tmp_path / "tasks") / "rows.json"
    first = digests(tmp_path)
    assert first == digests(tmp_path) and first[0] != first[1]
    text = rows.read_text()
    rows.write_text(text.replace("blue", "grey"))
    assert digests(tmp_path)[0] != first[0]
    rows.write_text(text)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tasks").rename(tmp_path / "elsewhere/tasks")
    assert digests(tmp_path / "elsewhere") == first, "where it lies does not matter"


# --- the quick suite ------------------------------------------------------------------------------


def test_items_are_the_same_everywhere() -> None:
    """Scores are comparable only while this holds; a change of the items requires a new version in
    the tasks' YAML files.
    """
    spec = importlib.util.spec_from_file_location("items", SUITES.parent / "tasks" / "items.py")
    assert spec is not None and spec.loader is not None
    items: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(items)  # by its path, as the harness does
    drawn = [
        rows.__wrapped__()
        for rows in (items.brackets, items.keywords, items.next_line, items.recall)
    ]
    everything = [*drawn, items.WRITTEN["idioms"]]
    assert hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16] == "2da6afdbc83ff2af"


# --- errors in suites -----------------------------------------------------------------------------

WRONG = [
    "tasks: []",
    "tasks:\n  - {task: arc_easy, lable: ARC}",
    "tasks:\n  - {task: arc_easy, fewshot: many}",
    "tasks:\n  - {task: arc_easy, fewshot: true}",
    "tasks:\n  - {task: arc_easy, fewshot: -1}",
    "tasks:\n  - {task: arc_easy, rescale: leaderbord}",
    "tasks:\n  - {task: arc_easy}\n  - {task: arc_easy}",
    "tasks:\n  - {task: arc_easy, name: a/b}",
    "tasks:\n  - {task: arc_easy, chance: 1.0}",
    "tasks:\n  - {task: arc_easy, stride: 3}",
    "tasks:\n  - {label: x}",
    "tasks:\n  - {task: a, task: b}",
    "tasks: [",
    "- a",
    "task_paths: [nowhere]\ntasks:\n  - {task: arc_easy}",
]


def test_a_wrong_suite_is_reported(tmp_path: Path, raised: Refused) -> None:
    for text in WRONG:
        (tmp_path / "s.yaml").write_text(text)
        raised(load_suite, str(tmp_path / "s.yaml"))
    for name in ("papers", str(tmp_path / "none.yaml")):
        raised(load_suite, name)


@pytest.mark.parametrize(
    "task",
    [
        "task: arc_eazy",
        "task: arc_easy, metric: accnorm",
        "task: leaderboard_ifeval, metric: prompt_level_strict_acc, fewshot: 2",
        "task: leaderboard_instruction_following, metric: prompt_level_strict_acc",
        "task: leaderboard_gpqa, metric: acc",
        "task: leaderboard_gpqa, metric: acc_norm, subtask_chance: {leaderboard_gpqa_maine: 0.25}",
        "task: tiny_words, metric: perplexity",
    ],
)
def test_a_task_that_is_not_what_the_suite_states(
    tmp_path: Path, raised: Refused, task: str
) -> None:
    task_folder(tmp_path / "tasks")
    raised(find_tasks, load_suite(str(suite_file(tmp_path / "s.yaml", task))))
