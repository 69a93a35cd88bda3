"""Triton kernels run in Triton's interpreter in the tests' own process; processes that tests start are not touched.

Triton decides at import whether its own library is interpreted, so the variable is set for that import alone.
"""

from __future__ import annotations

import os

from tests.interpreter import mend_bfloat16

os.environ["TRITON_INTERPRET"] = "1"
import triton
import triton.language

triton.knobs.runtime.interpret = True
del os.environ["TRITON_INTERPRET"]  # which the line above sets, too
mend_bfloat16()
