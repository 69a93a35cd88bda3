"""Tests of linear maps in 8-bit floats: operands and products against float64 definitions, and the
set of such maps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from fem_megatron.megatron import fp8, platform
from fem_megatron.megatron.model import Layout, transformer_config
from fem_megatron.megatron.specs import MegatronBlock

# Mantissa bits, smallest exponent of a normal number, largest number (OCP's 8-bit formats).
FORMATS = {fp8.FORWARD: (3, -6, 448.0), fp8.BACKWARD: (2, -14, 57344.0)}
SPREAD = 12  # binary orders of magnitude; wide enough that some numbers are denormal in 8 bits


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(SPREAD * torch.rand(shape, generator=generator))
    return (torch.randn(shape, generator=generator) * sizes).to(dtype)


def rounded(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return t in float64 as rounded for an operand, and the largest possible error: half a step of
    2^(exponent - mantissa).
    """
    mantissa, least, largest = FORMATS[dtype]
    t = t.detach().double()
    scale = 2.0 ** torch.floor(torch.log2(t.abs().max() / largest) + 1)
    exponent = torch.floor(torch.log2((t / scale).abs())).clamp_min(least)
    step = scale * 2.0 ** (exponent - mantissa)
    return torch.round(t / step) * step, step / 2  # round: half to even


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_an_operand_is_the_nearest_number_to_the_bit(dtype: torch.dtype, of: torch.dtype) -> None:
    for seed in range(20):
        t = draw(16, 32, seed=seed, dtype=of) * 10.0 ** (seed - 10)
        found, scale = fp8.quantised(t, dtype)
        wanted, bound = rounded(t, dtype)
        assert found.is_contiguous() and torch.equal(found.double() * scale.double(), wanted)
        assert bool(((wanted - t.double()).abs() <= bound).all())
        assert float(torch.frexp(scale).mantissa) == 0.5
    nothing, _ = fp8.quantised(torch.zeros(16, 16, dtype=of), dtype)
    assert not nothing.double().any()


def test_parts_scaled_separately_round_to_the_same_numbers() -> None:
    for dtype, normal in ((fp8.FORWARD, 2.0**-13), (fp8.BACKWARD, 2.0**-28)):
        full = draw(64, 32, seed=3)
        parts = []
        for part in full.split(16):
            found, scale = fp8.quantised(part, dtype)
            parts.append(found.double() * scale.double())
        found, scale = fp8.quantised(full, dtype)
        same = full.abs() > normal * full.abs().max()
        assert torch.equal(torch.cat(parts)[same], (found.double() * scale.double())[same])
        assert same.float().mean() > 0.9
        assert len({float(fp8.quantised(part, dtype)[1]) for part in full.split(16)}) > 1


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=str)
def test_all_three_products_are_those_of_their_operands(of: torch.dtype) -> None:
    """Tolerance: the rounding of the sum (fp32's 2^-24 for each of n terms) and of the result. The
    error of the exact products is that of the operands.
    """
    x = draw(8, 6, 32, seed=0, dtype=of)
    weight = draw(48, 32, seed=1, dtype=of)
    dy = draw(8, 6, 48, seed=2, dtype=of)
    x.requires_grad_()
    weight.requires_grad_()
    y = fp8.linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (of, of, of)
    qx, off_x = rounded(x.flatten(0, 1), fp8.FORWARD)
    qw, off_w = rounded(weight, fp8.FORWARD)
    qg, off_g = rounded(dy.flatten(0, 1), fp8.BACKWARD)
    for found, (a, off_a, t), (b, off_b, u) in (
        (y, (qx, off_x, x.flatten(0, 1)), (qw.T, off_w.T, weight.T)),
        (dx, (qg, off_g, dy.flatten(0, 1)), (qw, off_w, weight)),
        (dw, (qg.T, off_g.T, dy.flatten(0, 1).T), (qx, off_x, x.flatten(0, 1))),
    ):
        wanted, sums = a @ b, a.abs() @ b.abs()
        error = (found.detach().double().view_as(wanted) - wanted).abs()
        narrow = torch.finfo(of).eps / 2 * wanted.abs()
        assert bool((error <= a.shape[1] * 2.0**-24 * sums + narrow).all())
        exact = t.detach().double() @ u.detach().double()
        allowed = (
            off_a @ u.detach().double().abs() + t.detach().double().abs() @ off_b + off_a @ off_b
        )
        assert bool(((wanted - exact).abs() <= allowed * (1 + 1e-12)).all())
        assert not torch.equal(wanted, exact)


def history(weight: Tensor, steps: int, margin: int = 0) -> fp8.Delayed:
    return fp8.Delayed(
        {"map": weight}, steps, margin, torch.distributed.group.WORLD, torch.device("cpu")
    )


def passes(
    x: Tensor, weight: Tensor, dy: Tensor, known: fp8.Known | None = None
) -> tuple[Tensor, ...]:
    x = x.clone().requires_grad_()
    y = fp8.linear(x, weight, known)
    return y.detach(), *torch.autograd.grad(y, (x, weight), dy)


def test_a_delayed_scale_goes_by_the_largest_of_the_last_steps() -> None:
    """Includes the margin; skipped steps and computations between steps do not count."""
    weight, scales = draw(16, 32, seed=1).requires_grad_(), []
    delayed = history(weight, steps=2, margin=3)
    for step, times in enumerate((1.0, 8.0, 0.5, 0.25, 2.0)):
        # Passes of an evaluation.
        passes(100 * times * draw(16, 32, seed=5), weight, draw(16, 16, seed=6))
        delayed.begin()
        for part in (0.125, 1.0):  # two micro-batches
            passes(
                times * part * draw(16, 32, seed=0),
                weight,
                draw(16, 16, seed=2) / times,
                fp8.known_of(weight),
            )
        if step != 3:
            delayed.advance()
        delayed.begin(gradient=0.5)
        scales.append(delayed.by[0] * torch.tensor([1, 1, 2]))
    x = draw(16, 32, seed=0).abs().max()
    dy = draw(16, 16, seed=2).abs().max()
    w = weight.detach().abs().max()
    wanted = [(1, 1), (8, 1), (8, 2), (8, 2), (2, 2)]  # of x, of dy
    largest = torch.stack([torch.stack((a * x, w, b * dy)) for a, b in wanted])
    assert torch.equal(torch.stack(scales), 8 * largest)


def test_another_length_of_history_takes_over_the_last_steps() -> None:
    kept = draw(4, 1, 3, seed=9).abs()
    for steps, wanted in ((2, kept[:2]), (4, kept), (6, torch.cat((kept, torch.zeros(2, 1, 3))))):
        delayed = history(draw(16, 16, seed=1), steps)

        def load(entries: dict[str, Any]) -> dict[str, Tensor]:
            return {name: kept[:, 0] for name, one in entries.items() if one.local_shape == (4, 3)}

        delayed.restore(load, 4)
        assert torch.equal(delayed.history, wanted)
        delayed.restore(dict, None)  # the checkpoint of a run without a history
        assert not delayed.history.any()


@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32], ids=str)
def test_delayed_operands_are_the_nearest_numbers_of_their_scale(of: torch.dtype) -> None:
    """Without history, and if it does not exceed the tensor, they equal those of tensorwise;
    otherwise within half a step, or clipped.
    """
    t = draw(16, 32, seed=4, dtype=of)
    own = t.abs().max().float()
    for dtype, (mantissa, least, largest) in FORMATS.items():
        plain, scale = fp8.quantised(t, dtype)
        for known in (torch.zeros(()), own):
            now = torch.zeros(())
            found, its = fp8.quantised(t, dtype, (known, now))
            assert torch.equal(found.float(), plain.float()) and its == scale and now == own
        for octaves in (-5, 7):
            found, its = fp8.quantised(t, dtype, (own * 2.0**octaves, torch.zeros(())))
            assert its == scale * 2.0**octaves
            scaled = (t.double() / its.double()).clamp(-largest, largest)
            step = 2.0 ** (torch.floor(torch.log2(scaled.abs())).clamp_min(least) - mantissa)
            assert torch.equal(found.double(), torch.round(scaled / step) * step)
            assert bool((found.double().abs() == largest).any()) == (octaves < 0)
            same = (t.abs() <= largest * its) & (t.abs() >= 2.0**least * torch.maximum(its, scale))
            assert same.float().mean() > 0.3
            assert torch.equal((found.double() * its)[same], (plain.double() * scale)[same])


def test_what_is_not_finite_stays_so_whatever_is_known() -> None:
    weight = draw(16, 16, seed=1).requires_grad_()
    delayed = history(weight, steps=2)
    delayed.now.fill_(1.0)
    delayed.advance()
    delayed.begin()
    for bad in (torch.inf, torch.nan):
        x, dy = draw(16, 16, seed=0), torch.ones(16, 16)
        x[3, 4] = dy[2, 2] = bad
        y, dx, dw = passes(x, weight, dy, fp8.known_of(weight))
        assert not (y.isfinite().any() or dx.isfinite().any() or dw.isfinite().any())
        assert not delayed.now[0, 0].isfinite()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    x, weight = draw(16, 16, seed=0), draw(16, 16, seed=1).requires_grad_()
    x[3, 4] = bad
    assert fp8.linear(x, weight)[3].isnan().all()
    dy = torch.ones(16, 16)
    dy[2, 2] = bad
    (dw,) = torch.autograd.grad(fp8.linear(draw(16, 16, seed=0), weight), weight, dy)
    assert not dw.isfinite().all()


@pytest.mark.parametrize(
    "mixer", [name for name in catalogue.MIXERS if not name.startswith("fla.")]
)
def test_the_maps_of_a_layer_and_its_weights(mixer: str) -> None:
    """With 8 bits the parameters and names are the same; the modules that multiply 8-bit floats are
    those named by the shapes.
    """
    model = ModelConfig(
        mixer=mixer, hidden_size=64, num_attention_heads=4, ffn_hidden_size=64, vocab_size=512
    )
    config = transformer_config(model, Layout())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    shape = catalogue.block(model, mixer, 0)
    off = MegatronBlock(config, shape=shape, causal=True, fp8=False, pg_collection=groups)
    on = MegatronBlock(config, shape=shape, causal=True, fp8=True, pg_collection=groups)

    def parameters(block: MegatronBlock) -> list[tuple[str, torch.Size, torch.dtype]]:
        return [(name, one.shape, one.dtype) for name, one in block.named_parameters()]

    assert parameters(off) == parameters(on)
    found = {
        f"{name}.weight" for name, module in on.named_modules() if isinstance(module, fp8.Fp8Linear)
    }
    wanted = {name for name, weight in shape.weights().items() if weight.eight_bit}
    assert found == wanted - {"mlp.gate_up"}
    assert not any(isinstance(module, fp8.Fp8Linear) for module in off.modules())
    assert not {
        name
        for name in found
        if any(part in name for part in ("tdc", "rates", "steps", "query", "step."))
    }


def test_a_gpu_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platform.lacks_fp8() is None  # a CPU emulates fp8
    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    for capability, missing in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        missing_part = platform.lacks_fp8()
        assert bool(missing_part) == missing
        assert missing_part is None or (
            "8.9" in missing_part and "NVIDIA A100 has 8.0" in missing_part
        )
