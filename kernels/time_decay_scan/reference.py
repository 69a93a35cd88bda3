"""The first-order scan s_t = exp(a_t) s_{t-1} + x_t in plain PyTorch, any device. Only sums of a over windows (<= 0) may be exponentiated.

Neighbouring steps are joined in pairs, (a, x), (a', x') -> (a + a', exp(a') x + x'), the scan of half the length is solved the same way,
and the steps between are filled in: log2(t) rounds, about 2 t joins, no loop over tokens. A state is made from its own past alone, so it
never moves by a bit when later steps change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class TimeDecayScan(torch.autograd.Function):
    """States s [t, ...] from a, x [t, ...] and initial [...]; the backward is the same scan run from the end."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, x: Tensor, initial: Tensor | None) -> Tensor:
        if initial is not None:
            x = torch.cat((x[:1] + a[:1].exp() * initial, x[1:]))
        states = _scan(a, x)
        ctx.save_for_backward(a, states, initial)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        a, states, initial = ctx.saved_tensors
        (d_states,) = grads
        following = torch.cat((a[1:], torch.zeros_like(a[:1])))
        dx = _scan(following.flip(0), d_states.flip(0)).flip(0)
        first = torch.zeros_like(states[0]) if initial is None else initial
        through = dx * a.exp()
        da = through * torch.cat((first[None], states[:-1]))
        return da, dx, None if initial is None else through[0]


def _scan(a: Tensor, x: Tensor) -> Tensor:
    steps = x.shape[0]
    if steps == 1:
        return x
    paired = steps - steps % 2
    first, second = slice(0, paired, 2), slice(1, paired, 2)
    joined = _scan(a[first] + a[second], torch.addcmul(x[second], a[second].exp(), x[first]))
    states = torch.empty_like(x)
    states[0] = x[0]
    states[second] = joined
    states[2::2] = torch.addcmul(x[2::2], a[2::2].exp(), joined[: (steps - 1) // 2])
    return states
