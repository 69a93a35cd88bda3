"""Scans over the tokens of a sequence, also of a sequence that is split over ranks.

A scan is one kernel call. If the sequence is split, each chunk's scan also starts from the state
after the earlier chunks, which ranks exchange. Otherwise the scan starts from the stored decoding
state.

Call each function only within a read for which the context is called with ``passes=True``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils.checkpoint import checkpoint

from fem_megatron.context_parallel.split import SequenceSplit
from fem_megatron.state import Context
from kernels.linear_attention import end_state, linear_attention
from kernels.linear_attention.op import Damp
from kernels.time_decay_scan import time_decay_scan


def fading_sum(
    a: Tensor, f: Tensor, initial: Tensor | None, context: Context, *, backward: bool = False
) -> Tensor:
    """Return s_t = exp(-softplus(a_t)) s_{t-1} + f_t, [s, b, n]: a and f [s, b, n], initial [b, n].

    backward: scan from the last token to the first.
    """
    if backward:
        a, f = a.flip(0), f.flip(0)
    made = time_decay_scan(a, f, initial, softplus=True)
    if (split := context.passing) is not None:
        since = -softplus(a.to(made.dtype)).cumsum(0)
        before = states_before(split, made[-1, ..., None], since[-1, ..., None], reverse=backward)
        made = made + before.squeeze(-1) * since.exp()
    return made.flip(0) if backward else made


def linear_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    initial: Tensor | None,
    context: Context,
    *,
    normalise: bool = False,
    eps: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return causal `linear_attention`: its output and the final state.

    If the sequence is split, the state is the state of all tokens up to the end of each chunk.
    """
    if (split := context.passing) is not None:
        # Recompute: the product keeps wider tensors than its inputs.
        given = (k, v, log_decay, normalise, eps)
        end, fading = checkpoint(end_state, *given, use_reentrant=False, preserve_rng_state=False)
        initial = states_before(split, end, fading)
    return linear_attention(q, k, v, log_decay, initial, normalise=normalise, eps=eps)


def squares_before(
    k: Tensor,
    initial: Tensor | None,
    context: Context,
    features: Callable[[Tensor], Tensor] | None = None,
) -> Tensor | None:
    """Return the sum of f_i f_i^T, f = features(k), over the tokens before this chunk.

    k is [b, h, s, d]; the result is [b, h, d, d], fp32 or wider. If the sequence is not split, or
    if the read is not causal, return ``initial`` unchanged.
    """
    if (split := context.passing) is None or not context.causal:
        return initial
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    wide = wide if features is None else features(wide)
    return states_before(split, wide.mT @ wide, None)


def states_before(
    split: SequenceSplit, end: Tensor, log_decay: Tensor | None, *, reverse: bool = False
) -> Tensor:
    """Return the state before each of this rank's two chunks, [2 b, ..., n].

    end: [2 b, ..., n], the state after a scan of each chunk that starts from zero.
    log_decay: [2 b, ..., 1], at most 0: the factor exp(log_decay) by which a chunk shrinks the
        state before it. Its middle dimensions may be 1. None: no decay.
    reverse: True if scans run from the last token to the first.
    """
    both = end if log_decay is None else torch.cat((end, log_decay.expand(*end.shape[:-1], 1)), -1)
    chunks = split.all_chunks(both, 0)
    state, before = torch.zeros_like(chunks[0][..., : end.shape[-1]]), {}
    for number in sorted(range(len(chunks)), reverse=reverse):
        before[number] = state
        if log_decay is None:
            state = state + chunks[number]
        else:
            added, faded = chunks[number].tensor_split([end.shape[-1]], -1)
            state = Damp.apply(state, faded) + added
    return torch.cat([before[number] for number in split.own])
