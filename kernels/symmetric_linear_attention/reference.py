"""Linear symmetric attention in plain PyTorch, any device: sums of outer products, chunk by chunk. No loop over tokens.

Where chunks begin depends on the length alone and a masked pair is an exact zero: no bit of an output depends on later tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def read(z: Tensor, causal: bool, valid: Tensor | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `symmetric_linear_attention`, with z and the state in the type to compute in."""
    t, p = z.shape[2:]
    phi = z.sigmoid()
    slope = phi * (-z).sigmoid() * p**-0.5
    keys = phi if valid is None else phi * valid[:, None, :, None]
    past = z.new_zeros(*z.shape[:2], p, p) if state is None else state
    if not causal:
        after = past + keys.mT @ keys
        return slope * (phi @ after), after
    size = min(CHUNK, t)
    # The last chunk is filled up with keys of zeros.
    queries, keys = (pad(x, (0, 0, 0, -t % size)).unflatten(2, (-1, size)) for x in (phi, keys))
    sums = torch.cat((past[:, :, None], keys.mT @ keys), dim=2).cumsum(2)
    inside = (queries @ keys.mT).tril() @ keys
    return slope * (inside + queries @ sums[:, :, :-1]).flatten(2, 3)[:, :, :t], sums[:, :, -1]
