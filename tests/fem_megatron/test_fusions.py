"""Megatron's fused kernels: their mathematics on a CPU, uncompiled, against what they stand in for; and that a CPU uses none of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.megatron import fusions, platform
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import Rope
from fem_megatron.state import Context
from fem_megatron.update import rotate

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
    # Uncompiled, its backward rounds every step of the gate's derivative; compiled, all of it is one kernel in float32.
    assert (grad - plain_grad).norm() <= (1e-2 if dtype == torch.bfloat16 else 1e-14) * plain_grad.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_is_for_bfloat16(dtype: torch.dtype) -> None:
    """Fused and plain agree to the bit in bfloat16; in float32 the fused one's gradient is rounded, which is why it is not used there."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    group = parallel_state.get_tensor_model_parallel_group()
    logits, labels, weight = 4 * draw(7, 2, 32, dtype=dtype), torch.arange(14).view(7, 2) * 2, draw(7, 2, seed=1)
    # Each works in place on float32 logits; a model's are made for it.
    with torch.compiler.set_stance("force_eager"):
        fused = gradient(lambda x: fused_vocab_parallel_cross_entropy(x.clone(), labels, group), logits, weight)
    plain = gradient(lambda x: tensor_parallel.vocab_parallel_cross_entropy(x.clone(), labels), logits, weight)
    assert torch.equal(fused[0], plain[0])
    assert torch.equal(fused[1], plain[1]) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_by_the_kernel_that_megatron_calls(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn's function stood in for by its documented formula: x [b, s, h, d], cos and sin [s, d / 2], halves paired."""
    from megatron.core.models.common.embeddings import rope_utils

    def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        assert not interleaved and cos.shape == (x.shape[1], x.shape[3] // 2) and cos.dtype == x.dtype
        first, second = x.chunk(2, dim=-1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    monkeypatch.setattr(rope_utils, "apply_rotary_emb_flash", apply_rotary_emb)

    class Turning(OneProcess):
        turn = staticmethod(fusions.megatron_turn)

    x = draw(6, 2, 3, 8, dtype=dtype)
    wanted = rotate(x, Context(), Rope(10000))
    torch.testing.assert_close(rotate(x, Context(), Rope(10000), Turning()), wanted)
    assert not torch.equal(wanted, x)


def test_positions_of_their_own_are_turned_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusions, "lacks_rope", lambda device: None)
    monkeypatch.setattr(fusions, "megatron_turn", lambda x, cos, sin: torch.zeros_like(x))

    class Turning(OneProcess):
        turn = staticmethod(fusions.turn)

    x, own = draw(6, 2, 3, 8), torch.arange(12).view(6, 2)
    assert torch.equal(rotate(x, Context(positions=own), Rope(10000), Turning()), rotate(x, Context(positions=own), Rope(10000)))
    assert not rotate(x, Context(), Rope(10000), Turning()).any()
    assert rotate(x.double(), Context(), Rope(10000), Turning()).any()


def test_a_cpu_uses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from fem_megatron.megatron.model import Layout, transformer_config

    config = transformer_config(ModelConfig(vocab_size=64), Layout(params_dtype=torch.bfloat16))
    assert not config.cross_entropy_loss_fusion
    assert fusions.lacks(CPU) == fusions.lacks_rope(CPU) == "no GPU"

    def refuse(*arguments: Any) -> Tensor:
        raise AssertionError("a fused kernel runs on a CPU")

    monkeypatch.setattr(fusions, "megatron_swiglu", refuse)
    monkeypatch.setattr(fusions, "megatron_turn", refuse)
    x = draw(5, 2, 8)
    assert torch.equal(fusions.swiglu(x), OneProcess().swiglu(x))
    fusions.turn(draw(6, 1, 1, 4), draw(6, 1, 1, 2), draw(6, 1, 1, 2))


@pytest.mark.parametrize(("dtype", "fused"), [(torch.bfloat16, True), (torch.float32, False)])
def test_on_a_gpu_the_loss_is_fused_in_bfloat16(dtype: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(fusions, "lacks", lambda device: None)
    monkeypatch.setattr(fusions, "lacks_rope", lambda device: "the package flash-attn is not installed")
    assert fusions.config_overrides(dtype).get("cross_entropy_loss_fusion", False) is fused


def test_without_triton_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(platform, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(fusions, "lacks", lambda device: "the package triton is not installed")
    assert fusions.config_overrides(torch.bfloat16) == {}
    assert "triton is not installed" in caplog.text
