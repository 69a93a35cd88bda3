"""The short causal convolution of recurrent mixers: every channel over its last few tokens, then SiLU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from fem_megatron.layers.update import Context


def short_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, context: Context, name: str) -> Tensor:
    """silu(sum_i weight[:, i] x_(t - K + 1 + i) + bias): x [s, b, c], weight [c, K], bias [c] -> [s, b, c].

    Tokens before the first count as zero, and so does padding. The state keeps the last K - 1 inputs under ``name``, [b, K - 1, c].
    """
    length, taps = x.shape[0], weight.shape[1]
    valid = context.valid_now(length)
    if valid is not None:
        x = x.masked_fill(~valid[..., None], 0)
    past = context.recall(name)
    before = x.new_zeros(taps - 1, *x.shape[1:]) if past is None else past.to(x.dtype).transpose(0, 1)
    x = torch.cat((before, x))
    context.keep(name, x[length:].transpose(0, 1).clone(memory_format=torch.contiguous_format))
    y = x[:length] * weight[:, 0]
    for tap in range(1, taps):
        y = torch.addcmul(y, x[tap : tap + length], weight[:, tap])
    return silu(y if bias is None else y + bias)
