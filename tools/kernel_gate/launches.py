"""What the gate compiles: the launches of the layers and operations themselves, on tensors without numbers. No list of shapes.

Each part of configs/model, and each mixer at the 1.3B Transformer's widths, a layer forward and backward as `tools.bench.traffic` runs it;
FEM's softmax prior with this room's own attention too, with and without documents. Then every case of ``kernels/<op>/cases.py`` at its real
size, in bfloat16 and float32: masks, pasts, states, padding. Two launches that Triton would compile alike are one build: an integer that is
1 is a constant, and a multiple of 16 says so, as do pointers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fem_common.config import load
from fem_megatron.block import Block
from fem_megatron.catalogue import MIXERS
from fem_megatron.config import ModelConfig
from fem_megatron.documents import Documents
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import BlockShape
from fem_megatron.state import Context
from kernels.check import Suite, suites
from tools.bench.traffic.trace import run_on_paper
from tools.kernel_gate.gate import Build

MODELS = Path(__file__).parents[2] / "configs" / "model"
TOKENS, BATCH = 4096, 2
OTHERS = {"gated_delta_rule": ()}  # operations without a Triton kernel of ours
IMPLEMENTATIONS = {"fem_attention": ("triton", "decode")}
TYPES = (torch.bfloat16, torch.float32)
POINTERS = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.float64: "*fp64", torch.bool: "*i1",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip


def build_of(label: str, kernel: Any, given: Mapping[str, Any]) -> Build:
    """What Triton compiles for a launch with these arguments and options, by name."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for parameter in kernel.params:
        name, value = parameter.name, given.get(parameter.name)
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor):
            types[name] = POINTERS[value.dtype]
            aligned += [name] if value.storage_offset() * value.element_size() % 16 == 0 else []
        elif isinstance(value, int):
            types[name] = "i32" if abs(value) < 2**31 else "i64"
            aligned += [name] if value % 16 == 0 else []
        else:
            types[name] = "fp32"
    options = given.get("num_warps", 4), given.get("num_stages", 3)
    return Build(kernel.fn.__module__, kernel.fn.__name__, label, (*types.items(),), (*constants.items(),), tuple(aligned), *options)


def recorded() -> list[Build]:
    """The builds of all launches, each once, by module and kernel."""
    found: dict[Build, Build] = {}
    for label, launches in _labelled():
        for kernel, given in launches:
            if kernel.fn.__module__.startswith("kernels."):
                build = build_of(label, kernel, given)
                found.setdefault(replace(build, label=""), build)
    return sorted(found.values(), key=lambda build: (build.module, build.function.fn.__code__.co_firstlineno))


Launches = Sequence[tuple[Any, Mapping[str, Any]]]


def _labelled() -> Iterator[tuple[str, Launches]]:
    for label, model in models().items():
        for n, shape in enumerate(dict.fromkeys(model.blocks())):
            name = label if n == 0 else f"{label}, layer kind {n + 1}"
            yield name, _layer(shape, model)
            if model.mixer == "fem_softmax":
                yield f"{name}, own attention", _layer(shape, model, "triton")
                yield f"{name}, own attention, documents", _layer(shape, model, "triton", documents=True)
    for op, suite in suites().items():
        for implementation in () if op in OTHERS else IMPLEMENTATIONS.get(op, ("triton",)):
            for case, make in suite.cases.items():
                for dtype in TYPES:
                    try:
                        launches = _case(suite, make(suite.real), implementation, dtype)
                    except ValueError:  # a case that the implementation refuses
                        continue
                    yield f"{op}: {case}, {implementation}, {str(dtype).removeprefix('torch.')}", launches


def models() -> dict[str, ModelConfig]:
    """By name: the parts of configs/model, and every mixer at the 1.3B Transformer's widths."""
    found = {path.stem: load(ModelConfig, path) for path in sorted(MODELS.glob("*.yaml"))}
    base = found["transformer_1.3b"]
    named = {
        f"{name} as wide as 1.3B": replace(base, mixer=name) for name, mixer in MIXERS.items() if mixer.package is None and name != "mha2nd"
    }
    return found | named


def _layer(shape: BlockShape, model: ModelConfig, engine: str = "", *, documents: bool = False) -> Launches:
    def make(parallel: OneProcess) -> tuple[Callable[[], Tensor], list[Tensor]]:
        block = Block(shape, parallel)
        x = torch.empty(TOKENS, 1 if documents else BATCH, model.hidden_size, dtype=parallel.dtype, requires_grad=True)
        apart = _documents() if documents else None
        positions = None if apart is None else apart.positions
        return lambda: block(x, Context(positions, causal=model.causal, documents=apart)), list(block.parameters())

    before = os.environ.get("FEM_KERNELS")
    if engine:
        os.environ["FEM_KERNELS"] = f"fem_attention={engine}"
    try:
        return run_on_paper(make).kernels
    finally:
        os.environ.pop("FEM_KERNELS", None)
        os.environ.update({} if before is None else {"FEM_KERNELS": before})


def _documents() -> Documents:
    """Of one sequence, so long that their rows have padding."""
    with torch.device("cpu"):
        begins = torch.zeros(1, TOKENS, dtype=torch.bool)
        begins[0, 1000] = begins[0, 1900] = True
        made = Documents.of(begins)
    places = {name: getattr(made, name).to("meta") for name in ("positions", "batch", "time", "kept")}
    return replace(made, **places, valid=tuple(each.to("meta") for each in made.valid))


def _case(suite: Suite, x: Mapping[str, Any], implementation: str, dtype: torch.dtype) -> Launches:
    trains = implementation != "decode"

    def on_paper(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        floats = value.is_floating_point()
        return value.to("meta", dtype if floats else value.dtype).requires_grad_(floats and trains)

    def make(_: OneProcess) -> tuple[Callable[[], Tensor], list[Tensor]]:
        given = {name: on_paper(value) for name, value in x.items()}

        def call() -> Tensor:
            outputs = suite.call(given, implementation)
            return torch.cat([each.flatten().float() for each in outputs if not trains or each.requires_grad])

        return call, []

    return run_on_paper(make, backward=trains).kernels
