"""Hyper-SET's attention, where one projection z per head is query, key and value:
`symmetric_attention`, `symmetric_linear_attention`.

The layer implements the projections, the norm that puts z on its sphere and the step; `reference`
contains the energies of the operators.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton, uneven
from kernels.pairs import allowed_pairs
from kernels.registered import registered
from kernels.second_order_attention.reference import energy_linear_attention
from kernels.symmetric_attention.reference import pairwise_attention

KINDS = ("softmax", "bisoftmax", "sigmoid")
# Largest head widths whose gradients the kernels keep in registers, in bfloat16 and in float32.
WIDEST = {"bisoftmax": 256, "sigmoid": 128}
FLOAT32_WIDEST = 64

OP = Op(
    "symmetric_attention",
    "Hyper-SET's attention, z as query, key and value",
    (
        Implementation("sdpa", "torch's own attention: softmax"),
        Implementation(
            "triton",
            "bisoftmax in two passes, sigmoid in one; as many in the backward",
            lacks_triton,
        ),
        Implementation("reference", "any kind, blocks of rows in PyTorch"),
    ),
)


@operation("z")
@registered(lambda z, *_, **__: z.new_empty(z.shape))
def symmetric_attention(
    z: Tensor,
    keys: Tensor | None = None,
    *,
    kind: str = "softmax",
    causal: bool = True,
    valid: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the gradient of an attention energy with respect to z: out_i = sum_j A_ij z_j.

    With s_ij = z_i . z_j / sqrt(p), the kinds are

        softmax:    A = softmax of each row, the gradient of sqrt(p) log sum_j exp(s_ij) in z_i with
                    the keys held fixed
        bisoftmax:  A = softmax of each row + softmax of each column, the gradient of the sum of
                    those over all i (no causal form)
        sigmoid:    A_ij = sigma(s_ij) (1 - sigma(s_ij)), the gradient of
                    sqrt(p)/2 sum_ij sigma(s_ij); a sum over keys, not a mean

    Shapes: z [b, h, t, p], keys [b, h, tk, p] (the past's z, then this z; None: z alone), valid
    [b, tk] bool, False at padding.
    Returns [b, h, t, p] in z's dtype. A token at padding sees itself alone, and no other token sees
    it.
    Dtypes: float64, float32, bfloat16 or float16. bfloat16 is computed in float32; sdpa and triton
    round the operands to bfloat16. Memory is linear in t.
    implementation: "sdpa" (torch's scaled_dot_product_attention), "triton" (p up to 64 in float32;
    in bfloat16 up to 128, or 256 for bisoftmax; on a GPU a multiple of 16 if over 64), "reference"
    or "auto", the fastest that this call allows.
    Raises ValueError for shapes, dtypes or a kind that do not fit, and for an implementation that
    cannot run.
    Source: Hyper-SET, equations 3, 7, 9 and table 18.
    """
    _check(z, keys, kind, causal, valid)
    own = keys is None or keys is z
    reasons = {"kind softmax": kind == "softmax", "float64": z.dtype == torch.float64}
    reasons |= {"bisoftmax with keys of their own": kind == "bisoftmax" and not own}
    widest = WIDEST.get(kind, 0) if z.dtype == torch.bfloat16 else FLOAT32_WIDEST
    reasons |= {f"head width {z.shape[3]} is over {widest}": z.shape[3] > widest}
    unfit = {"sdpa": None if kind == "softmax" else f"kind {kind}"}
    unfit["triton"] = first_reason(reasons) or uneven("head width", z.shape[3], z.device)
    chosen = OP.choose(implementation, z.device, unfit.get)
    if chosen == "triton":
        from kernels.symmetric_attention.triton import bisoftmax_attention, sigmoid_attention

        return (
            bisoftmax_attention(z, valid)
            if kind == "bisoftmax"
            else sigmoid_attention(z, None if own else keys, valid, causal=causal)
        )
    keys = z if keys is None else keys
    if chosen == "reference":
        return pairwise_attention(z, keys, kind=kind, causal=causal, valid=valid)
    return _by_sdpa(z, keys, causal, valid)


@operation("z", state=True)
def symmetric_linear_attention(
    z: Tensor, *, causal: bool = True, valid: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return Hyper-SET's linear attention of z, and the state after the last token.

        out_i = Phi'(z_i) * (1 / sqrt(p)) sum_j Phi(z_j) (Phi(z_j) . Phi(z_i)), Phi the sigmoid

    The sum is over j <= i if causal. out is the gradient of (1 / 4 sqrt(p)) sum_ij (Phi(z_i) .
    Phi(z_j))^2; if causal, of each token's own terms, the keys held fixed.
    Shapes: z [b, h, t, p], valid [b, t] bool, False at padding (those keys contribute zero), state
    [b, h, p, p]: sum_j Phi(z_j) Phi(z_j)^T over the past (None: no past).
    Returns (out [b, h, t, p] in z's dtype, the state after the last token).
    Dtypes: float64, float32, bfloat16 or float16; sums and state are float32 (float64 for float64).
    Time and memory are linear in t.
    Raises ValueError for shapes or dtypes that do not fit.
    Source: Hyper-SET, table 18, linear attention (the released code scales by 1 / sqrt(t) instead,
    which a causal model cannot know).
    """
    check_first("symmetric_linear_attention", "z", z)
    b, h, t, p = z.shape
    compute = torch.promote_types(z.dtype, torch.float32)
    expected = {"valid": (valid, (b, t), torch.bool), "state": (state, (b, h, p, p), compute)}
    check_others("symmetric_linear_attention", "z", z, expected)
    wide = z.to(compute)
    phi = wide.sigmoid()
    summed, after = energy_linear_attention(phi, phi, causal=causal, valid=valid, state=state)
    return (phi * (-wide).sigmoid() * p**-0.5 * summed).to(z.dtype), after


def _by_sdpa(z: Tensor, keys: Tensor, causal: bool, valid: Tensor | None) -> Tensor:
    tq, tk = z.shape[2], keys.shape[2]
    is_causal = causal and tq == tk and valid is None
    alone = causal and tq == 1 and valid is None
    mask = (
        None
        if is_causal or alone
        else allowed_pairs(torch.arange(tk - tq, tk, device=z.device), tk, causal, valid)
    )
    return scaled_dot_product_attention(z, keys, keys, attn_mask=mask, is_causal=is_causal)


def _check(z: Tensor, keys: Tensor | None, kind: str, causal: bool, valid: Tensor | None) -> None:
    if kind not in KINDS:
        raise ValueError(f"symmetric_attention: kind {kind!r} is not one of {', '.join(KINDS)}")
    check_first("symmetric_attention", "z", z)
    (b, h, t, p), tk = z.shape, z.shape[2] if keys is None else max(z.shape[2], *keys.shape[2:3])
    check_others(
        "symmetric_attention",
        "z",
        z,
        {"keys": (keys, (b, h, tk, p), z.dtype), "valid": (valid, (b, tk), torch.bool)},
    )
    if kind == "bisoftmax" and (causal or tk != t):
        raise ValueError(
            "symmetric_attention: bisoftmax lets every token move every other; it has no causal "
            "form, use softmax"
        )
