"""Attention that takes a Newton step on its free energy: one public function,
`second_order_attention`.

The layer implements the projections, the norm and the residual. `reference` contains the free
energies that are descended, and the first-order step on a quadratic energy (linear attention).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton, uneven
from kernels.registered import registered
from kernels.second_order_attention.reference import step

WIDEST = 128  # largest head width; wider heads do not fit the registers

OP = Op(
    "second_order_attention",
    "a step of MHA2nd1st or MHA2nd",
    (
        Implementation(
            "triton", "MHA2nd1st's two flash passes, forward and backward", lacks_triton
        ),
        Implementation("reference", "blocks of rows in PyTorch, the exact step too"),
    ),
)


@operation("q")
@registered(lambda q, *_, **__: q.new_empty(q.shape))
def second_order_attention(
    q: Tensor,
    k: Tensor,
    gram: Tensor,
    temperature: Tensor,
    newton_temperature: Tensor,
    *,
    exact: bool = False,
    causal: bool = True,
    valid: Tensor | None = None,
    turn: Tensor | None = None,
    jitter: float = 0.0,
    implementation: str = "auto",
) -> Tensor:
    """Return r + b of every token and head; the free energy is -T log sum_i exp(-|q - k_i|^2 / 2T).

        p_i = softmax_i((q.k_i - |k_i|^2 / 2) / T)      kbar = sum_i p_i k_i      r = q - kbar
        C = sum_i p_i (k_i - kbar)(k_i - kbar)^T
        first order:  r + G^-1 (C / T') G r             exact:  G^-1 (I - C / T')^-1 G r

    The operation has no values.
    Shapes: q [b, h, t, d], k [b, h, tk, d] (the past's k, then those of q's tokens), symmetric gram
    [h, d, d] (G = W_Q W_Q^T of a head), temperature T and newton_temperature T' [h] (> 0,
    unchecked: a check would wait for the device), valid [b, tk] bool, False at padding, turn
    [1 or b, 1, t, d]: (cos | sin) of the rotation R of each query's position. With turn, k must be
    rotated by its own position, the energy is |R q - k_i|^2 / 2, and r, C and b are in q's own
    frame, with R^-1 k_i in place of k_i, so that they depend on differences of positions; turn gets
    no gradient.
    jitter: this multiple of the mean of G's diagonal is added to the diagonal before the
    factorisation.
    Returns [b, h, t, d] in q's dtype. A token at padding sees itself alone, and no other token sees
    it. A G without a Cholesky factor gives NaN.
    Dtypes: float64, float32, bfloat16 or float16 for q and k. Everything is computed in float32 or
    float64, except that triton's products over the keys take operands in q's dtype. Memory is
    linear in tk: blocks of rows, recomputed in the backward; exact also needs tk d^2 numbers per
    head.
    implementation: "triton" (not exact; d up to 128, on a GPU a multiple of 16 if over 64),
    "reference" or "auto", the fastest that this call allows.
    Raises ValueError for shapes or dtypes that do not fit, and for an implementation that cannot
    run.
    Source: Transformers as Intrinsic Optimizers, equations 28 to 31.
    """
    check_first("second_order_attention", "q", q)
    b, h, t, d = q.shape
    tk = max(t, k.shape[2]) if k.dim() == 4 else t
    expected: dict[str, Any] = {
        "k": (k, (b, h, tk, d), q.dtype),
        "gram": (gram, (h, d, d)),
        "temperature": (temperature, (h,)),
    }
    expected |= {
        "newton_temperature": (newton_temperature, (h,)),
        "valid": (valid, (b, tk), torch.bool),
    }
    check_others(
        "second_order_attention",
        "q",
        q,
        expected | {"turn": (turn, [(n, 1, t, d - d % 2) for n in {1, b}])},
    )
    compute = torch.promote_types(q.dtype, torch.float32)
    wide = (
        gram.to(compute),
        temperature.to(compute),
        newton_temperature.to(compute),
        None if turn is None else turn.detach().to(compute),
    )
    reasons = {
        "the exact step solves a system for each token": exact,
        "float64": q.dtype == torch.float64,
    }
    unfit = first_reason(reasons | {f"head width {d} is over {WIDEST}": d > WIDEST}) or uneven(
        "head width", d, q.device
    )
    if OP.choose(implementation, q.device, {"triton": unfit}.get) == "triton":
        from kernels.second_order_attention.triton.function import first_order_step

        taken: Tensor = first_order_step(q, k, *wide, causal=causal, valid=valid, jitter=jitter)
        return taken
    return step(q, k.to(compute), *wide, exact=exact, causal=causal, valid=valid, jitter=jitter).to(
        q.dtype
    )
