"""Tests of the choice of an implementation.

The choice depends on the order, the machine, the call, and the request. It is logged once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import machine
from kernels.__main__ import lines
from kernels.check import Inputs, suites
from kernels.implementations import Implementation, Op, check_overrides, lacks_triton, operations

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


def op(name: str = "sum") -> Op:
    """Return an operation with three implementations.

    They are one for a GPU, one that runs only on request, and the definition.
    """
    return Op(
        name,
        "adds",
        (
            Implementation(
                "fast", "on a GPU", lambda device: None if device.type == "cuda" else "no GPU"
            ),
            Implementation("odd", "never by itself", automatic=False),
            Implementation("reference", "the definition"),
        ),
    )


def test_auto_takes_the_first_that_machine_and_call_allow(
    messages: pytest.LogCaptureFixture,
) -> None:
    assert op().choose("auto", GPU) == "fast"
    assert op().choose("auto", CPU) == "reference"
    assert op().choose("auto", GPU, {"fast": "float64"}.get) == "reference"
    assert [record.levelname for record in messages.records] == ["INFO", "INFO"]


def test_falling_back_to_the_definition_on_a_gpu_is_a_warning_with_the_reason_once(
    messages: pytest.LogCaptureFixture,
) -> None:
    for width in (300, 301):
        op().choose("auto", GPU, {"fast": f"head width {width} is over 256"}.get)
    (record,) = messages.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "sum: reference runs (fast does not: head width 300 is over 256)"


def test_what_is_requested_runs_or_reports_why_not(messages: pytest.LogCaptureFixture) -> None:
    assert op().choose("odd", CPU) == "odd"
    with pytest.raises(ValueError, match="sum: implementation 'fast' cannot run: no GPU; use auto"):
        op().choose("fast", CPU)
    with pytest.raises(ValueError, match="'quick' is not one of auto, fast, odd, reference"):
        op().choose("quick", CPU)


def test_the_environment_overrides_auto_alone(
    monkeypatch: pytest.MonkeyPatch, messages: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEM_KERNELS", "other=reference, sum=odd")
    assert op().choose("auto", GPU) == "odd"
    assert op().choose("reference", GPU) == "reference"
    monkeypatch.setenv("FEM_KERNELS", "sum=fast")
    assert op().choose("auto", CPU) == "reference"
    assert "fast does not: no GPU" in messages.text
    monkeypatch.setenv("FEM_KERNELS", "sum=quick")
    with pytest.raises(ValueError, match="FEM_KERNELS: sum has no implementation 'quick'"):
        op().choose("auto", CPU)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "fem_atention=reference",
            "there is no operation 'fem_atention'; did you mean fem_attention?",
        ),
        ("fem_attention=fastest", "fem_attention has no implementation 'fastest'"),
        ("fem_attention", "'fem_attention' is not of the form operation=implementation"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEM_KERNELS", value)
    with pytest.raises(ValueError, match=message):
        check_overrides()


def test_every_operation_ends_in_its_definition_which_lacks_nothing_anywhere() -> None:
    found = operations()
    assert set(found) == set(suites())  # every operation has cases
    for name, each in found.items():
        assert each.name == name
        assert each.implementations[-1].lacks(CPU) is None
        assert each.implementations[-1].lacks(GPU) is None
        assert len({implementation.name for implementation in each.implementations}) == len(
            each.implementations
        )
        # Triton's interpreter is on in this process, but auto must not choose it.
        assert each.choose("auto", CPU) not in {
            one.name for one in each.implementations if one.lacks is lacks_triton
        }
    assert sum(line.startswith("  ->") for line in lines(found, machine.device())) == len(found)


def wide(op: str, name: str, width: int) -> Inputs:
    return suites()[op].cases[name](
        {**suites()[op].small, "tokens": 3, "width": width, "channels": width}
    )


def slices(**size: int) -> Inputs:
    suite = suites()["fem_projection"]
    return suite.cases["normal"]({**suite.small, **size, "tokens": 2})


LEFT: list[tuple[str, str, str, Any]] = [
    (
        "aft_read",
        "normal",
        "the free energy has logits of its own",
        lambda x: x | {"k": torch.cat((x["k"], x["k"]), -1)},
    ),
    ("aft_read", "normal", "all tokens read all", lambda x: x | {"causal": False}),
    ("ssm_read", "normal", "all tokens read all", lambda x: x | {"causal": False}),
    ("ssm_read", "normal", "weights that are not normalised", lambda x: x | {"normalise": False}),
    (
        "linear_attention",
        "no decay",
        "causal=False reads both ways",
        lambda x: x | {"causal": False},
    ),
    (
        "cem_attention",
        "normal",
        "head width 129 is over 128",
        lambda x: wide("cem_attention", "normal", 129),
    ),
    (
        "second_order_attention",
        "normal",
        "head width 130 is over 128",
        lambda x: wide("second_order_attention", "normal", 130),
    ),
    (
        "second_order_attention",
        "normal",
        "the exact step solves a system for each token",
        lambda x: x | {"exact": True},
    ),
    (
        "symmetric_attention",
        "sigmoid: normal",
        "head width 65 is over 64",
        lambda x: wide("symmetric_attention", "sigmoid: normal", 65),
    ),
    ("symmetric_attention", "sigmoid: normal", "kind softmax", lambda x: x | {"kind": "softmax"}),
    (
        "symmetric_attention",
        "bisoftmax: normal",
        "bisoftmax with keys of their own",
        lambda x: x | {"keys": x["z"].clone()},
    ),
    (
        "conditioner_features",
        "normal",
        "4097 channels are over 4096",
        lambda x: wide("conditioner_features", "normal", 4097),
    ),
    (
        "residual_norm",
        "normal",
        "4097 channels are over 4096",
        lambda x: wide("residual_norm", "normal", 4097),
    ),
    ("rotary", "normal", "2050 channels are over 2048", lambda x: wide("rotary", "normal", 2050)),
    ("fem_projection", "normal", "slices of 129 channels are over 128", lambda x: slices(dv=129)),
    (
        "fem_projection",
        "normal",
        "slices of 64 channels take a conditioner of 64, not of 65",
        lambda x: slices(n=65),
    ),
    *((op, "", "float64", lambda x: None) for op in suites() if op != "gated_delta_rule"),
]


@pytest.mark.parametrize(("op", "case", "reason", "change"), LEFT)
def test_what_triton_leaves_to_other_implementations_reports_why_and_runs(
    op: str, case: str, reason: str, change: Any
) -> None:
    suite = suites()[op]
    x = suite.cases[case or next(iter(suite.cases))](suite.small)
    if case:
        x = {
            name: t.float() if isinstance(t, Tensor) and t.is_floating_point() else t
            for name, t in change(x).items()
        }
    with pytest.raises(
        ValueError, match=f": implementation 'triton' cannot run: {reason}; use auto"
    ) as error:
        suite.call(x, "triton")
    assert "\n" not in str(error.value)
    suite.call(x, "auto")
    with pytest.raises(ValueError, match="implementation 'tritn' is not one of auto, "):
        suite.call(x, "tritn")


def test_the_command_lists_and_refuses() -> None:
    command = [sys.executable, "-m", "kernels"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in listed for name in operations())
    wrong = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "FEM_KERNELS": "a=b"}
    )
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1
    assert "no operation 'a'" in wrong.stderr
