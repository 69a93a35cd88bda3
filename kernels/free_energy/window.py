"""The free energy in decoding: a running window of the values seen, so that exp(beta (v - c)) stays in range. No scan, no prior.

The scan's state holds sums of U = exp(beta (v - c)). When a new value widens the window, c moves and those sums are multiplied by
exp(beta (c_old - c_new)): any constant is valid, so nothing else changes.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kernels.free_energy.streams import MAX_RANGE, FreeEnergyGap, ValueStream
from kernels.implementations import OncePerMessage

_log = logging.getLogger("kernels.free_energy")
_log.addFilter(OncePerMessage())


class ValueWindow:
    """The least and the greatest value of each channel so far, and the constant c that goes with them.

    While beta * (high - low) <= 80, c is the middle and every exponent lies in [-40, 40]; beyond, c = high - 40 / beta: values far under
    the greatest underflow smoothly, and F falls back to mu where nothing else is read. state [b, h, 2, dv]: (low, high); None: no past.
    On a CPU a warning says so, once. On a device, and in a compiled step, nothing does: to know the range, each step would wait for it.
    """

    def __init__(self, v: Tensor, beta: Tensor, state: Tensor | None) -> None:
        """v [b, h, t, dv], the new values (float32 or float64), beta [h, dv] of the same type; no gradient flows through a window."""
        self.beta = beta.detach()[:, None].expand(v.shape[0], -1, -1, -1)
        new = torch.stack(torch.aminmax(v.detach(), dim=2), dim=2)
        before = new if state is None else state
        low = torch.minimum(before[:, :, :1], new[:, :, :1])
        high = torch.maximum(before[:, :, 1:], new[:, :, 1:])
        self.state = torch.cat((low, high), dim=2)
        self.centre = self._centre(self.state)
        self.rescale = torch.exp(self.beta * (self._centre(before) - self.centre))
        self.v = v
        if v.device.type == "cpu" and not torch.compiler.is_compiling():
            self._warn(float((self.beta * (high - low)).max()))

    @staticmethod
    def _warn(largest: float) -> None:
        if not largest <= MAX_RANGE:
            _log.warning(
                "decoding: beta * (max v - min v) reaches %.4g, over %g: values that far under the greatest so far are lost to F",
                largest,
                MAX_RANGE,
            )

    def _centre(self, state: Tensor) -> Tensor:
        low, high = state[:, :, :1], state[:, :, 1:]
        return torch.maximum((low + high) / 2, high - MAX_RANGE / 2 / self.beta)

    def stream(self) -> Tensor:
        """U [b, h, t, dv], to be read beside v; what a state already sums is to be multiplied by ``rescale`` [b, h, 1, dv] first."""
        return ValueStream.apply(self.v, self.beta, self.centre, torch.zeros_like(self.centre, dtype=torch.bool))

    def gap(self, mu: Tensor, z: Tensor) -> Tensor:
        """F - mu [b, h, t, dv] from the reads of v and U."""
        return FreeEnergyGap.apply(mu, z, self.beta, self.centre, torch.zeros_like(self.centre, dtype=torch.bool))
