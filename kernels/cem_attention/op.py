"""CEM's attention read: keys that are values, ALiBi, a diagonal in the scores.

One public function, `cem_attention`. The layer implements projections, preconditioner, norms and
steps; `reference` contains the energy that the read descends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, operation
from kernels.cem_attention.reference import Diagonal, Read
from kernels.implementations import Implementation, Op, first_reason, lacks_triton, uneven
from kernels.registered import registered

# Largest head widths that the Triton kernels keep in registers, in float32 and in bfloat16.
WIDE, WIDEST = 128, 256

OP = Op(
    "cem_attention",
    "CEM's attention: keys are values, ALiBi, a diagonal in the scores",
    (
        Implementation(
            "triton",
            "tiles of pairs in registers, forward and backward; the diagonal's scores by matrix "
            "products",
            lacks_triton,
        ),
        Implementation("reference", "blocks of rows in plain PyTorch"),
    ),
)


@operation("q")
def cem_attention(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    own_bias: Tensor,
    diagonal: Diagonal | None = None,
    *,
    scale: float,
    causal: bool = True,
    valid: Tensor | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return the attention read o_i = sum_j softmax_j(a_ij) k_j with CEM's scores.

        a_ij = scale (k_j . q_i + h_j . (d u_i)) - m |i - j| + own_bias [i = j]

    Shapes: q [b, heads, t, r], k [b, heads, tk, r] (the past's keys, then those of these tokens),
    slopes m [heads] (no gradient), own_bias [] or [1], b_self - b_cross (a constant added to all
    scores of a row does not change the softmax), ``diagonal``: u [b, t, D], h [b, tk, D], d [1, D]
    (one for all heads: its scores are computed once), [heads, D] or None (already in h); None: no
    diagonal. valid [b, tk] bool, False at padding: only the token at its own
    position sees such a key. i and j count all keys, padding too: padding between two tokens adds
    to their distance.
    Returns [b, heads, t, r] in q's dtype.
    Dtypes: q, k, u, h all float64, float32, bfloat16 or float16; computed in float32 or float64; d
    and own_bias of any of them. Memory is linear in the tokens: pairs are computed in blocks, and
    again in the backward, which keeps the inputs in their own dtypes and the output.
    implementation: auto, triton (heads up to 128 wide, in bfloat16 256, on a GPU an even width if
    over 64; not float64; bfloat16 multiplies in bfloat16) or reference.
    Raises ValueError for shapes and dtypes that do not fit.
    Source: Causal Energy Minimization, Algorithm 1 and appendix B.
    """
    _check(q, k, slopes, own_bias, diagonal, valid)
    u, h, d = diagonal or (None, None, None)
    return _read(q, k, slopes, own_bias, u, h, d, scale, causal, valid, implementation)


@registered(lambda q, **_: q.new_empty(q.shape), name="cem_attention")
def _read(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    own_bias: Tensor,
    u: Tensor | None,
    h: Tensor | None,
    d: Tensor | None,
    scale: float,
    causal: bool,
    valid: Tensor | None,
    implementation: str,
) -> Tensor:
    """Run `cem_attention` on checked arguments, with the diagonal passed as three tensors."""
    wide = torch.promote_types(q.dtype, torch.float32)
    widest = WIDEST if q.dtype == torch.bfloat16 else WIDE
    unfit = first_reason(
        {
            "float64": q.dtype == torch.float64,
            f"head width {q.shape[3]} is over {widest}": q.shape[3] > widest,
        }
    )
    unfit = unfit or uneven("head width", q.shape[3], q.device, 2)
    read: type[torch.autograd.Function] = Read
    if OP.choose(implementation, q.device, {"triton": unfit}.get) == "triton":
        from kernels.cem_attention.triton.function import Read as Tiles

        read = Tiles
        if h is not None and d is not None and len(d) == 1:
            h, d = (h * d).to(h.dtype), None
    alone = own_bias.to(wide).view(())
    o: Tensor = read.apply(q, k, u, h, d, slopes.to(wide), alone, scale, causal, valid)
    return o


def _check(
    q: Tensor,
    k: Tensor,
    slopes: Tensor,
    own_bias: Tensor,
    diagonal: Diagonal | None,
    valid: Tensor | None,
) -> None:
    check_first("cem_attention", "q", q)
    (b, heads, t, r), tk = q.shape, k.shape[2] if k.dim() == 4 else 0
    expected: dict[str, Any] = {"k": (k, (b, heads, tk, r), q.dtype)}
    if diagonal is not None:
        width = diagonal.u.shape[-1]
        expected |= {
            "diagonal.u": (diagonal.u, (b, t, width), q.dtype),
            "diagonal.h": (diagonal.h, (b, tk, width), q.dtype),
        }
        expected["diagonal.d"] = (diagonal.d, [(1, width), (heads, width)])
    expected |= {
        "slopes": (slopes, (heads,)),
        "own_bias": (own_bias, [(), (1,)]),
        "valid": (valid, (b, tk), torch.bool),
    }
    check_others("cem_attention", "q", q, expected)
    if tk < t:
        raise ValueError(
            f"cem_attention: {tk} keys for {t} tokens; the keys are the past's and these tokens'"
        )
