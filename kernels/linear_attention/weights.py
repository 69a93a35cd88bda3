"""The logarithms of linear attention's weights, rows at a time, for the exact O(t^2) forms. Exact for decays of any strength."""

from __future__ import annotations

import torch
from torch import Tensor


def log_weights(q: Tensor, k: Tensor, log_decay: Tensor | None, start: int, stop: int, *, causal: bool = True) -> Tensor:
    """log (q_t * exp(-|c_t - c_i|)) . k_i [b, h, stop - start, t] of the rows start to stop, -inf where the weight is zero or unread.

    Shapes as in `linear_attention`, q and k not negative. A row that reads nothing reads its own token. Float32 or float64.
    """
    t = k.shape[2]
    rows = q[:, :, start:stop]
    row, column = torch.arange(start, stop, device=q.device)[:, None], torch.arange(t, device=q.device)
    products = rows @ k.mT
    read = products.detach() > 0
    if causal:
        read = read & (column <= row)
    read = read | ((column == row) & ~read.any(-1, keepdim=True))
    decay = None if log_decay is None else _decay_between(log_decay if log_decay.dim() == 4 else log_decay[..., None], row, column, causal)
    if decay is None or decay.shape[-1] == 1:
        positive = products > 0
        logs = torch.where(positive, products, 1).log()
        return (logs if decay is None else logs + decay[..., 0].masked_fill(~read, 0)).masked_fill(~read, -torch.inf)
    terms = _log(rows)[:, :, :, None] + _log(k)[:, :, None] + decay
    # A row of padding has no finite term: it is filled before the logarithm, whose gradient there would be NaN.
    finite = read & (terms.detach() > -torch.inf).any(-1)
    summed = terms.masked_fill(~finite[..., None], 0).logsumexp(-1)
    return torch.where(finite, summed, torch.where(read & (column == row), 0.0, -torch.inf))


def _decay_between(a: Tensor, row: Tensor, column: Tensor, causal: bool) -> Tensor:
    """a [b, h, t, w] -> its sum over (i, t] (over (t, i] where the key is later) [b, h, rows, i, w]."""
    steps = a[:, :, None]
    earlier = steps.masked_fill(~(column <= row)[..., None], 0)
    between = torch.cat((earlier[:, :, :, 1:], torch.zeros_like(earlier[:, :, :, :1])), dim=3).flip(3).cumsum(3).flip(3)
    return between if causal else between + steps.masked_fill(~(column > row)[..., None], 0).cumsum(3)


def _log(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.where(x > 0, x, 1).log(), -torch.inf)
