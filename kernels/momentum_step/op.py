"""Step with momentum of tokens and velocities. One public function: `momentum_step`. The point
ahead and the update that is computed there are not included.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from kernels.arguments import FLOATS, check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import registered
from kernels.residual_norm.op import WIDEST

OP = Op(
    "momentum_step",
    "YuriiFormer's step of the stream [x | v]",
    (
        Implementation("triton", "one pass over memory forward, one backward", lacks_triton),
        Implementation("reference", "the equations in PyTorch"),
    ),
)


@operation("stream")
@registered(lambda stream, *_, **__: stream.new_empty(stream.shape), any_size=True)
def momentum_step(
    stream: Tensor,
    step: Tensor,
    beta: Tensor,
    gamma: Tensor,
    weight: Tensor,
    eps: float,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Return [x + v' | v'] for stream = [x | v], with v' = LayerNorm(beta v + gamma step) * weight.

    Shapes: stream [..., 2n], step [..., n], beta and gamma [1], weight [n]; the result has stream's
    shape. Types: each float64, float32, bfloat16 or float16; the result has stream's, and so has v'
    before it is added. implementation: "triton", which computes in float32 and stores its arguments
    alone for the backward, "reference" or "auto", the fastest that supports this call. Raises
    ValueError for shapes, types or devices that do not fit, and for an implementation that cannot
    run. Equation: YuriiFormer, Nesterov's step as published with arXiv 2603.16535.
    """
    check_first("momentum_step", "stream", stream, "[..., 2n]")
    size = stream.shape[-1] // 2
    shapes = {
        "step": (step, (*stream.shape[:-1], size)),
        "beta": (beta, (1,)),
        "gamma": (gamma, (1,)),
        "weight": (weight, (size,)),
    }
    check_others(
        "momentum_step", "stream", stream, {name: (*t, *FLOATS) for name, t in shapes.items()}
    )
    unfit = first_reason(
        {"float64": stream.dtype.itemsize == 8, f"{size} channels are over {WIDEST}": size > WIDEST}
    )
    if OP.choose(implementation, stream.device, {"triton": unfit}.get) == "triton":
        from kernels.momentum_step.triton import fused

        return fused(stream, step, beta, gamma, weight, eps)
    x, v = stream.chunk(2, dim=-1)
    v = torch.addcmul(beta * v, gamma, step).to(stream.dtype)
    v = layer_norm(v, (size,), weight.to(v.dtype), None, eps)
    return torch.cat((x + v, v), dim=-1)
