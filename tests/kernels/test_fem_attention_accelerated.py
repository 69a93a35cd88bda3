"""fem_attention's accelerated form in Triton's interpreter: prep, an engine, epilogue, and the heads that are read exactly."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from kernels.fem_attention import accelerated as accelerated_room
from kernels.fem_attention import fem_attention
from kernels.implementations import OncePerMessage
from tests.kernels.oracle import NAMES, inputs, relative

ENGINES_HERE = ("sdpa", "triton")
# The Triton engine's own tests go through its attention; here are the cases in which the two halves of the work meet.


def small(**changed: Any) -> dict[str, Any]:
    """Two sequences of 21 tokens, float32, all differentiable."""
    made = inputs(21, **{"heads": 2, "dk": 16, "dv": 8, "dtype": torch.float32, **changed})
    return {name: t.requires_grad_() for name, t in made.items()}


def gradients(x: dict[str, Any], **arguments: Any) -> dict[str, Tensor]:
    o = fem_attention(**x, **arguments)
    made = torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum(), [x[name] for name in NAMES])
    return {"o": o.detach(), **dict(zip(NAMES, made, strict=True))}


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_a_wild_head_leaves_the_others_as_they_were_to_the_bit(engine: str) -> None:
    calm = small()
    wild = {name: t.detach().clone().requires_grad_() for name, t in calm.items()}
    with torch.no_grad():
        wild["v"][1, 0, :, 3] *= 100
    before, after = gradients(calm, implementation=engine), gradients(wild, implementation=engine)
    for name in ("o", "q", "k", "v", "lam", "gate"):
        assert torch.equal(after[name][0], before[name][0]) and torch.equal(after[name][1, 1], before[name][1, 1])
        assert not torch.equal(after[name][1, 0], before[name][1, 0])
    exact = gradients({name: t.detach().requires_grad_() for name, t in wild.items()}, implementation="reference")
    for name in ("o", *NAMES):
        assert relative(after[name], exact[name]) < 1e-5, name  # the stated bound of float32


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e30])
def test_a_value_that_is_not_finite_stays_in_its_head(value: float) -> None:
    x = small()
    with torch.no_grad():
        x["v"][1, 0, 9, 3] = value
    got = gradients(x, implementation="sdpa")
    with torch.no_grad():
        x["v"][1, 0, 9:, 3] = 0
        before = fem_attention(**x, implementation="reference")[:, :, :9]
    for name in ("o", "q", "k", "v", "lam", "gate"):
        assert got[name][0].isfinite().all() and got[name][1, 1].isfinite().all()
    assert relative(got["o"][:, :, :9], before) < 1e-5  # rows that do not read it; the stated bound of float32


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_an_output_moves_by_rounding_alone_when_later_tokens_change(engine: str) -> None:
    x = small()
    later = {name: t.detach().clone() for name, t in x.items()}
    for name in ("q", "k", "v", "lam", "gate"):
        later[name][:, :, 13:] = later[name][:, :, 13:].flip(2) * 1.5
    with torch.no_grad():
        o, moved = (fem_attention(**given, implementation=engine) for given in (x, later))
    torch.testing.assert_close(moved[:, :, :13], o[:, :, :13], rtol=1e-5, atol=1e-6)  # another centre: float32's rounding
    assert (o[:, :, 13:] - moved[:, :, 13:]).abs().max() > 0.01


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_strided_inputs_and_a_call_without_gradients_give_the_same_bits(engine: str) -> None:
    x = small()
    # As the layers pass them: [s, b, h, d] in memory, and one whose channels are not next to each other.
    moved = {
        name: t.detach() if name == "beta" else t.detach().permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for name, t in x.items()
    }
    moved["lam"] = moved["lam"].mT.contiguous().mT
    moved = {name: t.requires_grad_() for name, t in moved.items()}
    plain, strided = gradients(x, implementation=engine), gradients(moved, implementation=engine)
    for name in ("o", *NAMES):
        assert torch.equal(plain[name], strided[name]), name
    with torch.no_grad():
        assert torch.equal(fem_attention(**x, implementation=engine), plain["o"])
    with torch.inference_mode():
        assert torch.equal(fem_attention(**x, implementation=engine), plain["o"])


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_gradients_of_some_inputs_alone(engine: str) -> None:
    whole = gradients(small(), implementation=engine)
    for asked in (("v",), ("q", "beta", "gate")):
        x = small()
        given = {name: t if name in asked else t.detach() for name, t in x.items()}
        o = fem_attention(**given, implementation=engine)
        weights = torch.linspace(-1, 1, o.numel()).view(o.shape)
        for name, got in zip(asked, torch.autograd.grad((o * weights).sum(), [x[name] for name in asked]), strict=True):
            assert torch.equal(got, whole[name]), (asked, name)


def test_float32_gates_beside_bfloat16() -> None:
    x = small(dtype=torch.bfloat16)
    mixed = {name: t.detach().float().requires_grad_() if name in ("beta", "lam", "gate") else t for name, t in x.items()}
    got = gradients(mixed, implementation="sdpa")
    assert {name: t.dtype for name, t in got.items()} == {name: mixed[name].dtype if name != "o" else torch.bfloat16 for name in got}
    expected = gradients({name: t.detach().requires_grad_() for name, t in mixed.items()}, implementation="fused")
    for name in ("o", *NAMES):
        assert relative(got[name], expected[name]) < 0.01, name  # two bfloat16 roundings of the same attention


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_give_the_same_gradients(reentrant: bool) -> None:
    direct, x = gradients(small(), implementation="sdpa"), small()
    o = checkpoint(
        lambda *tensors: fem_attention(*(t * 1.0 for t in tensors), implementation="sdpa"),
        *(x[name] for name in NAMES),
        use_reentrant=reentrant,
    )
    (o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum().backward()
    for name in NAMES:
        assert torch.equal(x[name].grad, direct[name]), name


class Graft(torch.autograd.Function):
    """A tensor as an inner node of a graph, its memory its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, t: Tensor) -> Tensor:
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].sum(), None


def test_what_is_saved_goes_through_the_hooks_and_nothing_else_is_held() -> None:
    """Who offloads or recomputes activations gets their memory back: the inner graph holds no input."""
    anchor, memory = torch.zeros((), requires_grad=True), {name: t.detach().numpy().copy() for name, t in small().items()}
    offloaded: list[Tensor] = []

    def pack(t: Tensor) -> int:
        offloaded.append(t.clone())
        return len(offloaded) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda n: offloaded[n]):
        o = fem_attention(**{name: Graft.apply(anchor, torch.from_numpy(array)) for name, array in memory.items()}, implementation="sdpa")
    held = {name: weakref.ref(array) for name, array in memory.items()}
    del memory
    gc.collect()
    assert [name for name, array in held.items() if array() is not None] == []
    (gradient,) = torch.autograd.grad((o * torch.linspace(-1, 1, o.numel()).view(o.shape)).sum(), anchor)
    whole = gradients(small(), implementation="sdpa")
    torch.testing.assert_close(gradient, sum((whole[name].sum() for name in NAMES), torch.zeros(())), rtol=1e-5, atol=1e-5)  # float32 sums


def test_a_checkpoint_remakes_a_block_once() -> None:
    """The inner graph's own backward is a second task of autograd's; what it unpacks must not make the checkpoint run again."""
    forwards = 0

    def block(*tensors: Tensor) -> Tensor:
        nonlocal forwards
        forwards += 1
        return sum((fem_attention(*tensors, implementation="sdpa") for _ in range(2)), torch.zeros(()))

    x = list(small().values())
    checkpoint(block, *x, use_reentrant=False).sum().backward()
    assert forwards == 2


def test_a_second_backward_says_that_the_graph_is_gone() -> None:
    x = small()
    o = fem_attention(**x, implementation="sdpa").sum()
    o.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="fem_attention: a second backward through the same call"):
        o.backward()


class Waits(TorchDispatchMode):
    """Counts operations that would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default")):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ENGINES_HERE)
def test_the_host_waits_for_nothing(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The watch reads a number that lies on the host.
    monkeypatch.setattr(accelerated_room.RangeWatch, "note", lambda self, largest, log: None)
    x = small(batch=1)
    with Waits() as waits:
        gradients(x, implementation=engine, cu_seqlens=torch.tensor([0, 5, 21]))
    assert waits.seen > 20 and waits.found == []


def test_the_largest_range_is_told_once_by_a_later_call(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("kernels.fem_attention"), "filters", [OncePerMessage()])
    accelerated_room.watch.cache_clear()
    caplog.set_level(logging.INFO, "kernels.fem_attention")
    calm, wild = small(), small()
    with torch.no_grad():
        wild["v"][0, 1, 2, 3] = 1000
        for x in (calm, wild):
            fem_attention(**x, implementation="sdpa")
        assert [record.getMessage() for record in caplog.records] == ["fem_attention: sdpa runs (asked for)"]
        for _ in range(3):
            fem_attention(**calm, implementation="sdpa")
    largest = 1.95 * float(wild["v"][0, 1, :, 3].max() - wild["v"][0, 1, :, 3].min())
    (record,) = caplog.records[1:]
    assert record.levelname == "WARNING" and f"has reached {largest:.4g}, over 80" in record.getMessage()
    accelerated_room.watch.cache_clear()


# --- decoding --------------------------------------------------------------------------------------------------------------------


def test_decoding_without_gradients_and_what_it_refuses() -> None:
    x = {name: t.detach() for name, t in small().items()}
    part = x | {name: x[name][:, :, -3:] for name in ("q", "lam", "gate")}
    truth = fem_attention(**part, implementation="reference")
    assert relative(fem_attention(**part, implementation="decode"), truth) < 1e-5  # the stated bound of float32
    with pytest.raises(ValueError, match="'decode' cannot run: 21 queries"):
        fem_attention(**x, implementation="decode")
    with pytest.raises(ValueError, match="'decode' cannot run: gradients"):
        fem_attention(**part | {"v": x["v"].requires_grad_()}, implementation="decode")
