"""Golden file of the commands' messages: ``wording(text)`` compares with tests/wording.yaml,
``pytest --update-wording`` rewrites it.

Tests assert the function of a message (exit code, one line, the key named); its wording is in one
file.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

GOLDEN = Path(__file__).with_name("wording.yaml")
ROOT = GOLDEN.parents[1]


def read_golden() -> dict[str, list[str]]:
    """Return test -> its texts, call after call."""
    if GOLDEN.exists():
        return yaml.load(GOLDEN.read_text(encoding="utf-8"), yaml.CSafeLoader) or {}
    return {}


class Wording:
    """Texts of one test. The n-th call is compared with the n-th entry."""

    def __init__(
        self, test: str, expected: list[str], updating: bool, names: dict[str, str]
    ) -> None:
        self.test = test
        self.expected = expected
        self.updating = updating
        self.names = names
        self.recorded = list[str]()

    def __call__(self, text: object, **names: object) -> None:
        """Compare ``text`` with the golden file. ``names`` (WORD=value): values that differ from
        run to run, each replaced by its WORD.
        """
        output = str(text).rstrip("\n")
        for word, value in sorted(
            {**self.names, **names}.items(), key=lambda item: -len(str(item[1]))
        ):
            output = output.replace(str(value), word)
        self.recorded.append(output)
        if not self.updating:
            index = len(self.recorded) - 1
            assert index < len(self.expected), (
                f"not in tests/wording.yaml (pytest --update-wording writes it): {output}"
            )
            assert output == self.expected[index]


@pytest.fixture
def wording(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Wording]:
    """Golden texts of this test; the test's folder is written as TMP, the repository's as ROOT."""
    test = request.node.nodeid.removeprefix("tests/")
    updating = request.config.getoption("--update-wording")
    recorded = Wording(
        test,
        [] if updating else _golden(request.config).get(test, []),
        updating,
        {"TMP": str(tmp_path), "ROOT": str(ROOT)},
    )
    yield recorded
    if updating:
        _rewrite(test, recorded.recorded)
    elif not request.session.shouldfail:
        assert len(recorded.recorded) == len(recorded.expected) or request.node.stash.get(
            _FAILED, False
        ), "tests/wording.yaml expects more to be said"


_FAILED = pytest.StashKey[bool]()
_READ = pytest.StashKey[dict[str, list[str]]]()


def _golden(config: pytest.Config) -> dict[str, list[str]]:
    if _READ not in config.stash:
        config.stash[_READ] = read_golden()
    return config.stash[_READ]


def _rewrite(test: str, recorded: list[str]) -> None:
    """Write one test's texts to the golden file; several test processes may do so at once."""
    with GOLDEN.open("a+", encoding="utf-8") as golden:
        fcntl.flock(golden, fcntl.LOCK_EX)
        texts = dict(sorted({**read_golden(), test: recorded}.items()))
        golden.truncate(0)
        golden.write(yaml.dump(texts, width=130, allow_unicode=True, sort_keys=False))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-wording",
        action="store_true",
        help="rewrite tests/wording.yaml with what the commands say now",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    report: Any = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report
