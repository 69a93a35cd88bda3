"""Operations between FEM's packed projection and its read: one public function, `fem_projection`.

Scans and the read are not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, rms_norm, softplus

from kernels.arguments import check_first, check_others, operation, without_autocast
from kernels.implementations import Implementation, Op, first_reason, lacks_triton, uneven
from kernels.registered import opaque, registered
from kernels.rotary import turned

# Most channels of a slice, and most numbers of its part of the conditioner's weight, that the
# kernels hold in registers.
WIDEST, LARGEST = 256, 1 << 15
# Most channels, and most features of a conditioner, if a slice is not a multiple of 8 channels; in
# float32 half the features.
HARD = 128

OP = Op(
    "fem_projection",
    "FEM's packed projection scaled by the conditioner, its queries and keys turned, its gates "
    "opened",
    (
        Implementation("triton", "one pass over memory forward, one backward", lacks_triton),
        Implementation("reference", "the equations in PyTorch"),
    ),
)


@operation("z")
def fem_projection(
    z: Tensor,
    conditioners: Sequence[tuple[Tensor, Tensor]],
    turn: tuple[Tensor, Tensor] | None,
    widths: Mapping[str, int],
    eps: float,
    *,
    implementation: str = "auto",
) -> dict[str, Tensor]:
    """Return the slices of z (1 + phi) by head, with rotated queries and keys and activated gates.

    "q" and "k" are rotated by RoPE, "lam" is the sigmoid of its slice, and "gate" is the softplus
    of its slice divided by the root mean square of the softplus.

    Shapes: z [s, b, heads * sum of widths]: each head has its slices in the order of ``widths``
    (name -> channels); "lam" and "gate", if present, are last. conditioners: any number of
    (features f [s, b, n], weight W [heads * sum of widths, n]), each with its own n; phi is the sum
    of all f W^T. turn (cos, sin), [s, 1 or b, 1, d / 2] each, of the pairs (x_i, x_(i + d/2)) of
    "q" and "k", which are first and d wide; None: no rotation.
    eps: added to the mean square.
    Returns name -> [s, b, heads, width] in z's dtype; without conditioners, turn, lam and gate
    these are views of z.
    Dtypes: z float64, float32, bfloat16 or float16, features and weights the same; cos and sin the
    same, but float32 for narrower ones.
    implementation: "triton", "reference" or "auto", the fastest that this call allows. "triton"
    saves only its arguments for the backward.
    Raises ValueError for shapes, dtypes or devices that do not fit, and for an implementation that
    cannot run.
    Equations: Free Energy Mixer, the time-decay conditioner and the two gates; RoFormer,
    equation 34.
    """
    check_first("fem_projection", "z", z, "[s, b, ...]")
    head, compute = sum(widths.values()), torch.promote_types(z.dtype, torch.float32)
    if z.dim() != 3 or z.shape[2] % head:
        raise ValueError(
            f"fem_projection: z has shape {list(z.shape)}, expected [s, b, heads * {head}] for "
            f"slices of {dict(widths)}"
        )
    pair, gates = (
        ("q", "k") if turn is not None else (),
        [name for name in ("lam", "gate") if name in widths],
    )
    plain = {name: width for name, width in widths.items() if name not in (*pair, *gates)}
    if list(widths) != [*pair, *plain, *gates] or len({widths[name] for name in pair}) > 1:
        raise ValueError(
            f"fem_projection: widths are {dict(widths)}; q and k, with one width if rotated, must "
            "be first, lam and gate last"
        )
    expected: dict[str, tuple[Any, ...]] = {}
    for n, (features, weight) in enumerate(conditioners):
        expected |= {f"features {n}": (features, (*z.shape[:2], weight.shape[-1]), z.dtype)}
        expected |= {f"weight {n}": (weight, (z.shape[2], features.shape[-1]), z.dtype)}
    if turn is not None:
        angles = [(z.shape[0], batch, 1, widths["q"] // 2) for batch in (1, z.shape[1])]
        expected |= {
            name: (t, angles, compute) for name, t in zip(("cos", "sin"), turn, strict=True)
        }
    check_others("fem_projection", "z", z, expected)
    if not conditioners and turn is None and not gates:
        return split_heads(z, widths)
    if opaque(z):
        (f, w), (cos, sin) = _joined(conditioners), turn or (None, None)
        parts = _slices(
            z, f, w, cos, sin, ",".join(widths), [*widths.values()], eps, implementation
        )
        return dict(zip(widths, parts, strict=True))
    # The widest tile of a program.
    widest = max([64, *(widths[name] // 2 for name in pair), *(widths[name] for name in gates)])
    inner = sum(features.shape[-1] for features, _ in conditioners)
    odd = any(width % 8 for width in widths.values())
    if z.dtype == torch.float32:
        limit, most = HARD, HARD // 2
    elif odd:
        limit, most = HARD, HARD
    else:
        limit, most = WIDEST, min(256, LARGEST // widest)
    unfit = first_reason(
        {
            "float64": compute == torch.float64,
            f"slices of {widest} channels are over {limit}": widest > limit,
            f"slices of {widest} channels take a conditioner of {most}, not of {inner}": inner
            > most,
        }
    ) or (uneven("a conditioner's width", inner, z.device) if odd else None)
    if OP.choose(implementation, z.device, {"triton": unfit}.get) == "triton":
        from kernels.fem_projection.triton import fused_projection

        return fused_projection(
            z,
            *_joined(conditioners),
            turn,
            plain,
            [widths.get(name, 0) for name in ("lam", "gate")],
            eps,
        )
    return projection(z, conditioners, turn, widths, eps)


def _joined(conditioners: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor | None, Tensor | None]:
    """Return the features and weight of one conditioner that replaces several, or (None, None)."""
    if not conditioners:
        return None, None
    f, w = (
        each[0] if len(each) == 1 else torch.cat(each, dim=-1)
        for each in zip(*conditioners, strict=True)
    )
    return f, w


@registered(
    lambda z, sizes, **_: [
        z.new_empty(*z.shape[:2], z.shape[2] // sum(sizes), size) for size in sizes
    ],
    name="fem_projection",
)
def _slices(
    z: Tensor,
    f: Tensor | None,
    w: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    names: str,
    sizes: Sequence[int],
    eps: float,
    implementation: str,
) -> list[Tensor]:
    """Return the slices in their order; names: separated by commas."""
    conditioners, turn = (
        [] if f is None or w is None else [(f, w)],
        None if cos is None or sin is None else (cos, sin),
    )
    widths = dict(zip(names.split(","), sizes, strict=True))
    return list(
        fem_projection(z, conditioners, turn, widths, eps, implementation=implementation).values()
    )


def projection(
    z: Tensor,
    conditioners: Sequence[tuple[Tensor, Tensor]],
    turn: tuple[Tensor, Tensor] | None,
    widths: Mapping[str, int],
    eps: float,
) -> dict[str, Tensor]:
    """Return the slices by the definition.

    The arguments are those of `fem_projection`, which has checked them.
    """
    f, w = _joined(conditioners)
    if torch.compiler.is_compiling():  # the compiler fuses the operations itself
        parts = split_heads(z if f is None or w is None else z + z * linear(f, w), widths)
        if turn is not None:
            parts |= {
                name: turned(parts[name].to(turn[0].dtype), *turn).to(z.dtype)
                for name in ("q", "k")
            }
    else:
        slices = _Slices.apply(z, f, w, *(turn or (None, None)), tuple(widths.values()))
        parts = dict(zip(widths, slices, strict=True))
    if "lam" in parts:
        parts["lam"] = torch.sigmoid(parts["lam"])
    if "gate" in parts:
        parts["gate"] = outer_gate(parts["gate"], eps)
    return parts


class _Slices(torch.autograd.Function):
    """Slices of x = z (1 + phi), phi = f W^T, [s, b, heads, width] with the first two, q and k,
    rotated by (cos, sin) unless these are None.

    The backward writes the gradients of all slices into one buffer. Slices are contiguous: on a CPU
    torch computes exp and log of shorter runs of numbers than 64 one by one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        f: Tensor | None,
        w: Tensor | None,
        cos: Tensor | None,
        sin: Tensor | None,
        sizes: tuple[int, ...],
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        phi = None if f is None or w is None else linear(f, w)
        ctx.save_for_backward(*(() if phi is None else (z, f, w, phi)), cos, sin)
        ctx.sizes, ctx.shape = sizes, z.shape
        x = z if phi is None else torch.addcmul(z, z, phi)
        heads = x.view(*x.shape[:2], -1, sum(sizes))
        slices = []
        for n, part in enumerate(heads.split(sizes, -1)):
            out = torch.empty(part.shape, dtype=z.dtype, device=z.device)
            if n < 2 and cos is not None and sin is not None:
                wide = out if out.dtype == cos.dtype else torch.empty_like(out, dtype=cos.dtype)
                _turn(part.to(cos.dtype), cos, sin, wide)
                slices.append(wide.to(z.dtype))
            else:
                slices.append(out.copy_(part))
        return tuple(slices)

    @staticmethod
    @once_differentiable
    @without_autocast
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *scaled, cos, sin = ctx.saved_tensors
        like = next((g for g in grads if g is not None), None)
        if like is None:
            return (None,) * 6
        d_x = like.new_empty(ctx.shape)
        heads = d_x.view(*ctx.shape[:2], -1, sum(ctx.sizes))
        for n, (out, grad) in enumerate(zip(heads.split(ctx.sizes, -1), grads, strict=True)):
            if grad is None:
                out.zero_()
            elif n < 2 and cos is not None:
                wide = out if out.dtype == cos.dtype else torch.empty_like(out, dtype=cos.dtype)
                _turn(grad.to(cos.dtype), cos, -sin, wide)
                if wide is not out:
                    out.copy_(wide)
            else:
                out.copy_(grad)
        if not scaled:
            return d_x, *[None] * 5
        z, f, w, phi = scaled
        d_z, d_phi = torch.addcmul(d_x, d_x, phi), d_x.mul_(z).flatten(0, 1).mT
        # f is narrow: on a CPU its products take half the time with the long dimension last.
        return d_z, (w.mT @ d_phi).mT.view_as(f), (f.flatten(0, 1).mT @ d_phi.mT).mT, *[None] * 3


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    """Write x, rotated as by `kernels.rotary.op.turned`, into ``out``."""
    (first, second), (low, high) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=high).addcmul_(first, sin)


def split_heads(z: Tensor, widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Split z [..., heads * sum of widths] into name -> [..., heads, width]."""
    heads = z.unflatten(-1, (-1, sum(widths.values())))
    return dict(zip(widths, heads.split(list(widths.values()), dim=-1), strict=True))


def outer_gate(logit: Tensor, eps: float) -> Tensor:
    """Return g = softplus(logit), RMS-normalised over the last dimension, without weight."""
    return rms_norm(softplus(logit), logit.shape[-1:], None, eps)
