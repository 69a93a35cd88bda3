"""Mutants: one-line faults that measure which share of faults the tests detect."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

LISTS = Path(__file__).parent
ROOT = LISTS.parents[1]


@dataclass(frozen=True)
class Mutant:
    """A fault: the line that it replaces and the replacement, both without indentation.

    line: one source line, or several consecutive lines. near: the line above, if ``line`` is not
    unique in the file. slow: the slow test that detects the fault, if no quick test does.
    """

    id: str
    file: str
    line: str
    becomes: str
    why: str
    near: str | None = None
    slow: str | None = None

    def place(self, root: Path) -> int:
        """Return the index of the mutant's first line in the file below ``root``.

        Raise ValueError unless the lines occur exactly once.
        """
        lines = [
            line.strip() for line in (root / self.file).read_text(encoding="utf-8").splitlines()
        ]
        own = self._lines()
        found = []
        for index in range(len(lines)):
            follows = self.near is None or lines[index - 1] == self.near.strip()
            if follows and lines[index : index + len(own)] == own:
                found.append(index)
        if len(found) != 1:
            below = f" below {self.near!r}" if self.near else ""
            raise ValueError(f"{self.id}: {self.file} has {len(found)} lines {self.line!r}{below}")
        return found[0]

    def text(self, root: Path) -> str:
        """Return the content of the file below ``root`` with the fault in it."""
        lines = (root / self.file).read_text(encoding="utf-8").splitlines(keepends=True)
        index = self.place(root)
        indent = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        changed = "".join(f"{indent}{line.strip()}\n" for line in self.becomes.splitlines())
        lines[index : index + len(self._lines())] = [changed]
        return "".join(lines)

    def _lines(self) -> list[str]:
        return [line.strip() for line in self.line.splitlines()]


def read_mutants(folder: Path = LISTS) -> list[Mutant]:
    """Load all lists of a folder. Raise ValueError if two mutants have the same id."""
    mutants = []
    for path in sorted(folder.glob("*.yaml")):
        mutants += [Mutant(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8"))]
    uses = Counter(mutant.id for mutant in mutants)
    twice = {name for name, count in uses.items() if count > 1}
    if twice:
        raise ValueError(f"two mutants have the id {', '.join(sorted(twice))}")
    return mutants


def probed(source: str, lines: dict[str, int], log: Path) -> tuple[str, set[str]]:
    """Return the source with probes and the ids of the mutants that got none.

    lines: id -> line index. When the statement at the line runs in a test, its probe appends ``id
    TAB test`` to ``log``. A statement at module or class level gets no probe, because it runs at
    import and not in a test. A Triton kernel gets none, because its source is compiled.
    """
    tree = ast.parse(source)
    parent = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    text = source.splitlines(keepends=True)
    probes: dict[int, list[str]] = {}
    without = set()
    for name, index in lines.items():
        inside = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.stmt) and node.lineno <= index + 1 <= (node.end_lineno or 0)
        ]
        node = max(inside, key=lambda found: (found.lineno, found.col_offset))
        while text[node.lineno - 1].lstrip().startswith("elif"):
            node = next(up for up in _above(node, parent) if isinstance(up, ast.stmt))
        around = [up for up in _above(node, parent) if isinstance(up, ast.FunctionDef)]
        decorators = [decorator for up in around for decorator in up.decorator_list]
        if not around or any("jit" in ast.unparse(decorator) for decorator in decorators):
            without.add(name)
            continue
        if isinstance(node, ast.FunctionDef):
            node = node.body[0]
        probes.setdefault(node.lineno - 1, []).append(name)
    for place, names in sorted(probes.items(), reverse=True):
        indent = text[place][: len(text[place]) - len(text[place].lstrip())]
        written = " + ".join(
            f"{name + chr(9)!r} + o.environ['PYTEST_CURRENT_TEST'] + chr(10)" for name in names
        )
        probe = (
            f"(lambda o: 'PYTEST_CURRENT_TEST' in o.environ and open({str(log)!r},"
            f" 'a').write({written}))(__import__('os'))"
        )
        text.insert(place, f"{indent}{probe}\n")
    return "".join(text), without


def _above(node: ast.AST, parent: dict[ast.AST, ast.AST]) -> list[ast.AST]:
    """Return the ancestors of a node, the nearest first."""
    above = []
    while node in parent:
        node = parent[node]
        above.append(node)
    return above
