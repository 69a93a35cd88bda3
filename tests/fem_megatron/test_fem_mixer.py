"""The mixer module against the float64 fixtures, and the properties that its switches promise. One process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.fem.layer import FemMixer
from fem_megatron.mixers.fem.shape import FemConfig, FemShape
from fem_megatron.parallel import OneProcess
from fem_megatron.state import Context

FIXTURES = Path(__file__).parent.parent / "fixtures"
Arrays = dict[str, torch.Tensor]


def build_mixer(model: ModelConfig) -> FemMixer:
    """The model's mixer in float64, every weight drawn anew so that none is trivial."""
    mixer = model.blocks()[0].mixer
    assert isinstance(mixer, FemShape)
    layer = FemMixer(mixer, OneProcess(torch.float64))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0.0, 0.3, generator=generator)
    return layer


def pack(heads: int, *parts: torch.Tensor) -> torch.Tensor:
    """Rows of q, k, v, lambda, g, head after head, as the packed projection holds them."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def load_fixture(name: str) -> tuple[dict[str, Any], Arrays]:
    with np.load(FIXTURES / f"{name}.npz") as file:
        return json.loads(str(file["meta"])), {key: torch.from_numpy(file[key]) for key in file.files if key != "meta"}


def _inverse_temperature(released: torch.Tensor) -> torch.Tensor:
    """The fixture's beta is softplus(parameter) + 1e-6; ours is softplus(b + 1.8)."""
    beta = torch.nn.functional.softplus(released) + 1e-6
    return beta + torch.log(-torch.expm1(-beta)) - 1.8


def _released_order(rows: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """phi's slices in the fixture are v, q, k, lambda, g; ours follow the projection: q, k, v, lambda, g."""
    q, k, v, lam, gate = widths
    v_rows, q_rows, k_rows, lam_rows, gate_rows = rows.split([v, q, k, lam, gate])
    return [q_rows, k_rows, v_rows, lam_rows, gate_rows]


def place(mixer: Any, arrays: Arrays, heads: int, kind: str) -> Arrays:
    """The fixture's parameters (``param``) or gradients (``grad``) by our names and packing."""
    names = [f"{kind}/W_{name}.weight" for name in ("q", "k", "v", "lambda", "gate")]
    placed = {
        "in_proj.weight": pack(heads, *(arrays[name] for name in names)),
        "norm.weight": torch.ones(arrays["x"].shape[-1], dtype=torch.float64),
        "out_proj.weight": arrays[f"{kind}/W_o.weight"],
        "beta": _inverse_temperature(arrays["param/_beta_param"]) if kind == "param" else arrays["grad/_beta_param"],
    }
    if f"{kind}/tdc.fwd.out_proj" in arrays:
        tdc = {key.removeprefix(f"{kind}/tdc.fwd."): value for key, value in arrays.items() if key.startswith(f"{kind}/tdc.fwd.")}
        widths = [arrays[name].shape[0] for name in names]
        placed |= {
            "tdc.norm.weight": tdc["norm.weight"],
            "tdc.state_norm.weight": tdc["ln.weight"],
            # Rows a, f, r of each channel.
            "tdc.in_proj.weight": torch.stack([tdc["in_f.weight"], tdc["x_f.weight"], tdc["shortcut.weight"]], dim=1).flatten(0, 1),
            "tdc.out_proj.weight": pack(heads, *_released_order(tdc["out_proj"].T, widths)),
        }
    assert placed.keys() == dict(mixer.named_parameters()).keys()
    return placed


def read_alone(mixer: FemMixer, x: torch.Tensor) -> torch.Tensor:
    """The mixer without its norm and residual: the fixture's layer stands alone."""
    return mixer.step(x, Context(causal=mixer.shape.causal))


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("name", ["fem_softmax_full", "fem_softmax_no_conv", "fem_softmax_bidirectional"])
def test_reproduces_the_fixture(name: str, backend: str) -> None:
    meta, arrays = load_fixture(name)
    fem = FemConfig(conditioner=meta["C"], budget="ii" if meta["d_k"] == meta["d_v"] else "i", value_size=meta["fem_dim"])
    if meta["C"]:
        fem = replace(fem, conditioner_size=4)
    model = ModelConfig(
        hidden_size=meta["D"],
        num_attention_heads=meta["H"],
        vocab_size=8,
        rope=False,
        norm_eps=0.0,
        attention_backend=backend,
        fem=fem,
        causal=meta["causal"],
    )
    mixer = build_mixer(model)
    if meta["C"]:
        mixer.tdc.eps = 1e-5
    mixer.load_state_dict(place(mixer, arrays, meta["H"], "param"))
    x = arrays["x"].transpose(0, 1).clone().requires_grad_()
    y = read_alone(mixer, x)
    (y * arrays["w"].transpose(0, 1)).sum().backward()

    # The fixture adds 1e-6 to the gate (of order one) before it normalises it; ours adds nothing there. All else agrees to rounding.
    def close(got: torch.Tensor | None, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got, wanted, rtol=0, atol=3e-6 * wanted.abs().max().item())

    close(y, arrays["y"].transpose(0, 1))
    close(x.grad, arrays["dx"].transpose(0, 1))
    for key, wanted in place(mixer, arrays, meta["H"], "grad").items():
        if key != "norm.weight":  # the fixture has none
            close(mixer.get_parameter(key).grad, wanted)
