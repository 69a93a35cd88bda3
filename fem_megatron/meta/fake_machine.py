"""Simulate one rank of a machine that is not available: its device and the groups of all its ranks.

Tensors have no data (torch's ``meta``) and collectives do not communicate; the simulation records
which kernels would run and how much memory they would use. On `kernels.machine.FAKE_GPU` it
replaces torch.cuda and the kernels of torch.compile; for a CPU it uses `platform`'s shim.
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

from fem_megatron.megatron import fusions, upstream
from fem_megatron.meta.trace import META, OnFakeGpu, Trace, counted, stand_in
from kernels.machine import FAKE_GPU as FAKE_GPU
from kernels.machine import name as name_of

CPU = torch.device("cpu")
# Functions of Megatron-core's fused cross entropy, which torch.compile compiles: they allocate no
# intermediate tensors, and each is one kernel.
_COMPILED = (
    "calculate_logits_max",
    "calculate_predicted_logits",
    "calculate_cross_entropy_loss",
    "calculate_gradients",
)
Layer = Callable[..., Tensor]
Fused = Callable[[str, Callable[..., Any]], Callable[..., Any]]
"""(name, function) -> the function as one kernel, of which only the results are counted."""


@contextlib.contextmanager
def machine(
    device: torch.device, rank: int, world_size: int, trace: Trace, fused: Fused
) -> Iterator[None]:
    """Make this process simulate rank ``rank`` of ``world_size`` ranks within the context.

    device: `FAKE_GPU` or `CPU`.
    trace: records the kernels that would run.
    fused: returns a substitute for a function that torch.compile would compile.

    If this process has a device other than ``device``, Megatron-core must not have been prepared
    for it (``upstream.prepare``).
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
            stack.enter_context(META)  # also the default device
        upstream.prepare()
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
        stack.enter_context(OnFakeGpu(trace, device))
        yield


def _groups() -> dict[str, Any]:
    """Return replacements for functions of torch.distributed in a process without other ranks.

    Megatron creates some groups with the backend gloo, and gathers objects.
    """
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
    """Replace the functions that torch.compile would compile on a GPU."""

    def swiglu(packed: Tensor) -> Tensor:
        return stand_in(trace, "SwiGLU", (*packed.shape[:-1], packed.shape[-1] // 2), [packed])

    stack.enter_context(
        mock.patch.multiple(fusions, megatron_swiglu=swiglu, lacks=lambda device: None)
    )
    module = importlib.import_module("megatron.core.fusions.fused_cross_entropy")
    compiled: dict[str, Any] = {name: fused(name, getattr(module, name)) for name in _COMPILED}
    stack.enter_context(mock.patch.multiple(module, **compiled))


def graphed(
    trace: Trace, runs: Sequence[Layer], samples: Sequence[tuple[Tensor, ...]]
) -> tuple[Layer, ...]:
    """Simulate ``torch.cuda.make_graphed_callables``.

    Each function runs once, then once as a capture. A replay runs the kernels again. Like the
    real function it keeps allocated a copy of the input, and the gradients of output, input
    and weights.

    Raises:
        RuntimeError: if the host reads a number of the device, which a capture does not allow; the
            message contains the place.
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
                raise RuntimeError(f"a CUDA graph cannot contain a host read: {trace.reads[seen]}")
        held = (torch.empty_like(out), *gradients)
        made.append(partial(_replayed, run, given, held))
    return tuple(made)


def _replayed(
    run: Layer, sample: tuple[Tensor, ...], held: tuple[Tensor, ...], *given: Tensor
) -> Tensor:
    out: Tensor = _Replay.apply(run, sample[1:], *given)
    return out


class _Replay(torch.autograd.Function):
    """Both passes of a replayed layer; the backward pass frees what the forward pass kept."""

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
        del ctx.out, ctx.inputs  # a reference to the loss keeps this node alive
        return None, None, *torch.autograd.grad(out, inputs, grads)


class _Stream:
    """Replacement for a CUDA stream or event; it never waits."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., float]:
        return lambda *_, **__: 0.0


def _cuda() -> dict[str, Any]:
    """Return the replacements for functions of torch.cuda on the simulated machine.

    The result maps the name of each function to its replacement.
    """
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
    # torch._dynamo requires that each name has its own function.
    return {name: lambda *_, **__: None for name in quiet} | {
        "is_available": lambda: True,
        "current_device": lambda: FAKE_GPU.index,
        "device_count": lambda: FAKE_GPU.index + 1,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_device_name": lambda *_: name_of(FAKE_GPU),
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
