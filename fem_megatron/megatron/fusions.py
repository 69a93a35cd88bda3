"""Fused kernels of other packages that a model uses on a GPU, through hooks of Megatron-core.

SwiGLU: ``megatron.core.fusions.fused_bias_swiglu``, compiled by torch; it keeps only its input for
the backward pass. Cross-entropy over the split vocabulary:
``TransformerConfig.cross_entropy_loss_fusion``, Megatron's own form, compiled by torch.

RoPE is `kernels.rotary`, or part of `kernels.fem_projection`. A layer's RMSNorm is
`kernels.residual_norm`; other norms are torch's, one kernel on a GPU. Megatron-core 0.16.1 has no
fused linear + cross-entropy; `loss.sum_in_chunks` avoids the full logits. On a CPU none of these
fusions run. TORCH_COMPILE_DISABLE=1, torch's own switch, disables compilation.
"""

from __future__ import annotations

import functools
import logging
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fem_megatron.megatron import platform
from fem_megatron.parallel import swiglu as plain_swiglu
from kernels.implementations import OncePerMessage, lacks_triton

_log = logging.getLogger("kernels.fusions")
_log.addFilter(OncePerMessage())


@functools.cache
def _has_megatron() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def lacks(device: torch.device) -> str | None:
    """Return why Megatron's compiled kernels cannot run on ``device``, or None if they can.

    torch.compile generates them through Triton, for GPUs.
    """
    if device.type != "cuda":
        return "no GPU"
    return lacks_triton(device) if _has_megatron() else "the package megatron-core is not installed"


def config_overrides(dtype: torch.dtype) -> dict[str, Any]:
    """Return Megatron's settings for a model of this dtype, and log one line about the fusions.

    Megatron's fused cross-entropy rounds its gradient to bfloat16 for all logits. For other dtypes
    the settings therefore select the plain one.
    """
    device = platform.device()
    reason = lacks(device)
    if reason is not None:
        if device.type != "cpu":
            _log.warning("fusions: none of Megatron's (%s)", reason)
        return {}
    loss = dtype == torch.bfloat16
    _log.info(
        "fusions: SwiGLU%s by Megatron through torch.compile", " and cross-entropy" if loss else ""
    )
    return (
        {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"} if loss else {}
    )


def swiglu(packed: Tensor) -> Tensor:
    """Return silu(x) * gate for packed [x | gate]: [s, b, 2 n] -> [s, b, n].

    Megatron's kernel runs if it can.
    """
    return plain_swiglu(packed) if lacks(packed.device) else megatron_swiglu(packed)


def megatron_swiglu(packed: Tensor) -> Tensor:
    """Return silu(x) * gate for packed [x | gate] from Megatron's function, on any device."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    out: Tensor = bias_swiglu_impl(packed, None)
    return out
