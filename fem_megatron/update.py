"""Base class of every layer: an update x -> x' of the residual stream. Also shared operations.

The shared operations are rotary positions and norms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fem_megatron.parallel import Parallel, add_weights
from fem_megatron.rope import Rope
from fem_megatron.shape import Shape
from fem_megatron.state import Context
from kernels.residual_norm import residual_norm
from kernels.rotary import rotary


class Layer(nn.Module):
    """Base class of modules whose parameters are added from a dictionary (``add_weights``).

    The parameters are registered by their names; no class attribute declares them.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Update(Layer):
    """Base class of mixers and MLPs with their norm: x' = x + step(x).

    The parameters are those in the update's shape.

    diagnostics: "module:function" of a function (update, `diagnostics.Sample`) -> quantities in
        addition to the step norm; None: no additional quantities.
    """

    diagnostics: ClassVar[str | None] = None

    def __init__(self, shape: Shape, parallel: Parallel) -> None:
        super().__init__()
        self.parallel, self.hidden, self.stream = parallel, shape.hidden, shape.stream
        self.build()
        add_weights(self, shape.weights(), parallel)

    def build(self) -> None:
        """Create submodules that must exist before the weights are added. Default: none."""

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """Update x [s (/ tensor-parallel size under sequence parallelism), b, D].

        The result has the same shape and type.
        """
        raise NotImplementedError

    def start(self, x: Tensor) -> Tensor:
        """Return the point at which the step is evaluated, sliced like x. The default is x."""
        return x


def rotate(x: Tensor, context: Context, rope: Rope) -> Tensor:
    """Apply RoPE to the entire last dimension of x [s, b, heads, d], pairing its halves.

    Positions are the context's. With d = 0, x is returned unchanged.
    """
    return rotary(x, None, *_angles(x, context, rope))[0] if x.shape[-1] else x


def rotate_back(x: Tensor, context: Context, rope: Rope) -> Tensor:
    """Apply the inverse of `rotate` to x [s, b, heads, d].

    The gradient of an energy in R_i q_i . R_j k_j with respect to q_i is a sum of rotated keys;
    this function makes it a vector in q_i's own frame.
    """
    positions = context.positions
    if positions is None:
        positions = torch.arange(context.past, context.past + x.shape[0], device=x.device)
    return rotate(
        x, replace(context, positions=-positions), replace(rope, factor=1.0 / rope.factor)
    )


def rotate_both(q: Tensor, k: Tensor, context: Context, rope: Rope) -> tuple[Tensor, Tensor]:
    """Apply `rotate` to q [s, b, heads, d] and k [s, b, heads or groups, d].

    On a GPU one kernel computes both.
    """
    if q.shape[-1] == 0:
        return q, k
    q, k = rotary(q, k, *_angles(q, context, rope))
    return q, k


def _angles(x: Tensor, context: Context, rope: Rope) -> tuple[Tensor, Tensor]:
    cos, sin = (t.to(x.dtype) for t in rotations(x, x.shape[-1], context, rope))
    return cos, sin


def rotations(x: Tensor, size: int, context: Context, rope: Rope) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of RoPE's angles for x [s, b, ...], times RoPE's factor.

    Each is [s, 1 or b, 1, size / 2], float32 or wider.

    size: number of rotated channels.
    """
    positions = context.positions
    if positions is None:
        positions = torch.arange(context.past, context.past + x.shape[0], device=x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    angles = (positions.to(wide)[..., None] * frequencies(rope, size, wide, x.device)).view(
        x.shape[0], -1, 1, size // 2
    )
    cos, sin = angles.cos(), angles.sin()
    return (cos, sin) if rope.factor == 1.0 else (cos * rope.factor, sin * rope.factor)


def frequencies(
    rope: Rope, size: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """Return RoPE's scaled frequencies over ``size`` channels in radians per token, [size / 2].

    f_i = base^(-2i / size) becomes (1 - s_i) f_i / factor + s_i f_i, with s_i clamped to [0, 1]:

        linear  s = 0
        llama3  s = (original f / 2 pi - low) / (high - low)        Llama 3.1's published code
        yarn    s = 1 - (i - first) / (last - first), `Rope.ramp`   arXiv 2309.00071, 3.2
    """
    scaling = rope.scaling
    plain = 1.0 / (
        rope.first_base() ** (torch.arange(0, size, 2, dtype=dtype, device=device) / size)
    )
    if scaling.kind in (None, "abf"):
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_length * plain / (2 * torch.pi)
        smooth = (
            (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        ).clamp(0, 1)
    else:
        first, last = rope.ramp(size)
        smooth = 1 - (
            (torch.arange(size // 2, dtype=dtype, device=device) - first) / (last - first)
        ).clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def product_type(x: Tensor) -> torch.dtype:
    """Return the dtype of the matrix products in linear attention for a residual stream x.

    On a GPU it is x's dtype, for the matrix units; on a CPU float32 or wider. float16 is too narrow
    for the free energy's exponentials and becomes float32.
    """
    return (
        x.dtype
        if x.is_cuda and x.dtype != torch.float16
        else torch.promote_types(x.dtype, torch.float32)
    )


def normed(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x, `rms_norm` of x). Use the returned x for the rest of the update.

    On a GPU one kernel then computes the gradients of both.
    """
    x, h, _ = residual_norm(x, weight, eps)
    return x, h


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return x / rms(x) over the last dimension, times the weight if given.

    The result has x's type, also under torch.autocast.
    """
    made = torch.nn.functional.rms_norm(
        x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps
    )
    return made.to(x.dtype)


def head_norms(
    owner: Layer, parallel: Parallel, q: Tensor, k: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return q and k [s, b, heads, d], each RMS-normalised over d and scaled (qk_norm).

    The scales are ``owner``'s q_norm and k_norm [d], which all heads share.
    """
    return rms_norm(q, parallel.share(owner.q_norm()), eps), rms_norm(
        k, parallel.share(owner.k_norm()), eps
    )


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return LayerNorm without bias over the last dimension.

    The result has x's type, also under torch.autocast.
    """
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight.to(x.dtype), None, eps).to(
        x.dtype
    )
