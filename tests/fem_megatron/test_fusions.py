"""Tests of Megatron's fused kernels on a CPU, uncompiled, against the code they replace; a CPU uses
none of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.megatron import fusions, platform
from fem_megatron.parallel import OneProcess

CPU = torch.device("cpu")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradient(function: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out, x, weight.to(out.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu(dtype: torch.dtype) -> None:
    x, weight = draw(5, 2, 12, dtype=dtype), draw(5, 2, 6, dtype=dtype, seed=1)
    with torch.compiler.set_stance("force_eager"):
        out, grad = gradient(fusions.megatron_swiglu, x, weight)
    plain, plain_grad = gradient(OneProcess().swiglu, x, weight)
    assert torch.equal(out, plain)
    # Uncompiled, its backward pass rounds every step of the gate's derivative; compiled, it is one
    # kernel in float32.
    assert (grad - plain_grad).norm() <= (
        1e-2 if dtype == torch.bfloat16 else 1e-14
    ) * plain_grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_for_bfloat16(dtype: torch.dtype) -> None:
    """Fused and plain loss agree bit for bit in bfloat16; in float32 the fused gradient is rounded,
    so it is not used.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    logits = 4 * draw(7, 2, 32, dtype=dtype)
    labels = torch.arange(14).view(7, 2) * 2
    weight = draw(7, 2, seed=1)
    # Each of the two fused functions modifies float32 logits in place; a model creates its logits
    # only for the loss.
    with torch.compiler.set_stance("force_eager"):
        fused = gradient(
            lambda x: fused_vocab_parallel_cross_entropy(x.clone(), labels, group), logits, weight
        )
    plain = gradient(
        lambda x: tensor_parallel.vocab_parallel_cross_entropy(x.clone(), labels), logits, weight
    )
    assert torch.equal(fused[0], plain[0])
    assert torch.equal(fused[1], plain[1]) == (dtype == torch.bfloat16)


def test_a_cpu_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from fem_megatron.megatron.model import Layout, transformer_config

    config = transformer_config(ModelConfig(vocab_size=64), Layout(params_dtype=torch.bfloat16))
    assert not config.cross_entropy_loss_fusion
    assert fusions.lacks(CPU) == "no GPU"

    def refuse(*arguments: Any) -> Tensor:
        raise AssertionError("a fused kernel runs on a CPU")

    monkeypatch.setattr(fusions, "megatron_swiglu", refuse)
    x = draw(5, 2, 8)
    assert torch.equal(fusions.swiglu(x), OneProcess().swiglu(x))


@pytest.mark.parametrize(("dtype", "fused"), [(torch.bfloat16, True), (torch.float32, False)])
def test_on_a_gpu_the_loss_is_fused_in_bfloat16(
    dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(fusions, "lacks", lambda device: None)
    assert fusions.config_overrides(dtype).get("cross_entropy_loss_fusion", False) is fused


def test_without_triton_nothing_is_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(fusions, "lacks", lambda device: "the package triton is not installed")
    assert fusions.config_overrides(torch.bfloat16) == {}
    assert "triton is not installed" in caplog.text
