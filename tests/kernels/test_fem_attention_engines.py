"""Tests of the engines that read [v | U].

They cover the calls that each engine takes, its arguments, the order of the engines, and the
measured table.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import machine
from kernels.fem_attention import OP, fem_attention
from kernels.fem_attention.engines import ENGINES, Call, Engine, Plan, Reading
from kernels.fem_attention.table import (
    HOPPER,
    MASKED,
    OTHERS,
    TABLE,
    Entry,
    measured_order,
    order,
    read,
    write,
)
from kernels.implementations import Op
from kernels.machine import without_cudnn_attention
from kernels.pairs import document_bounds, readable_keys
from tests.test_house import ROOT

CALL = Call(
    torch.device("cpu"), torch.bfloat16, batch=2, heads=4, kv_heads=2, tq=40, tk=40, dk=128,
    values=128,
    causal=True, positive=True, padding=False, documents=False, trains=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "changed", "reason"),
    [
        ("cudnn", {"dtype": torch.float64}, "float64"),
        ("triton", {"dtype": torch.float64}, "float64"),
        ("triton", {"positive": False}, "a negative scale"),
        ("triton", {"dk": 257}, "widths 257 and 128 in bfloat16"),
        ("triton", {"values": 1026}, "widths 128 and 1026 in bfloat16"),
        ("triton", {"padding": True, "documents": True}, None),
        ("flash", {"padding": True}, "padding"),
        ("flash", {"documents": True}, "documents"),
        ("flash", {"tq": 5}, "queries after a past"),
        ("flash_attn_2", {"padding": True}, "padding"),
        ("flash_attn_2", {"dtype": torch.float32}, "float32"),
        ("flash_attn_3", {"documents": True}, None),
        ("flash_attn_3", {"dk": 256, "values": 512}, None),
        ("flash_attn_3", {"dk": 32, "values": 1024}, "widths 32 and 1024 in bfloat16"),
        ("sdpa", {"dk": 300, "padding": True, "tq": 1}, None),
    ],
)
def test_why_an_engine_does_not_take_a_call(
    engine: str, changed: dict[str, Any], reason: str | None
) -> None:
    assert ENGINES[engine].unfit(replace(CALL, **changed)) == reason


def test_cudnn_is_not_given_ragged_or_changing_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = replace(ENGINES["cudnn"], fits=lambda call, widths: True)
    full = replace(CALL, tq=256, tk=256)
    assert cudnn.unfit(full) is None
    for trains in (True, False):
        assert (
            cudnn.unfit(replace(full, tk=200, trains=trains))
            == "lengths that are no multiples of 128"
        )
    assert "change from call to call" in str(cudnn.unfit(replace(full, cudnn=False)))
    calls: list[bool] = []
    monkeypatch.setitem(
        ENGINES, "cudnn", replace(cudnn, refuses=lambda call: calls.append(call.cudnn))
    )
    x = torch.randn(1, 2, 128, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(Op, "choose", lambda op, asked, device, unfit: (unfit("cudnn"), "fused")[1])
    fem_attention(x, x, x)
    with without_cudnn_attention():
        fem_attention(x, x, x)
    assert calls == [True, False] and torch.backends.cuda.cudnn_sdp_enabled()


def test_what_a_cpu_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, auto chooses the fused form even if an engine could run in the interpreter.

    An engine that is requested explicitly raises an error with the reason.
    """
    assert [each.name for each in OP.implementations] == [*ENGINES, "decode", "fused", "reference"]
    x = [
        torch.randn(1, 2, 9, 4),
        torch.randn(1, 2, 9, 4),
        torch.randn(1, 2, 9, 3),
        torch.ones(2, 3),
    ]
    with pytest.raises(ValueError, match="'flash_attn_2' cannot run: no GPU; use auto"):
        fem_attention(*x, implementation="flash_attn_2")
    assert torch.equal(fem_attention(*x), fem_attention(*x, implementation="fused"))
    monkeypatch.setenv("FEM_KERNELS", "fem_attention=reference")
    assert torch.equal(fem_attention(*x), fem_attention(*x, implementation="reference"))


@pytest.mark.parametrize(
    ("dk", "values", "plan"),
    [
        (128, 128, Plan(1, True)),
        (128, 256, Plan(2, True)),
        (256, 512, Plan(2, True)),
        (96, 96, Plan(1, True)),
        (64, 96, Plan(1, True)),
    ],
)
def test_how_values_are_laid_out_for_an_engine_with_equal_widths(
    dk: int, values: int, plan: Plan
) -> None:
    assert ENGINES["flash_attn_2"].plan(replace(CALL, dk=dk, values=values)) == plan


@pytest.mark.parametrize(("dk", "values"), [(8, 8), (8, 6), (6, 8), (8, 16), (5, 22)])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("limit", [8, 16, 64])
def test_padding_and_halves_change_nothing(dk: int, values: int, equal: bool, limit: int) -> None:
    seen = []

    def attend(q: Tensor, k: Tensor, v: Tensor, reading: Reading) -> Tensor:
        seen.append((q.shape[-1], v.shape[-1]))
        return (q @ k.mT * reading.scale).softmax(-1) @ v

    engine = Engine(
        "fake",
        "",
        lambda device: None,
        attend,
        lambda call, widths: max(widths) <= limit,
        equal=equal,
    )
    call = replace(CALL, dk=dk, values=values)
    if engine.unfit(call) is not None:
        assert max(dk, -(-values // 2)) > limit
        return
    q, k, v = (torch.randn(2, 2, 9, width, dtype=torch.float64) for width in (dk, dk, values))
    got = engine.read(q, k, v, Reading(False, 0.3), call)
    # float64 rounding
    torch.testing.assert_close(got, (q @ k.mT * 0.3).softmax(-1) @ v, rtol=1e-13, atol=1e-13)
    assert all(max(widths) <= limit and (widths[0] == widths[1] or not equal) for widths in seen)


# --- arguments of the engines ---------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1) @ v


READINGS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "past": {"tq": 4},
    "documents": {"documents": [0, 0, 3, 7, 12]},
    "full documents": {"causal": False, "documents": [0, 5, 12, 12]},
    "padding": {"padding": True},
    "padding and a past": {"padding": True, "tq": 5, "causal": False},
    "one query": {"tq": 1},
}


def reading_of(made: dict[str, Any]) -> tuple[Reading, int, Tensor]:
    tq, causal = made.get("tq", 12), made.get("causal", True)
    documents = torch.tensor(made["documents"]) if "documents" in made else None
    bounds = None if documents is None else document_bounds(documents, 12)
    valid = (torch.arange(12) % 5 > 0)[None] if made.get("padding") else None
    position = torch.arange(12)
    row = position[12 - tq :, None]
    mask = (row >= position) if causal else torch.ones(tq, 12, dtype=torch.bool)
    if documents is not None:
        document = (position[:, None] >= documents[1:]).sum(1)
        mask = mask & (document[row] == document)
    if valid is not None:
        mask = (mask & valid[0]) | (row == position)
    return Reading(causal, 0.4, valid, documents, bounds), tq, mask


@pytest.mark.parametrize("kind", READINGS)
def test_torchs_attention_reads_what_is_requested(kind: str) -> None:
    reading, tq, mask = reading_of(READINGS[kind])
    made = readable_keys(
        tq,
        12,
        torch.device("cpu"),
        causal=reading.causal,
        keys_valid=reading.keys_valid,
        bounds=reading.bounds,
    )
    assert torch.equal(made.expand(1, 1, tq, 12)[0, 0], mask)
    q, k, v = torch.randn(1, 4, tq, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 8)
    # float32 rounding
    torch.testing.assert_close(
        ENGINES["sdpa"].attend(q, k, v, reading), plain(q, k, v, mask, 0.4), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(RuntimeError, match="scaled_dot_product_attention|No available kernel"):
        ENGINES["efficient"].attend(q, k, v, reading)  # its kernels need a GPU


ENGINE_PACKAGES = [
    ("flash_attn_2", "flash_attn"),
    ("flash_attn_3", "flash_attn_interface"),
    ("flash_attn_4", "flash_attn.cute"),
]


def dense(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> None:
    """The signature of flash_attn_func in flash-attn 2.8.3, the version of constraints.txt."""


DENSE = inspect.signature(dense)
_first, _rest = tuple(DENSE.parameters.values())[:3], tuple(DENSE.parameters.values())[3:]
_named = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
RAGGED = DENSE.replace(
    parameters=[
        *_first,
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _named),
        *_rest,
    ]
)
"""The signature of flash_attn_varlen_func in the same version, without its block_table."""


def bound(function: Any, like: inspect.Signature) -> Any:
    """Return the function, which then accepts only calls that the signature ``like`` accepts."""

    def call(*given: Any, **named: Any) -> Any:
        like.bind(*given, **named)
        return function(*given, **named)

    return call


@pytest.mark.parametrize("kind", [kind for kind in READINGS if "padding" not in kind])
@pytest.mark.parametrize(("engine", "package"), ENGINE_PACKAGES)
def test_flash_attention_packages_are_called_in_their_layout(
    kind: str, engine: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, tq, mask = reading_of(READINGS[kind])
    with_sums = engine != "flash_attn_2"  # like early versions of FlashAttention-3

    def given(out: Tensor) -> Any:
        return (out, None) if with_sums else out

    def flash_attn_func(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, deterministic: bool
    ) -> Any:
        assert causal == reading.causal and not deterministic
        aligned = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
        aligned = aligned.tril(k.shape[1] - q.shape[1]) if causal else aligned
        return given(
            plain(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), aligned, softmax_scale
            ).transpose(1, 2)
        )

    def flash_attn_varlen_func(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, **kinds: Any
    ) -> Any:
        starts = cu_seqlens_q
        assert starts.dtype == torch.int32 and starts is kinds.pop("cu_seqlens_k")
        assert kinds.pop("max_seqlen_q") == kinds.pop("max_seqlen_k") == 12
        pieces = [
            slice(a, b)
            for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
            if b > a
        ]
        outs = [
            flash_attn_func(q[None, part], k[None, part], v[None, part], **kinds) for part in pieces
        ]
        return given(torch.cat([(out[0] if with_sums else out)[0] for out in outs]))

    functions = types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )
    if engine == "flash_attn_2":
        assert "flash-attn==2.8.3" in (ROOT / "constraints.txt").read_text().split()
        functions.flash_attn_func = bound(flash_attn_func, DENSE)
        functions.flash_attn_varlen_func = bound(flash_attn_varlen_func, RAGGED)
    monkeypatch.setitem(sys.modules, package, functions)
    q, k, v = torch.randn(1, 4, tq, 8), torch.randn(1, 2, 12, 8), torch.randn(1, 2, 12, 16)
    call = replace(CALL, batch=1, tq=tq, tk=12, dk=8, values=16)
    # float32 rounding
    torch.testing.assert_close(
        ENGINES[engine].read(q, k, v, reading, call),
        plain(q, k, v, mask, 0.4),
        rtol=1e-5,
        atol=1e-6,
    )


# --- measured table -------------------------------------------------------------------------------


def entry(tokens: int, times: dict[str, float], **changed: Any) -> Entry:
    return Entry(
        **{
            "dtype": "bfloat16",
            "dk": 128,
            "dv": 64,
            "tokens": tokens,
            "causal": True,
            "microseconds": times,
            **changed,
        }
    )


def test_the_nearest_measured_shape_decides() -> None:
    entries = [
        entry(2048, {"flash": 9.0, "cudnn": 8.0, "triton": 7.0}),
        entry(16384, {"flash": 5.0, "cudnn": 6.0}),
        *(
            entry(4096, {"efficient": 1.0}, **one)
            for one in ({"dk": 64, "dv": 32}, {"causal": False}, {"dtype": "float32"})
        ),
    ]
    rest = ["flash_attn_3", "flash_attn_4", "flash_attn_2", "efficient", "sdpa"]
    assert measured_order(replace(CALL, tk=3000), entries, HOPPER) == (
        "triton",
        "cudnn",
        "flash",
        *rest,
    )
    assert measured_order(replace(CALL, tk=9000), entries, HOPPER)[:2] == ("flash", "cudnn")
    assert (
        measured_order(replace(CALL, tk=9000, dk=64, values=64), entries, HOPPER)[0] == "efficient"
    )
    assert measured_order(CALL, [], HOPPER) == HOPPER
    assert all(set(usual) == set(ENGINES) for usual in (HOPPER, OTHERS, MASKED))


@pytest.mark.parametrize(
    ("architecture", "first"),
    [(80, "flash"), (90, "cudnn"), (100, "cudnn"), (103, "cudnn"), (120, "flash")],
)
def test_where_nothing_is_measured_the_architecture_decides(
    architecture: int, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "architecture", lambda where: architecture)
    monkeypatch.setattr(machine, "name", lambda where: "not measured")
    found = order(replace(CALL, tq=architecture, tk=architecture))  # no cache contains this call
    assert found[0] == first and found.index("cudnn") < found.index("triton")


def test_a_benchmarks_table_is_written_read_and_followed(tmp_path: Path) -> None:
    for entries in read(TABLE).values():
        for one in entries:
            assert one.microseconds.keys() <= ENGINES.keys()
    path = tmp_path / "table.json"
    write("cpu", [entry(64, {"triton": 2.0, "flash": 1.0}), entry(32, {"sdpa": 1.0})], path)
    write("cpu", [entry(32, {"triton": 1.0})], path)
    write("another", [entry(1, {"sdpa": 1.0})], path)
    assert read(path)["cpu"] == (
        entry(32, {"triton": 1.0}),
        entry(64, {"triton": 2.0, "flash": 1.0}),
    )
    assert list(json.loads(path.read_text())) == ["another", "cpu"]
    assert order(replace(CALL, tq=33, tk=33), path)[0] == "triton"
    assert order(replace(CALL, tq=70, tk=70), path)[:2] == ("flash", "triton")
    assert order(replace(CALL, tq=70, tk=70, padding=True), path) == MASKED


NOTHING_MEASURED = {
    "dtype": "bfloat16",
    "dk": 0,
    "dv": 1,
    "tokens": 1,
    "causal": True,
    "microseconds": {},
}


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"cpu": 3}', '{"cpu": [{"dk": 3}]}', json.dumps({"cpu": [NOTHING_MEASURED]})],
)
def test_a_table_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="table.json is not a table of engines"):
        read(path)
