"""How an implementation is chosen: by order, by the machine, by the call, by what is asked; and that it is said, once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import machine
from kernels.__main__ import lines
from kernels.implementations import Implementation, OncePerMessage, Op, check_overrides, lacks_triton, operations

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


def op(name: str = "sum") -> Op:
    """Three implementations: one for a GPU, one that only runs where it is asked for, and the definition."""
    return Op(
        name,
        "adds",
        (
            Implementation("fast", "on a GPU", lambda device: None if device.type == "cuda" else "no GPU"),
            Implementation("odd", "never by itself", automatic=False),
            Implementation("reference", "the definition"),
        ),
    )


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The records of the operation `sum` as of a fresh process."""
    monkeypatch.setattr(logging.getLogger("kernels.sum"), "filters", [OncePerMessage()])
    caplog.set_level(logging.INFO, "kernels.sum")
    return caplog


def test_auto_takes_the_first_that_machine_and_call_allow(said: pytest.LogCaptureFixture) -> None:
    assert op().choose("auto", GPU) == "fast"
    assert op().choose("auto", CPU) == "reference"
    assert op().choose("auto", GPU, {"fast": "float64"}) == "reference"
    assert [record.levelname for record in said.records] == ["INFO", "INFO"]


def test_falling_back_to_the_definition_on_a_gpu_is_a_warning_with_the_reason_once(said: pytest.LogCaptureFixture) -> None:
    for width in (300, 301):
        op().choose("auto", GPU, {"fast": f"head width {width} is over 256"})
    (record,) = said.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "sum: reference runs (fast does not: head width 300 is over 256)"


def test_what_is_asked_for_runs_or_says_why_not(said: pytest.LogCaptureFixture) -> None:
    assert op().choose("odd", CPU) == "odd"
    with pytest.raises(ValueError, match="sum: implementation 'fast' cannot run: no GPU; use auto"):
        op().choose("fast", CPU)
    with pytest.raises(ValueError, match="'quick' is not one of auto, fast, odd, reference"):
        op().choose("quick", CPU)


def test_the_environment_overrides_auto_alone(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FEM_KERNELS", "other=reference, sum=odd")
    assert op().choose("auto", GPU) == "odd"
    assert op().choose("reference", GPU) == "reference"
    monkeypatch.setenv("FEM_KERNELS", "sum=fast")
    assert op().choose("auto", CPU) == "reference"
    assert "fast does not: no GPU" in said.text
    monkeypatch.setenv("FEM_KERNELS", "sum=quick")
    with pytest.raises(ValueError, match="FEM_KERNELS: sum has no implementation 'quick'"):
        op().choose("auto", CPU)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("fem_atention=reference", "there is no operation 'fem_atention'; did you mean fem_attention?"),
        ("fem_attention=fastest", "fem_attention has no implementation 'fastest'"),
        ("fem_attention", "'fem_attention' is not of the form operation=implementation"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEM_KERNELS", value)
    with pytest.raises(ValueError, match=message):
        check_overrides()


def test_every_operation_ends_in_its_definition_which_lacks_nothing_anywhere() -> None:
    found = operations()
    assert {
        "fem_attention",
        "time_decay_scan",
        "linear_attention",
        "cem_attention",
        "second_order_attention",
        "symmetric_attention",
    } <= set(found)
    for name, each in found.items():
        assert each.name == name
        assert each.implementations[-1].lacks(CPU) is None and each.implementations[-1].lacks(GPU) is None
        assert len({implementation.name for implementation in each.implementations}) == len(each.implementations)
        # Triton's interpreter, on in this process, is for tests that ask for it.
        assert each.choose("auto", CPU) not in {one.name for one in each.implementations if one.lacks is lacks_triton}


def test_the_list_marks_one_implementation_of_each_operation() -> None:
    found = operations()
    text = lines(found, machine.device())
    assert sum(line.startswith("  ->") for line in text) == len(found)


def test_the_command_lists_and_refuses() -> None:
    command = [sys.executable, "-m", "kernels"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(name in listed for name in operations())
    wrong = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "FEM_KERNELS": "a=b"})
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1 and "no operation 'a'" in wrong.stderr
