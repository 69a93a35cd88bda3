"""Descriptions of the operations that the contract in ``test_cases`` checks.

For each operation: the arguments that have a row for each token, the argument that is the state
of earlier tokens, and the forms (cases with changed arguments) that the tests run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import kernels.cem_attention.reference as cem
import kernels.fem_attention.reference as fem
import kernels.free_energy.op as free_energy
import kernels.linear_attention.op as linear
import kernels.second_order_attention.reference as second_order
import kernels.ssm_read.op as ssm
import kernels.symmetric_attention.reference as symmetric
from kernels.aft_read import aft_read
from kernels.check import Inputs, Outputs, Suite, suites
from kernels.pairs import allowed_pairs
from kernels.second_order_attention.reference import energy_linear_attention
from kernels.ssm_read import ssm_read
from kernels.symmetric_attention import symmetric_linear_attention

Size = Mapping[str, int]
FIXTURES = Path(__file__).parents[1] / "fixtures"


def load(name: str) -> dict[str, Tensor]:
    """Return the arrays of a fixture by key, without its metadata."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files if key != "meta"}


def _linear(
    name: str,
    read: Callable[..., Outputs],
    feature: Callable[[Tensor], Tensor],
    slope: Callable[[Tensor], Tensor],
) -> Suite:
    """Return a suite for slope(q_i) * (sum_j (f(q_i).f(k_j)) f(k_j)), with f = ``feature``.

    The read has a state and no cases in its package. If the operation has z, z is both query and
    key.
    """

    def inputs(size: Size) -> Inputs:
        rng = torch.Generator().manual_seed(size["tokens"])
        shape = (size["batch"], size["heads"], size["tokens"], size["width"])
        names = ("z",) if name.startswith("symmetric") else ("q", "k")
        made = {each: torch.randn(shape, generator=rng, dtype=torch.float64) for each in names}
        return made | {
            "state": torch.randn(*shape[:2], shape[3], shape[3], generator=rng, dtype=torch.float64)
        }

    def definition(x: Inputs) -> Outputs:
        q, k = (x["z"] if "z" in x else x[name] for name in "qk")
        at = feature(q)
        keys = feature(k) * (x["valid"][:, None, :, None] if x.get("valid") is not None else 1)
        seen = allowed_pairs(torch.arange(q.shape[2]), q.shape[2], x.get("causal", True), None)
        weights = at @ keys.mT
        after = x["state"] + keys.mT @ keys
        read = (weights if seen is None else weights.masked_fill(~seen, 0.0)) @ keys + at @ x[
            "state"
        ]
        return slope(q) * read, after

    def call(x: Inputs, implementation: str) -> Outputs:
        return read(
            **{**x, "state": x["state"].to(torch.promote_types(x["state"].dtype, torch.float32))}
        )

    return Suite(
        name,
        {"normal": inputs},
        definition,
        call,
        {"batch": 2, "heads": 2, "tokens": 150, "width": 4},
        {},
        {},
    )


SUITES = suites()
ENERGY = _linear("energy_linear_attention", energy_linear_attention, lambda x: x, torch.ones_like)
SYMMETRIC = _linear(
    "symmetric_linear_attention",
    symmetric_linear_attention,
    torch.sigmoid,
    lambda z: z.sigmoid() * (-z).sigmoid() / z.shape[-1] ** 0.5,
)
ALL = SUITES | {suite.op: suite for suite in (ENERGY, SYMMETRIC)}

IMPLEMENTATIONS = {
    "fem_attention": ("fused", "reference", "sdpa", "triton", "decode"),
    "gated_delta_rule": ("reference",),
}
# Cases with wild heads. All engines share the code that selects the heads for the exact form, so
# only sdpa runs these cases.
WILD = ("ramp", "wild", "500", "large beta")


def fits(op: str, implementation: str, case: str) -> bool:
    """Return True if an implementation of an operation takes the case."""
    if op != "fem_attention" or implementation not in ("triton", "decode"):
        return True
    x = SUITES[op].cases[case](SUITES[op].small)
    if implementation == "triton":
        return not any(word in case for word in WILD)
    return x["q"].shape[2] <= 16 and x["cu_seqlens"] is None


@dataclass(frozen=True)
class Rows:
    """Names of the arguments that have one row for each token, separated by spaces.

    reading: arguments of the tokens that read. read: arguments of the tokens that are read,
    including those of earlier calls. state: the argument that is the state of earlier tokens. axes:
    token dimension of the arguments for which it is not 2. valid: the argument that marks the
    tokens that are not padding.
    """

    reading: str
    read: str = ""
    state: str = ""
    axes: Mapping[str, int] = field(default_factory=dict)
    valid: str = ""

    @property
    def all(self) -> dict[str, int]:
        """Map each argument to its token dimension."""
        return {
            name: self.axes.get(name, 2) for name in (*self.reading.split(), *self.read.split())
        }


ROWS = {
    "time_decay_scan": Rows("a x", state="initial", axes={"a": 0, "x": 0}),
    "linear_attention": Rows("q k v log_decay", state="initial"),
    "gated_delta_rule": Rows("q k v beta log_decay", state="initial"),
    "aft_read": Rows("k v lam gate query", state="state", valid="valid"),
    "ssm_read": Rows("delta b_in c_out v lam gate", state="state", valid="valid"),
    "energy_linear_attention": Rows("q k", state="state", valid="valid"),
    "symmetric_linear_attention": Rows("z", state="state", valid="valid"),
    "free_energy": Rows("q k v lam gate log_decay"),
    "fem_attention": Rows("q lam gate", "k v", valid="keys_valid"),
    "cem_attention": Rows("q u", "k h", axes={"u": 1, "h": 1}),
    "second_order_attention": Rows("q turn", "k", valid="valid"),
    "symmetric_attention": Rows("z", "keys", valid="valid"),
}


@dataclass(frozen=True)
class Form:
    """A case of an operation with some arguments changed.

    size: overrides of the suite's small size. triton: True if a Triton implementation runs the
    form. extreme: factor that a causality test multiplies later tokens by.
    """

    op: str
    case: str
    change: Callable[[Inputs], Inputs] = dict
    triton: bool = True
    size: Size = field(default_factory=dict)
    extreme: float = 1e4

    @property
    def suite(self) -> Suite:
        return ALL[self.op]

    @property
    def rows(self) -> Rows:
        return ROWS[self.op]

    @property
    def axis(self) -> int:
        """Token dimension of the output."""
        return 0 if self.op == "time_decay_scan" else 2

    def inputs(self, dtype: torch.dtype = torch.float64, **size: Any) -> Inputs:
        """Return the arguments, with floats in ``dtype``; ``size`` overrides the form's size."""
        tokens = (
            {"steps": size["tokens"]} if "tokens" in size and self.op == "time_decay_scan" else {}
        )
        made = self.change(
            self.suite.cases[self.case]({**self.suite.small, **self.size, **size, **tokens})
        )
        return {
            name: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in made.items()
        }

    def run(self, x: Inputs, implementation: str = "reference") -> tuple[Tensor, Tensor | None]:
        """Return (output, state after the last token or None)."""
        if self.op in ("aft_read", "ssm_read"):
            read: Any = aft_read if self.op == "aft_read" else ssm_read
            o, state = read(**x, implementation=implementation)
            return o, state
        outputs = self.suite.call(x, implementation)
        if self.op == "time_decay_scan":
            return outputs[0], outputs[0][-1]
        return outputs[0], outputs[1] if len(outputs) > 1 else None

    def tokens(self, x: Inputs) -> dict[str, int]:
        """Map each token argument that x contains to its token dimension."""
        return {
            name: axis for name, axis in self.rows.all.items() if isinstance(x.get(name), Tensor)
        }

    def trained(self, x: Inputs) -> dict[str, int]:
        """Return `tokens` without the rotation's cos and sin, which get no gradient."""
        return {name: axis for name, axis in self.tokens(x).items() if name != "turn"}

    def taken(self, x: Inputs, reading: Any, read: Any = None) -> Inputs:
        """Return x with a selection of rows (a slice or indices).

        reading: rows of the tokens that read. read: rows of the tokens that are read; None:
        ``reading``.
        """
        at = {
            name: reading if name in self.rows.reading.split() or read is None else read
            for name in self.tokens(x)
        }
        return x | {
            name: x[name][(slice(None),) * axis + (at[name],)]
            for name, axis in self.tokens(x).items()
        }

    def times(self, x: Inputs, cut: int) -> Inputs:
        """Return x with the rows from ``cut`` on multiplied by ``extreme`` (``turn`` stays)."""
        later = dict(x)
        for name, axis in self.tokens(x).items():
            first, second = x[name].split([cut, x[name].shape[axis] - cut], dim=axis)
            later[name] = torch.cat(
                (first, (1 if name == "turn" else self.extreme) * second), dim=axis
            )
        return later


def changed(**arguments: Any) -> Callable[[Inputs], Inputs]:
    """Return a function that replaces these arguments in inputs."""
    return lambda x: {**x, **arguments}


def _own_logits(x: Inputs) -> Inputs:
    """Return AFT's inputs with separate logits for F, the second half of k."""
    return {**x, "k": torch.cat((x["k"], x["k"].flip(2)), dim=-1)}


def _keys(**arguments: Any) -> Callable[[Inputs], Inputs]:
    """Return a function that passes z as ``keys``, too, and replaces these arguments."""
    return lambda x: {**x, "keys": x["z"], **arguments}


def _full(x: Inputs) -> Inputs:
    """Return the inputs for a read that is not causal and has no initial state."""
    return {name: t for name, t in x.items() if name != "initial"} | {"causal": False}


EXACT = changed(exact=True)
SIGMOID = "sigmoid, causal: normal"
FORMS = (
    Form("time_decay_scan", "a state before", extreme=1e30),
    Form("time_decay_scan", "logits"),
    Form("linear_attention", "no decay, with a state"),
    Form("linear_attention", "a decay a head, with a state"),
    Form("linear_attention", "a decay a channel, with a state"),
    Form("linear_attention", "plain, a decay a head", extreme=1e3),
    Form("gated_delta_rule", "a state", changed(chunk=8), triton=False),
    Form("gated_delta_rule", "no decay", changed(chunk=16), triton=False, extreme=0.5),
    Form("aft_read", "normal"),
    Form("aft_read", "mu alone"),
    Form("aft_read", "normal", _own_logits, triton=False),
    Form("ssm_read", "normal"),
    Form("ssm_read", "mu alone"),
    Form("ssm_read", "normal", changed(normalise=False), triton=False),
    Form("energy_linear_attention", "normal", triton=False, extreme=1e10),
    Form("symmetric_linear_attention", "normal", triton=False, extreme=1e30),
    *(
        Form("cem_attention", name, extreme=1e15)
        for name in ("normal", "no diagonal", "a diagonal a head")
    ),
    Form("second_order_attention", "normal", extreme=1e15),
    Form("second_order_attention", "turned", extreme=1e15),
    Form("second_order_attention", "turned", EXACT, triton=False, size={"width": 4, "tokens": 19}),
    Form("symmetric_attention", SIGMOID, _keys(), extreme=1e15),
    Form("symmetric_attention", SIGMOID, _keys(kind="softmax"), triton=False, extreme=1e15),
    Form("fem_attention", "normal", triton=False),
    Form("free_energy", "linear attention", EXACT, triton=False),
    Form("free_energy", "a decay a head", EXACT, triton=False),
    Form("free_energy", "a decay a channel", EXACT, triton=False),
)
# Forms that are not causal, or that compute complete rows at once.
FULL = (
    Form("linear_attention", "a decay a head", _full),
    Form("linear_attention", "plain, a decay a head", _full),
    Form("linear_attention", "rows that read nothing, a decay a head", _full),
    Form("linear_attention", "a decay a channel", _full),
    Form("linear_attention", "plain, a decay a channel", _full),
    Form("linear_attention", "rows that read nothing, a decay a channel", _full),
    Form("linear_attention", "no decay", _full),
    Form("linear_attention", "plain", _full),
    Form("linear_attention", "rows that read nothing", _full),
    Form("aft_read", "padded", changed(causal=False)),
    Form("aft_read", "padded", lambda x: {**_own_logits(x), "causal": False}),
    Form("ssm_read", "padded", changed(causal=False)),
    Form("ssm_read", "normal", changed(causal=False, normalise=False)),
    Form("energy_linear_attention", "normal", changed(causal=False)),
    Form("symmetric_linear_attention", "normal", changed(causal=False)),
    Form("second_order_attention", "normal", EXACT, size={"width": 4}),
    Form("second_order_attention", "past, full", EXACT, size={"width": 4}),
    Form("second_order_attention", "padding, full", EXACT, size={"width": 4}),
    Form("symmetric_attention", "sigmoid, causal: padding", changed(kind="softmax")),
    Form("symmetric_attention", SIGMOID, changed(kind="softmax", causal=False)),
)


def named(forms: tuple[Form, ...]) -> list[Any]:
    """Return the forms as parameters of a test, with ids."""
    return [pytest.param(each, id=f"{each.op}: {each.case}, {n}") for n, each in enumerate(forms)]


def both() -> list[Any]:
    """Return (form, implementation) parameters: each form's reference, and Triton if it applies.

    Further Triton forms of an operation are marked slow, because they repeat a kernel.
    """
    ways = []
    for each in FORMS:
        ways.append((each, "reference"))
        if each.triton:
            ways.append((each, "triton"))
    made = []
    for n, (each, way) in enumerate(ways):
        again = way == "triton" and any(
            form.op == each.op and form.triton for form in FORMS[: FORMS.index(each)]
        )
        # linear_attention has a kernel for each kind of decay, so that its forms repeat none.
        marks = [pytest.mark.slow] if again and each.op != "linear_attention" else []
        made.append(pytest.param(each, way, marks=marks, id=f"{each.op}: {each.case}, {way}, {n}"))
    return made


def small_blocks(monkeypatch: pytest.MonkeyPatch, terms: int) -> None:
    """Set block and chunk sizes of the references so small that small inputs take many blocks.

    terms: number of terms that a reference holds at a time.
    """
    for module in (fem, cem, symmetric, second_order, free_energy):
        monkeypatch.setattr(module, "BLOCK_TERMS_CPU", terms)
    for name, tokens in (("CHUNK", 4), ("CHUNK_PER_CHANNEL", 4), ("CHUNKS", 2)):
        monkeypatch.setattr(linear, name, tokens)
    monkeypatch.setattr(ssm, "CHUNK", 4)
    monkeypatch.setattr(second_order, "CHUNK", 16)


class Waits(TorchDispatchMode):
    """Recorder of the operations that would make the host wait for a device (``found``)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if any(
            word in str(func)
            for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default")
        ):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))
