"""Average rank and #Top1 as the FEM paper counts them: all nineteen rows of its Table 2, from its printed scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tools.evaluate.result_files import suite, write
from tools.evaluate.results import read
from tools.evaluate.table import build, printed, summary

PAPER: dict[str, Any] = json.loads((Path(__file__).parents[2] / "fixtures/fem_table_2.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("group", PAPER["groups"], ids=lambda group: group["name"])
def test_both_columns_of_the_paper_come_out_of_its_scores(group: dict[str, Any]) -> None:
    rows = group["rows"]
    found = summary([row["scores"] for row in rows], [True] * len(PAPER["columns"]))
    ours = [None if one is None else (str(printed(one[0], 2)), one[1]) for one in found]
    assert ours == [(row["avg_rank"], row["top1"]) for row in rows]


def test_no_other_rule_for_ties_gives_the_papers_ranks() -> None:
    """The mean or the worst of the tied ranks, or ranks without gaps, miss most of its rows: the rule is not a matter of taste."""
    rules = {
        "mean": lambda better, equal, distinct: better + (equal + 1) / 2,
        "worst": lambda better, equal, distinct: better + equal,
        "without gaps": lambda better, equal, distinct: distinct + 1,
    }
    for rule in rules.values():
        agree = 0
        for group in PAPER["groups"]:
            scores = [row["scores"] for row in group["rows"]]
            for row in group["rows"]:
                places = []
                for index, own in enumerate(row["scores"]):
                    column = [other[index] for other in scores]
                    above = [other for other in column if other > own]
                    places.append(rule(len(above), column.count(own), len(set(above))))
                agree += str(printed(sum(places) / len(places), 2)) == row["avg_rank"]
        assert agree <= 2  # of 19


def test_result_files_of_the_papers_scores_make_the_papers_table(tmp_path: Path) -> None:
    group = PAPER["groups"][0]
    for row in group["rows"]:
        for name, score in zip(PAPER["columns"], row["scores"], strict=True):
            write(tmp_path, row["model"], name, score)
    table = build(read([tmp_path]), suite(*PAPER["columns"]))
    found = {row.model: one for row, one in zip(table.rows, table.summary(), strict=True)}
    assert {model: one and (str(printed(one[0], 2)), one[1]) for model, one in found.items()} == {
        row["model"]: (row["avg_rank"], row["top1"]) for row in group["rows"]
    }
