"""Hyper-SET's attention with a linear-time energy: one public function, `symmetric_linear_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.symmetric_linear_attention.reference import read

__all__ = ["symmetric_linear_attention"]


def symmetric_linear_attention(
    z: Tensor, *, causal: bool = True, valid: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out_i = Phi'(z_i) * (1 / sqrt(p)) sum_j Phi(z_j) (Phi(z_j) . Phi(z_i)), Phi the sigmoid; causal: over j <= i.

    It is the gradient of (1 / 4 sqrt(p)) sum_ij (Phi(z_i) . Phi(z_j))^2; causal: of each token's own terms, the keys held fixed.
    Shapes: z [b, h, t, p], valid [b, t] bool, False at padding (those keys count as nothing), state [b, h, p, p]: sum_j Phi(z_j) Phi(z_j)^T
    over the past (None: none). Returns (out [b, h, t, p] in z's type, the state after the last token).
    Types: float64, float32 or bfloat16; sums and state are float32 (float64 for float64). Time and memory linear in t.
    Raises ValueError for shapes or types that do not fit. Source: Hyper-SET, table 18, linear attention (the released code scales by
    1 / sqrt(t) instead, which a causal model cannot know).
    """
    if z.dim() != 4 or z.numel() == 0:
        raise ValueError(f"symmetric_linear_attention: z has shape {list(z.shape)}, expected [batch, heads, tokens, width], not empty")
    if z.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"symmetric_linear_attention: z is {z.dtype}; use float64, float32 or bfloat16")
    b, h, t, p = z.shape
    compute = torch.promote_types(z.dtype, torch.float32)
    if valid is not None and (valid.shape != (b, t) or valid.dtype != torch.bool):
        raise ValueError(f"symmetric_linear_attention: valid is {list(valid.shape)} {valid.dtype}, expected [{b}, {t}] bool")
    if state is not None and (state.shape != (b, h, p, p) or state.dtype != compute):
        raise ValueError(f"symmetric_linear_attention: state is {list(state.shape)} {state.dtype}, expected [{b}, {h}, {p}, {p}] {compute}")
    out, after = read(z.to(compute), causal, valid, state)
    return out.to(z.dtype), after
