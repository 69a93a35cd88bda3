"""Tests of the draw of slow tests: one seed gives the same tests, every test is drawn at some time,
and the budget is respected.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import draw as module
from tests.draw import draw, measured, merged, seconds_of

pytest_plugins = ["pytester"]
SECONDS = {"a.py::test_many": 2.0, "a.py::test_one": 50.0, "b.py::test_long": 400.0}
CASES = [
    *(f"a.py::test_many[{n}]" for n in range(300)),
    "a.py::test_one",
    "b.py::test_long",
    "c.py::test_unknown[x]",
]


# Independent of the machine's load and of luck.
@settings(
    deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.text(max_size=5), st.integers(0, 500), st.permutations(CASES[298:]))
def test_a_draw_depends_on_its_seed_alone_and_keeps_the_budget(
    seed: str, budget: int, some: list[str]
) -> None:
    drawn = draw(some, SECONDS, budget, seed)
    assert drawn == draw(sorted(some), SECONDS, budget, seed) and len(set(drawn)) == len(drawn)
    spent = sum(seconds_of(case, SECONDS) for case in drawn)
    assert spent <= budget
    assert all(spent + seconds_of(case, SECONDS) > budget for case in set(some) - set(drawn))


def test_every_test_that_fits_has_its_turn() -> None:
    drawn = [set(draw(CASES, SECONDS, 100.0, str(seed))) for seed in range(400)]
    assert set.union(*drawn) == set(CASES) - {"b.py::test_long"}
    share = sum("a.py::test_one" in each for each in drawn) / len(drawn)
    # 300 cases of another function do not displace it: 100 s suffice for one case of each.
    assert share > 0.9


def test_a_file_s_set_up_is_shared_and_files_that_are_gone_are_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "DURATIONS", tmp_path / "tests/durations.json")
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    reports = [
        ("a.py::test_x[1]", "setup", 30.0, True),
        ("a.py::test_x[1]", "call", 1.0, True),
        ("a.py::test_x[2]", "call", 3.0, True),
    ]
    found = measured(
        [*reports, ("a.py::test_y", "call", 0.5, False), ("b.py::test_z", "setup", 0.0, True)]
    )
    assert found == {
        "quick files": {"a.py": 10.5},
        "slow tests": {"a.py::test_x": 12.0, "b.py::test_z": 0.0},
    }
    many = measured(
        [(f"a.py::test_x[{n}]", "call", 50.0 if n == 7 else 1.0, True) for n in range(9)]
    )
    assert many["slow tests"] == {"a.py::test_x": 1.0, "a.py::test_x[7]": 50.0}
    before = {
        "quick files": {"a.py": 1.0, "gone.py": 9.0},
        "slow tests": {"b.py::test_z": 7.0, "gone.py::test": 1.0},
    }
    assert merged(before, found) == {
        "quick files": {"a.py": 10.0},
        "slow tests": {"a.py::test_x": 12.0, "b.py::test_z": 7.0},
    }


def test_pytest_runs_what_was_drawn_and_records(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    durations = pytester.path / "tests/durations.json"
    durations.parent.mkdir()
    monkeypatch.setattr(module, "DURATIONS", durations)
    pytester.makeini("[pytest]\nmarkers = slow: of the night\naddopts = -m 'not slow'")
    slow = (
        "import pytest, time\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(9))\ndef"
        " test_it(n): time.sleep(0.02)\n"
    )
    pytester.makepyfile(test_a=slow, test_b="raise AssertionError('no draw imports this')")
    call = ["-p", "tests.draw", "-p", "no:randomly", "-m", "slow", "--slow-seconds"]
    done = pytester.runpytest_inprocess(*call, "90", "--slow-seed", "x", "--record-durations")
    done.assert_outcomes(passed=3, deselected=6)
    done.stdout.fnmatch_lines(["*the same ones: pytest -m slow --slow-seconds 90 --slow-seed x"])
    recorded = json.loads(durations.read_text())
    assert recorded["quick files"] == {} and [*recorded["slow tests"]] == ["test_a.py::test_it"]
    # Only a lower bound: on a busy machine a sleep takes longer. `measured` is tested above.
    assert recorded["slow tests"]["test_a.py::test_it"] >= 0.02
    durations.write_text(
        json.dumps({"quick files": {}, "slow tests": {"test_a.py::test_it": 100.0}})
    )
    done = pytester.runpytest_inprocess(*call, "90")
    done.assert_outcomes(deselected=9)
    done.stdout.fnmatch_lines(
        ["never drawn, since one case takes longer: test_a.py::test_it (100 s)"]
    )
