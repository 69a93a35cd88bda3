"""Builds that the gate compiles, recorded from launches on tensors without data.

No list of shapes is needed. The launches are those of layers and of operations.

Layers: each model of configs/model, and each mixer at the 1.3B Transformer's widths. A layer runs
forward and backward like in `tools.bench.traffic`. Models with FEM's softmax prior also run with
this package's own attention, with and without documents.

Operations: every case of ``kernels/<op>/cases.py`` at its real size, in bfloat16 and float32. The
cases include masks, pasts, states and padding.

Two launches that Triton would compile to the same code are one build. Triton treats an integer 1 as
a constant, and specialises on whether an integer is a multiple of 16 and a pointer is aligned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fem_common.config import load
from fem_megatron.block import Block
from fem_megatron.catalogue import MIXERS
from fem_megatron.config import ModelConfig
from fem_megatron.documents import Documents
from fem_megatron.meta.trace import run_on_fake_gpu
from fem_megatron.parallel import OneProcess
from fem_megatron.shape import BlockShape
from fem_megatron.state import Context
from kernels.check import Inputs, Suite, suites
from tools.bench.speed import implementations
from tools.kernel_gate.gate import Build, covering
from tools.kernel_gate.jit import POINTERS

MODELS = Path(__file__).parents[2] / "configs" / "model"
TOKENS, BATCH = 4096, 2
OTHERS = {"gated_delta_rule": ()}  # operations without a Triton kernel in this repository
IMPLEMENTATIONS = {"fem_attention": ("triton", "decode")}
TYPES = (torch.bfloat16, torch.float32)


Launches = Sequence[tuple[Any, Mapping[str, Any]]]


def build_of(label: str, kernel: Any, given: Mapping[str, Any]) -> Build:
    """Return the build of a launch of ``kernel``.

    label: description of the launch.
    given: its arguments and options (name -> value).
    """
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for name in kernel.arg_names:
        value = given.get(name)
        if name in _constexprs(kernel) or value is None or (type(value) is int and value == 1):
            constants[name] = value
        elif isinstance(value, Tensor):
            types[name] = POINTERS[value.dtype]
            aligned += [name] if value.storage_offset() * value.element_size() % 16 == 0 else []
        elif isinstance(value, bool):
            types[name] = "u1"
        elif isinstance(value, int):
            types[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned += [name] if value % 16 == 0 else []
        else:
            types[name] = "fp32"
    options = given.get("num_warps", 4), given.get("num_stages", 3)
    return Build(
        kernel.fn.__module__,
        kernel.fn.__name__,
        label,
        (*types.items(),),
        (*constants.items(),),
        tuple(aligned),
        *options,
    )


def recorded() -> list[Build]:
    """Return the builds that the gate checks, ordered by module and kernel.

    They are two builds of each kind of launch by the layers, and those of the operations' cases
    that are needed to cover each value of each constant.
    """
    of_layers, of_cases = _alike(_layers()), _alike(_cases())
    found = dict.fromkeys((*of_layers, *covering([*of_layers, *of_cases])))
    return sorted(
        found, key=lambda build: (build.module, build.function.fn.__code__.co_firstlineno)
    )


def launched(only: Collection[str] = ()) -> list[Build]:
    """Return a build of every distinct launch, for the cache.

    The launches are those of the layers and of the operations' cases. All implementations are
    included except the reference.

    only: operations. Other cases, and kernels of other operations in layers, are left out; if
        empty, everything is included.
    """
    found: dict[str, Build] = {}
    layers = (
        (label, [each for each in launches if not only or _package(each[0]) in only])
        for label, launches in _layers()
    )
    for label, launches in (*layers, *_cases(only, _fast)):
        for kernel, given in launches:
            if _package(kernel):
                build = build_of(label, kernel, given)
                found.setdefault(repr(replace(build, label="")), build)
    return list(found.values())


def _package(kernel: Any) -> str:
    """Return the operation whose folder contains the kernel.

    Return "" if the kernel belongs to another package.
    """
    first, _, rest = kernel.fn.__module__.partition(".")
    return str(rest.split(".")[0]) if first == "kernels" else ""


def _alike(labelled: Iterator[tuple[str, Launches]]) -> list[Build]:
    """Return two builds for each kind of launch (see `_kind`).

    These are the first build, and the one with the fewest specialised numbers.
    """
    first: dict[tuple[Any, ...], Build] = {}
    least: dict[tuple[Any, ...], Build] = {}
    for label, launches in labelled:
        for kernel, given in launches:
            if _package(kernel):
                build = build_of(label, kernel, given)
                kind = _kind(kernel, build)
                first.setdefault(kind, build)
                known = least.setdefault(kind, build)
                if (len(build.aligned), -len(build.types)) < (
                    len(known.aligned),
                    -len(known.types),
                ):
                    least[kind] = build
    return [*dict.fromkeys((*first.values(), *least.values()))]


def _constexprs(kernel: Any) -> set[str]:
    return {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}


def _kind(kernel: Any, build: Build) -> tuple[Any, ...]:
    """Return the key of launches that differ only in numbers.

    It consists of the kernel, its constants, its pointers with their types, and the options.
    """
    constants = tuple(
        each for each in build.constants if each[1] is None or each[0] in _constexprs(kernel)
    )
    return (
        build.module,
        build.kernel,
        constants,
        tuple(each for each in build.types if each[1].startswith("*")),
        build.warps,
        build.stages,
    )


def _layers() -> Iterator[tuple[str, Launches]]:
    for label, model in models().items():
        for n, shape in enumerate(dict.fromkeys(model.blocks())):
            name = label if n == 0 else f"{label}, layer kind {n + 1}"
            yield name, _layer(shape, model)
            if model.mixer == "fem_softmax":
                yield f"{name}, own attention", _layer(shape, model, "triton")
                yield (
                    f"{name}, own attention, documents",
                    _layer(shape, model, "triton", documents=True),
                )


def _own(op: str) -> tuple[str, ...]:
    """Return the implementations of an operation whose kernels are all in this repository."""
    return () if op in OTHERS else IMPLEMENTATIONS.get(op, ("triton",))


def _fast(op: str) -> tuple[str, ...]:
    """Return the implementations that the GPU suite checks, without the reference.

    They include implementations whose kernels run around another package's attention.
    """
    return tuple(name for name in implementations(op, automatic=True) if name != "reference")


def _cases(
    only: Collection[str] = (), chosen: Callable[[str], tuple[str, ...]] = _own
) -> Iterator[tuple[str, Launches]]:
    for op, suite in suites().items():
        for implementation in chosen(op) if not only or op in only else ():
            for case, make in suite.cases.items():
                for dtype in TYPES:
                    try:
                        launches = _case(suite, make, implementation, dtype)
                    except ValueError:  # the implementation refuses this case
                        continue
                    yield (
                        f"{op}: {case}, {implementation}, {str(dtype).removeprefix('torch.')}",
                        launches,
                    )


def models() -> dict[str, ModelConfig]:
    """Return name -> model configuration of the models whose layers are launched.

    These are the models of configs/model, and every mixer at the 1.3B Transformer's widths.
    """
    found = {path.stem: load(ModelConfig, path) for path in sorted(MODELS.glob("*.yaml"))}
    base = found["transformer_1.3b"]
    named = {
        f"{name} as wide as 1.3B": replace(base, mixer=name)
        for name, mixer in MIXERS.items()
        if mixer.package is None and name != "mha2nd"
    }
    return found | named


def _layer(
    shape: BlockShape, model: ModelConfig, engine: str = "", *, documents: bool = False
) -> Launches:
    def make(parallel: OneProcess) -> tuple[Callable[[], Tensor], list[Tensor]]:
        block = Block(shape, parallel)
        x = torch.empty(
            TOKENS,
            1 if documents else BATCH,
            model.stream_size,
            dtype=parallel.dtype,
            requires_grad=True,
        )
        documents_of = _documents() if documents else None
        positions = None if documents_of is None else documents_of.positions
        return lambda: block(
            x, Context(positions, causal=model.causal, documents=documents_of)
        ), list(block.parameters())

    before = os.environ.get("FEM_KERNELS")
    if engine:
        os.environ["FEM_KERNELS"] = f"fem_attention={engine}"
    try:
        return run_on_fake_gpu(make).kernels
    finally:
        os.environ.pop("FEM_KERNELS", None)
        os.environ.update({} if before is None else {"FEM_KERNELS": before})


def _documents() -> Documents:
    """Return the documents of one sequence of TOKENS tokens, whose rows have padding."""
    with torch.device("cpu"):
        begins = torch.zeros(1, TOKENS, dtype=torch.bool)
        begins[0, 1000] = begins[0, 1900] = True
        made = Documents.of(begins)
    places = {
        name: getattr(made, name).to("meta") for name in ("positions", "batch", "time", "kept")
    }
    return replace(made, **places, valid=tuple(each.to("meta") for each in made.valid))


class _Unnumbered(TorchFunctionMode):
    """Mode that drops the argument ``generator``, which tensors without data do not support."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(
            *args, **{name: value for name, value in (kwargs or {}).items() if name != "generator"}
        )


def _case(
    suite: Suite,
    draw: Callable[[Mapping[str, int]], Inputs],
    implementation: str,
    dtype: torch.dtype,
) -> Launches:
    trains = implementation != "decode"

    def made(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().to(dtype).requires_grad_(trains) if floats else value

    def make(_: OneProcess) -> tuple[Callable[[], Tensor], list[Tensor]]:
        with _Unnumbered():
            given = {name: made(value) for name, value in draw(suite.real).items()}

        def call() -> Tensor:
            outputs = suite.call(given, implementation)
            return torch.cat(
                [each.flatten().float() for each in outputs if not trains or each.requires_grad]
            )

        return call, []

    return run_on_fake_gpu(make, backward=trains).kernels
