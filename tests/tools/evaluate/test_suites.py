"""The paper's suite against the harness's own YAMLs, the examples of the quick one, and what is told of a suite that is wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from lm_eval.tasks import TaskManager

from fem_common.errors import ConfigError
from tests.tools.evaluate.tiny import suite_file, task_folder
from tools.evaluate.catalogue import Tasks, find_tasks, named_in
from tools.evaluate.suite import SUITES, Suite, load_suite

# The header of the paper's Table 2, and Appendix L's few-shot counts.
TABLE = [
    ("MMLU-P", "acc", 5),
    ("GPQA", "acc_norm", 0),
    ("BBH", "acc_norm", 3),
    ("MATH", "exact_match", 4),
    ("MuSR", "acc_norm", 0),
    ("IFE-I", "inst_level_strict_acc", 0),
    ("IFE-P", "prompt_level_strict_acc", 0),
    ("ARC-C", "acc_norm", 0),
    ("ARC-E", "acc_norm", 0),
    ("HS", "acc_norm", 0),
    ("PIQA", "acc_norm", 0),
    ("BoolQ", "acc", 0),
    ("WinoG", "acc", 0),
    ("COPA", "acc", 0),
    ("OBQA", "acc_norm", 0),
    ("SciQ", "acc_norm", 0),
]


def items_module() -> Any:
    """The quick suite's examples, loaded as the harness does: by path."""
    spec = importlib.util.spec_from_file_location("items", SUITES.parent / "tasks" / "items.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


items = items_module()


@pytest.fixture(scope="module")
def paper() -> tuple[Suite, Tasks]:
    suite = load_suite("paper")
    return suite, find_tasks(suite)


def test_the_papers_columns(paper: tuple[Suite, Tasks]) -> None:
    assert [(task.label, task.metric, task.fewshot) for task in paper[0].tasks] == TABLE
    groups = [task.group for task in paper[0].tasks]
    assert groups == ["Open LLM Leaderboard"] * 7 + ["General Ability"] * 9
    assert [task.rescale for task in paper[0].tasks] == ["leaderboard"] * 7 + ["none"] * 9


def test_few_shot_counts_and_metrics_are_those_of_the_harness(paper: tuple[Suite, Tasks]) -> None:
    suite, tasks = paper
    for task in suite.tasks:
        for leaf in tasks.leaves[task.task]:
            assert leaf.fewshot == task.fewshot, leaf.name
            assert task.metric in leaf.metrics, leaf.name
    # What is asked with examples takes the first ones of a fixed list, as the leaderboard does, not random ones.
    for name in ("leaderboard_mmlu_pro", "leaderboard_bbh", "leaderboard_math_hard"):
        assert {leaf.config["fewshot_config"]["sampler"] for leaf in tasks.leaves[name]} == {"first_n"}


def test_what_guessing_scores(paper: tuple[Suite, Tasks]) -> None:
    suite, tasks = paper
    by_task = {task.task: task for task in suite.tasks}
    bbh = {leaf.name: 1 / len(leaf.config["doc_to_choice"]) for leaf in tasks.leaves["leaderboard_bbh"]}
    assert by_task["leaderboard_bbh"].subtask_chance == pytest.approx(bbh)
    assert len(bbh) == 24
    assert set(by_task["leaderboard_musr"].subtask_chance) == {leaf.name for leaf in tasks.leaves["leaderboard_musr"]}
    assert (by_task["leaderboard_gpqa"].chance, by_task["leaderboard_mmlu_pro"].chance) == (0.25, 0.1)


def test_tasks_are_those_that_the_harness_finds_by_itself(paper: tuple[Suite, Tasks]) -> None:
    """Only folders that a search of the first lines names are read; a task of the same name elsewhere would be another one."""
    suite, tasks = paper
    wanted = {task.task for task in suite.tasks}
    places: dict[str, list[Path]] = {}
    for name, file in named_in(tasks.folder):
        if name in wanted:
            places.setdefault(name, []).append(file)
    assert {name: len(files) for name, files in places.items()} == dict.fromkeys(wanted, 1)
    manager = TaskManager(include_path=[str(tasks.folder / "arc"), str(tasks.folder / "leaderboard")], include_defaults=False)
    assert manager.task_index["arc_challenge"].cfg == tasks.manager.task_index["arc_challenge"].cfg


def test_no_task_needs_code_from_the_hub(paper: tuple[Suite, Tasks]) -> None:
    """datasets 4 and later run no loading scripts."""
    for leaves in paper[1].leaves.values():
        for leaf in leaves:
            assert leaf.data is not None
            assert "trust_remote_code" not in leaf.data.options


def test_the_digest_sees_what_a_task_asks(tmp_path: Path) -> None:
    suite_file(tmp_path / "s.yaml", "task: tiny_choices", "task: tiny_words")
    task_folder(tmp_path / "tasks")

    def digests() -> list[str]:
        suite = load_suite(str(tmp_path / "s.yaml"))
        found = find_tasks(suite)
        return [found.digest(task.task) for task in suite.tasks]

    first = digests()
    assert first == digests() and first[0] != first[1]
    text = (tmp_path / "tasks/rows.json").read_text()
    (tmp_path / "tasks/rows.json").write_text(text.replace("blue", "grey"))
    assert digests()[0] != first[0]
    (tmp_path / "tasks/rows.json").write_text(text)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tasks").rename(tmp_path / "elsewhere/tasks")
    suite_file(tmp_path / "elsewhere/s.yaml", "task: tiny_choices", "task: tiny_words")
    found = find_tasks(load_suite(str(tmp_path / "elsewhere/s.yaml")))
    assert [found.digest("tiny_choices"), found.digest("tiny_words")] == first, "where it lies does not matter"


# --- the quick suite -------------------------------------------------------------------------------------------------------------


def test_quick_is_found_and_needs_no_data() -> None:
    tasks = find_tasks(load_suite("quick"))
    assert len(tasks.leaves) == 5
    assert all(leaf.data is None for leaves in tasks.leaves.values() for leaf in leaves)


@pytest.mark.parametrize("rows", [items.bracket_rows(), items.keyword_rows(), items.line_rows()], ids=["brackets", "keywords", "lines"])
def test_multiple_choice_items_have_one_right_answer(rows: list[dict[str, Any]]) -> None:
    assert 50 <= len(rows) <= 100
    for row in rows:
        assert len(set(row["choices"])) == len(row["choices"]) == 4
    places = [row["answer"] for row in rows]
    assert {places.count(place) > len(rows) // 8 for place in range(4)} == {True}, "the right answer is at all places"
    right = {row["context"] for row in rows}
    assert len(right) > len(rows) // 2


def test_brackets_close_what_is_open() -> None:
    for row in items.bracket_rows():
        for index, choice in enumerate(row["choices"]):
            text = re.sub(r"[^()\[\]{}]", "", row["context"] + choice)
            while text != (text := text.replace("()", "").replace("[]", "").replace("{}", "")):
                pass
            assert (text == "") == (index == row["answer"])


def test_recall_items_ask_what_was_set() -> None:
    for row in items.recall_rows():
        name = row["context"].splitlines()[-1].split()[1]
        assert f"{name} = {row['answer']}\n" in row["context"]
        assert f"assert {name} == {row['answer']}" not in row["context"]


def test_items_are_the_same_everywhere() -> None:
    """Scores are comparable only while this holds; a change of the items is a new version in the tasks' YAMLs."""
    everything = [items.bracket_rows(), items.keyword_rows(), items.line_rows(), items.recall_rows(), items.IDIOMS]
    assert hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16] == "2da6afdbc83ff2af"


# --- what is wrong with a suite --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tasks: []", "at least one task"),
        ("tasks:\n  - {task: arc_easy, lable: ARC}", "unknown key tasks.0.lable; did you mean tasks.0.label?"),
        ("tasks:\n  - {task: arc_easy, fewshot: many}", "tasks.0.fewshot = 'many': expected a whole number or null"),
        ("tasks:\n  - {task: arc_easy, fewshot: true}", "tasks.0.fewshot"),
        ("tasks:\n  - {task: arc_easy, fewshot: -1}", "must be 0 or more"),
        ("tasks:\n  - {task: arc_easy, rescale: leaderbord}", "did you mean leaderboard"),
        ("tasks:\n  - {task: arc_easy}\n  - {task: arc_easy}", "two tasks have the name arc_easy"),
        ("tasks:\n  - {task: arc_easy, name: a/b}", "names a file"),
        ("tasks:\n  - {task: arc_easy, chance: 1.0}", "chance = 1.0"),
        ("tasks:\n  - {task: arc_easy, stride: 3}", "tasks.0.stride: only of a task with kind: heldout"),
        ("tasks:\n  - {label: x}", "tasks.0.task"),
        ("tasks:\n  - {task: a, task: b}", "given twice"),
        ("tasks: [", "not valid YAML"),
        ("- a", "expected a mapping"),
        ("task_paths: [nowhere]\ntasks:\n  - {task: arc_easy}", "is not a folder"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_suite(str(tmp_path / "s.yaml"))


def test_a_wrong_name_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean paper\?"):
        load_suite("papers")
    with pytest.raises(ConfigError, match="no such file"):
        load_suite(str(tmp_path / "none.yaml"))
    assert {path.stem for path in SUITES.glob("*.yaml")} == {"paper", "quick"}


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("task: arc_eazy", "did you mean arc_easy?"),
        ("task: arc_easy, metric: accnorm", "did you mean acc_norm?"),
        ("task: leaderboard_ifeval, metric: prompt_level_strict_acc, fewshot: 2", "without examples alone"),
        ("task: leaderboard_instruction_following, metric: prompt_level_strict_acc", "has no score of its own"),
        ("task: leaderboard_gpqa, metric: acc", "has no metric acc; it has acc_norm"),
        ("task: leaderboard_gpqa, metric: acc_norm, subtask_chance: {leaderboard_gpqa_maine: 0.25}", "did you mean leaderboard_gpqa_main?"),
        ("task: tiny_words, metric: perplexity", "higher_is_better: false"),
    ],
)
def test_a_task_that_is_not_what_the_suite_says(tmp_path: Path, task: str, told: str) -> None:
    task_folder(tmp_path / "tasks")
    with pytest.raises(ConfigError, match=re.escape(told)):
        find_tasks(load_suite(str(suite_file(tmp_path / "s.yaml", task))))
