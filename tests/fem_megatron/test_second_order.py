"""Tests of second-order and energy-linear attention layers: the paper's numbers, positions, sizes,
diagnostics.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.second_order.layer import EnergyLinearAttention, SecondOrderAttention
from fem_megatron.mixers.second_order.shape import (
    EnergyLinearShape,
    SecondOrderConfig,
    SecondOrderShape,
)
from fem_megatron.parallel import OneProcess
from fem_megatron.rope import Rope, RopeScaling
from fem_megatron.state import Context
from fem_megatron.update import rms_norm, rotate
from tests.fem_megatron.conftest import drawn, load_fixture, tokens


def descending(kind: str, eta: float) -> Any:
    """Return a layer with W_O = -(eta / H) W_Q^T: the paper's step before W_O is learned."""
    layer = build(kind, jitter=0.0)
    with torch.no_grad():
        layer.norm.weight.fill_(1.0)
        layer.out_proj.weight.copy_(
            -eta / 2 * layer.in_proj.weight.unflatten(0, (2, 2, 8))[:, 0].flatten(0, 1).mT
        )
    return layer


ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-12}  # float64 through a few solves
KINDS = ("mha2nd1st", "mha2nd", "energy_linear")
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def shape(kind: str, **changes: Any) -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "rope": True,
        "rope_base": 10000,
        "norm_eps": 1e-6,
        "causal": True,
    }
    sizes["rope_scaling"] = RopeScaling()
    given = {key: changes.pop(key) for key in list(changes) if key in sizes}
    model = ModelConfig(**{**sizes, **given}, second_order=SecondOrderConfig(**changes))
    if kind == "energy_linear":
        return EnergyLinearShape.of(model)
    return SecondOrderShape.of(model, exact=kind == "mha2nd")


def build(kind: str, **changes: Any) -> Any:
    """Return a layer with random weights around their constants."""
    made = EnergyLinearAttention if kind == "energy_linear" else SecondOrderAttention
    return drawn(made(shape(kind, **changes), OneProcess(torch.float64)), spread=0.2)


@pytest.mark.parametrize("kind", ["mha2nd1st", "mha2nd"])
def test_fixture(kind: str) -> None:
    _, stored = load_fixture(kind)

    def packed(source: str) -> dict[str, Tensor]:
        return {
            "in_proj.weight": (
                torch.stack((stored[f"{source}/Wq"], stored[f"{source}/Wk"]), dim=1).flatten(0, 2)
            ),
            "out_proj.weight": stored[f"{source}/Wo"].permute(1, 0, 2).flatten(1),
            "temperature": stored[f"{source}/T"],
            "newton_temperature": stored[f"{source}/Tb"],
        }

    layer = build(kind, rope=False, jitter=0.0)
    layer.load_state_dict({**packed("in"), "norm.weight": torch.ones(16)})
    z = stored["in/z"][:, None].clone().requires_grad_()
    y = z + layer.step(z, Context())  # the tokens of the fixture are already normalised
    # float64 on both sides; the tolerance of the fixtures.
    torch.testing.assert_close(y[:, 0], stored["out/0"], rtol=1e-9, atol=1e-9)
    (y[:, 0] * stored["w"]).sum().backward()
    assert z.grad is not None
    torch.testing.assert_close(z.grad[:, 0], stored["grad/z"], rtol=1e-9, atol=1e-9)
    for name, grad in packed("grad").items():
        torch.testing.assert_close(layer.get_parameter(name).grad, grad, rtol=1e-9, atol=1e-9)


@EVERY_KIND
@pytest.mark.parametrize("rope", [True, False])
def test_single_tokens_by_the_definition(kind: str, rope: bool) -> None:
    """Token by token and head by head from the equations, with keys in the frame of the query."""
    layer, x = build(kind, rope=rope, jitter=0.0), tokens(7, 1)
    z = rms_norm(x, layer.norm.weight, 1e-6)
    expected = x.clone()
    for t in range(7):
        for h in range(2):
            w_q, w_k = layer.in_proj.weight.unflatten(0, (2, 2, 8))[h]
            q, k = w_q @ z[t, 0], (z[: t + 1] @ w_k.mT)[:, :, None]
            k = (rotate(k, Context(positions=torch.arange(t + 1) - t), Rope(10000)) if rope else k)[
                :, 0, 0
            ]
            if kind == "energy_linear":
                step = (k @ q) @ k
            else:
                temperature = layer.temperature[h]
                newton = layer.newton_temperature[h]
                gram = w_q @ w_q.mT
                p = (-(q - k).square().sum(-1) / (2 * temperature)).softmax(0)
                away = k - p @ k
                bracket = (away.mT * p) @ away / newton
                one = torch.eye(8, dtype=x.dtype)
                bracket = torch.linalg.inv(one - bracket) if kind == "mha2nd" else one + bracket
                step = torch.linalg.inv(gram) @ bracket @ gram @ (q - p @ k)
            expected[t, 0] += layer.out_proj.weight[:, 8 * h : 8 * h + 8] @ step
    torch.testing.assert_close(layer(x, Context()), expected, **ROUNDING)


@EVERY_KIND
def test_yarn_s_factor_is_a_lower_temperature_of_the_same_energy(kind: str) -> None:
    """The rotation stays a rotation: with factor m the layer equals that of m = 1 at T / m^2 and T'
    / m^2; linear attention has none.
    """
    hot = build(kind, rope_scaling=RopeScaling("yarn", 4.0, 24, attention_factor=1.0))
    cold = build(kind, rope_scaling=RopeScaling("yarn", 4.0, 24, attention_factor=1.5))
    x = tokens(9)
    if kind != "energy_linear":
        assert not torch.allclose(hot(x, Context()), cold(x, Context()))
        with torch.no_grad():
            hot.temperature /= 1.5**2
            hot.newton_temperature /= 1.5**2
    torch.testing.assert_close(hot(x, Context()), cold(x, Context()), **ROUNDING)


@EVERY_KIND
@pytest.mark.parametrize(
    "scaling", [RopeScaling(), RopeScaling("yarn", 4.0, 24)], ids=["plain", "yarn"]
)
def test_only_differences_of_positions_count(kind: str, scaling: RopeScaling) -> None:
    layer, x = build(kind, rope_scaling=scaling), tokens(9)
    near, far = (layer(x, Context(positions=torch.arange(9) + start)) for start in (0, 1000))
    # float64 angles of up to 1000 radians.
    torch.testing.assert_close(near, far, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(near, layer(x, Context(positions=2 * torch.arange(9))))


@EVERY_KIND
def test_without_positions_and_mask_order_is_unknown(kind: str) -> None:
    layer = build(kind, rope=False, causal=False)
    x = tokens(9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    context = Context(causal=False)
    torch.testing.assert_close(layer(x[order], context), layer(x, context)[order], **ROUNDING)


def test_mha2nd_refuses_long_sequences() -> None:
    layer = build("mha2nd", exact_max_length=8)
    assert layer.shape.max_length() == 8 and shape("mha2nd1st").max_length() is None
    layer(tokens(8), Context())
    with pytest.raises(
        ValueError, match=r"model.second_order.exact_max_length=8, but mha2nd was given 9 tokens"
    ):
        layer(tokens(9), Context())
    with pytest.raises(ValueError, match="given 9 tokens"):
        layer(tokens(9)[8:], Context(past=8))


# --- sizes ----------------------------------------------------------------------------------------


def test_temperatures_start_at_the_head_s_width_and_a_raw_one_must_be_positive() -> None:
    raw = SecondOrderAttention(shape("mha2nd1st", temperature="raw"), OneProcess()).temperatures()
    log = SecondOrderAttention(shape("mha2nd1st", temperature="log"), OneProcess()).temperatures()
    for ours, theirs in zip(raw, log, strict=True):
        torch.testing.assert_close(ours, torch.full((2,), 8.0))
        torch.testing.assert_close(theirs, ours)
    layer = build("mha2nd1st")
    with torch.no_grad():
        layer.temperature[1] = -1.0
    assert layer(tokens(3), Context()).isnan().all()


def test_mean_is_the_sum_over_the_number_of_tokens() -> None:
    for causal in (True, False):
        summed = build("energy_linear", linear_read="sum", causal=causal)
        mean = build("energy_linear", linear_read="mean", causal=causal)
        x, context = tokens(5), Context(causal=causal)
        count = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None, None] if causal else 5.0
        torch.testing.assert_close(
            mean(x, context) - x, (summed(x, context) - x) / count, **ROUNDING
        )


def test_diagnose_is_the_mean_over_heads_of_the_definition() -> None:
    layer, x = build("mha2nd1st"), tokens(6)
    z = rms_norm(x, layer.norm.weight, 1e-6)
    q, k = torch.nn.functional.linear(z, layer.in_proj.weight).unflatten(-1, (2, 2, 8)).unbind(3)
    q, k = (rotate(part, Context(), Rope(10000)).permute(1, 2, 0, 3) for part in (q, k))
    scores = (-torch.cdist(q, k).square() / (2 * layer.temperature[:, None, None])).masked_fill(
        ~torch.ones(6, 6).tril().bool(), -torch.inf
    )
    expected = (-layer.temperature[:, None] * scores.logsumexp(-1)).mean(1).T
    found = layer.diagnose(x, Context(), torch.arange(6))
    torch.testing.assert_close(found["free_energy_before"], expected.detach(), **ROUNDING)
    half = layer.diagnose(x[:4], Context(), torch.tensor([3]))
    torch.testing.assert_close(
        half["free_energy_after"], found["free_energy_after"][3:4], **ROUNDING
    )


def test_three_quarters_of_attention_and_half_its_cache() -> None:
    for kind in KINDS:
        matrices = [
            weight.size for weight in shape(kind).weights().values() if len(weight.shape) == 2
        ]
        assert sum(matrices) == 3 * 16 * 16
    # The k and v of attention are twice as many.
    assert shape("mha2nd1st").state_bytes(100, 2) == 100 * 16 * 2
    assert (
        shape("energy_linear").state_bytes(100, 2)
        == shape("energy_linear").state_bytes(1, 2)
        == 2 * 8 * 8 * 4
    )


def test_a_small_step_lowers_the_free_energy() -> None:
    layer = descending("mha2nd1st", 0.05)
    x = tokens(9)
    sample = torch.tensor([0, 3, 8])
    with torch.no_grad():
        layer.newton_temperature.fill_(1e9)  # leaves only the gradient; b is a second-order term
    found = layer.diagnose(x, Context(), sample)
    assert all(value.shape == (3, 2) for value in found.values())
    assert (found["free_energy_after"] < found["free_energy_before"]).all()
    torch.testing.assert_close(
        found["step_norm"], (layer(x, Context()) - x)[sample].norm(dim=-1), **ROUNDING
    )
