"""The conditioner's features: the definition's gradients, and the Triton kernels in the interpreter against it."""

from __future__ import annotations

import pytest
import torch

from kernels.check import results
from kernels.conditioner_features import conditioner_features
from kernels.conditioner_features.cases import SUITE
from tests.kernels.oracle import relative


@pytest.mark.parametrize("channels", [1, 16, 33, 128])
@pytest.mark.parametrize("tokens", [1, 4, 5])
def test_every_edge(channels: int, tokens: int) -> None:
    size = {"tokens": tokens, "batch": 1, "channels": channels}
    x = SUITE.cases["normal"](size)
    truth = results(SUITE.definition, x, torch.float64, "cpu")
    for name, got in results(lambda given: SUITE.call(given, "triton"), x, torch.float32, "cpu").items():
        assert float((got - truth[name]).abs().max()) < 1e-5, name  # rounding of numbers of order ten


def test_the_weight_may_have_another_type() -> None:
    x = {name: t.float() for name, t in SUITE.cases["normal"](SUITE.small).items()}
    weight = x["weight"].bfloat16().requires_grad_()
    plain = conditioner_features(x["logits"], x["state"], weight, 1e-5, implementation="reference")
    fused = conditioner_features(x["logits"], x["state"], weight, 1e-5, implementation="triton")
    assert relative(fused, plain.double()) < 1e-6
    (d_fused,) = torch.autograd.grad(fused.square().sum(), weight)
    assert d_fused.dtype == torch.bfloat16


def test_bad_arguments_are_refused_in_one_line() -> None:
    logits, state, weight = torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(4)
    for given, message in (
        ((logits[:2], state, weight), r"logits have shape \[2, 4\] and state \[3, 4\]"),
        ((logits, state, weight[:2]), r"weight has shape \[2\], expected \[4\]"),
        ((logits.half(), state, weight), "use float64, float32 or bfloat16"),
        ((logits.bfloat16(), state.bfloat16(), weight), "state is torch.bfloat16 on cpu.*expected torch.float32"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            conditioner_features(*given, 1e-5)
        assert str(error.value).startswith("conditioner_features: ") and "\n" not in str(error.value)
    for many, dtype, reason in ((4, torch.float64, "float64"), (8193, torch.float32, "8193 channels are over 8192")):
        x = torch.zeros(1, many, dtype=dtype)
        with pytest.raises(ValueError, match=f"implementation 'triton' cannot run: {reason}"):
            conditioner_features(x, x, x[0], 1e-5, implementation="triton")
