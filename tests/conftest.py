"""Run Triton kernels in Triton's interpreter in the tests' own process; processes started by tests
are not affected.

Triton decides at import whether its library is interpreted, so the variable is set only for that
import. Ctrl-C is not ignored. transformers copies the code of an export to a folder of this
process, one for all tests, because Python finds the code through the first such folder.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from tests.interpreter import interpret

interpret()
pytest_plugins = ["tests.wording", "tests.draw"]
# Each package builds on those before it.
ROOMS = (
    "fem_common",
    "kernels",
    "fem_megatron",
    "data_prep",
    "pretrain",
    "tools",
    "launch",
    "slurm",
)
# Temporary folders are in memory if it has enough free space: a checkpoint calls fsync twenty
# times, which takes 0.1 s on a disk.
MEMORY, ROOM = "/dev/shm", 4e9  # bytes
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)
_COPIED_CODE = tempfile.TemporaryDirectory(prefix="hf_modules_")
os.environ["HF_MODULES_CACHE"] = _COPIED_CODE.name  # read when transformers is imported


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Restore the handlers of Ctrl-C and SIGHUP: a shell starts background commands with Ctrl-C
    ignored, nohup with SIGHUP, and children inherit it.
    """
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for workers: the first package, long files by decreasing recorded duration,
    then the others by package.

    Short files are last, so that no worker waits for another's long one at the end.
    """
    # Not at the top: tests.draw is a plugin, which pytest must import first to rewrite its
    # assertions.
    from tests.draw import read_durations

    here, seconds = Path(__file__).parent, read_durations()["quick files"]
    places = {folder: place for place, folder in enumerate(ROOMS)}

    def place(item: pytest.Item) -> tuple[bool, float, int]:
        folder = item.path.relative_to(here).parts[0]
        return (
            folder != ROOMS[0],
            -seconds.get(f"tests/{item.path.relative_to(here)}", 0.0),
            places.get(folder, len(ROOMS)),
        )

    items.sort(key=place)
