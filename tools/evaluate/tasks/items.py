"""Generate the examples of the suite ``quick``: small questions about Python from templates, equal
on every machine and in every Python version.

The harness loads this file by its path and calls the functions that the YAML files in this folder
name, so it must not import project files. The templates and the continuations of well-known lines
are in items.json.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

ITEMS = 60
NOUNS = "item value path name node key line token entry field record index".split()
CALLS = "load parse find read check make count merge split open_file update remove".split()
CLOSES = {"(": ")", "[": "]", "{": "}"}
WRITTEN: dict[str, list[Any]] = json.loads(
    Path(__file__).with_name("items.json").read_text(encoding="utf-8")
)

Rows = list[dict[str, Any]]


class Draw:
    """Random choices from a seed.

    Only random() is used, because its sequence is the same in all Python versions.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, number: int) -> int:
        """Return an integer from 0 to ``number`` - 1."""
        return int(self._random.random() * number)

    def some(self, words: list[str], number: int = 1) -> list[str]:
        """Return ``number`` different elements of ``words`` in random order."""
        left = list(words)
        return [left.pop(self.below(len(left))) for _ in range(number)]

    def choose(self, context: str, right: str, wrong: list[str]) -> dict[str, Any]:
        """Return a multiple-choice row: ``context``, ``choices`` in random order, and ``answer``.

        ``answer`` is the index of ``right`` in ``choices``.
        """
        choices = self.some([right, *wrong], 1 + len(wrong))
        return {"context": context, "choices": choices, "answer": choices.index(right)}


def dataset(rows: Callable[[], Rows]) -> Callable[..., Any]:
    """Convert a function that returns rows to a data set function of the harness."""

    @functools.wraps(rows)
    def given(**_: Any) -> Any:
        import datasets

        return {"test": datasets.Dataset.from_list(rows())}

    return given


@dataset
def brackets() -> Rows:
    """Return questions on the closing brackets of an expression: four choices of three brackets
    each.
    """
    draw, rows = Draw(1), Rows()
    while len(rows) < ITEMS:
        opened = [list(CLOSES)[draw.below(3)] for _ in range(3)]
        right = "".join(CLOSES[bracket] for bracket in reversed(opened))
        every = [a + b + c for a in ")]}" for b in ")]}" for c in ")]}" if a + b + c != right]
        noun, first, second = draw.some(NOUNS, 3)
        call = CALLS[draw.below(len(CALLS))]
        context = f"{noun} = {call}{opened[0]}{first}, {call}{opened[1]}{second}{opened[2]}0"
        rows.append(draw.choose(context, right, draw.some(every, 3)))
    return rows


@dataset
def keywords() -> Rows:
    """Return questions on the next word of Python code: four choices."""
    draw, rows, written = Draw(2), Rows(), WRITTEN["keywords"]
    for number in range(ITEMS):
        text, right, wrong = written[number % len(written)]
        a, b = draw.some(NOUNS, 2)
        context = text.format(a=a, b=b, f=CALLS[draw.below(len(CALLS))])
        rows.append(draw.choose(context, right, wrong))
    return rows


@dataset
def next_line() -> Rows:
    """Return questions on the next line of code: four choices with the names of the earlier lines.

    The choices differ in length.
    """
    draw, rows, written = Draw(3), Rows(), WRITTEN["lines"]
    for number in range(ITEMS):
        at = number % len(written)
        a, b = draw.some(NOUNS, 2)
        names = {"a": a, "b": b, "f": CALLS[draw.below(len(CALLS))]}
        others = draw.some([line for index, (_, line) in enumerate(written) if index != at], 3)
        before, right = written[at]
        rows.append(
            draw.choose(
                before.format(**names),
                right.format(**names),
                [line.format(**names) for line in others],
            )
        )
    return rows


@dataset
def recall() -> Rows:
    """Return questions on the value that was assigned to a name some lines before.

    The model must generate the exact value.
    """
    draw, rows = Draw(4), Rows()
    for _ in range(50):
        names = draw.some(NOUNS, 3)
        values = draw.some([str(number) for number in range(10, 100)], 3)
        set_to = "".join(f"{name} = {value}\n" for name, value in zip(names, values, strict=True))
        requested = draw.below(3)
        shown = "".join(f"assert {names[i]} == {values[i]}\n" for i in range(3) if i != requested)
        rows.append(
            {
                "context": f"{set_to}\n{shown}assert {names[requested]} ==",
                "answer": values[requested],
            }
        )
    return rows


@dataset
def idioms() -> Rows:
    """Return continuations of lines that every Python programmer knows, scored by
    log-likelihood.
    """
    return [{"context": context, "target": target} for context, target in WRITTEN["idioms"]]
