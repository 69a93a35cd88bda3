"""The fused kernels of others that a model uses on a GPU, each through a hook of Megatron-core's own. None is written here.

SwiGLU: ``megatron.core.fusions.fused_bias_swiglu``, compiled by torch; it keeps its input alone for the backward pass.
Cross-entropy over the split vocabulary: ``TransformerConfig.cross_entropy_loss_fusion``, Megatron's own form, compiled by torch.
RoPE: flash-attn's kernel where that package is installed, which Megatron calls in ``rope_utils``.
A layer's RMSNorm is `kernels.residual_norm`, others are torch's, one kernel on a GPU.
Megatron-core 0.16.1 has no fused linear + cross-entropy; `loss.sum_in_chunks` does without all logits.
On a CPU nothing of this runs. TORCH_COMPILE_DISABLE=1, torch's own switch, makes the compiled ones plain again.
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
from kernels.fem_projection import turned
from kernels.implementations import OncePerMessage, lacks_triton

_log = logging.getLogger("kernels.fusions")
_log.addFilter(OncePerMessage())


@functools.cache
def _has_megatron() -> bool:
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def lacks(device: torch.device) -> str | None:
    """Why Megatron's compiled kernels cannot run on ``device``, or None: torch.compile makes them through Triton, for GPUs."""
    if device.type != "cuda":
        return "no GPU"
    return lacks_triton(device) if _has_megatron() else "the package megatron-core is not installed"


def lacks_rope(device: torch.device) -> str | None:
    """Why RoPE's kernel cannot run on ``device``, or None."""
    if (reason := lacks(device)) is not None:
        return reason
    from megatron.core.models.common.embeddings import rope_utils

    return None if rope_utils.apply_rotary_emb_flash is not None else "the package flash-attn is not installed"


def config_overrides(dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's settings for a model of this type on this machine, and one line in the log that says what is fused.

    The fused cross-entropy rounds its gradient to bfloat16 whatever the logits are, so other types have the plain one.
    """
    device = platform.device()
    reason = lacks(device)
    if reason is not None:
        if device.type != "cpu":
            _log.warning("fusions: none of Megatron's (%s)", reason)
        return {}
    loss = dtype == torch.bfloat16
    rope = lacks_rope(device)
    _log.info(
        "fusions: SwiGLU%s by Megatron through torch.compile; RoPE by %s",
        " and cross-entropy" if loss else "",
        "flash-attn" if rope is None else f"torch's single operations ({rope})",
    )
    return {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"} if loss else {}


def swiglu(packed: Tensor) -> Tensor:
    """silu(a) * b of [a | b]: [s, b, 2 n] -> [s, b, n], by Megatron's kernel where it can run."""
    return plain_swiglu(packed) if lacks(packed.device) else megatron_swiglu(packed)


def megatron_swiglu(packed: Tensor) -> Tensor:
    """The same by Megatron's function, on any device."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    out: Tensor = bias_swiglu_impl(packed, None)
    return out


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE's product, x [s, b, heads, d] by cos and sin [s, 1 or b, 1, d / 2], by flash-attn's kernel where it can run.

    Sequences of a batch whose positions differ (cos has b in its second place) and float64 go to torch's single operations.
    """
    plain = cos.shape[1] != 1 or x.dtype == torch.float64 or lacks_rope(x.device) is not None
    return turned(x, cos, sin) if plain else megatron_turn(x, cos, sin)


def megatron_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same by the kernel that Megatron calls; needs flash-attn."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb_with_cos_sin

    out: Tensor = apply_rotary_pos_emb_with_cos_sin(x, cos[:, 0, 0], sin[:, 0, 0])
    return out
