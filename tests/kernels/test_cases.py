"""One contract that every operation's cases must meet. Long, because every operation has cases.

The tests compare the references with the definition in float64 and each implementation with the
definition. They also check causality, calls in parts, padding, and memory layouts.

`kernels.check` defines the bounds. In float32, the bound is 1e-5 of the norm. In bfloat16, it is
1.5 times the error of the definition if each of its steps is rounded to bfloat16. All results must
be written and finite. Triton kernels run in the interpreter, at lengths that are not a multiple of
a block.

`make test` runs an implementation's first case in all types and each further case in one of two.
It runs only every third of the Triton cases that differ only in their numbers, and every third
case of other implementations. `make test-all` runs all cases in both types. All operations share
the code that computes float16 in float32, so only the first case of each reference runs in float16.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.cem_attention.triton.function as cem
from kernels.check import Inputs, check, poisoned_memory, relative, results
from tests.kernels.operations import (
    ALL,
    FORMS,
    FULL,
    IMPLEMENTATIONS,
    ROWS,
    SIGMOID,
    SUITES,
    Form,
    both,
    fits,
    named,
    small_blocks,
)

TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NARROW = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # unit roundoff of each type
# Bounds for results of the references that exceed the usual ones, at twice the measured error. In
# float32, their log-sum-exp rounds at 1e-6, so that F - mu has an error of 1e-6 / beta. Sums whose
# terms cancel (the gradient of a bias, or of a temperature with keys far from zero) have errors up
# to 1e-4. On a CPU, torch sums the gradient of a LayerNorm's weight in bfloat16, and rounds the
# terms of the gradients of beta and gamma, which cancel, to bfloat16.
LOOSER: dict[tuple[str, str, str], dict[str, float]] = {
    ("fem_attention", "small beta", "float32"): {"d beta": 1e-3, "d lam": 1e-3},
    ("fem_attention", "one query, a past, small beta", "float32"): {
        "d k": 2.5e-5,
        "d beta": 1.3e-3,
        "d lam": 1e-3,
    },
    ("aft_read", "underflow", "float32"): {"d beta": 3.5e-5, "d lam": 7e-5},
    ("cem_attention", "a large bias on others", "float32"): {"d biases": 5e-5},
    ("second_order_attention", "far from zero", "float32"): {"d temperature": 1e-4},
    ("residual_norm", "normal", "bfloat16"): {"d second": 1.5e-2},
    ("residual_norm", "vanishing", "bfloat16"): {"d second": 1.5e-2},
    ("residual_norm", "uneven", "bfloat16"): {"d second": 1.5e-2},
    ("momentum_step", "normal", "bfloat16"): {"d beta": 8e-3, "d gamma": 1.5e-2},
    ("momentum_step", "vanishing", "bfloat16"): {"d beta": 8e-3, "d weight": 1.5e-2},
    ("momentum_step", "one token", "bfloat16"): {"d weight": 8e-3},
}
# Names of cases that run the same code as others, with other numbers.
NUMBERS = re.compile(
    "range|ramp|sharp|beta|far|equal|alike|underflow|large|steep|T =|widths|forgetting|short"
)


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make CEM's matrix products run in several strips at few tokens."""
    monkeypatch.setattr(cem, "STRIP", 16)


def calls() -> Iterator[Any]:
    """Yield (operation, case, implementation, type); those outside `make test` are marked slow."""
    for op, suite in SUITES.items():
        for implementation in IMPLEMENTATIONS.get(op, ("triton", "reference")):
            cases = [each for each in suite.cases if fits(op, implementation, each)]
            if implementation == "triton":
                alike = [each for each in cases if NUMBERS.search(each)]
            else:
                alike = cases
            repeated = {each for n, each in enumerate(alike) if n % 3}
            for n, case in enumerate(cases):
                types = (*TYPES, "float16") if n == 0 and implementation == "reference" else TYPES
                for m, kind in enumerate(types):
                    quick = case not in repeated and n % 2 == m
                    marks = [] if n == 0 or quick else [pytest.mark.slow]
                    yield pytest.param(
                        op,
                        case,
                        implementation,
                        kind,
                        marks=marks,
                        id=f"{op}: {case}, {implementation}, {kind}",
                    )


def faults(
    suite: Any,
    case: str,
    implementation: str,
    dtype: torch.dtype,
    looser: Mapping[str, float] = MappingProxyType({}),
) -> list[str]:
    """Describe the results of a check that exceed their bounds.

    looser: bounds that replace those of the check, by result.
    """
    found = [
        replace(each, bound=looser.get(each.result, each.bound))
        for each in check(suite, case, implementation, dtype)
    ]
    assert found and looser.keys() <= {each.result for each in found}
    return [
        f"{each.result}: {each.error:.2e} > {each.bound:.2e}" for each in found if not each.good
    ]


@pytest.mark.parametrize(("op", "case", "implementation", "kind"), list(calls()))
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_against_the_definition(op: str, case: str, implementation: str, kind: str) -> None:
    assert not faults(
        SUITES[op],
        case,
        implementation,
        getattr(torch, kind),
        LOOSER.get((op, case, kind), {}) if implementation == "reference" else {},
    )


EDGES: dict[str, tuple[str, list[dict[str, int]]]] = {
    "time_decay_scan": (
        "a state before",
        [{"steps": 15, "channels": 9}, {"steps": 16}, {"steps": 17, "channels": 1}],
    ),
    "conditioner_features": (
        "normal",
        [
            {"tokens": 4, "channels": 1},
            {"tokens": 5, "channels": 128},
            {"tokens": 3, "channels": 16},
        ],
    ),
    "fem_projection": (
        "both ways",
        [
            {"tokens": 8, "dk": 2, "dv": 1},
            {"tokens": 16, "n": 17, "dv": 70},
            {"tokens": 17, "dk": 34},
        ],
    ),
    "rotary": (
        "packed documents",
        [{"tokens": 8, "width": 2}, {"tokens": 16, "width": 34}, {"tokens": 17, "width": 64}],
    ),
    "residual_norm": (
        "normal",
        [
            {"tokens": 4, "channels": 2},
            {"tokens": 5, "channels": 64},
            {"tokens": 3, "channels": 17},
        ],
    ),
    "momentum_step": (
        "normal",
        [
            {"tokens": 4, "channels": 8},
            {"tokens": 5, "channels": 64},
            {"tokens": 3, "channels": 17},
        ],
    ),
    "gated_silu": (
        "normal",
        [{"tokens": 1, "batch": 1, "channels": n} for n in (1, 64, 129)],
    ),
    "linear_attention": (
        "a decay a channel, with a state",
        [{"tokens": 15}, {"tokens": 16, "keys": 36}, {"tokens": 17, "values": 33}],
    ),
    "aft_read": ("normal", [{"tokens": 7}, {"tokens": 8}, {"tokens": 9, "channels": 5}]),
    "ssm_read": (
        "normal",
        [{"tokens": 3}, {"tokens": 4}, {"tokens": 5, "channels": 5, "states": 3}],
    ),
    "cem_attention": (
        "normal",
        [
            {"tokens": 16, "width": 4},
            {"tokens": 32, "width": 20},
            {"tokens": 33, "width": 84, "heads": 1},
        ],
    ),
    "second_order_attention": (
        "turned",
        [{"tokens": 31, "width": 6}, {"tokens": 32, "width": 16}, {"tokens": 33, "width": 34}],
    ),
    "symmetric_attention": (
        SIGMOID,
        [{"tokens": 15, "width": 64}, {"tokens": 16, "width": 5}, {"tokens": 33, "width": 16}],
    ),
    "fem_attention": (
        "normal",
        [{"tokens": 15, "dk": 33, "dv": 20}, {"tokens": 16}, {"tokens": 33, "dv": 40}],
    ),
}


@pytest.mark.parametrize(
    ("op", "n"), [(op, n) for op, (_, sizes) in EDGES.items() for n in range(len(sizes))]
)
def test_every_edge_of_a_block(op: str, n: int) -> None:
    case, sizes = EDGES[op]
    few = {"batch": 1, "heads": 2} if "heads" in SUITES[op].small else {}
    assert not faults(
        replace(SUITES[op], small={**SUITES[op].small, **few, **sizes[n]}),
        case,
        "triton",
        torch.float32,
    )


NORMAL_FORMS = [
    Form(op, case) for op, suite in ALL.items() for case in suite.cases if "range 500" not in case
]


@pytest.mark.parametrize("terms", [0, 300], ids=["one block", "many blocks"])
@pytest.mark.parametrize("form", named((*NORMAL_FORMS, *FORMS, *FULL)))
def test_the_reference_is_the_definition_in_float64(
    form: Form, terms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outputs and all gradients agree for every division into blocks."""
    if terms:
        small_blocks(monkeypatch, terms)
    x = form.inputs()
    truth = results(form.suite.definition, x, torch.float64, "cpu")
    for name, got in results(
        lambda given: form.suite.call(given, "reference"), x, torch.float64, "cpu"
    ).items():
        # float64's rounding, with exponents up to 500 and logarithms divided by beta (0.02 or
        # 0.001), of which the definition has two.
        rounding = 1e-9 if "0.001" in form.case else 1e-10
        assert float((got - truth[name]).norm()) <= rounding * max(
            1.0, float(truth[name].norm())
        ), name


@pytest.mark.parametrize(
    "form", named(tuple(each for each in (*FORMS, *FULL) if "nothing" not in each.case))
)
def test_gradcheck(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 40)
    small: dict[str, Any] = {
        "tokens": 5,
        "batch": 1,
        "heads": 1,
        "channels": 2,
        "width": 4,
        "keys": 2,
        "values": 2,
        "dk": 3,
        "dv": 2,
    }
    x = form.inputs(**small)
    names = [
        name
        for name, t in x.items()
        if isinstance(t, Tensor) and t.is_floating_point() and t.shape[0] <= 5 and name != "turn"
    ]  # the angles' cos and sin get no gradient

    def call(*tensors: Tensor) -> Any:
        return form.suite.call(x | dict(zip(names, tensors, strict=True)), "reference")

    # fast_mode checks one random direction; the test above compares every number.
    assert torch.autograd.gradcheck(
        call, [x[name].requires_grad_() for name in names], fast_mode=True
    )


@pytest.mark.parametrize(("form", "implementation"), both())
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_no_bit_depends_on_later_tokens(
    form: Form, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_blocks(monkeypatch, 1000)
    x = form.inputs(torch.float32)
    before = form.run(x, implementation)[0].movedim(form.axis, 0)
    for cut in (1, len(before) // 2, len(before) - 1):
        after = form.run(form.times(x, cut), implementation)[0].movedim(form.axis, 0)
        assert torch.equal(after[:cut], before[:cut]) and not torch.equal(after[cut:], before[cut:])
    cut = len(before) // 2
    leaves = {name: x[name].requires_grad_() for name in form.trained(x)}
    o = form.run(x | leaves, implementation)[0].movedim(form.axis, 0)
    for (name, axis), g in zip(
        form.trained(x).items(),
        torch.autograd.grad(o[:cut].square().sum(), list(leaves.values())),
        strict=True,
    ):
        earlier, later = g.split([cut, g.shape[axis] - cut], dim=axis)
        assert (later == 0).all() and (earlier != 0).any(), name


@pytest.mark.parametrize(("form", "implementation"), both())
def test_parts_with_a_past_equal_the_whole(form: Form, implementation: str) -> None:
    if form.op == "free_energy":
        return  # test_free_energy tests its window
    # The parts join the same sums in another order, hence the tolerances.
    for dtype, rounding in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        if implementation == "triton" and dtype == torch.float64:
            continue
        x = form.inputs(dtype)
        full, last = form.run(x, implementation)
        state, count = x.get(form.rows.state), full.shape[form.axis]
        partitions: list[tuple[int, ...]] = [(count // 3, 1, count - count // 3 - 1)]
        if implementation == "reference":
            partitions.append((1,) * count)
        for sizes in partitions:
            made = []
            start = 0
            past = state
            for size in sizes:
                past_and_now = slice(0, start + size) if form.rows.read else None
                now = form.taken(x, slice(start, start + size), past_and_now)
                if past is not None:
                    now |= {form.rows.state: past}
                o, past = form.run(now, implementation)
                made.append(o)
                start += size
            scale = float(full.abs().max())
            torch.testing.assert_close(
                torch.cat(made, form.axis), full, rtol=rounding, atol=rounding * scale
            )
            if last is not None and past is not None:
                assert past.dtype == last.dtype
                assert form.op == "time_decay_scan" or past.requires_grad is False
                torch.testing.assert_close(
                    past, last, rtol=rounding, atol=rounding * float(last.abs().max())
                )


@pytest.mark.parametrize(
    "form",
    named(tuple(each for each in (*FORMS, *FULL) if each.rows.valid and "pa" not in each.case)),
)
def test_padding_is_not_there(form: Form) -> None:
    """Padded sequences give the outputs of unpadded ones for any padding values.

    Padding receives no gradient.
    """
    x = form.inputs(batch=2)
    x.pop("valid", None)
    x.pop(form.rows.state, None)
    if form.rows.state and "linear" in form.op:
        x[form.rows.state] = torch.zeros(*form.inputs(batch=2)["state"].shape, dtype=torch.float64)
    o = form.run(x)[0]
    valid = torch.rand(2, o.shape[2], generator=torch.Generator().manual_seed(1)) > 0.4
    valid[0, : o.shape[2] // 2] = False
    for name in {"v", "k", "z"} & set(x):
        x[name] = x[name] + 20.0 * ~valid[:, None, :, None]
    leaves = {
        name: x[name].detach().requires_grad_() for name in form.tokens(x) if len(x[name]) == 2
    }
    o = form.run(x | leaves | {form.rows.valid: valid})[0]
    assert o.isfinite().all()
    for row, kept in enumerate(valid):
        one = x.copy()
        for name in (*leaves, "state"):
            if isinstance(x.get(name), Tensor) and len(x[name]) == 2:
                one[name] = x[name][row : row + 1]
        alone = form.run(form.taken(one, kept.nonzero().flatten()))[0]
        # float64 rounding of values shifted by 20
        torch.testing.assert_close(o[row : row + 1, :, kept], alone, rtol=1e-9, atol=1e-9)
    for name, g in zip(
        leaves,
        torch.autograd.grad((o * valid[:, None, :, None]).square().sum(), list(leaves.values())),
        strict=True,
    ):
        assert g.isfinite().all() and (g.movedim(2, 1)[~valid] == 0).all(), name


ONE_OF_EACH = [param for param in both() if param.values[1] == "triton"] + [
    pytest.param(Form("fem_attention", "normal"), engine, id=f"fem_attention: {engine}")
    for engine in ("sdpa", "triton")
]


@pytest.mark.parametrize(("form", "implementation"), ONE_OF_EACH)
def test_any_layout_gives_the_same(form: Form, implementation: str) -> None:
    """Inputs with tokens first in memory or with strided channels give the same results.

    An expanded gradient, for one input only, gives the same result, too.
    """
    x = form.inputs(torch.float32, heads=2)
    turned = dict(x)
    for n, (name, axis) in enumerate(form.tokens(x).items()):
        first = x[name].movedim(axis, 0).contiguous().movedim(0, axis)
        turned[name] = first if n % 2 else torch.stack((x[name], x[name]), -1)[..., 0]
    with poisoned_memory():
        plain, other = (
            results(lambda given: (form.run(given, implementation)[0],), each, torch.float32, "cpu")
            for each in (x, turned)
        )
    # Library matrix products depend on strides, so that bits may differ.
    assert all(relative(other[name], plain[name]) < 1e-6 for name in plain)
    if form.op in ("aft_read", "ssm_read"):
        # The output has the memory layout that the layer needs.
        assert other["output 0"].permute(2, 0, 1, 3).is_contiguous()
    name = next(iter(form.tokens(x)))
    leaf, found = turned[name].clone().requires_grad_(), []
    for way in (implementation, "reference"):
        found += torch.autograd.grad(form.run(turned | {name: leaf}, way)[0].sum(), leaf)
    assert relative(*found) < 1e-5


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("form", named((*FORMS, *FULL)))
def test_a_narrow_type_is_rounded_once(form: Form, dtype: torch.dtype) -> None:
    x = form.inputs(dtype)
    o, state = form.run(x)
    exact = form.run(
        {
            name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in x.items()
        }
    )[0]
    assert relative(o, exact) < NARROW[dtype]
    wide = form.op == "time_decay_scan" and form.case == "logits"
    assert o.dtype == (torch.float32 if wide else dtype)
    assert state is None or form.axis == 0 or state.dtype == torch.float32


class Made(TorchDispatchMode):
    """Recorder of every storage that operations create within the mode.

    ``storages`` contains weak references with sizes in bytes; ``largest`` is a number of elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for t in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(t, Tensor):
                storage = t.untyped_storage()
                ref = StorageWeakRef(storage)
                self.storages[ref.cdata] = ref, storage.nbytes()
                self.largest = max(self.largest, storage.nbytes() // t.element_size())
        return found

    def kept(self, *but: Tensor) -> int:
        """Return the bytes of the recorded storages that are alive, except those of ``but``."""
        others = {StorageWeakRef(t.untyped_storage()).cdata for t in but}
        return sum(
            size
            for address, (ref, size) in self.storages.items()
            if address not in others and not ref.expired()
        )


def kept_bytes(form: Form, implementation: str, tokens: int) -> tuple[int, int]:
    """Return (bytes that remain allocated after a call, bytes of its token inputs).

    The first number counts the result and the tensors that the graph saves, without the inputs.
    """
    x = form.inputs(torch.float32, tokens=tokens, batch=1, heads=1)
    x |= {name: x[name].requires_grad_() for name in form.trained(x)}
    leaves = [x[name] for name in form.trained(x)]
    # The collection below then skips all objects that imports created.
    gc.freeze()
    with Made() as made:
        o = form.run(x, implementation)[0]
        if implementation == "triton":
            # Reference cycles in the interpreter keep a kernel's arguments alive.
            gc.collect()
        kept = made.kept(*(t for t in x.values() if isinstance(t, Tensor)))
    gc.unfreeze()
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.sum(), leaves))
    return kept, sum(x[name].nbytes for name in form.tokens(x))


@pytest.mark.parametrize(("form", "implementation"), both())
def test_what_is_kept_is_linear_in_the_tokens(form: Form, implementation: str) -> None:
    quadratic = form.op in (
        "fem_attention",
        "cem_attention",
        "second_order_attention",
        "symmetric_attention",
        "free_energy",
    )
    if implementation == "triton":
        tokens = 32
    else:
        tokens = 128 if quadratic else 1024
    short, _ = kept_bytes(form, implementation, tokens)
    long, inputs = kept_bytes(form, implementation, 2 * tokens)
    assert long < 2.1 * short
    # Saving all states of the chunks or all blocks of pairs would take many times the inputs'
    # memory. The two linear attentions save the 64 x 64 pairs of their chunks.
    most = {
        "energy_linear_attention": 12,
        "symmetric_linear_attention": 25,
        "aft_read": 12 if implementation == "triton" else 8,
    }
    usual = 6 if implementation == "reference" else 12
    assert long < most.get(form.op, usual) * inputs


@pytest.mark.parametrize(
    "op",
    [
        "fem_attention",
        "cem_attention",
        "second_order_attention",
        "symmetric_attention",
        "free_energy",
    ],
)
def test_terms_held_at_once_are_bounded(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 4000)
    (form, *_) = (each for each in FORMS if each.op == op)
    x = form.inputs(torch.float32, tokens=90, batch=1, heads=1)
    with Made() as made:
        o = form.run(
            {
                name: t.requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
                for name, t in x.items()
            }
        )[0]
        o.sum().backward()
    assert made.largest <= 4000 < 90 * 90


# --- refused calls --------------------------------------------------------------------------------


def refused(op: str, x: Inputs, words: str) -> None:
    """Assert that the call raises a ValueError that matches ``words``.

    The message must be one line that starts with ``op``.
    """
    with pytest.raises(ValueError, match=words) as error:
        ALL[op].call(x, x.pop("implementation", "reference"))
    assert str(error.value).startswith(op) and "\n" not in str(error.value)


@pytest.mark.parametrize("form", named((*FORMS, Form("conditioner_features", "normal"))))
def test_an_argument_of_another_shape_or_type_is_refused_in_one_line(form: Form) -> None:
    x = form.inputs(torch.float32)
    names = (*form.tokens(x), form.rows.state) if form.op in ROWS else ("weight",)
    for name in names:
        t = x.get(name)
        if not isinstance(t, Tensor):
            continue
        if form.op == "free_energy" and name in ("q", "k", "log_decay"):
            continue
        wrong = [t[..., None], t[:0]]
        if name != "v":
            wrong.append(t[..., :-1])
        for bad in wrong:
            refused(form.op, x | {name: bad}, r"\b(shape|expected|empty|multiple|must be|is) ")
    refused(
        form.op,
        form.inputs(torch.int32),
        "use float64, float32, bfloat16 or float16|is torch.int32",
    )


zeros: Any = torch.zeros
META: Any = {"device": "meta"}
REFUSED: list[tuple[str, str, Inputs]] = [
    ("time_decay_scan", "initial is torch.float32 on meta", {"initial": zeros(2, 5, **META)}),
    ("time_decay_scan", "a is torch.float64", {"a": zeros(41, 2, 5).double()}),
    (
        "conditioner_features",
        "state is torch.float64 on cpu.*expected torch.float32",
        {"state": zeros(13, 2, 37).double()},
    ),
    (
        "conditioner_features",
        "state has shape .* expected",
        {"logits": zeros(13, 2, 111), "state": zeros(12, 2, 37)},
    ),
    (
        "rotary",
        r"k has shape \[13, 1, 3, 6\], expected \[13, 2, 3, 6\] for q",
        {"k": zeros(13, 1, 3, 6)},
    ),
    ("rotary", "k is torch.float64", {"k": zeros(13, 2, 3, 6).double()}),
    (
        "rotary",
        r"cos has shape .* expected \[13, 1, 1, 3\] or \[13, 2, 1, 3\]",
        {"positions": torch.zeros(13, 3)},
    ),
    (
        "rotary",
        "q has 5 channels, and pairs are rotated",
        {"q": zeros(13, 2, 3, 5), "k": zeros(13, 2, 3, 5)},
    ),
    ("residual_norm", r"weight has shape \[36\], expected \[37\]", {"weight": zeros(36)}),
    ("residual_norm", "second is torch.float32 on meta", {"second": zeros(37, **META)}),
    ("residual_norm", "twice is RMSNorm, and second LayerNorm", {"twice": True}),
    ("momentum_step", r"step has shape \[37\], expected \[13, 2, 37\]", {"step": zeros(37)}),
    ("momentum_step", r"beta has shape \[37\], expected \[1\]", {"beta": zeros(37)}),
    ("momentum_step", r"weight has shape \[74\], expected \[37\]", {"weight": zeros(74)}),
    ("gated_silu", r"gate has shape \[7, 2\]", {"gate": zeros(7, 2)}),
    (
        "fem_projection",
        r"z has shape \[13, 2, 82\], expected \[s, b, heads \* 27\]",
        {"z": zeros(13, 2, 82)},
    ),
    ("fem_projection", r"features 0 has shape .* expected \[13, 2, 4\]", {"f": zeros(13, 1, 4)}),
    ("fem_projection", r"weight 0 has shape .* expected \[81, 4\]", {"wf": zeros(80, 4)}),
    ("fem_projection", r"weight 0 is torch.float64", {"wf": zeros(81, 4).double()}),
    (
        "fem_projection",
        r"cos has shape .* expected \[13, 1, 1, 3\] or \[13, 2, 1, 3\]",
        {"positions": torch.zeros(13, 3)},
    ),
    (
        "fem_projection",
        "q and k, with one width if rotated, must be first",
        {"widths": {"v": 15, "q": 6, "k": 6}},
    ),
    (
        "fem_projection",
        "q and k, with one width if rotated, must be first",
        {"widths": {"q": 6, "k": 6, "gate": 5, "lam": 5, "v": 5}},
    ),
    ("linear_attention", "k is torch.float64", {"k": zeros(1, 1, 37, 12).double()}),
    ("linear_attention", "v is torch.float32 on meta", {"v": zeros(1, 1, 37, 20, **META)}),
    ("linear_attention", "leave it out", {"initial": zeros(1, 1, 12, 21), "causal": False}),
    ("linear_attention", r"expected \[1, 1, 12, 21\]", {"initial": zeros(1, 1, 12, 20)}),
    ("gated_delta_rule", "chunk is 0", {"chunk": 0}),
    ("gated_delta_rule", "v is torch.bfloat16", {"v": zeros(1, 2, 37, 16).bfloat16()}),
    ("gated_delta_rule", "beta is torch.float64", {"beta": zeros(1, 2, 37).double()}),
    ("aft_read", "lam mixes mu", {"beta": None}),
    ("aft_read", "causal=True", {"state": zeros(1, 2, 7, 3), "causal": False}),
    (
        "aft_read",
        r"k has shape \[1, 2, 19, 4\], expected \[1, 2, 19, 3\] or \[1, 2, 19, 6\]",
        {"k": zeros(1, 2, 19, 4)},
    ),
    ("aft_read", r"beta has shape \[1, 3\], expected \[2, 3\]", {"beta": zeros(1, 3)}),
    ("ssm_read", "lam mixes mu", {"beta": None}),
    ("ssm_read", "causal=True", {"state": zeros(1, 2, 3, 10), "causal": False}),
    (
        "ssm_read",
        r"rate has shape \[1, 3, 2\], expected \[2, 3, states\]",
        {"rate": zeros(1, 3, 2)},
    ),
    ("ssm_read", "valid has shape", {"valid": zeros(1, 8).bool()}),
    ("free_energy", "needs beta", {"beta": None}),
    ("cem_attention", "40 keys for 41 tokens", {"k": zeros(2, 2, 40, 12), "h": zeros(2, 40, 24)}),
    ("cem_attention", r"diagonal.h has shape \[2, 41, 7\]", {"h": zeros(2, 41, 7)}),
    ("cem_attention", r"expected \[1, 24\] or \[2, 24\]", {"d": zeros(2, 6)}),
    ("cem_attention", r"slopes has shape \[1\], expected \[2\]", {"slopes": (0.5,)}),
    ("cem_attention", "valid is", {"valid": zeros(2, 41)}),
    (
        "second_order_attention",
        r"k has shape .* expected \[1, 3, 37, 20\]",
        {"k": zeros(1, 3, 36, 20)},
    ),
    ("second_order_attention", "gram has shape", {"factor": zeros(3, 19, 20)}),
    ("second_order_attention", "temperature has shape", {"temperature": zeros(1)}),
    ("second_order_attention", "newton_temperature has shape", {"newton_temperature": zeros(4)}),
    ("second_order_attention", "valid is .* expected torch.bool", {"valid": zeros(1, 37)}),
    ("second_order_attention", "turn has shape", {"turn": zeros(1, 1, 2, 20)}),
    ("symmetric_attention", "no causal form", {"causal": True}),
    ("symmetric_attention", "kind 'hard' is not one of", {"kind": "hard"}),
    (
        "symmetric_attention",
        r"keys has shape .* expected \[2, 2, 37, 20\]",
        {"keys": zeros(2, 2, 36, 20), "kind": "sigmoid"},
    ),
    ("symmetric_attention", "bool", {"valid": zeros(2, 37)}),
    ("symmetric_linear_attention", "valid is .* torch.bool", {"valid": zeros(2, 150)}),
    ("energy_linear_attention", "valid is .* torch.bool", {"valid": zeros(2, 150)}),
    (
        "fem_attention",
        "3 query heads are not a multiple of v's 2 heads",
        {"q": zeros(2, 3, 45, 16)},
    ),
    ("fem_attention", "needs beta", {"beta": None}),
    (
        "fem_attention",
        "46 queries but 45 keys",
        {"q": zeros(2, 2, 46, 16), "lam": None, "gate": None},
    ),
    ("fem_attention", "v is torch.bfloat16", {"v": zeros(2, 2, 45, 8).bfloat16()}),
    ("fem_attention", "lam is torch.float64", {"lam": zeros(2, 2, 45, 8).double()}),
    ("fem_attention", "k is torch.float32 on meta", {"k": zeros(2, 2, 45, 16, **META)}),
    ("fem_attention", "keys_valid has shape", {"keys_valid": zeros(2, 4).bool()}),
    ("fem_attention", "keys_valid is torch.float32", {"keys_valid": zeros(2, 45)}),
    ("fem_attention", "'cudnn' cannot run: no GPU; use auto", {"implementation": "cudnn"}),
    ("fem_attention", "'decode' cannot run: 45 queries", {"implementation": "decode"}),
    ("fem_attention", "cu_seqlens is torch.float32", {"cu_seqlens": zeros(2)}),
    ("fem_attention", "cu_seqlens has shape", {"cu_seqlens": zeros(1).int()}),
    ("fem_attention", "cu_seqlens needs a batch of 1", {"cu_seqlens": zeros(2).int()}),
]


@pytest.mark.parametrize(("op", "words", "change"), REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(op: str, words: str, change: Inputs) -> None:
    case = "normal" if "normal" in ALL[op].cases else next(iter(ALL[op].cases))
    x = Form(op, case).inputs(torch.float32) | change
    missing = (
        {name for name, t in x.items() if t is None} if op in ("aft_read", "ssm_read") else set()
    )
    refused(op, {name: t for name, t in x.items() if name not in missing}, words)
