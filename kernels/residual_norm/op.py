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
    "RMSNorm of the residual stream, a second norm of that; the residual's own gradient is added"
    " where the norm's is made",
    (
        Implementation("triton", "one pass over memory forward, one backward", lacks_triton),
        Implementation("reference", "PyTorch's norms"),
    ),
)


@operation("x")
def residual_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    second: Tensor | None = None,
    *,
    twice: bool = False,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (x, h, u): x itself, h = x / rms(x) * weight, and u = LayerNorm(h) * second if
    ``second`` is given, h / rms(h) if ``twice``, else None; over the last dimension.

    The gradient of the returned x, the residual, is added to the norms' gradients in one pass.
    Shapes: x [..., n], weight (None: ones) and second [n]; the results have x's shape. Types:
    float64, float32, bfloat16 or float16, the results x's. h is rounded to x's type before the
    second norm. implementation: "triton", "reference" or "auto", the fastest that supports this
    call. Triton's stores its arguments alone for the backward. Raises ValueError for shapes, types
    or devices that do not fit, for both second norms, and for an implementation that cannot run.
    Equations: RMSNorm and LayerNorm without biases.
    """
    check_first("residual_norm", "x", x, "[..., n]")
    size = x.shape[-1]
    check_others(
        "residual_norm",
        "x",
        x,
        {"weight": (weight, (size,), *FLOATS), "second": (second, (size,), *FLOATS)},
    )
    if twice and second is not None:
        raise ValueError("residual_norm: twice is RMSNorm, and second LayerNorm; give one of them")
    if opaque(x):  # an unchanged input is not a result of the operation
        h, *rest = _norms(x, weight, eps, second, twice, implementation)
        return x, h, rest[0] if rest else None
    unfit = first_reason(
        {"float64": x.dtype == torch.float64, f"{size} channels are over {WIDEST}": size > WIDEST}
    )
    if OP.choose(implementation, x.device, {"triton": unfit}.get) == "triton":
        from kernels.residual_norm.triton import fused_norms

        return fused_norms(x, weight, second, eps, twice)
    h = rms_norm(x, (size,), weight, eps)
    if twice:
        return x, h, rms_norm(h, (size,), None, eps)
    return x, h, None if second is None else layer_norm(h, (size,), second, None, eps)


@registered(
    lambda x, second, twice, **_: [
        torch.empty_like(x) for _ in range(1 if second is None and not twice else 2)
    ],
    name="residual_norm",
)
def _norms(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    second: Tensor | None,
    twice: bool,
    implementation: str,
) -> list[Tensor]:
    """Return h, and u if there is a second norm."""
    made = residual_norm(x, weight, eps, second, twice=twice, implementation=implementation)
    return [t for t in made[1:] if t is not None]
