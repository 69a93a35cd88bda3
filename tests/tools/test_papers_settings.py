"""Tests of the papers' settings in the full forms of tools.papers, and of the layers that only its
experiments use.
"""

from __future__ import annotations

from typing import Any

import torch

from fem_megatron.config import ModelConfig
from fem_megatron.state import Context
from tools.papers import catalogue, images, lis, parts


def test_parts_of_the_papers() -> None:
    """Hyena is causal and is the direct convolution; a tied output matrix has a sign."""
    model = ModelConfig(hidden_size=8, num_attention_heads=2, ffn_hidden_size=16)
    torch.manual_seed(0)
    hyena = parts.Hyena(model, 12).double()
    torch.nn.init.normal_(hyena.skip)
    x = torch.randn(12, 2, 8, dtype=torch.float64, requires_grad=True)
    out = hyena(x, Context())
    (grad,) = torch.autograd.grad(out[5].square().sum(), x)
    # A filter may nearly end within six tokens. The transform mixes all tokens, up to rounding.
    assert grad[4:6].abs().amax((1, 2)).min() > 1e-6 and grad[6:].abs().max() < 1e-12
    mixed = hyena.short(hyena.into(hyena.norm(x)).permute(1, 2, 0))[..., :12]
    gate, first, value = mixed.chunk(3, dim=1)
    value, h = first * value, hyena.filters(12).T
    long = torch.stack(
        [sum(h[:, i - j] * value[..., j] for j in range(i + 1)) for i in range(12)], -1
    )
    wanted = x + hyena.out((gate * (long + hyena.skip.T * value)).permute(2, 0, 1))
    torch.testing.assert_close(out, wanted, rtol=1e-11, atol=1e-12)  # float64 rounding
    up, down = (parts.SharedAttention(model, tied=sign) for sign in (1, -1))
    down.load_state_dict(up.state_dict())
    y = torch.randn(12, 2, 8)
    torch.testing.assert_close(up(y, Context()) + down(y, Context()), 2 * y)  # float32 rounding
    assert not torch.equal(up(y, Context()), y)
    assert parts.SharedAttention(model).out is not None
    mlp = parts.ReluMlp(model)
    assert [tuple(layer.weight.shape) for layer in (mlp.up, mlp.down)] == [(16, 8), (8, 16)]


def test_full_forms_have_the_papers_settings() -> None:
    """Appendices of the papers: optimizer, learning rate, sizes."""

    def settings(name: str, *fields: str, kind: str = "full") -> tuple[Any, ...]:
        size = catalogue.experiment_of(name).sizes[kind]
        return tuple(getattr(size, field) for field in fields)

    optimizer = ("l2", "betas", "weight_decay", "rates", "floor", "clip", "constant")
    assert settings("sudoku", *optimizer) == (
        False, (0.9, 0.95), 0.1, (1e-4,), 0.0, 1.0, False,
    )  # fmt: skip
    adam = (True, (0.9, 0.999), 5e-5, (1e-3,), 1e-5, None, False)
    assert settings("hyperset-images", *optimizer) == settings("imagenet-100", *optimizer) == adam
    masked = settings("masked-digits", *optimizer, kind="quick")
    assert (*masked[:3], *masked[4:]) == (False, (0.9, 0.95), 0.1, 0.0, 3.0, True)
    assert settings("lis", *optimizer) == (
        False, (0.9, 0.999), 0.01, (1e-4,), 0.0, 1.0, True,
    )  # fmt: skip
    assert settings("lis", "epochs", "averaged", "batch", "layers") == (300, 5, 128, 3)
    assert settings("mad", "epochs", "batch", "floor") == (200, 128, 1e-6)
    cases = catalogue.experiment_of("lis").sizes["full"].cases
    assert {lis.parts(case)[0] for case in cases} == {10, 20, 30, 40}
    assert {lis.parts(case)[2] for case in cases} == {32, 64, 128, 256}
    for name in ("sudoku", "hyperset-images", "masked-digits"):
        for row in catalogue.experiment_of(name).rows.values():
            switches = row.get("hyperset", {"step_norm": False})
            # Table 5 has no norm; fixed step sizes have no network.
            assert switches["step_norm"] == (switches.get("step_size") == "fixed")
    size = catalogue.experiment_of("hyperset-images").sizes["full"]
    for row, width in (
        ("Transformer", 384),
        ("Energy Transformer", 384),
        ("Hyper-SET, small", 384),
        ("Hyper-SET", 512),
        ("LoRA of rank 32", 512),
        ("Transformer, wide", 1152),
        ("Hyper-SET, wide", 1536),
    ):
        assert images.width_of(row) == width and size.width == 384
