"""Tests of the adapter for flash-linear-attention, with a stand-in for the package."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.documents import Documents
from fem_megatron.mixers.fla.layer import FlaLayer
from fem_megatron.mixers.fla.shape import FlaConfig, FlaShape
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context, State
from tests.fem_megatron.conftest import tokens
from tests.fem_megatron.test_baselines import ROUNDING, model, norm
from tests.fem_megatron.test_decoding import decode


class Half(OneProcess):
    """One of two tensor-parallel ranks."""

    size = 2


class CumulativeMean(torch.nn.Module):
    """A layer with the package's interface."""

    def __init__(self, hidden_size: int, num_heads: int, expand: int = 1) -> None:
        super().__init__()
        self.out = torch.nn.Linear(hidden_size, hidden_size, bias=False)
        self.scale = torch.nn.Parameter(torch.rand(expand))

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, None, None]:
        mask = torch.ones(hidden_states.shape[:2]) if attention_mask is None else attention_mask
        h = hidden_states * mask[..., None]
        return (
            self.out(h.cumsum(1) / mask.cumsum(1).clamp_min(1)[..., None]) * self.scale.sum(),
            None,
            None,
        )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = ModuleType("fla.layers")
    layers.CumulativeMean = CumulativeMean  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "fla.layers", layers)


def fla_layer(
    name: str = "CumulativeMean", parallel: OneProcess | None = None, **options: Any
) -> Any:
    return FlaLayer(
        FlaShape.of(model(fla=FlaConfig(options)), 2, name=name),
        parallel or OneProcess(torch.float64),
    )


def test_a_foreign_layer(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlaLayer, "require_gpu", lambda self, x: None)
    layer, x = fla_layer(expand=3), tokens(9)
    h = norm(x, layer.norm.weight)
    mean = h.cumsum(0) / torch.arange(1, 10)[:, None, None]
    full = layer(x, Context())
    torch.testing.assert_close(
        full, x + layer.layer.out(mean) * layer.layer.scale.sum(), **ROUNDING
    )
    state: State = {}
    torch.testing.assert_close(decode(layer, x, [4, 1, 3, 1], state), full, **ROUNDING)
    assert sum(kept.numel() * 8 for kept in state.values()) == 2 * layer.shape.state_bytes(9, 8)
    valid = torch.arange(9)[None] >= torch.tensor([[0], [5]])
    padded = layer(x, Context(valid=valid))
    torch.testing.assert_close(padded[5:, 1:], layer(x[5:, 1:], Context()), **ROUNDING)
    documents = Documents.of(
        torch.isin(torch.arange(9), torch.tensor([0, 2, 6])).expand(x.shape[1], -1)
    )
    per_document = layer(x, Context(documents=documents))
    torch.testing.assert_close(
        per_document, torch.cat([layer(part, Context()) for part in x.split([2, 4, 3])]), **ROUNDING
    )
    assert {key: weight.spec.init for key, weight in layer.named_parameters()} == {
        "layer.out.weight": "normal",
        "layer.scale": 0.0,
        "norm.weight": 1.0,
    }
    assert torch.equal(layer.layer.scale, fla_layer(expand=3).layer.scale)


def test_foreign_layers_that_cannot_run_are_refused_in_one_line(
    package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, function: Callable[[], Any]) -> None:
        with pytest.raises(ValueError, match=message) as error:
            function()
        assert "\n" not in str(error.value)

    refused("needs a GPU", lambda: fla_layer()(tokens(2), Context()))
    refused("no layer of this name", lambda: fla_layer("Nothing"))
    refused("does not take width; it takes hidden_size", lambda: fla_layer(width=3))
    refused("tensor_model_parallel_size to 1", lambda: fla_layer(parallel=Half()))
    refused("write a class of fla.layers", lambda: fla_layer("a-b"))
    refused("model.fla.options.num_heads", lambda: fla_layer(num_heads=3))
    refused(
        "model.causal", lambda: FlaShape.of(model(causal=False), 0, name="GatedLinearAttention")
    )
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    refused("pip install flash-linear-attention", fla_layer)
