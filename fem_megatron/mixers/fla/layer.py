"""Layers of the package flash-linear-attention as baselines: x + layer(RMSNorm(x)).

The configuration names the class of the layer. The package is imported when a layer is built.
"""

from __future__ import annotations

import inspect
from importlib import import_module

import torch
from torch import Tensor, nn

from fem_megatron.mixers.fla.shape import FlaShape
from fem_megatron.parallel import Parallel
from fem_megatron.shape import Weight
from fem_megatron.state import Context
from fem_megatron.update import Update, rms_norm


class FlaLayer(Update):
    """A layer of the package flash-linear-attention.

    Its matrices are initialised like those of every layer. Other parameters keep the package's
    initialisation, seeded by the layer's number. Decoding stores the normalised inputs and runs the
    layer over all of them at every step, which is correct but slow. Export is not supported.

    Raises:
        ValueError: if the package is not installed, for an unknown layer or option, and under
        tensor parallelism.
    """

    def __init__(self, shape: FlaShape, parallel: Parallel) -> None:
        self.shape = shape
        if parallel.size != 1:
            raise ValueError(
                f"model.mixer=fla.{shape.name} cannot be split: set "
                "parallel.tensor_model_parallel_size to 1"
            )
        super().__init__(shape, parallel)

    def build(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.shape.layer)
            self.layer = _build(self.shape).to(self.parallel.dtype)
        for weight in self.layer.parameters():
            weight.spec = Weight(  # type: ignore[attr-defined]
                tuple(weight.shape), init="normal" if weight.ndim == 2 else 0.0
            )

    def forward(self, x: Tensor, context: Context) -> Tensor:
        self.require_gpu(x)
        h = context.extend("h", rms_norm(x, self.norm(), self.shape.norm_eps).transpose(0, 1))

        def read(valid: Tensor | None, h: Tensor) -> Tensor:
            out: Tensor = self.layer(h, attention_mask=None if valid is None else valid.long())[0]
            return out

        return x + context.per_document(read, h, time=1)[:, -x.shape[0] :].transpose(0, 1)

    def require_gpu(self, x: Tensor) -> None:
        """Raise ValueError if x is on the CPU, for which the package has no kernels."""
        if x.device.type == "cpu":
            raise ValueError(
                f"model.mixer=fla.{self.shape.name} needs a GPU; deltanet, gated_deltanet and "
                "mamba2 run without"
            )


def _build(shape: FlaShape) -> nn.Module:
    where = f"model.mixer=fla.{shape.name}"
    try:
        layers = import_module("fla.layers")
    except ImportError as error:
        raise ValueError(
            f"{where} needs a GPU and the package flash-linear-attention (pip install "
            f"flash-linear-attention): {error}"
        ) from None
    made = getattr(layers, shape.name, None)
    if made is None:
        raise ValueError(
            f"{where}: the installed flash-linear-attention has no layer of this name in fla.layers"
        )
    takes = inspect.signature(made).parameters
    given = {"hidden_size": shape.hidden, "num_heads": shape.heads, "layer_idx": shape.layer}
    arguments = {key: value for key, value in given.items() if key in takes} | dict(shape.options)
    unknown = sorted(set(arguments) - set(takes))
    if unknown:
        raise ValueError(
            f"model.fla.options: fla.{shape.name} does not take {', '.join(unknown)}; it takes "
            f"{', '.join(takes)}"
        )
    return made(**arguments)
