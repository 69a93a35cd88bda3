"""Standard causal attention with RoPE, the Transformer's mixer.

Queries can share keys and values, and can be limited to a window.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fem_megatron.context_parallel.ring import softmax_read
from fem_megatron.mixers.attention.shape import AttentionShape, window_blocks
from fem_megatron.parallel import Parallel
from fem_megatron.state import Context
from fem_megatron.update import Update, head_norms, normed, rotate_both, rotations
from kernels.fem_attention import fem_attention
from kernels.fem_projection import fem_projection
from kernels.registered import registered


class Attention(Update):
    """Layer of standard attention: x + softmax(q k^T / sqrt(d)) v W_O.

    ``in_proj`` packs the query groups one after another, so that a rank's slice consists of
    complete groups. The decoding state is a KV-cache of each group's k (after RoPE) and v. With a
    window it contains only the last ``window - 1`` tokens.
    """

    diagnostics = "fem_megatron.mixers.attention.diagnostics:observe"

    def __init__(self, shape: AttentionShape, parallel: Parallel) -> None:
        self.shape = shape
        super().__init__(shape, parallel)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x, h = normed(x, self.norm(), self.shape.norm_eps)
        return x + self.step(h, context)

    def step(self, h: Tensor, context: Context) -> Tensor:
        """Return the contribution of the normalised slice h to the stream, sliced like h."""
        q, k, v = self.project(h, context)
        if self.shape.window is not None:
            context = context.without_gap(q.shape[0])
        k, v = (
            context.extend(name, t.permute(1, 2, 0, 3), dim=2) for name, t in (("k", k), ("v", v))
        )
        if self.shape.window is not None:
            o = self.read_window(q.permute(1, 2, 0, 3), k, v, self.shape.window, context)
        else:
            o = softmax_read(context, q.permute(1, 2, 0, 3), k, v, scale=self.shape.scale)
        return self.parallel.leave(self.out_proj(o.permute(2, 0, 1, 3).flatten(2)))

    def read_window(self, q: Tensor, k: Tensor, v: Tensor, window: int, context: Context) -> Tensor:
        """Return attention over the last ``window`` tokens, [b, local heads, s, d].

        A decoding state without fixed size is cut to the tokens that the next token can see.
        """
        length = k.shape[2]
        if context.capacity is None and context.state is not None:
            for name, t in (("k", k), ("v", v)):
                context.keep(name, t[:, :, max(0, length - window + 1) :])

        def read(valid: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            valid = None if valid is None else valid[:, -k.shape[2] :]
            return windowed_attention(q, k, v, window, valid, scale=self.shape.scale)

        return context.per_document(read, q, k, v, keys=(1, 2))

    def project(self, h: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the normalised slice h.

        q [s, b, local heads, d]; k and v [s, b, local groups, d]. q and k are normalised and
        rotated as configured.
        """
        shape, each = self.shape, self.shape.heads // self.shape.groups
        packed = self.parallel.project(h, self.in_proj)
        if shape.rope and shape.splits_at_once:
            turn = rotations(packed, shape.head, context, shape.rope)
            widths = dict.fromkeys(("q", "k", "v"), shape.head)
            q, k, v = fem_projection(packed, [], turn, widths, shape.norm_eps).values()
            return q, k, v
        packed = packed.unflatten(-1, (-1, each + 2, shape.head))
        q, k, v = (t.flatten(2, 3) for t in packed.split([each, 1, 1], dim=3))
        if shape.qk_norm:
            q, k = head_norms(self, self.parallel, q, k, shape.norm_eps)
        if shape.rope:
            q, k = rotate_both(q, k, context, shape.rope)
        return q, k, v


@registered(lambda q, v, **_: q.new_empty(*q.shape[:3], v.shape[3]), kernels=False)
def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    keys_valid: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v over the last ``window`` tokens of each query.

    These are the token itself and the ``window - 1`` tokens before it. Time and memory grow
    with tokens times window. q [b, h, tq, d]; k, v [b, hk, tk, d], hk divides h; the queries
    are the last tq of the tk positions. keys_valid [b, tk] bool: False at padding, which is
    read by no query but its own. scale: replaces 1 / sqrt(d). The result [b, h, tq, d] has
    q's type and is exact: keys outside the window have weight zero.
    """
    tq, tk = q.shape[2], k.shape[2]
    past = tk - tq
    near = min(max(window - past, 0), tq)  # queries whose window contains all earlier tokens
    reads = []
    if near:
        valid = None if keys_valid is None else keys_valid[:, : past + near]
        q_near, k_near, v_near = q[:, :, :near], k[:, :, : past + near], v[:, :, : past + near]
        reads.append(
            fem_attention(q_near, k_near, v_near, causal=True, keys_valid=valid, scale=scale)
        )
    if near < tq:
        # The first key is one before the first query's window, so that a block has window + block
        # keys.
        first = past + near - window
        valid = None if keys_valid is None else keys_valid[:, first:]
        reads.append(
            _blockwise(q[:, :, near:], k[:, :, first:], v[:, :, first:], window, valid, scale)
        )
    return reads[0] if len(reads) == 1 else torch.cat(reads, dim=2)


def _blockwise(
    q: Tensor, k: Tensor, v: Tensor, window: int, valid: Tensor | None, scale: float | None
) -> Tensor:
    """Return attention for queries that each see a full window.

    q [b, h, n, d]; k, v [b, hk, window + n, d], query i's own key at window + i; valid [b, window +
    n].
    """
    batch, queries = q.shape[0], q.shape[2]
    block, blocks = window_blocks(queries, window)
    missing = blocks * block - queries
    q, k, v = (F.pad(t, (0, 0, 0, missing)) for t in (q, k, v))
    q = q.unflatten(2, (blocks, block)).transpose(1, 2).flatten(0, 1)
    each, size = q.shape[1] // k.shape[1], window + block
    # Copy each group's windows for each of its queries: masked GPU engines do not support groups.
    k, v = (
        t.unfold(2, size, block)
        .permute(0, 2, 1, 4, 3)[:, :, :, None]
        .expand(-1, -1, -1, each, -1, -1)
        for t in (k, v)
    )
    k, v = (t.reshape(batch * blocks, each * t.shape[2], size, t.shape[-1]) for t in (k, v))
    row = torch.arange(block, device=q.device)[:, None]
    column = torch.arange(window + block, device=q.device)
    seen = ((row < column) & (column <= row + window))[None, None]
    if valid is not None:
        valid = F.pad(valid, (0, missing)).unfold(1, window + block, block).flatten(0, 1)
        seen = (seen & valid[:, None, None]) | (column == row + window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :queries]
