"""What the FEM asks of a prior. A new prior is one file here, one in ``fem_megatron.shapes.priors`` and a line in each registry."""

from __future__ import annotations

from torch import Tensor

from fem_megatron.layers.parallel import Parallel
from fem_megatron.layers.update import Context, Layer
from fem_megatron.shapes.fem import FemShape

Parts = dict[str, Tensor]
"""The projection's slices that the prior's shape names: each [s, b, local heads, width], scaled by the conditioner."""


class Prior(Layer):
    """p_t(i), and the free-energy read under it. Its parameters (``shape.prior.weights()``) are given to it by the mixer."""

    def __init__(self, shape: FemShape, parallel: Parallel) -> None:
        super().__init__()
        self.shape, self.parallel = shape, parallel

    def forward(self, parts: Parts, v: Tensor, beta: Tensor | None, lam: Tensor | None, gate: Tensor | None, context: Context) -> Tensor:
        """o = gate * ((1 - lam) mu + lam F): v, lam, gate [b, h, s, d_v], beta [h, d_v] -> [b, h, s, d_v] in v's type.

        beta None: o = mu. lam None: o = F. gate None: no gate.
        """
        raise NotImplementedError
