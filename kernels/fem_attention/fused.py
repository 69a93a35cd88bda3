"""The free-energy read as standard attention on other values: prep -> torch's fused attention -> epilogue. Nothing here may clip a value.

With U of `kernels.free_energy.streams`, torch's attention gives [mu | Z] from the values [v | U], and F - mu follows from the two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.fem_attention.reference import Bounds, repeat_heads
from kernels.free_energy.streams import SHIFT_BELOW, FreeEnergyGap, ValueStream, compute_type
from kernels.pairs import readable_keys


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
    bounds: Bounds | None = None,
    *,
    causal: bool,
    scale: float,
) -> Tensor:
    """The read o = gate * (mu + lam * (F - mu)); arguments as in `fem_attention`, bounds as in `reference_attention`.

    centre and spread come from `value_centre_and_range` (None without beta); spread must be at most MAX_RANGE, which the caller checks.
    Prep and epilogue run in float32 for float32 and bfloat16 inputs, in float64 for float64; the attention runs in q's type.
    """
    compute, heads = compute_type(q), q.shape[1]
    k = repeat_heads(k, 1, heads)
    if beta is None or centre is None or spread is None:
        out = _attend(q, k, repeat_heads(v, 1, heads), keys_valid, bounds, causal, scale).to(compute)
    else:
        shifted = spread < SHIFT_BELOW
        inverse_temperature = beta.to(compute)[:, None].expand_as(centre)
        stream = ValueStream.apply(v.to(compute), inverse_temperature, centre, shifted)
        values = repeat_heads(torch.cat((v, stream.to(v.dtype)), dim=-1), 1, heads)
        mu, z = _attend(q, k, values, keys_valid, bounds, causal, scale).to(compute).chunk(2, dim=-1)
        gap = FreeEnergyGap.apply(mu, z, *(repeat_heads(t, 1, heads) for t in (inverse_temperature, centre, shifted)))
        out = mu + (gap if lam is None else lam.to(compute) * gap)
    return (out if gate is None else gate.to(compute) * out).to(q.dtype)


def _attend(q: Tensor, k: Tensor, values: Tensor, keys_valid: Tensor | None, bounds: Bounds | None, causal: bool, scale: float) -> Tensor:
    """softmax(scale * q k^T) values by torch's scaled_dot_product_attention; the queries are the last positions of the keys."""
    (tq, width), tk, value_width = q.shape[2:], k.shape[2], values.shape[-1]
    mask = None
    if keys_valid is not None or bounds is not None or (causal and 1 < tq < tk):
        mask = readable_keys(tq, tk, q.device, causal=causal, keys_valid=keys_valid, bounds=bounds)
    if q.device.type == "cpu" and width != value_width:
        # The CPU's flash kernel wants equal widths, and padded it still beats the unfused path that runs without it.
        common = max(width, value_width)
        q, k, values = F.pad(q, (0, common - width)), F.pad(k, (0, common - width)), F.pad(values, (0, common - value_width))
    out = F.scaled_dot_product_attention(q, k, values, attn_mask=mask, is_causal=causal and tq == tk and mask is None, scale=scale)
    return out[..., :value_width]
