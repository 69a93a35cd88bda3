"""Private Slurm for the tests of this folder; all are marked ``slurm``, and skipped with the reason
if it cannot run.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.mini import MiniSlurm

HERE = Path(__file__).parent


class MakeCluster:
    """``make_cluster(nodes=3, ...)``: a started MiniSlurm with these arguments, which ends with the
    test.
    """

    def __init__(self) -> None:
        self.made: list[MiniSlurm] = []

    def __call__(self, **shape: Any) -> MiniSlurm:
        cluster = MiniSlurm(**shape)
        self.made.append(cluster)
        cluster.start()
        return cluster


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test below this folder."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    reason = MiniSlurm.unavailable() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.slurm)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the last log lines of its clusters to a failed test's report."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            clusters = list[MiniSlurm]()
            if isinstance(value, MakeCluster):
                clusters = value.made
            elif isinstance(value, MiniSlurm):
                clusters = [value]
            for cluster in clusters:
                report.sections.append((f"Slurm's logs in {cluster.root}", cluster.logs()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[MiniSlurm]:
    """One cluster of two nodes for all tests that do not disturb its nodes; jobs of a test are
    cancelled at its end.
    """
    with MiniSlurm() as running:
        yield running


@pytest.fixture
def make_cluster() -> Iterator[MakeCluster]:
    """Separate clusters of a test, which it may break; stopped at its end."""
    clusters = MakeCluster()
    yield clusters
    for made in clusters.made:
        made.stop()


@pytest.fixture(autouse=True)
def _leave_no_job(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a test submitted to the shared cluster; jobs of wider fixtures stay."""
    if "cluster" not in request.fixturenames:
        yield
        return
    cluster: MiniSlurm = request.getfixturevalue("cluster")
    before = _jobs(cluster)
    yield
    if left := _jobs(cluster) - before:
        cluster.run("scancel", "--full", *sorted(left), check=False)
        for job in left:
            cluster.wait(job)


def _jobs(cluster: MiniSlurm) -> set[str]:
    """Return the ids of unfinished jobs."""
    return set(cluster.run("squeue", "--noheader", "--array", "--format=%A").stdout.split())
