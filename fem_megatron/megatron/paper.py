"""One rank of a machine that is not there: what runs within `machine` finds its device, and the groups of all its ranks.

Tensors have no numbers (torch's ``meta``) and no collective is done; what is looked at is what would run, and what it would hold.
On `kernels.machine.PAPER` it stands in for torch.cuda, and for what torch.compile makes there; on a CPU `platform` does.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fem_megatron.megatron import fusions, platform
from fem_megatron.trace import META, OnPaper, Trace, counted, stand_in
from kernels.machine import PAPER as PAPER
from kernels.machine import name as name_of

CPU = torch.device("cpu")
# Megatron-core's functions that it hands to torch.compile: what they make between is in no memory, and each pass is one kernel.
_COMPILED = {
    "fusions.fused_cross_entropy": (
        *(
            "calculate_logits_max",
            "calculate_predicted_logits",
            "calculate_cross_entropy_loss",
            "calculate_gradients",
        ),
    ),
}
Layer = Callable[..., Tensor]
Fused = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name, function) -> the function as one kernel, whose results alone are seen."""


@contextlib.contextmanager
def machine(
    device: torch.device, rank: int, world_size: int, trace: Trace, fused: Fused
) -> Iterator[None]:
    """This process is one of so many ranks, each with a ``device`` (`PAPER` or `CPU`), until the end.

    Megatron-core must not yet have been prepared for this process's own device (``platform.prepare``), if that is another one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(
                mock.patch.multiple(
                    torch.cuda, **_cuda(), make_graphed_callables=partial(graphed, trace)
                )
            )
            stack.enter_context(
                mock.patch.object(Tensor, "cuda", lambda self, *_, **__: self.to(META))
            )
            _stand_in_kernels(stack, trace, fused)
        else:
            stack.enter_context(META)  # what names no device is on it, too
        platform.prepare()
        torch.distributed.init_process_group(
            "fake", store=FakeStore(), rank=rank, world_size=world_size
        )
        stack.callback(torch.distributed.destroy_process_group)
        stack.enter_context(mock.patch.multiple(torch.distributed, **_groups()))
        if device.type == "cuda":
            random = importlib.import_module("megatron.core.tensor_parallel.random")
            states: dict[str, Any] = {
                "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
                "_set_cuda_rng_state": lambda *_, **__: None,
            }
            stack.enter_context(mock.patch.multiple(random, **states))
        stack.enter_context(counted(trace))
        stack.enter_context(OnPaper(trace, device))
        yield


def _groups() -> dict[str, Any]:
    """Name in torch.distributed -> what it is where no other rank is: Megatron asks for some groups of gloo by name, and for objects."""
    own = torch.distributed.new_group

    def new_group(
        ranks: list[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        **kwargs: Any,
    ) -> Any:
        return own(ranks, timeout, "fake", **kwargs)

    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [mine] * len(found)

    return {"new_group": new_group, "all_gather_object": all_gather_object}


def _stand_in_kernels(stack: contextlib.ExitStack, trace: Trace, fused: Fused) -> None:
    """What torch's compiler would make on a GPU."""

    def swiglu(packed: Tensor) -> Tensor:
        return stand_in(trace, "SwiGLU", (*packed.shape[:-1], packed.shape[-1] // 2), [packed])

    stack.enter_context(
        mock.patch.multiple(fusions, megatron_swiglu=swiglu, lacks=lambda device: None)
    )
    for name, functions in _COMPILED.items():
        module = importlib.import_module(f"megatron.core.{name}")
        compiled: dict[str, Any] = {each: fused(each, getattr(module, each)) for each in functions}
        stack.enter_context(mock.patch.multiple(module, **compiled))


def graphed(
    trace: Trace, runs: Sequence[Layer], samples: Sequence[tuple[Tensor, ...]]
) -> tuple[Layer, ...]:
    """``torch.cuda.make_graphed_callables``: each is tried, then looked at while it would be captured. A replay's kernels run again.

    Held to the end, as there: a copy of the input, and the gradients of output, input and weights.

    Raises:
        RuntimeError: the host reads a number of the device, which no capture allows; the message has the place.
    """
    captured: dict[str, Any] = {
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: True,
    }
    made = []
    for run, given in zip(runs, samples, strict=True):
        for capture in (False, True):
            seen = len(trace.reads)
            with (
                mock.patch.multiple(torch.cuda, **captured) if capture else contextlib.nullcontext()
            ):
                out = run(*given)
                gradients = torch.autograd.grad(out, given, torch.empty_like(out))
            if capture and trace.reads[seen:]:
                raise RuntimeError(f"a CUDA graph holds no host read, as {trace.reads[seen]} is")
        held = (torch.empty_like(out), *gradients)
        made.append(partial(_replayed, run, given, held))
    return tuple(made)


def _replayed(
    run: Layer, sample: tuple[Tensor, ...], held: tuple[Tensor, ...], *given: Tensor
) -> Tensor:
    out: Tensor = _Replay.apply(run, sample[1:], *given)
    return out


class _Replay(torch.autograd.Function):
    """Both passes of a layer; what the first keeps, the second frees."""

    @staticmethod
    def forward(ctx: Any, run: Layer, weights: tuple[Tensor, ...], *given: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inputs = (given[0].detach().requires_grad_(), *weights)
            ctx.out = run(*ctx.inputs)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, inputs = ctx.out, ctx.inputs
        del ctx.out, ctx.inputs  # whoever holds the loss holds this node
        return None, None, *torch.autograd.grad(out, inputs, grads)


class _Stream:
    """A stream of kernels or a moment in one; nothing waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 0.0


def _cuda() -> dict[str, Any]:
    """Name in torch.cuda -> what a process on the machine finds there."""
    quiet = (
        "set_device",
        "synchronize",
        "empty_cache",
        "manual_seed",
        "manual_seed_all",
        "set_rng_state",
        "reset_peak_memory_stats",
    )
    properties = SimpleNamespace(
        total_memory=80 * 2**30,
        L2_cache_size=50 * 2**20,
        multi_processor_count=132,
        major=9,
        minor=0,
    )
    stream = _Stream()
    return {name: lambda *_, **__: None for name in quiet} | {
        "is_available": lambda: True,
        "current_device": lambda: PAPER.index,
        "device_count": lambda: PAPER.index + 1,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_device_name": lambda *_: name_of(PAPER),
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
    }
