"""Linear attention with decay: `linear_attention`, and `log_weights` for exact forms. Feature maps, gates and norms stay with the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.linear_attention.reference import LinearAttention, both_ways
from kernels.linear_attention.weights import log_weights

__all__ = ["linear_attention", "log_weights"]


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    causal: bool = True,
    normalise: bool = False,
) -> tuple[Tensor, Tensor]:
    """y_t = sum_{i <= t} ((q_t * exp(c_t - c_i)) . k_i) v_i with c = cumsum(log_decay), and the state after the last token.

    Shapes: q, k [b, h, t, dk], v [b, h, t, dv], log_decay [b, h, t] (a decay for each head), [b, h, t, dk] (for each channel) or None,
    initial [b, h, dk, dv], the state before the first token. Returns y [b, h, t, dv] and the state [b, h, dk, dv].
    normalise: y is divided by the sum of its weights, which q and k >= 0 must keep from being negative; a row whose weights are all 0
    gives its own v. Then states have one column more, the sums over ones: [b, h, dk, dv + 1].
    causal False: all tokens, weighed by exp(-|c_t - c_i|); no initial.
    log_decay <= 0 is the caller's promise (-inf, a full reset, is allowed) and is not checked, since that would wait for the device.
    Types: q, k, v, log_decay all float64, float32 or bfloat16; computed in float32 (float64 for float64), the type of states. y has q's.
    Time and memory are linear in t, forward and backward. Raises ValueError for shapes, types or devices that do not fit.
    Equations: Free Energy Mixer, appendix H.2 and H.3; exact where the released code clips the cumulated decay.
    """
    _check(q, k, v, log_decay, initial, causal, normalise)
    wide = torch.promote_types(q.dtype, torch.float32)
    decay = None if log_decay is None else (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(wide)
    if causal:
        y, state = LinearAttention.apply(q.to(wide), k.to(wide), v.to(wide), decay, initial, normalise)
    else:
        y, state = both_ways(q.to(wide), k.to(wide), v.to(wide), decay, normalise)
    return y.to(q.dtype), state


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, causal: bool, normalise: bool) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or tensor.numel() == 0:
            raise ValueError(f"linear_attention: {name} has shape {list(tensor.shape)}, expected [batch, heads, tokens, width], not empty")
    (b, h, t, dk), dv = q.shape, v.shape[3]
    fitting: tuple[tuple[str, Tensor | None, list[tuple[int, ...]]], ...] = (
        ("k", k, [(b, h, t, dk)]),
        ("v", v, [(b, h, t, dv)]),
        ("log_decay", log_decay, [(b, h, t), (b, h, t, dk)]),
        ("initial", initial, [(b, h, dk, dv + normalise)]),
    )
    for name, given, shapes in fitting:
        if given is not None and given.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise ValueError(f"linear_attention: {name} has shape {list(given.shape)}, expected {wanted} beside q {list(q.shape)}")
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16):
        raise ValueError(f"linear_attention: q is {q.dtype}; use float64, float32 or bfloat16")
    wide = torch.promote_types(q.dtype, torch.float32)
    for name, other, dtype in (("k", k, q.dtype), ("v", v, q.dtype), ("log_decay", log_decay, q.dtype), ("initial", initial, wide)):
        if other is not None and (other.dtype, other.device) != (dtype, q.device):
            raise ValueError(f"linear_attention: {name} is {other.dtype} on {other.device}, expected {dtype} on {q.device}")
    if not causal and initial is not None:
        raise ValueError("linear_attention: initial is the past of a causal scan; leave it out with causal=False")
