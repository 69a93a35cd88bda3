"""Tests of CEM's layers: the numbers of the fixtures, their energies, and their switches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.cem.layer import (
    CemAttention,
    CemMlp,
    elementwise_energy,
    smallest_eigenvalue,
)
from fem_megatron.mixers.cem.shape import CemAttentionShape, CemConfig, CemMlpShape
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import Weight
from fem_megatron.state import Context
from fem_megatron.update import rms_norm
from kernels.cem_attention.reference import interaction_energy, interaction_scores
from tests.fem_megatron.conftest import drawn, load_fixture, tokens

ROUNDING: Any = {"rtol": 1e-10, "atol": 1e-12}  # float64 over two steps
DIAGONALS = ("none", "shared", "head")
PRECONDITIONERS = ("identity", "diagonal", "low_rank")
PLAIN: dict[str, Any] = {
    "diagonal": "none",
    "preconditioner": "identity",
    "steps_attention": 1,
    "steps_mlp": 1,
}
Layers = CemAttention | CemMlp


def model(
    hidden: int = 16,
    heads: int = 4,
    ffn_size: int = 24,
    causal: bool = True,
    norm_eps: float = 1e-6,
    **switches: Any,
) -> Any:
    return ModelConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        ffn_hidden_size=ffn_size,
        causal=causal,
        norm_eps=norm_eps,
        cem=CemConfig(**switches),
    )


def attention(**sizes: Any) -> CemAttention:
    made: CemAttention = drawn(
        CemAttention(CemAttentionShape.of(model(**sizes)), OneProcess(torch.float64))
    )
    return made


def mlp(**sizes: Any) -> CemMlp:
    made: CemMlp = drawn(CemMlp(CemMlpShape.of(model(**sizes)), OneProcess(torch.float64)))
    return made


def both(**sizes: Any) -> list[Layers]:
    return [attention(**sizes), mlp(**sizes)]


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fold", [True, False])
def test_fixture(kind: str, steps: int, fold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixtures contain the subroutines of Algorithm 1 for a normalised h; their p is our
    sqrt(D) p.
    """
    _, stored = load_fixture(f"cem_{kind}_T{steps}")
    switches: dict[str, Any] = {
        "preconditioner": "low_rank" if "in/U" in stored else "diagonal",
        "rank_attention": 2,
        "rank_mlp": 2,
    }
    switches |= {f"steps_{kind}": steps, "diagonal": "shared" if "in/d" in stored else "none"}
    layer: Any = (attention if kind == "attention" else mlp)(**switches)
    preconditioner = {
        "p": "precondition.p",
        "U": "precondition.u",
        "Vp" if kind == "mlp" else "V": "precondition.v",
    }
    names = {"W": "gamma.weight", "V": "up.weight"}
    if kind == "attention":
        names = {
            "Wq": "query.weight",
            "Wk": "key.weight",
            "d": "diagonal",
            "b_self": "self_bias",
            "b_cross": "cross_bias",
        }
    names |= preconditioner
    weights = {
        ours: layer.get_parameter(ours)
        for theirs, ours in names.items()
        if f"in/{theirs}" in stored
    }
    assert {*weights, "norm.weight"} == {name for name, _ in layer.named_parameters()}
    with torch.no_grad():
        for theirs, ours in names.items():
            if ours in weights:
                weights[ours].copy_(
                    stored[f"in/{theirs}"].view(weights[ours].shape)
                    / (4.0 if theirs == "p" else 1.0)
                )
    forward = layer.precondition.forward
    monkeypatch.setattr(
        layer.precondition, "forward", lambda w, tokens: forward(w, 1000 if fold else 1)
    )
    h = stored["in/h"][:, None].clone().requires_grad_()
    out = layer.descend(h, h, None, Context()) if kind == "attention" else layer.descend(h, h, None)
    grads = dict(
        zip(
            ["h", *weights],
            torch.autograd.grad((out * stored["w"][:, None]).sum(), [h, *weights.values()]),
            strict=True,
        )
    )
    checks = [(out[:, 0], stored["out/0"]), (grads["h"][:, 0], stored["grad/h"])]
    for theirs, ours in names.items():
        if ours in weights:
            checks.append(
                (
                    grads[ours].view(stored[f"grad/{theirs}"].shape),
                    stored[f"grad/{theirs}"] * (4.0 if theirs == "p" else 1.0),
                )
            )
    for got, right in checks:
        # float64 on both sides; the tolerance of the fixtures.
        torch.testing.assert_close(got, right, rtol=1e-9, atol=1e-9)


# --- limits and energies --------------------------------------------------------------------------


def energy(layer: Layers, h: Tensor, u: Tensor, u_diagonal: Tensor | None = None) -> Tensor:
    """Return the energy of each token at u given h, [s, b]; u_diagonal: the input of the diagonal,
    if it is not u.
    """
    if isinstance(layer, CemMlp):
        return elementwise_energy(layer.gamma(h), linear(u, layer.up.weight))
    k, seen = layer.remember(h, Context())
    q, diagonal = layer.score_inputs(u, seen)
    if diagonal is not None and u_diagonal is not None:
        diagonal = diagonal._replace(u=u_diagonal.transpose(0, 1))
    scores = interaction_scores(
        q, k, *layer.biases(q), diagonal, own=torch.arange(len(h)), scale=layer.shape.scale
    )
    return interaction_energy(scores, layer.shape.scale).T


@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_a_step_is_minus_the_gradient_of_the_energy(diagonal: str) -> None:
    """The gradient is with respect to u. A diagonal changes the weights, and Algorithm 1 omits its
    own part of the gradient.
    """
    for layer in both(**PLAIN | {"diagonal": diagonal}):
        h, start = tokens(9), tokens(9, seed=1)
        u = rms_norm(start, None, 1e-6).requires_grad_()
        (gradient,) = torch.autograd.grad(energy(layer, h, u, u.detach()).sum(), u)
        if isinstance(layer, CemAttention):
            moved = layer.descend(h, start, None, Context())
        else:
            moved = layer.descend(h, start, None)
        torch.testing.assert_close(moved - start, -gradient, **ROUNDING)


def test_elementwise_energy() -> None:
    z = torch.linspace(-40, 40, 4001, dtype=torch.float64).requires_grad_()
    phi = -elementwise_energy(torch.ones(4001, 1, dtype=torch.float64), z[:, None])
    (slope,) = torch.autograd.grad(phi.sum(), z)
    phi = phi.detach()
    torch.testing.assert_close(slope, silu(z), rtol=1e-12, atol=1e-14)  # float64 rounding
    torch.testing.assert_close(
        phi[2000], torch.tensor(-(torch.pi**2) / 12, dtype=torch.float64), rtol=1e-14, atol=0
    )  # Li2(-1)
    assert abs(float(phi[0])) < 1e-15  # the integral starts at zero
    assert (
        elementwise_energy(torch.ones(3).bfloat16(), torch.ones(3).bfloat16()).dtype
        == torch.float32
    )


@pytest.mark.parametrize("residual", ["normalised", "raw"])
def test_diagnose(residual: str) -> None:
    for layer in both(residual=residual):
        x, some = tokens(11), torch.tensor([0, 4, 7])
        after = layer(x, Context())
        found = layer.diagnose(x, Context(), some)
        h = rms_norm(x, layer.norm.weight, 1e-6)
        start = h if residual == "normalised" else x
        for name, end in (("energy_before", start), ("energy_after", after)):
            torch.testing.assert_close(
                found[name], energy(layer, h, rms_norm(end, None, 1e-6))[some], **ROUNDING
            )
        torch.testing.assert_close(
            found["step_norm"], (after - start)[some].norm(dim=-1), **ROUNDING
        )
        assert found["smallest_eigenvalue"].shape == (
            (4,) if isinstance(layer, CemAttention) else (1,)
        )
        for name, value in layer.diagnose(x, Context(), some, after).items():
            torch.testing.assert_close(value, found[name], **ROUNDING)


# --- switches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", ["normalised", "raw"])
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_attention_equals_a_naive_loop(diagonal: str, preconditioner: str, residual: str) -> None:
    """Algorithm 1, head by head, with every P_k as a D x D matrix."""
    switches: dict[str, Any] = {
        "preconditioner": preconditioner,
        "residual": residual,
        "eta_attention": 0.7,
        "steps_attention": 3,
        "scale": "head",
    }
    layer, stream = attention(diagonal=diagonal, **switches), tokens(5, b=1)
    h = rms_norm(stream, layer.norm.weight, 1e-6)[:, 0]
    x = h if residual == "normalised" else stream[:, 0]
    i = torch.arange(5)
    for _ in range(3):
        u, moved = rms_norm(x, None, 1e-6), torch.zeros_like(x)
        for k in range(4):
            w_q, w_k = (w.weight[4 * k : 4 * k + 4] for w in (layer.query, layer.key))
            a = (w_q @ u.T).T @ (w_k @ h.T)
            if diagonal != "none":
                a = a + (u * layer.diagonal.view(-1, 16)[k if diagonal == "head" else 0]) @ h.T
            a = (
                a / 2
                - 0.25 ** (k + 1) * (i[:, None] - i).abs()
                + torch.where(i[:, None] == i, layer.self_bias, layer.cross_bias)
            )
            o = a.masked_fill(i[:, None] < i, -torch.inf).softmax(-1) @ (w_k @ h.T).T
            moved = moved + o @ w_q @ matrix(layer, k)
        x = x + 0.7 * moved
    torch.testing.assert_close(layer(stream, Context())[:, 0], x, **ROUNDING)


@pytest.mark.parametrize("residual", ["normalised", "raw"])
@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_mlp_equals_a_naive_loop(preconditioner: str, residual: str) -> None:
    layer = mlp(preconditioner=preconditioner, residual=residual, eta_mlp=0.7, steps_mlp=3)
    stream = tokens(5)
    h = rms_norm(stream, layer.norm.weight, 1e-6)
    x = h if residual == "normalised" else stream
    for _ in range(3):
        activations = silu(linear(rms_norm(x, None, 1e-6), layer.up.weight))
        step = 0.7 * (layer.gamma(h) * activations)
        x = x + step @ layer.up.weight @ matrix(layer, 0)
    torch.testing.assert_close(layer(stream, Context()), x, **ROUNDING)


def matrix(layer: Layers, group: int) -> Tensor:
    """Return P as a full matrix."""
    part, kind = layer.precondition, layer.shape.switches.preconditioner
    if kind == "identity":
        return torch.eye(16, dtype=torch.float64)
    p = torch.diag(torch.nn.functional.softplus(4.0 * part.p.view(-1, 16)[group]))
    if kind == "low_rank":
        u, v = part.u[group], part.v[group]
        p = p + u @ v.T + v @ u.T
    return p


@pytest.mark.parametrize("strength", [0.0, 1e-3, 1.0, 30.0])
def test_smallest_eigenvalue(strength: float) -> None:
    rng = torch.Generator().manual_seed(0)
    d = torch.randn(3, 20, generator=rng, dtype=torch.float64)
    u = torch.randn(3, 20, 4, generator=rng, dtype=torch.float64)
    v = torch.randn(3, 20, 4, generator=rng, dtype=torch.float64)
    d, v = torch.nn.functional.softplus(d), v * strength
    expected = torch.linalg.eigvalsh(torch.diag_embed(d) + u @ v.mT + v @ u.mT)[:, 0]
    # Both are exact up to float64 rounding.
    torch.testing.assert_close(smallest_eigenvalue(d, u, v), expected, rtol=1e-10, atol=1e-10)
    for kind in PRECONDITIONERS:
        for layer in both(preconditioner=kind):
            least = [
                torch.linalg.eigvalsh(matrix(layer, group))[0]
                for group in range(layer.precondition.smallest_eigenvalue().numel())
            ]
            torch.testing.assert_close(
                layer.precondition.smallest_eigenvalue(),
                torch.stack(least).detach(),
                rtol=1e-10,
                atol=1e-10,
            )


def test_as_it_starts() -> None:
    """P is softplus(1) I; the biases and the diagonal are zero."""
    parts = [
        CemAttention(CemAttentionShape.of(model()), OneProcess()),
        CemMlp(CemMlpShape.of(model()), OneProcess()),
    ]
    for layer in parts:
        with torch.no_grad():
            for name, weight in layer.named_parameters():
                if name.endswith("precondition.u"):
                    weight.normal_(0, 0.02)
        p = layer.precondition
        rows = torch.randn(p.p.numel() // 16, 3, 16)
        torch.testing.assert_close(p.times(rows, p.diagonal(), p.factors()), rows * 1.3132617)
    assert parts[0].diagonal.abs().max() == 0 and parts[0].self_bias == parts[0].cross_bias == 0


# --- as a language model --------------------------------------------------------------------------


def test_bidirectional() -> None:
    layer, x = attention(causal=False), tokens(7)
    forth, back = layer(x, Context(causal=False)), layer(x.flip(0), Context(causal=False))
    # |i - j| does not depend on the direction.
    torch.testing.assert_close(forth, back.flip(0), **ROUNDING)
    assert not torch.allclose(forth, layer(x, Context()))


# --- the shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_energies_fall_along_small_steps(preconditioner: str) -> None:
    # The initial P: softplus(1) I.
    switches: dict[str, Any] = {
        "diagonal": "none",
        "preconditioner": preconditioner,
        "eta_attention": 0.02,
        "eta_mlp": 0.02,
    }
    for layer in both(**switches):
        with torch.no_grad():
            for name, weight in layer.named_parameters():
                if name.startswith("precondition"):
                    weight.fill_(0.25 if name.endswith("p") else 0.0)
        h = tokens(9)
        before, points = energy(layer, h, rms_norm(h, None, 1e-6)), [h]
        for _ in range(6):
            known = (Context(),) if isinstance(layer, CemAttention) else ()
            points.append(layer.descend(h, points[-1], None, *known))
            after = energy(layer, h, rms_norm(points[-1], None, 1e-6))
            assert (after < before).all()
            before = after


def test_a_preconditioner_folded_or_not() -> None:
    for layer in both():
        w = (layer.query if isinstance(layer, CemAttention) else layer.up).weight
        c = tokens(9, hidden=16)
        c = torch.cat((c, c), -1)[..., : len(w)]
        torch.testing.assert_close(
            layer.precondition(w, 1000)(c), layer.precondition(w, 1)(c), **ROUNDING
        )


def test_numbers_of_parameters() -> None:
    """Half of attention's D^2 and two thirds of a gated MLP's; every weight counts once."""

    def matrices(weights: dict[str, Weight]) -> int:
        return sum(weight.size for weight in weights.values() if len(weight.shape) == 2)

    assert matrices(CemAttentionShape.of(model(**PLAIN)).weights()) == 2 * 16**2
    assert matrices(CemMlpShape.of(model(**PLAIN)).weights()) == 2 * 16 * 24
    sizes = []
    for layer in both():
        sizes.append(sum(weight.size for weight in layer.shape.weights().values()))
    preconditioners = [4 * 16 * (1 + 2 * 4), 16 * (1 + 2 * 16)]
    assert sizes == [
        16 + 2 * 16**2 + 2 + 16 + preconditioners[0],
        16 + 2 * 16 * 24 + preconditioners[1],
    ]
    for layer, size in zip(both(), sizes, strict=True):
        assert sum(weight.numel() for weight in layer.parameters()) == size


@pytest.mark.parametrize(("alibi", "each"), [("heads", -8 / 12), ("powers", -1.0)])
def test_slopes_fall_by_head(alibi: str, each: float) -> None:
    """The two definitions differ for 12 heads."""
    shape = CemAttentionShape.of(model(hidden=48, heads=12, alibi=alibi))
    wanted = torch.tensor([2.0 ** (each * (head + 1)) for head in range(12)], dtype=torch.float64)
    slopes, _, _ = CemAttention(shape, OneProcess(torch.float64)).biases(wanted)
    torch.testing.assert_close(slopes, wanted, **ROUNDING)
