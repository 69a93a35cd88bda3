"""For every failing file system call in a save, the old or the new checkpoint is complete, and one
line reports the failure.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pretrain.write_faults import OTHERS, SHORT, Outcome, Plan, failing_saves

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None, reason="no C compiler for the library that lets calls fail"
)
# A rank writes two tensor files at the same time.
OF_RANK_0 = ["*/__0_0.distcp*", "*/__0_1.distcp*"]
# Order that makes a power cut harmless at any point: every file is on the disk before it gets its
# final name, then latest is updated, then the old checkpoint is deleted.
ORDER = [
    *(
        "fsync .writing_step/.metadata",
        "fsync .writing_step/common.pt",
        "fsync .writing_step/manifest.json",
        "fsync .writing_step",
    ),
    *(
        "rename step",
        "fsync .",
        "fsync .latest",
        "rename latest",
        "fsync .",
        "rename .writing_step",
        "rmdir .writing_step",
    ),
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory if possible: a save calls fsync eleven times, which takes 50 ms on a
    disk.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def calls(found: list[Outcome]) -> list[str]:
    """Return the failed calls without the numbers of steps and processes."""
    paths = [re.sub(r"step_\d{8}", "step", one.path).partition("~")[0] for one in found]
    return [
        f"{one.call} {'.' if path.startswith('/') else path}"
        for one, path in zip(found, paths, strict=True)
    ]


def harmless(one: Outcome) -> bool:
    """Return True if no report is required: the rest of a short write is written, and an old
    checkpoint that remains is deleted later.
    """
    of_the_old = one.call in ("unlinkat", "rmdir") or (
        one.call == "rename" and re.fullmatch(r"\.writing_step_\d{8}", one.path) is not None
    )
    return of_the_old or (one.call == "write" and one.error == SHORT)


def reported_where_it_matters(found: list[Outcome]) -> None:
    """Check that every failure except harmless ones is reported."""
    assert [one for one in found if (one.error_message is None) != harmless(one)] == []


def of_a_file_of_tensors(found: list[Outcome]) -> None:
    """Check all calls on a file of tensors and its hash: written, synced by its writer and again at
    publication, and deleted later.
    """
    hashed, writes = ["open", "write", "close", "unlink"], len(found) - 9
    assert [one.call for one in found] == [
        "open",
        *["write"] * writes,
        "fsync",
        "close",
        *hashed,
        "fsync",
        "unlinkat",
    ]
    assert writes >= 5


def in_order(found: list[str]) -> None:
    """Check that the calls of `ORDER` occur in this order among others."""
    rest = iter(found)
    assert [call for call in ORDER if call not in rest] == [], found


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_call_may_fail_with_every_error(
    folder: Path, tmp_path: Path, asynchronous: bool
) -> None:
    """Each call once, and each call on files without tensors with all six errors."""
    everything = dict.fromkeys([*OF_RANK_0, OTHERS], 1)
    plans = [
        Plan(1, asynchronous, everything),
        *(Plan(1, asynchronous, {OTHERS: 1}, first) for first in range(1, 6)),
    ]
    full, *others = failing_saves(plans, folder, tmp_path / "faults.so")
    for found in (full, *others):
        reported_where_it_matters(found)
        in_order(calls(found))
    for name in ("__0_0.distcp", "__0_1.distcp"):
        of_a_file_of_tensors([one for one in full if name in one.path])
    assert all(calls(found) == calls(others[0]) == calls(full)[-len(found) :] for found in others)


@pytest.mark.slow
def test_a_call_of_another_rank_that_fails_is_reported_by_all(folder: Path, tmp_path: Path) -> None:
    """Each call on rank 1's files of tensors: both ranks raise the same error, and neither waits
    forever for the other.
    """
    plans = [Plan(2, False, {"*/__1_0.distcp*": 1}), Plan(2, True, {"*/__1_1.distcp*": 1})]
    for found in failing_saves(plans, folder, tmp_path / "faults.so"):
        reported_where_it_matters(found)
        of_a_file_of_tensors(found)
        # Rank 0 publishes and deletes the checkpoints.
        assert all("(rank 1)" in (one.error_message or "") or harmless(one) for one in found[:-3])
