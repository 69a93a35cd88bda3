"""Step of CEM's MLP in its inner channels: a gate times SiLU. One public function: `gated_silu`.
Projections are not included.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from kernels.arguments import check_first, check_others, operation
from kernels.implementations import Implementation, Op, first_reason, lacks_triton
from kernels.registered import opaque, registered

OP = Op(
    "gated_silu",
    "a gate times SiLU, for a gate with several uses",
    (
        Implementation("triton", "one pass over memory forward, one backward", lacks_triton),
        Implementation("reference", "the equation in PyTorch"),
    ),
)


@operation("z")
def gated_silu(z: Tensor, gate: Tensor, *, implementation: str = "auto") -> tuple[Tensor, Tensor]:
    """Return (gate * silu(z), gate): the gate itself is for its later uses, whose gradient is added
    in the pass that computes this one's.

    Shapes: z and gate [...], the same, results too. Types: both float64, float32, bfloat16 or
    float16. implementation: "triton", which computes in float32, "reference" or "auto", the fastest
    that supports this call. Both keep only the arguments for the backward. Raises ValueError for
    shapes, types or devices that do not fit, and for an implementation that cannot run. Equation:
    Causal Energy Minimization, the gradient of equation 7.
    """
    check_first("gated_silu", "z", z, "[...]")
    check_others("gated_silu", "z", z, {"gate": (gate, z.shape, z.dtype)})
    if opaque(z):  # an unchanged input is not a result of the operation
        return _gated(z, gate, implementation), gate
    unfit = first_reason({"float64": z.dtype.itemsize == 8})
    if OP.choose(implementation, z.device, {"triton": unfit}.get) == "triton":
        from kernels.gated_silu.triton import fused

        return fused(z, gate)
    return gate * silu(z), gate


@registered(lambda z, **_: z.new_empty(z.shape), name="gated_silu")
def _gated(z: Tensor, gate: Tensor, implementation: str) -> Tensor:
    """Return the product alone."""
    return gated_silu(z, gate, implementation=implementation)[0]
