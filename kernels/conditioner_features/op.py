"""Features of FEM's conditioner from its state. One public function: `conditioner_features`. Scans
and projections are not included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, softplus

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import registered

WIDEST = 4096  # channels: a token with twice as many exceeds the registers

OP = Op(
    "conditioner_features",
    "shortcut times LayerNorm of the state, in FEM's conditioner",
    (
        Implementation("triton", "one pass over memory forward, one backward", lacks_triton),
        Implementation("reference", "the equation in PyTorch"),
    ),
)


@operation("logits")
@registered(lambda logits, *_, **__: logits.new_empty(logits.shape), any_size=True)
def conditioner_features(
    logits: Tensor, state: Tensor, weight: Tensor, eps: float, *, implementation: str = "auto"
) -> Tensor:
    """Return r * LayerNorm(state) over the last dimension, with r = softplus(logits) sqrt(n) /
    max(||softplus(logits)||, eps).

    Shapes: logits and state [..., n], with any strides, weight [n] (LayerNorm's; it has no bias).
    Returns [..., n] in logits' type. Types: logits float64, float32, bfloat16 or float16; state the
    same, but float32 if logits are narrower; weight any of them. Computed in state's type. The
    product with W_out that follows is a separate GEMM: the vendor's GEMM runs at the speed of the
    matrix units, and fusion could save only one pass over n of the model's 16 n channels.
    implementation: "triton", "reference" or "auto", the fastest that supports this call. Raises
    ValueError for shapes, types or devices that do not fit, and for an implementation that cannot
    run. Equation: Free Energy Mixer, the time-decay conditioner, phi before W_out.
    """
    check_first("conditioner_features", "logits", logits, "[..., n]")
    size, compute = logits.shape[-1], torch.promote_types(logits.dtype, torch.float32)
    expected = {
        "state": (state, logits.shape, compute),
        "weight": (weight, (size,), torch.float64, torch.float32, torch.bfloat16),
    }
    check_others("conditioner_features", "logits", logits, expected)
    unfit = first_reason(
        {"float64": compute == torch.float64, f"{size} channels are over {WIDEST}": size > WIDEST}
    )
    if OP.choose(implementation, logits.device, {"triton": unfit}.get) == "triton":
        from kernels.conditioner_features.triton import fused_features

        return fused_features(logits, state, weight, eps)
    return features(logits, state, weight, eps)


def features(logits: Tensor, state: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the definition, with PyTorch's gradients. The arguments are those of
    `conditioner_features`, which has checked them.
    """
    size = state.shape[-1]
    r = softplus(logits.to(state.dtype).contiguous())
    r = r * (size**0.5 / r.norm(dim=-1, keepdim=True).clamp_min(eps))
    return (r * layer_norm(state, (size,), weight.to(state.dtype), None, eps)).to(logits.dtype)
