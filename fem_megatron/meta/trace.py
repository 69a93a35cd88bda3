"""Count the GPU memory traffic of a layer's forward and backward pass, on tensors without data.

The layers are the real ones; the tensors are torch's ``meta``. `OnFakeGpu` makes Python see them
on `kernels.machine.FAKE_GPU`, so every choice that depends on the device (an operation's
implementation, an attention engine, a dtype) is an H100's. Every executed operation is counted:

- torch's operations, when they are dispatched: the bytes that they read and write, once. Views
  count as 0 bytes.
- this project's Triton kernels, when they are launched: every tensor argument once, or only the
  arguments that the kernel's module lists in ``TRAFFIC``. No kernel is compiled or run.
- fused kernels of other packages (`_StandIn`): the bytes that they read, write and keep for the
  backward pass.

Not counted: repeated reads after L2 cache misses, small products inside a pointwise kernel, and
collectives.

Long, because all counting is in one module, so that no call is counted twice.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _allowed_determinism_checks_to_fns as _CHECKS
from torch.utils.flop_counter import flop_registry

from fem_megatron.parallel import OneProcess
from kernels.implementations import Op
from kernels.machine import FAKE_GPU

META = torch.device("meta")
POINTWISE, PRODUCT, WIDE, ATTENTION, TILES = KINDS = (
    "pointwise",
    "GEMM",
    "float32 GEMM",
    "attention",
    "tiles",
)
"""Kinds of kernels.

Bound by memory; a GEMM in bfloat16; a GEMM in a wider type; attention of an engine; a Triton kernel
of this project with matrix products.
"""


@dataclass(frozen=True)
class Launch:
    """Record of one kernel launch.

    backward: True in the backward pass.
    name: the kernel's name.
    kind: the kernel's kind, one of KINDS.
    bytes: bytes read and written.
    flops: FLOPs of matrix products, a multiply-add counted as two; 0 for ``tiles`` (this
        project's Triton kernels), where they are unknown.
    """

    backward: bool
    name: str
    kind: str
    bytes: float
    flops: float = 0.0


@dataclass
class Trace:
    """Record of the executed kernels.

    launches: all kernels, in order.
    kernels: each Triton launch, with its arguments and options by their names.
    chosen: operation -> chosen implementation.
    reads: code locations at which the host waited for a number from the device.
    activations: bytes kept for the backward pass.
    backward: True while the backward pass runs.
    """

    launches: list[Launch] = field(default_factory=list)
    kernels: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)
    chosen: dict[str, str] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    activations: int = 0
    backward: bool = False
    number: float = 0.0  # the value that the host reads

    @property
    def host_reads(self) -> int:
        """Number of times that the host waited for a number from the device."""
        return len(self.reads)

    def read(self, function: Any) -> None:
        """Record that the torch function ``function`` waits for a number from the device."""
        self.reads.append(f"{caller()} {getattr(function, '__name__', function)}")

    def launched(self, kernel: Any, given: dict[str, Any]) -> None:
        """Record the launch of a Triton kernel with these arguments."""
        self.kernels.append((kernel, given))

    def add(self, name: str, traffic: float, kind: str = POINTWISE, flops: float = 0.0) -> None:
        """Record a kernel in the current pass."""
        self.launches.append(Launch(self.backward, name, kind, traffic, flops))

    def restart(self) -> None:
        """Forget everything that was recorded."""
        for records in (self.launches, self.kernels, self.chosen, self.reads):
            records.clear()

    def passes(self, backward: bool | None) -> list[Launch]:
        """Return the launches of one pass, or of both passes for None."""
        return [each for each in self.launches if backward in (None, each.backward)]

    def traffic(self, *kinds: str, backward: bool | None = None, of: str = "") -> float:
        """Return the bytes of the launches of these kinds, or of all kinds if none is given.

        backward: True or False for only one pass; None: both passes.
        of: prefix of the names of the counted kernels.
        """
        wanted = kinds or KINDS
        return sum(
            each.bytes
            for each in self.passes(backward)
            if each.kind in wanted and each.name.startswith(of)
        )

    def flops(self, *, backward: bool | None = None) -> float:
        """Return the FLOPs of matrix products in one pass, or in both passes for None.

        These are the products of torch and of the attention kernel. Products within Triton kernels
        are unknown and not included.
        """
        return sum(each.flops for each in self.passes(backward))


def run_on_fake_gpu(
    make: Callable[[OneProcess], tuple[Callable[[], Tensor], Sequence[Tensor]]],
    *,
    backward: bool = True,
) -> Trace:
    """Return the trace of the second forward pass and, if ``backward``, its backward pass.

    make(parallel): returns the forward pass and its parameters; it is called in a context in which
    new tensors have no data. Raises ImportError if Triton, whose kernels are counted, is not
    installed.
    """
    from kernels.fem_attention.accelerated import watch

    trace, kept = Trace(), dict[int, int]()
    with OnFakeGpu(Trace()):
        watch(FAKE_GPU)  # once per process, not per layer

    def keep(t: Tensor) -> Tensor:
        if t.is_meta and t.untyped_storage()._cdata not in owned:
            kept[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.device(META):
        forward, parameters = make(Paper(trace))
    owned = {each.untyped_storage()._cdata for each in parameters}
    with counted(trace), OnFakeGpu(trace):
        forward()  # the first call may wait for the device; only the second is recorded
    trace.restart()
    with counted(trace), Dispatched(trace), OnFakeGpu(trace):
        with saved_tensors_hooks(keep, lambda t: t):
            y = forward()
        trace.activations = sum(kept.values())
        trace.backward = True
        if backward:
            torch.autograd.backward([y], [torch.empty(y.shape, dtype=y.dtype, device=META)])
    return trace


def caller() -> str:
    """Return ``file:line function`` of the innermost frame outside torch and the tracing code.

    The file path starts at the package.
    """
    frame = sys._getframe(1)
    while (place := _place_of(frame.f_code.co_filename)) is None and frame.f_back is not None:
        frame = frame.f_back
    return f"{place or frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


@functools.cache
def _place_of(file: str) -> str | None:
    """Return the file path from its package on; None for torch's and the tracing code."""
    if file in TRACING or "/torch/" in file or file.startswith("<") or file.endswith(_WRAPPERS):
        return None
    parts = Path(file).parts
    return "/".join(
        parts[max((n for n, part in enumerate(parts) if part in _ROOMS), default=len(parts) - 1) :]
    )


TRACING = {__file__, contextlib.__file__, functools.__file__}
"""Files of the tracing code."""
_ROOMS = ("fem_megatron", "kernels", "megatron", "pretrain", "deepspeed")
# They wrap or replace torch's functions and are treated like torch's frames.
_WRAPPERS = (
    "deepspeed/utils/nvtx.py",
    "deepspeed/runtime/zero/linear.py",
)


class OnFakeGpu(TorchFunctionMode):
    """Function mode in which meta tensors report ``device`` as their device.

    On `FAKE_GPU`, substitutes replace fused kernels of other packages that need a GPU.
    """

    def __init__(self, trace: Trace, device: torch.device = FAKE_GPU) -> None:
        self.trace, self.device = trace, device
        self.gpu = device.type == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        owner, kwargs = getattr(func, "__self__", None), kwargs or {}
        if owner is Tensor.device:
            found = func(*args)
            return self.device if found == META else found
        if owner is Tensor.is_cuda:
            return func(*args) or (self.gpu and args[0].is_meta)
        if func in _HOST_READS and args[0].is_meta:
            self.trace.read(func)
            return _HOST_READS[func](args[0], self.trace.number)
        if func is Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            return args[0]  # a copy to the host without waiting
        if func is Tensor.type and len(args) == 1 and args[0].is_meta and not kwargs:
            with torch._C.DisableTorchFunction():
                return _TYPE(*args).replace("meta.", "cuda." if self.gpu else "")
        if func is torch.autograd.grad:
            return self._gradients(*args, **kwargs)
        if func in _BACKWARD:
            return self._backward(func, *args, **kwargs)
        if func is F.rms_norm and self.gpu:
            return _rms_norm(self.trace, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return (_attention if self.gpu else _attention_of_a_cpu)(self.trace, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if "device" in kwargs and self._here(kwargs["device"]):
            kwargs["device"] = META
        named = (torch.device, str) if func is Tensor.to else torch.device
        if any(isinstance(each, named) for each in args):
            args = tuple(
                META if isinstance(each, named) and self._here(each) else each for each in args
            )
        return func(*args, **kwargs)

    def _here(self, device: Any) -> bool:
        """Return True if ``device`` names the device on which meta tensors are reported to be."""
        named = device is not None and not isinstance(device, int)
        return isinstance(device, int) or (named and torch.device(device).type == self.device.type)

    def _gradients(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Run ``torch.autograd.grad`` with this mode still active."""
        given = inspect.signature(torch.autograd.grad).bind(*args, **kwargs).arguments
        outputs, gradients = (
            tuple(x) if isinstance(x, tuple | list) and not hasattr(x, "node") else (x,)
            for x in (given["outputs"], given["grad_outputs"])
        )
        again = _again(given)
        with self:
            return _engine_run_backward(
                outputs, gradients, *again, tuple(given["inputs"]), False, accumulate_grad=False
            )

    def _backward(self, func: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass that ``func`` starts, with this mode still active.

        A recomputed layer then makes the same choices as in its forward pass.
        """
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        tensors, gradients = (
            tuple(x) if isinstance(x, tuple | list) else (x,)
            for x in map(given.get, _BACKWARD[func])
        )
        made = torch.autograd._make_grads(
            tensors, gradients if len(gradients) == len(tensors) else (None,) * len(tensors), False
        )
        with self:
            _engine_run_backward(tensors, made, *_again(given), (), True, accumulate_grad=True)


def _again(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (retain_graph, create_graph) with the defaults of torch.autograd's functions."""
    keep, create = given.get("retain_graph"), given.get("create_graph", False)
    return create if keep is None else keep, create


_BACKWARD: dict[Any, tuple[str, str]] = {
    torch.autograd.backward: ("tensors", "grad_tensors"),
    Tensor.backward: ("self", "gradient"),
}
"""Function that starts a backward pass -> its arguments for the tensors and their gradients."""
_TYPE = Tensor.type  # saved, because `platform` replaces it
_HOST_READS: dict[Any, Callable[[Tensor, float], Any]] = {
    Tensor.item: lambda t, number: number if t.is_floating_point() else 0,
    Tensor.__float__: lambda _, number: number,
    Tensor.__int__: lambda *_: 0,
    Tensor.__index__: lambda *_: 0,
    Tensor.__bool__: lambda *_: False,
    Tensor.tolist: lambda t, number: torch.full(t.shape, number, device="cpu").tolist(),
    Tensor.cpu: lambda t, number: torch.full(t.shape, number, dtype=t.dtype, device="cpu"),
}
"""Function that waits for a number from the device -> replacement."""


class Dispatched(TorchDispatchMode):
    """Dispatch mode that counts torch's operations."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensor queries by torch and by the counting code are not calls of the model.
        with torch._C.DisableTorchFunction():
            return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operation and count it."""
        out = func(*args, **kwargs)
        packet = func.overloadpacket
        name = (
            packet.__name__ if func.namespace == "aten" else f"{func.namespace}: {packet.__name__}"
        )
        if name.startswith(("empty", "new_empty")) or not all(t.is_meta for t in _tensors(out)):
            return out
        written, given = _written(func, args, kwargs), _tensors((args, kwargs))
        if not written and {_place(t)[0] for t in _tensors(out)} <= {_place(t)[0] for t in given}:
            return out  # a view
        made = written or _tensors(out)
        flops, kind = 0, POINTWISE
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        if flops:
            kind = PRODUCT if made[0].dtype == torch.bfloat16 else WIDE
        if name in _FILLED_FIRST:
            self.trace.add("fill", traffic_of(made))
            made = given[:1]  # it then writes as many bytes as it reads
        self.trace.add(name, _read(name, given, made) + traffic_of(made), kind, flops)
        if name == "native_layer_norm_backward" and made[1:]:
            self.trace.add("layer norm, its weight's gradient", traffic_of(given[:2]))
        return out


_FILLED_FIRST = (
    "select_backward",
    "slice_backward",
    "constant_pad_nd",
    "embedding_dense_backward",
    "nll_loss_backward",
    "diagonal_backward",
)
_GATHERS = ("index", "index_select", "gather", "embedding", "nll_loss_forward")


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments of a torch operation into which it writes, by its schema."""
    found = []
    for n, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            positional = n < len(args) and not argument.kwarg_only
            found += _tensors(args[n] if positional else kwargs.get(argument.name))
    return found


def _read(name: str, given: list[Tensor], made: list[Tensor]) -> float:
    """Return the bytes that a torch operation reads from its input tensors."""
    if (
        name.endswith("_like")
        or name.startswith("new_")
        or name in ("fill_", "zero_", "nll_loss_backward")
    ):
        return 0.0
    if name == "copy_":
        return traffic_of(given[1:])
    if name in _GATHERS:
        return traffic_of(given[1:]) + traffic_of(made)
    outputs = {_place(t) for t in made}
    # These operations do not read a tensor into which they write.
    pure = name in (
        "cat",
        "stack",
        "mul",
        "bmm",
        "mm",
        "maximum",
        "cumsum",
    )
    return traffic_of([t for t in given if not (pure and _place(t) in outputs)])


def _tensors(x: Any) -> list[Tensor]:
    return [each for each in tree_leaves(x) if isinstance(each, Tensor)]


def _place(t: Tensor) -> tuple[Any, ...]:
    return t.untyped_storage()._cdata, t.storage_offset(), tuple(t.shape), t.stride()


def traffic_of(tensors: Sequence[Tensor | None]) -> float:
    """Return the bytes of the tensors' memory.

    An element that appears several times, through broadcasting or through equal views, counts once.
    """
    different = {_place(t): t for t in tensors if t is not None}
    total = 0
    for t in different.values():
        count = 1
        for size, stride in zip(t.shape, t.stride(), strict=True):
            count *= size if stride or not size else 1
        total += count * t.element_size()
    return float(total)


# --- this project's Triton kernels ------------------------------------------------------------


@contextmanager
def counted(trace: Trace) -> Iterator[None]:
    """Record Triton launches and chosen implementations in the trace, within the context.

    Triton kernels do not run, and kernels of other packages are replaced.
    """
    # torch compares what both passes of a checkpointed part keep. The device is left out, because
    # torch's own functions see the meta device.
    checks = mock.patch.dict(_CHECKS, default=lambda t: {"shape": t.shape, "dtype": t.dtype})
    with _launches_counted(trace), _implementations_noted(trace), _packages(trace), checks:
        yield


@contextmanager
def _launches_counted(trace: Trace) -> Iterator[None]:
    """Count every launch of a Triton kernel without running it, within the context.

    Block sizes are those for a GPU, not those for Triton's interpreter.
    """
    import triton
    from triton.runtime.jit import KernelInterface

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        given = {**dict(zip(kernel.arg_names, args, strict=False)), **kwargs}
        trace.launched(kernel, given)
        counted_names, kind = given, POINTWISE
        modules = [module for name, module in sys.modules.items() if name.startswith("kernels.")]
        for module in modules:
            for each, names in getattr(module, "TRAFFIC", {}).items():
                if each is kernel:
                    counted_names = names
            if any(each is kernel for each in getattr(module, "MATRIX", ())):
                kind = TILES
        place = kernel.fn.__module__.split(".")
        name = f"{place[1] if place[0] == 'kernels' else place[0]}: {kernel.fn.__name__.strip('_')}"
        values = [given[each] for each in counted_names]
        trace.add(name, traffic_of([t for t in values if isinstance(t, Tensor)]), kind)

    own = KernelInterface.__getitem__
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        try:
            KernelInterface.__getitem__ = lambda kernel, grid: partial(launch, kernel)
            yield
        finally:
            KernelInterface.__getitem__ = own


@contextmanager
def _implementations_noted(trace: Trace) -> Iterator[None]:
    own = Op.choose

    def choose(op: Op, *args: Any, **kwargs: Any) -> str:
        trace.chosen[op.name] = own(op, *args, **kwargs)
        return trace.chosen[op.name]

    try:
        Op.choose = choose  # type: ignore[method-assign,assignment]
        yield
    finally:
        Op.choose = own  # type: ignore[method-assign]


# --- fused kernels of other packages ----------------------------------------------------------


class _StandIn(torch.autograd.Function):
    """Substitute for a fused kernel: one kernel in each pass.

    The forward kernel reads its inputs. The backward kernel reads the gradient and the kept
    tensors. Each kernel writes its results.
    """

    @staticmethod
    def forward(
        ctx: Any,
        trace: Trace,
        name: str,
        made: Tensor,
        kept: tuple[int, ...],
        *given: Tensor | None,
    ) -> Tensor:
        ctx.trace = trace
        ctx.name = name
        ctx.given = [None if t is None else (t.shape, t.dtype) for t in given]
        ctx.save_for_backward(*(given[n] for n in kept))
        trace.add(name, traffic_of([*given, made]))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        made = [
            torch.empty(each[0], dtype=each[1], device=META)
            if each is not None and wanted
            else None
            for each, wanted in zip(ctx.given, needed, strict=True)
        ]
        ctx.trace.add(ctx.name, traffic_of([*grads, *ctx.saved_tensors, *made]))
        return None, None, None, None, *made


def stand_in(
    trace: Trace,
    name: str,
    shape: Sequence[int],
    given: Sequence[Tensor | None],
    kept: Sequence[int] | None = None,
) -> Tensor:
    """Return the empty result of a fused kernel, and count the kernel's traffic.

    shape: shape of the result, which has the dtype of the first tensor in ``given``.
    given: inputs of the kernel.
    kept: indices of the inputs that the backward pass reads (None: all).
    """
    assert given[0] is not None
    made = torch.empty(shape, dtype=given[0].dtype, device=META)
    return cast(
        Tensor,
        _StandIn.apply(
            trace, name, made, tuple(range(len(given)) if kept is None else kept), *given
        ),
    )


class Paper(OneProcess):
    """A single process with the fused kernels of a bfloat16 GPU run.

    SwiGLU counts as one kernel, as torch.compile would produce.
    """

    def __init__(self, trace: Trace) -> None:
        super().__init__(torch.bfloat16)
        self.trace = trace

    def swiglu(self, packed: Tensor) -> Tensor:
        """Return SwiGLU, as `fem_megatron.parallel.Parallel` defines it."""
        return stand_in(self.trace, "SwiGLU", (*packed.shape[:-1], packed.shape[-1] // 2), [packed])


class _RmsNorm(torch.autograd.Function):
    """RMS norm with torch's GPU kernels.

    One forward kernel; one backward kernel for the input and one for the weight, which reads all
    inputs again.
    """

    @staticmethod
    def forward(ctx: Any, trace: Trace, x: Tensor, weight: Tensor | None) -> Tensor:
        y, rstd = torch.empty_like(x), torch.empty(x.shape[:-1], dtype=torch.float32, device=META)
        ctx.trace = trace
        ctx.save_for_backward(x, weight, rstd)
        trace.add("RMS norm", traffic_of([x, weight, y, rstd]))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dx = torch.empty_like(x)
        ctx.trace.add("RMS norm", traffic_of([*grads, x, weight, rstd, dx]))
        if weight is None:
            return None, dx, None
        ctx.trace.add("RMS norm, its weight's gradient", traffic_of([*grads, x, rstd, weight]))
        return None, dx, torch.empty_like(weight)


def _rms_norm(
    trace: Trace,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    return cast(Tensor, _RmsNorm.apply(trace, x, weight))


class _Attention(torch.autograd.Function):
    """Attention with the kernels of cuDNN or FlashAttention.

    One forward kernel; in the backward pass one for the row terms, one for the gradients, and one
    that converts dq from its float32 sums.
    """

    @staticmethod
    def forward(ctx: Any, trace: Trace, causal: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.tiles import empty_as

        out = empty_as(q, width=v.shape[-1])
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=META)
        ctx.trace, ctx.flops = trace, 2.0 * _pairs(q, k, causal) * (q.shape[-1] + v.shape[-1])
        ctx.save_for_backward(q, k, v, out, lse)
        trace.add("attention", traffic_of([q, k, v, out, lse]), ATTENTION, ctx.flops)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.tiles import empty_as

        q, k, v, out, lse = ctx.saved_tensors
        made = [empty_as(t) for t in (q, k, v)]
        sums = torch.empty(q.shape, dtype=torch.float32, device=META)
        ctx.trace.add("attention, row terms", traffic_of([*grads, out, lse]))
        # Five products instead of the forward's two: the scores are recomputed.
        ctx.trace.add(
            "attention",
            traffic_of([*grads, q, k, v, lse, sums, sums[:], *made[1:]]),
            ATTENTION,
            2.5 * ctx.flops,
        )
        ctx.trace.add("attention, dq", traffic_of([sums, made[0]]))
        return None, None, *made


def _pairs(q: Tensor, k: Tensor, causal: bool) -> float:
    (b, h, tq), tk = q.shape[:3], k.shape[2]
    return float(b * h * tq * (tk - (tq - 1) / 2 if causal else tk))


def _attention(
    trace: Trace,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    return cast(Tensor, _Attention.apply(trace, is_causal, q, k, v))


def _attention_of_a_cpu(
    trace: Trace,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the output of torch's flash attention for CPUs.

    It keeps the same tensors as the real call.
    """
    out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=attn_mask, scale=scale
    )
    return cast(Tensor, out)


@contextmanager
def _packages(trace: Trace) -> Iterator[None]:
    """Replace flash-linear-attention's delta rule with one kernel per pass.

    This underestimates the traffic: the real rule has several kernels, each with stored states.
    """

    def rule(
        q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, g: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        made = stand_in(trace, "delta rule", v.shape, [q, k, v, beta, g])
        return made, torch.empty(q.shape[0], q.shape[2], q.shape[3], v.shape[3], device=META)

    class Fla(ModuleType):
        chunk_delta_rule = chunk_gated_delta_rule = staticmethod(rule)

        def __init__(self, name: str) -> None:
            super().__init__(name)
            self.__spec__ = ModuleSpec(
                name, None
            )  # for code that checks whether the package is installed

    names = ("fla", "fla.ops", "fla.ops.delta_rule", "fla.ops.gated_delta_rule")
    own = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update({name: Fla(name) for name in names})
        yield
    finally:
        for name, module in own.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
