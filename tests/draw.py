"""Selection of slow tests in every CI run, ``pytest -m slow --slow-seconds N --slow-seed TEXT``,
and the recorded durations for it.

Durations are in ``durations.json``, which ``pytest --record-durations`` updates for the tests that
ran.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
UNKNOWN = 30.0  # seconds assumed for a case without a recorded duration
# Seconds; a case that takes longer, and twice the mean of its function, is recorded separately.
OWN = 20.0
LEAST = 5.0  # seconds; quick tests of a file that take less in total are not recorded
# "quick files": file -> seconds of its quick tests; "slow tests": test function -> seconds per
# case.
Recorded = dict[str, dict[str, float]]


def read_durations() -> Recorded:
    """Return the recorded durations; empty without a record."""
    if DURATIONS.exists():
        return json.loads(DURATIONS.read_text(encoding="utf-8"))
    return {"quick files": {}, "slow tests": {}}


def function_of(case: str) -> str:
    """Return a node id without its parameters."""
    return case.partition("[")[0]


def file_of(case: str) -> str:
    """Return the file of a node id."""
    return case.partition("::")[0]


def seconds_of(case: str, seconds: Mapping[str, float]) -> float:
    """Return the recorded duration of a case: its own, or its function's mean."""
    return seconds.get(case, seconds.get(function_of(case), UNKNOWN))


def draw(cases: Iterable[str], seconds: Mapping[str, float], budget: float, seed: str) -> list[str]:
    """Draw node ids of slow tests whose recorded durations fit the budget, the longest file first.

    Each round takes one random case of every test function, in random order, so that a function
    with 900 cases does not displace others. A case that exceeds the full budget is never drawn.
    """
    dice = random.Random(seed)
    waiting: dict[str, list[str]] = defaultdict(list)
    for case in sorted(cases):
        waiting[function_of(case)].append(case)
    order = sorted(waiting)
    dice.shuffle(order)
    for function in order:
        dice.shuffle(waiting[function])
    drawn, files = list[str](), defaultdict[str, float](float)
    while any(waiting.values()):
        for function in order:
            waiting[function] = [
                case for case in waiting[function] if seconds_of(case, seconds) <= budget
            ]
            if waiting[function]:
                case = waiting[function].pop()
                drawn.append(case)
                budget -= seconds_of(case, seconds)
                files[file_of(case)] += seconds_of(case, seconds)
    return sorted(drawn, key=lambda case: (-files[file_of(case)], case))


def measured(reports: Iterable[tuple[str, str, float, bool]]) -> Recorded:
    """Summarize reports, each a node id, a phase, seconds and whether the test is slow.

    A module's fixtures run in the set-up of one test for all: a file's set-up time is shared
    equally by its tests.
    """
    own, set_up, quick = (defaultdict[str, float](float) for _ in range(3))
    slow: dict[str, bool] = {}
    for case, phase, seconds, is_slow in reports:
        slow[case] = is_slow
        if phase == "setup":
            set_up[file_of(case)] += seconds
        else:
            own[case] += seconds
    tests = Counter(map(file_of, slow))
    functions = defaultdict[str, dict[str, float]](dict)
    for case, is_slow in slow.items():
        file = file_of(case)
        seconds = own[case] + set_up[file] / tests[file]
        if is_slow:
            functions[function_of(case)][case] = seconds
        else:
            quick[file] += seconds
    found = dict[str, float]()
    for function, each in functions.items():
        mean = sum(each.values()) / len(each)
        alone = {case: seconds for case, seconds in each.items() if seconds > max(OWN, 2 * mean)}
        shared = sum(each.values()) - sum(alone.values())
        found[function] = shared / (len(each) - len(alone))
        found |= alone
    return {"quick files": dict(quick), "slow tests": found}


def merged(recorded: Recorded, found: Recorded) -> Recorded:
    """Replace recorded durations by new ones, rounded to two digits; drop files that no longer
    exist.

    A test that is skipped on this machine, which takes no time, keeps the duration of another
    machine.
    """
    answer = {}
    for kind in ("quick files", "slow tests"):
        new = {
            name: seconds
            for name, seconds in found[kind].items()
            if seconds >= 0.01 or name not in recorded[kind]
        }
        values = {**recorded[kind], **new}
        kept = {}
        for name, seconds in sorted(values.items()):
            if kind == "quick files" and seconds < LEAST:
                continue
            if (DURATIONS.parents[1] / file_of(name)).exists():
                kept[name] = float(f"{seconds:.2g}")
        answer[kind] = kept
    return answer


class Recorder:
    """Collects durations from the reports of all workers, and writes the file at the end of a
    run.
    """

    def __init__(self) -> None:
        self.reports: list[tuple[str, str, float, bool]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = 0.0 if report.skipped else report.duration
        self.reports.append((report.nodeid, report.when or "", seconds, "slow" in report.keywords))

    def pytest_sessionfinish(self) -> None:
        text = json.dumps(merged(read_durations(), measured(self.reports)), indent=1)
        DURATIONS.write_text(f"{text}\n", encoding="utf-8")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("durations")
    group.addoption(
        "--slow-seconds",
        type=float,
        metavar="N",
        help="with -m slow: tests drawn for N recorded seconds, of all workers",
    )
    group.addoption(
        "--slow-seed",
        default="0",
        metavar="TEXT",
        help="what the draw depends on, besides the tests and their durations",
    )
    group.addoption(
        "--record-durations",
        action="store_true",
        help=f"update tests/{DURATIONS.name} with what was run",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files without slow tests during a draw."""
    drawing = config.getoption("--slow-seconds") is not None and collection_path.suffix == ".py"
    if drawing and not re.search(r"mark\.slow\b", collection_path.read_text(encoding="utf-8")):
        return True
    return None


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Print how to draw the same tests again, and which tests no draw of this size contains."""
    budget, seed = config.getoption("--slow-seconds"), config.getoption("--slow-seed")
    if budget is None:
        return []
    longer = [
        f"{name} ({seconds:.0f} s)"
        for name, seconds in read_durations()["slow tests"].items()
        if seconds > budget
    ]
    lines = [
        f"slow tests for {budget:g} recorded seconds; the same ones: pytest -m slow --slow-seconds"
        f" {budget:g} --slow-seed {seed}"
    ]
    if longer:
        return [*lines, f"never drawn, since one case takes longer: {', '.join(longer)}"]
    return lines


@pytest.hookimpl(trylast=True)  # runs after -m has deselected the quick tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep only the drawn tests, in the order of the draw."""
    budget = config.getoption("--slow-seconds")
    if budget is None:
        return
    of = {item.nodeid: item for item in items if item.get_closest_marker("slow")}
    drawn = draw(of, read_durations()["slow tests"], budget, config.getoption("--slow-seed"))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in set(drawn)])
    items[:] = [of[case] for case in drawn]
