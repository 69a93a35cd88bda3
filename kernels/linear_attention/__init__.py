"""Linear attention with decay: `linear_attention`, and `log_weights` for exact forms. Feature maps, gates and norms stay with the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others
from kernels.implementations import Implementation, Op, lacks_fla, lacks_triton
from kernels.linear_attention.reference import LinearAttention, both_ways, log_weights

__all__ = ["OP", "linear_attention", "log_weights"]


OP = Op(
    "linear_attention",
    "y_t = sum of (q_t * exp(c_t - c_i)) . k_i v_i, decays per head or per channel, with a state",
    (
        Implementation("triton", "chunks in parallel, their states in one pass; normaliser, decays and states exact", lacks_triton),
        Implementation("fla", "flash-linear-attention's chunked kernels", lacks_fla, automatic=False),
        Implementation("reference", "plain PyTorch, chunk by chunk"),
    ),
)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    causal: bool = True,
    normalise: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """y_t = sum_{i <= t} ((q_t * exp(c_t - c_i)) . k_i) v_i with c = cumsum(log_decay), and the state after the last token.

    Shapes: q, k [b, h, t, dk], v [b, h, t, dv], log_decay [b, h, t] (a decay for each head), [b, h, t, dk] (for each channel) or None,
    initial [b, h, dk, dv], the state before the first token. Returns y [b, h, t, dv] and the state [b, h, dk, dv].
    normalise: y is divided by the sum of its weights, which q and k >= 0 must keep from being negative; a row whose weights are all 0
    gives its own v. Then states have one column more, the sums over ones: [b, h, dk, dv + 1].
    causal False: all tokens, weighed by exp(-|c_t - c_i|); no initial.
    log_decay <= 0 is the caller's promise (-inf, a full reset, is allowed) and is not checked, since that would wait for the device.
    Types: q, k, v all float64, float32 or bfloat16, log_decay the same or float32; sums are float32 (float64 for float64), the type of
    states. y has q's. Time and memory are linear in t, forward and backward.
    implementation: "triton" multiplies float32 exactly and bfloat16 on the tensor cores; "reference" computes in float32 or float64; "fla"
    (only where asked for) takes bfloat16 and finite decays, and a weak decay behind a strong one loses digits there.
    Raises ValueError for shapes, types, devices or implementations that do not fit.
    Equations: Free Energy Mixer, appendix H.2 and H.3; exact where the released code clips the cumulated decay.
    """
    _check(q, k, v, log_decay, initial, causal, normalise)
    unfit = {"triton": _unfit(q, causal, (torch.float32, torch.bfloat16)), "fla": _unfit(q, causal, (torch.bfloat16,))}
    chosen = OP.choose(implementation, q.device, unfit.get)
    if chosen == "triton":
        from kernels.linear_attention.triton import TritonLinearAttention

        return TritonLinearAttention.apply(q, k, v, log_decay, initial, normalise)
    if chosen == "fla":
        return _by_fla(q, k, v, log_decay, initial, normalise)
    wide = torch.promote_types(q.dtype, torch.float32)
    decay = None if log_decay is None else (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(wide)
    if causal:
        y, state = LinearAttention.apply(q.to(wide), k.to(wide), v.to(wide), decay, initial, normalise)
    else:
        y, state = both_ways(q.to(wide), k.to(wide), v.to(wide), decay, normalise)
    return y.to(q.dtype), state


def _unfit(q: Tensor, causal: bool, types: tuple[torch.dtype, ...]) -> str | None:
    if not causal:
        return "causal=False reads both ways"
    return None if q.dtype in types else str(q.dtype).removeprefix("torch.")


def _by_fla(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, normalise: bool) -> tuple[Tensor, Tensor]:
    """The same by flash-linear-attention, which lays tensors out as [b, t, h, d]; the normaliser is a column of ones beside the values."""
    values = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1) if normalise else v
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, values)]
    decay = None if log_decay is None else log_decay.float().transpose(1, 2).contiguous()
    if log_decay is not None and log_decay.dim() == 4:
        from fla.ops.gla import chunk_gla as chunked
    else:
        from fla.ops.simple_gla import chunk_simple_gla as chunked
    y, state = chunked(*turned, g=decay, scale=1.0, initial_state=initial, output_final_state=True)
    y = y.transpose(1, 2)
    if not normalise:
        return y, state
    mass = y[..., -1:]
    empty = mass <= 0
    return torch.where(empty, v, y[..., :-1] / mass.masked_fill(empty, 1)), state


def _check(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None, causal: bool, normalise: bool) -> None:
    check_first("linear_attention", "q", q)
    check_first("linear_attention", "v", v)
    (b, h, t, dk), dv, wide = q.shape, v.shape[3], torch.promote_types(q.dtype, torch.float32)
    expected: dict[str, Any] = {"k": (k, q.shape, q.dtype), "v": (v, (b, h, t, dv), q.dtype)}
    expected |= {"log_decay": (log_decay, [(b, h, t), q.shape], q.dtype, wide), "initial": (initial, (b, h, dk, dv + normalise), wide)}
    check_others("linear_attention", "q", q, expected)
    if not causal and initial is not None:
        raise ValueError("linear_attention: initial is the past of a causal scan; leave it out with causal=False")
