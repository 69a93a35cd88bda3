"""Norms with which a layer reads the residual stream. One public function: `residual_norm`. The
layer's other operations are not included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from kernels.arguments import FLOATS, check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import opaque, registered

WIDEST = 4096  # channels that fit in registers together with the terms of their gradients

OP = Op(
    "residual_norm",
    "RMSNorm of the residual stream, a LayerNorm of that; the residual's own gradient is added"
    " where the norm's is made",
    (
        Implementation("triton", "one pass over memory forward, one backward", lacks_triton),
        Implementation("reference", "PyTorch's norms"),
    ),
)


@operation("x")
def residual_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    second: Tensor | None = None,
    *,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (x, h, u): x itself, h = x / rms(x) * weight, and u = LayerNorm(h) * second, or None
    without ``second``; over the last dimension.

    The gradient of the returned x, the residual, is added to the norms' gradients in one pass.
    Shapes: x [..., n], weight and second [n]; the results have x's shape. Types: float64, float32,
    bfloat16 or float16, the results x's. h is rounded to x's type before its LayerNorm.
    implementation: "triton", "reference" or "auto", the fastest that supports this call. Triton's
    stores its arguments alone for the backward. Raises ValueError for shapes, types or devices that
    do not fit, and for an implementation that cannot run. Equations: RMSNorm and LayerNorm without
    biases.
    """
    check_first("residual_norm", "x", x, "[..., n]")
    size = x.shape[-1]
    check_others(
        "residual_norm",
        "x",
        x,
        {"weight": (weight, (size,), *FLOATS), "second": (second, (size,), *FLOATS)},
    )
    if opaque(x):  # an unchanged input is not a result of the operation
        h, *rest = _norms(x, weight, eps, second, implementation)
        return x, h, rest[0] if rest else None
    unfit = first_reason(
        {"float64": x.dtype == torch.float64, f"{size} channels are over {WIDEST}": size > WIDEST}
    )
    if OP.choose(implementation, x.device, {"triton": unfit}.get) == "triton":
        from kernels.residual_norm.triton import fused_norms

        return fused_norms(x, weight, second, eps)
    h = rms_norm(x, (size,), weight, eps)
    return x, h, None if second is None else layer_norm(h, (size,), second, None, eps)


@registered(
    lambda x, second, **_: [torch.empty_like(x) for _ in range(1 if second is None else 2)],
    name="residual_norm",
)
def _norms(
    x: Tensor, weight: Tensor, eps: float, second: Tensor | None, implementation: str
) -> list[Tensor]:
    """Return h, and u if ``second`` is given."""
    return [
        t
        for t in residual_norm(x, weight, eps, second, implementation=implementation)[1:]
        if t is not None
    ]
