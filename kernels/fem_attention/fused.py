"""The free-energy read as standard attention on other values: prep -> torch's fused attention -> epilogue. Nothing here may clip a value.

With U of `kernels.free_energy.streams`, torch's attention gives [mu | Z] from the values [v | U], and F - mu follows from the two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.free_energy.streams import SHIFT_BELOW, FreeEnergyGap, ValueStream, compute_type


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
    centre: Tensor | None,
    spread: Tensor | None,
    keys_valid: Tensor | None = None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """The read o = gate * (mu + lam * (F - mu)); arguments as in `fem_attention`.

    centre and spread come from `value_centre_and_range` (None without beta); spread must be at most MAX_RANGE, which the caller checks.
    Prep and epilogue run in float32 for float32 and bfloat16 inputs, in float64 for float64; the attention runs in q's type.
    """
    compute = compute_type(q)
    if beta is None or centre is None or spread is None:
        out = _attend(q, k, v, keys_valid, causal, scale).to(compute)
    else:
        shifted = spread < SHIFT_BELOW
        inverse_temperature = beta.to(compute)[:, None].expand_as(centre)
        stream = ValueStream.apply(v.to(compute), inverse_temperature, centre, shifted)
        mu, z = _attend(q, k, torch.cat((v, stream.to(v.dtype)), dim=-1), keys_valid, causal, scale).to(compute).chunk(2, dim=-1)
        gap = FreeEnergyGap.apply(mu, z, inverse_temperature, centre, shifted)
        out = mu + (gap if lam is None else lam.to(compute) * gap)
    return (out if gate is None else gate.to(compute) * out).to(q.dtype)


def _attend(q: Tensor, k: Tensor, values: Tensor, keys_valid: Tensor | None, causal: bool, scale: float) -> Tensor:
    """softmax(scale * q k^T) values by torch's scaled_dot_product_attention; the queries are the last positions of the keys."""
    (tq, width), tk, value_width = q.shape[2:], k.shape[2], values.shape[-1]
    mask = None
    if keys_valid is not None or (causal and 1 < tq < tk):
        mask = torch.ones(tq, tk, dtype=torch.bool, device=q.device)
        mask = mask.tril(tk - tq) if causal else mask
    if keys_valid is not None and mask is not None:
        own = torch.ones_like(mask).tril(tk - tq).triu(tk - tq)
        mask = (mask & keys_valid[:, None, None]) | own
    if q.device.type == "cpu" and width != value_width:
        # The CPU's flash kernel wants equal widths, and padded it still beats the unfused path that runs without it.
        common = max(width, value_width)
        q, k, values = F.pad(q, (0, common - width)), F.pad(k, (0, common - width)), F.pad(values, (0, common - value_width))
    out = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, is_causal=causal and tq == tk and mask is None, scale=scale)
    return out[..., :value_width]
