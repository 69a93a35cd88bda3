"""Models whose inputs or outputs are not text: the layers that pretraining uses between an input
layer and a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fem_megatron.block import Block
from fem_megatron.config import ModelConfig
from fem_megatron.mup import starts_from
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import Normal, Shape, located
from fem_megatron.state import Context
from fem_megatron.update import Update
from tools.papers.experiment import Size


def model_of(size: Size, given: dict[str, Any]) -> ModelConfig:
    """Return the model configuration of a row.

    The widths are those of ``size``. ``given`` are the row's settings, with sections as
    dictionaries; ``parts`` is the network's.
    """
    given = {name: value for name, value in given.items() if name != "parts"}
    sizes = {
        "hidden_size": size.width,
        "num_layers": size.layers,
        "num_attention_heads": size.heads,
        "ffn_hidden_size": size.inner,
        "init_std": size.init_std,
    }
    sections = {
        name: type(getattr(ModelConfig(), name))(**value)
        for name, value in given.items()
        if isinstance(value, dict)
    }
    return ModelConfig(**{**sizes, **given, **sections})


def fem(prior: str, letters: str) -> dict[str, Any]:
    """Return the settings of a FEM row. letters: its switches that are on, of C, L, T and G."""
    switches = {"conditioner": "C", "free_energy": "L", "temperature": "T", "gate": "G"}
    return {
        "mixer": f"fem_{prior}",
        "fem": {switch: letter in letters for switch, letter in switches.items()},
    }


class Network(nn.Module):
    """Inputs, the blocks of ``model``, head: [b, s, ...] -> inputs -> [b, s, D] -> blocks -> [b, s,
    D] -> head.

    head receives the residual stream unchanged; it includes the norm and the selection of
    positions. parts: functions of the model that make other mixers or MLPs than the model's, by
    the name of the block's attribute, "mixer" or "mlp" (`tools.papers.parts`).
    """

    def __init__(
        self,
        model: ModelConfig,
        inputs: nn.Module,
        head: nn.Module,
        parts: Mapping[str, Callable[[ModelConfig], nn.Module]] | None = None,
    ) -> None:
        super().__init__()
        self.causal = model.causal
        self.inputs, self.head = inputs, head
        self.blocks = nn.ModuleList(Block(shape, OneProcess()) for shape in model.blocks())
        for block in self.blocks:
            for name, made in (parts or {}).items():
                setattr(block, name, made(model))
        start(self, model)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the head."""
        x = self.inputs(x).transpose(0, 1)
        for block in self.blocks:
            x = block(x, Context(causal=self.causal))
        made: Tensor = self.head(x.transpose(0, 1))
        return made


def layer(shape: Shape) -> Update:
    """Return an uninitialised update of this shape in one process; `start` initialises it."""
    made: Update = located(shape.layer_class)(shape, OneProcess())
    return made


@torch.no_grad()
def start(network: nn.Module, model: ModelConfig) -> None:
    """Initialise every weight with torch's random generator.

    Weights of pretraining's layers start as in training, matrices of this tool's modules with the
    model's init_std.
    """
    for name, weight in network.named_parameters():
        spec = getattr(weight, "spec", None)
        if spec is not None:
            begin = starts_from(model, spec)
            weight.normal_(0.0, begin.std) if isinstance(begin, Normal) else weight.fill_(begin)
        elif weight.ndim > 1:
            weight.normal_(0.0, model.init_std)
        elif name.endswith("bias"):
            weight.zero_()


class Last(nn.Module):
    """Layer that selects the last position and normalises it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, D] to [b, D]."""
        out: Tensor = self.norm(x[:, -1])
        return out


def classifier(width: int, classes: int) -> nn.Sequential:
    """Return a norm and an output layer, for every position."""
    return nn.Sequential(nn.RMSNorm(width), nn.Linear(width, classes))


def sinusoids(length: int, width: int) -> Tensor:
    """Return sines and cosines of the positions, [length, width] (Vaswani et al. 2017); width is
    even.
    """
    rates = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Positions(nn.Module):
    """Input layer that embeds by ``inner``, appends ``extra`` learned tokens and adds positions.

    The output of ``inner`` is [b, s, D]. The position vectors are learned; with ``sines`` they are
    sinusoids scaled by it.
    """

    places: Tensor

    def __init__(
        self, inner: nn.Module, length: int, width: int, extra: int = 0, sines: float = 0.0
    ) -> None:
        super().__init__()
        self.inner = inner
        self.extra = nn.Parameter(torch.empty(extra, width)) if extra else None
        if sines:
            self.register_buffer(
                "places", sines * sinusoids(length + extra, width), persistent=False
            )
        else:
            self.places = nn.Parameter(torch.empty(length + extra, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [b, s + extra, D]."""
        made: Tensor = self.inner(x)
        if self.extra is not None:
            made = torch.cat((made, self.extra.expand(len(made), -1, -1)), 1)
        return made + self.places
