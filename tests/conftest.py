"""Triton kernels run in Triton's interpreter in the tests' own process; processes that tests start are not touched.

Triton decides at import whether its own library is interpreted, so the variable is set for that import alone. Ctrl-C is heard. What
transformers copies of an export's code goes to a folder of this process, one for all tests: Python finds it through the first it has seen.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

from tests.interpreter import interpret

interpret()
pytest_plugins = ["tests.wording"]
# The files that take longest, the longest first: at the end of a run no worker waits for another's.
LONG = (
    *("pretrain/test_deepspeed.py", "pretrain/test_parity.py", "tools/test_kernel_gate.py", "kernels/test_cases.py"),
    *("pretrain/test_store_data.py", "pretrain/test_checkpoints.py", "pretrain/test_mirror.py", "pretrain/test_checkpoint_faults.py"),
    *("launch/test_local.py", "pretrain/test_memory.py", "pretrain/test_new_mixer.py", "pretrain/test_write_faults.py"),
    *("data_prep/test_encoders.py", "tools/hf/test_layouts.py", "tools/hf/test_elsewhere.py", "data_prep/test_crash.py"),
    *("slurm/test_ends.py", "slurm/test_training.py"),
)
_COPIED_CODE = tempfile.TemporaryDirectory(prefix="hf_modules_")
os.environ["HF_MODULES_CACHE"] = _COPIED_CODE.name  # read when transformers is imported


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored, nohup with SIGHUP, and children inherit that; ours hear both."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Workers take files in this order."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))
