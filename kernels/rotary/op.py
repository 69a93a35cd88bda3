"""RoPE's rotation of queries and keys. One public function: `rotary`. Positions and frequencies are
not included.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import registered

WIDEST = 2048  # channels of a head

OP = Op(
    "rotary",
    "RoPE's rotation of queries and keys",
    (
        Implementation(
            "triton", "queries and keys in one launch forward, one backward", lacks_triton
        ),
        Implementation("reference", "the equation in PyTorch"),
    ),
)


@operation("q")
def rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, *, implementation: str = "auto"
) -> list[Tensor]:
    """Return [q, k], or [q] without k, with each pair (x_i, x_(i + d/2)) of the last dimension
    rotated by its angle.

    Shapes: q [s, b, h, d] and k [s, b, hk, d], with any strides; cos and sin [s, 1 or b, 1, d / 2].
    Results have the shapes of q and k. Types: q float64, float32, bfloat16 or float16, k the same;
    cos and sin the same, or float32 with narrower q. They get no gradient. implementation: "triton"
    computes in float32, "reference" in the type of cos and sin; "auto" is the fastest that supports
    this call. Raises ValueError for shapes, types or devices that do not fit, and for an
    implementation that cannot run. Equation: RoFormer, equation 34.
    """
    check_first("rotary", "q", q, "[s, b, heads, d]")
    (s, b, _, d), types = q.shape, {q.dtype, torch.promote_types(q.dtype, torch.float32)}
    heads = q.shape[2] if k is None or k.dim() != 4 else k.shape[2]
    angles = {
        name: (t, [(s, 1, 1, d // 2), (s, b, 1, d // 2)], *types)
        for name, t in (("cos", cos), ("sin", sin))
    }
    check_others("rotary", "q", q, {"k": (k, (s, b, heads, d), q.dtype), **angles})
    check_others("rotary", "cos", cos, {"sin": (sin, tuple(cos.shape), cos.dtype)})
    if d % 2:
        raise ValueError(f"rotary: q has {d} channels, and pairs are rotated: use an even number")
    return _rotary(q, k, cos, sin, implementation)


@registered(
    lambda q, k, **_: [t.new_empty(t.shape) for t in (q, k) if t is not None],
    name="rotary",
    any_size=True,
)
def _rotary(
    q: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, implementation: str
) -> list[Tensor]:
    """Compute `rotary`, which has checked the arguments. An operation of torch.library that returns
    a list has no defaults.
    """
    d = q.shape[3]
    unfit = first_reason(
        {"float64": q.dtype == torch.float64, f"{d} channels are over {WIDEST}": d > WIDEST}
    )
    if OP.choose(implementation, q.device, {"triton": unfit}.get) == "triton":
        from kernels.rotary.triton import rotated

        return rotated(q, k, cos, sin)
    return [turned(t, cos, sin).to(t.dtype) for t in (q, k) if t is not None]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute the definition: rotate each pair (x_i, x_(i + d/2)) of the last dimension; cos and
    sin broadcast to x's shape with half its width.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
