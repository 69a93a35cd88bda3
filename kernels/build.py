"""What the compile gate builds: each Triton kernel as a real run would launch it at production shapes. No compiling here, no Triton.

A module of kernels ends with ``BUILDS``, a tuple of `Build`, made with the same functions that its wrappers take block sizes, warps and
stages from. `python -m tools.kernel_gate` finds them, compiles them without a GPU and writes docs/kernels.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Build:
    """One kernel at one production shape.

    label: what docs/kernels.md calls it, as "forward, d_k 128, d_v 64, causal". kernel: the ``@triton.jit`` function. types: the Triton
    type of every argument that is not a constexpr, in any order ("*bf16", "*fp32", "*i32", "*i1", "i32", "fp32"). constants: every
    constexpr argument, and pointers that are None. aligned: names of integer arguments that are multiples of 16 (pointers always are).
    matrix: its products must be wgmma on sm_90. allowed: ptxas warning, as "C7515" -> why it is accepted.
    """

    label: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int
    matrix: bool = False
    aligned: tuple[str, ...] = ()
    allowed: Mapping[str, str] = field(default_factory=dict)
