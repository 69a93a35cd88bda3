"""Softmax reads for all mixers, including ring attention for sequences split over ranks.

In a ring each rank keeps its queries, and keys and values pass from rank to rank, so that a rank
stores its own and those of one other rank at a time. Partial reads are merged by their
log-sum-exps, which gives exactly the softmax over all keys. FEM's read is attention with the
concatenated values [v | U] (defined in `kernels.free_energy`), whose range must be known first.
Therefore all ranks exchange the range of their values, and then merge as for softmax attention. The
backward pass makes one more round, in which the gradients of keys and values travel with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fem_megatron.context_parallel.split import Ranks, SequenceSplit
from fem_megatron.state import Context
from kernels.fem_attention import fem_attention
from kernels.fem_attention.reference import repeat_heads
from kernels.free_energy.op import FreeEnergyGap, ValueStream, Window, mix, mix_gap, value_window
from kernels.free_energy.ranges import Decision


def softmax_read(
    context: Context,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None = None,
    lam: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    scale: float | None = None,
    decision: Decision | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Return `fem_attention` of the layer's tokens.

    The read is computed separately per document if the context has documents, and across ranks if
    the context has a split. v may have fewer heads than k.

    decision: object by which the layer decides whether a ring may compute this call. None: decide
        from the range of the values, which waits for the device.
    """
    split = context.split
    if split is not None and split.ring:
        window = None if beta is None else value_window(split.span(v, 2), beta)
        if window is None or not (decision or Decision()).exact(window.largest):
            return context.again(
                lambda *given: _by_ring(split, window, scale, *given), q, k, v, beta, lam, gate
            )

    def read(
        valid: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lam: Tensor | None,
        gate: Tensor | None,
        beta: Tensor | None,
    ) -> Tensor:
        v = repeat_heads(v, 1, k.shape[1])
        return fem_attention(
            q,
            k,
            v,
            beta,
            lam,
            gate,
            causal=context.causal,
            keys_valid=valid,
            scale=scale,
            implementation=implementation,
        )

    return context.per_document(read, q, k, v, lam, gate, each=(beta,), keys=(1, 2))


def _by_ring(
    split: SequenceSplit,
    window: Window | None,
    scale: float | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    lam: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    wide = torch.promote_types(q.dtype, torch.float32)
    if beta is None or window is None:
        return mix(_Ring.apply(q, k, v, scale, split.ranks).to(wide), None, None, gate).to(q.dtype)
    centre, shifted = window.centre, window.shifted
    rows = beta.to(wide)[:, None].expand_as(centre)
    stream = ValueStream.apply(v.to(wide), rows, centre, shifted)
    mu, z = (
        _Ring.apply(q, k, torch.cat((v, stream.to(v.dtype)), -1), scale, split.ranks)
        .to(wide)
        .chunk(2, -1)
    )
    gap = FreeEnergyGap.apply(
        mu, z, *(repeat_heads(t, 1, q.shape[1]) for t in (rows, centre, shifted))
    )
    return mix_gap(mu, gap, lam, gate).to(q.dtype)


class _Ring(torch.autograd.Function):
    """Causal softmax attention of a sequence split over ranks, by ring attention.

    Inputs are this rank's tokens: q [b, h, s, dk]; k and v [b, h or a divisor of h, s, width].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, ranks: Ranks) -> Tensor:
        ctx.widths = [t.shape[-1] for t in (q, k, v)]
        # The kernels require equal widths.
        q, k, v = (pad(t, (0, max(ctx.widths) - t.shape[-1])) for t in (q, k, v))
        out = q.new_zeros(q.shape, dtype=torch.promote_types(q.dtype, torch.float32))
        total, kept = out.new_full(q.shape[:3], -torch.inf), list[Sequence[Any]]()

        def add(k: Tensor, v: Tensor, rows: slice, columns: slice, causal: bool) -> None:
            made, log, *more = _attend(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], causal, scale
            )
            both = torch.logaddexp(total[:, :, rows], log)
            out[:, :, rows] *= (total[:, :, rows] - both).exp()[..., None]
            out[:, :, rows] += made * (log - both).exp()[..., None]
            total[:, :, rows] = both
            kept.append(more)

        _round(ranks, k, v, add)
        narrow = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, narrow, total)
        ctx.scale, ctx.ranks, ctx.kept = scale, ranks, kept
        return narrow[..., : ctx.widths[2]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        grad, kept = pad(grads[0], (0, q.shape[-1] - ctx.widths[2])), iter(ctx.kept)
        dq, *held = (torch.zeros_like(t, dtype=total.dtype) for t in (q, k, v))

        def add(k: Tensor, v: Tensor, rows: slice, columns: slice, causal: bool) -> None:
            own = [t[:, :, rows].contiguous() for t in (grad, q, out, total)]
            found = _gradients(
                own, k[:, :, columns], v[:, :, columns], causal, ctx.scale, next(kept)
            )
            dq[:, :, rows] += found[0]
            for full, part in zip(held, found[1:], strict=True):
                full[:, :, columns] += part.to(full.dtype).unflatten(1, (full.shape[1], -1)).sum(2)
            # The gradients follow the keys and values and end at the rank that owns them.
            held[:] = ctx.ranks.shift(held)()

        _round(ctx.ranks, k, v, add)
        return (
            *(t[..., :width].to(q.dtype) for t, width in zip((dq, *held), ctx.widths, strict=True)),
            None,
            None,
        )


def _round(ranks: Ranks, k: Tensor, v: Tensor, add: Callable[..., None]) -> None:
    """Call ``add(k, v, rows, columns, causal)`` once for every rank's keys and values.

    rows: slice of this rank's queries that see these keys.
    columns: slice of the keys k and values v that these queries see.
    causal: True for this rank's own keys, which need the causal mask.
    """
    held, half, every = [k, v], k.shape[2] // 2, slice(None)
    for step in range(ranks.size):
        source, coming = (ranks.rank - step) % ranks.size, None
        if step < ranks.size - 1:
            coming = ranks.shift(held)
        if step == 0:
            add(*held, every, every, True)
        # Its first chunk precedes both of this rank's chunks, its second follows them.
        elif source < ranks.rank:
            add(*held, every, slice(0, half), False)
        else:  # both of its chunks are between this rank's
            add(*held, slice(half, None), every, False)
        held = held if coming is None else coming()


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Sequence[Any]:
    """Return (attention output, log-sum-exp of its scores, ...).

    On a GPU, further tensors for the backward pass follow. The kernels require equal numbers of
    heads in k and v, so heads of v are repeated.
    """
    v = repeat_heads(v, 1, k.shape[1])
    if q.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            "parallel.context_parallel_kind=ring on a GPU needs train.precision=bf16; all_gather "
            "also supports fp32"
        )
    out, total, *more = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scale
    )
    return out, total, *more[:6]


def _gradients(
    own: Sequence[Tensor], k: Tensor, v: Tensor, causal: bool, scale: float, kept: Sequence[Any]
) -> Sequence[Tensor]:
    """Return the gradients of q, k and v; v's has as many heads as k.

    own: the output's gradient, q, and the output and log-sum-exp over all keys.
    """
    grad, q, out, total = own
    v = repeat_heads(v, 1, k.shape[1])
    if q.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, total, 0.0, causal, scale=scale)
    sizes, seeds = kept[:4], kept[4:]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(grad, q, k, v, out, total, *sizes, 0.0, causal, *seeds, scale=scale)
