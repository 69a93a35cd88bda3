"""Whatever single call to the file system fails in a save: the old checkpoint or the new one is there, whole, and one line tells of it."""

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
OF_RANK_0 = [
    "*/__0_0.distcp*",
    "*/__0_1.distcp*",
]  # Megatron writes two files of tensors a rank, at the same time
# What a power cut may come between: everything is on the disk before it has its name, latest follows, the old one goes last.
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
    """In memory where there is such a place: a save calls fsync eleven times, which is 50 ms of a disk's time."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


def calls(found: list[Outcome]) -> list[str]:
    """The calls that failed, without the numbers of steps and processes."""
    paths = [re.sub(r"step_\d{8}", "step", one.path).partition("~")[0] for one in found]
    return [
        f"{one.call} {'.' if path.startswith('/') else path}"
        for one, path in zip(found, paths, strict=True)
    ]


def harmless(one: Outcome) -> bool:
    """Nothing is to be told: the rest of a write that was cut short is written, and an old checkpoint that stays is tried again."""
    of_the_old = one.call in ("unlinkat", "rmdir") or (
        one.call == "rename" and re.fullmatch(r"\.writing_step_\d{8}", one.path) is not None
    )
    return of_the_old or (one.call == "write" and one.error == SHORT)


def told_where_it_matters(found: list[Outcome]) -> None:
    """Every failure is told but the harmless ones. Of two mkdir the second, Megatron's, is of the folder that the first has made."""
    made = [one.told is not None for one in found if one.call == "mkdir"]
    assert made in ([], [True], [True, False])
    assert [
        one for one in found if one.call != "mkdir" and (one.told is None) != harmless(one)
    ] == []


def of_a_file_of_tensors(found: list[Outcome]) -> None:
    """All calls on one, and on its hash: its writer syncs it, publishing does again, and it goes when the next checkpoint is there."""
    hashed, writes = ["open", "write", "close", "unlink"], len(found) - 9
    assert [one.call for one in found] == [
        "open",
        *["write"] * writes,
        "fsync",
        "close",
        *hashed,
        "fsync",
        "unlinkat",
    ] and writes >= 5


def in_order(found: list[str]) -> None:
    """Among other calls there are those of `ORDER`, one after another."""
    rest = iter(found)
    assert [call for call in ORDER if call not in rest] == [], found


@pytest.mark.slow
def test_a_call_that_fails_costs_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    """All calls on files that hold no tensors; of the 27 or so writes of a file of tensors, some."""
    (found,) = failing_saves(
        [Plan(1, False, {"*/__0_0.distcp*": 20, OTHERS: 1})], folder, tmp_path / "faults.so"
    )
    told_where_it_matters(found)
    in_order(calls(found))
    assert {one.call for one in found} == {
        "mkdir",
        "open",
        "write",
        "fsync",
        "close",
        "rename",
        "unlinkat",
        "rmdir",
    }
    assert [call for call in calls(found) if "distcp" in call][:2] == [
        "open .writing_step/__0_0.distcp",
        "write .writing_step/__0_0.distcp",
    ]


@pytest.mark.slow
def test_a_call_that_fails_in_an_asynchronous_save_costs_no_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """Some of all."""
    (found,) = failing_saves(
        [Plan(1, True, {"*/__0_1.distcp*": 15, OTHERS: 12})], folder, tmp_path / "faults.so"
    )
    told_where_it_matters(found)
    assert [call for call in calls(found) if "distcp" in call][:2] == [
        "open .writing_step/__0_1.distcp",
        "write .writing_step/__0_1.distcp",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_call_may_fail_with_every_error(
    folder: Path, tmp_path: Path, asynchronous: bool
) -> None:
    """Each of the calls once, and each on files that hold no tensors with all six errors."""
    everything = dict.fromkeys([*OF_RANK_0, OTHERS], 1)
    plans = [
        Plan(1, asynchronous, everything),
        *(Plan(1, asynchronous, {OTHERS: 1}, first) for first in range(1, 6)),
    ]
    whole, *others = failing_saves(plans, folder, tmp_path / "faults.so")
    for found in (whole, *others):
        told_where_it_matters(found)
        in_order(calls(found))
    for name in ("__0_0.distcp", "__0_1.distcp"):
        of_a_file_of_tensors([one for one in whole if name in one.path])
    assert all(calls(found) == calls(others[0]) == calls(whole)[-len(found) :] for found in others)


@pytest.mark.slow
def test_a_call_of_another_rank_that_fails_is_told_by_all(folder: Path, tmp_path: Path) -> None:
    """Each of the calls on rank 1's files of tensors: both ranks raise the same, and neither waits for the other for ever."""
    plans = [Plan(2, False, {"*/__1_0.distcp*": 1}), Plan(2, True, {"*/__1_1.distcp*": 1})]
    for found in failing_saves(plans, folder, tmp_path / "faults.so"):
        told_where_it_matters(found)
        of_a_file_of_tensors(found)
        assert all(
            "(rank 1)" in (one.told or "") or harmless(one) for one in found[:-3]
        )  # rank 0 publishes and deletes
