"""Triton kernels run in Triton's interpreter in the tests' own process; processes that tests start are not touched.

Triton decides at import whether its own library is interpreted, so the variable is set for that import alone. Ctrl-C is heard.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.interpreter import mend_bfloat16

os.environ["TRITON_INTERPRET"] = "1"
import triton
import triton.language

triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]  # which the line above sets, too
mend_bfloat16()


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that; ours are to hear it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
