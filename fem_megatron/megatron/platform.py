"""Machine-dependent code: device, collective backend, random state, and Megatron-core without CUDA.

This is the only file that checks for a GPU and the only one that patches the pinned Megatron-core.
Each patch documents its reason and the upstream lines that require it. On CUDA ``prepare`` installs
only the fixes for checkpoint writers and for the gradient's norm.

Long, because it contains all patches.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fem_common.signals import PDEATHSIG, prctl
from fem_megatron.megatron.staging import staged
from kernels.implementations import check_overrides

MEGATRON_VERSION = "0.16.1"

# Modules of megatron.core in use whose code names CUDA devices explicitly:
# `torch.empty(..., device=torch.cuda.current_device())`, `torch.zeros(..., device="cuda")`,
# `torch.cuda.synchronize()`. Only the *name* `torch` in these modules is replaced.
PATCHED_MODULES = (
    "dist_checkpointing.exchange_utils",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "distributed.distributed_data_parallel",
    "distributed.finalize_model_grads",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rope_utils",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.language_module.language_module",
    "optimizer",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "parallel_state",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "pipeline_parallel.utils",
    "tensor_parallel.data",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.random",
    "tensor_parallel.utils",
    "transformer.module",
    "transformer.transformer_block",
    "transformer.transformer_layer",
    "transformer.utils",
    "utils",
)

_FACTORIES = (
    "zeros",
    "ones",
    "empty",
    "full",
    "tensor",
    "arange",
    "zeros_like",
    "ones_like",
    "empty_like",
    "full_like",
)


def has_cuda() -> bool:
    """Return True if this process computes on CUDA."""
    return torch.cuda.is_available()


def built_for_cuda() -> bool:
    """Return True if torch is built for CUDA. Unlike `has_cuda`, this does not initialize CUDA."""
    return torch.backends.cuda.is_built()


def device() -> torch.device:
    """Return the device of this process's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if has_cuda() else torch.device("cpu")


def device_name() -> str:
    """Return the accelerator's name, or ``cpu``."""
    return torch.cuda.get_device_name() if has_cuda() else "cpu"


def lacks_fp8() -> str | None:
    """Return the missing requirement for 8-bit products on this machine's GPU, or None.

    A CPU emulates them (``fem_megatron.megatron.fp8``).
    """
    if not has_cuda() or (found := torch.cuda.get_device_capability()) >= (8, 9):
        return None
    return (
        f"a GPU of compute capability 8.9 or more, such as H100 or L40S, but {device_name()} has "
        f"{found[0]}.{found[1]}"
    )


def lacks_graphs() -> str | None:
    """Return the missing requirement for CUDA graphs on this machine, or None."""
    return None if has_cuda() else "a GPU, and this machine has none"


def captured(
    functions: Iterable[Callable[..., torch.Tensor]], samples: Iterable[tuple[torch.Tensor, ...]]
) -> Any:
    """Return the functions as CUDA graphs, warmed up and captured on these samples in order.

    Backward passes are captured in the reverse order.
    """
    return torch.cuda.make_graphed_callables(tuple(functions), tuple(samples))


def toolkit() -> str | None:
    """Return the CUDA and cuDNN versions of the torch build, or None for a build without CUDA."""
    return (
        f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        if torch.version.cuda
        else None
    )


def import_megatron() -> None:
    """Import Megatron-core without its warnings; without CUDA this also halves the import time.

    Call it before any other import of Megatron. It silences warnings of Megatron and torch about
    things that this code already handles: no TE, no apex, renamed collectives.
    """
    for category in (UserWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"(megatron|torch)\..*")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with contextlib.nullcontext() if has_cuda() else _without_compiler_and_loggers():
        importlib.import_module("megatron.core")


@contextlib.contextmanager
def _without_compiler_and_loggers() -> Iterator[None]:
    """Disable ``torch.compile`` as a decorator, and hide wandb and TensorBoard, within the context.

    Upstream (jit.py:21, 0.16.1) decorates its fusions for CUDA, and the decorator imports torch's
    compiler: three seconds in every process. inference/contexts/dynamic_context.py:70 and
    timers.py:13 import the loggers, if installed, for inference and for timers that are not used.
    """
    compiler = torch.compile
    absent = [name for name in ("wandb", "tensorboard") if name not in sys.modules]
    torch.compile = lambda function: function  # type: ignore[assignment]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
    try:
        yield
    finally:
        torch.compile = compiler
        for name in absent:
            del sys.modules[name]


def check_kernel_overrides() -> None:
    """Raise ValueError if FEM_KERNELS names an unknown operation or implementation."""
    check_overrides()


def stored(tensor: torch.Tensor) -> Any:
    """Return all bytes of a CPU tensor's storage, as torch saves them.

    The result is a uint8 array on the same memory.
    """
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def write_checkpoints_with(opened: Callable[[Any, str], Any], *, asynchronous: bool) -> None:
    """Set how Megatron's checkpoint writers open files, run and report.

    Call it before ``dist_checkpointing.save``. The opened files receive one call per tensor:
    ``mark(start of its archive, `stored` bytes)``.

    A rank's writers are threads. Upstream (filesystem_async.py:266, 0.16.1) forks a process for
    each, which copies the rank's page tables, faults on every page of its tensors, and forks a
    process that uses CUDA if the save is synchronous. In a synchronous save the writers report
    through a queue in this process. Upstream starts a process for it that imports torch and
    Megatron: four seconds of a first save. Upstream's ``write_preloaded_data``
    (filesystem_async.py:342, 0.16.1) opens files with the builtin.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    threads = types.SimpleNamespace(
        Process=threading.Thread, Queue=queue.Queue, JoinableQueue=queue.Queue
    )
    contexts = types.SimpleNamespace(
        get_context=lambda kind: threads if kind == "fork" else multiprocessing.get_context(kind)
    )
    vars(filesystem_async).update(open=opened, mp=contexts)
    if not asynchronous:
        filesystem_async._results_queue = queue.SimpleQueue()
    elif isinstance(filesystem_async._results_queue, queue.SimpleQueue):
        filesystem_async._results_queue = None


def read_checkpoints_with(reader: type) -> None:
    """Set the subclass of torch's FileSystemReader that Megatron uses.

    Call it before ``dist_checkpointing.load``. Upstream (strategies/torch.py:758 and 760,
    0.16.1) uses fixed classes, which unpickle arbitrary objects and compare no checksums.
    """
    from megatron.core.dist_checkpointing.strategies import torch as upstream

    vars(upstream).update(CachedMetadataFileSystemReader=reader, FileSystemReader=reader)


def ending_with_parent(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``function`` for a forked process, which Linux then kills when its parent ends."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        parent = multiprocessing.parent_process()
        prctl(PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)  # the parent ended before prctl took effect
        function(*args, **kwargs)

    return call


def restore_linear(original: Callable[..., torch.Tensor]) -> None:
    """Undo the replacement of ``torch.nn.functional.linear`` by another library."""
    torch.nn.functional.linear = original


def prepare() -> str:
    """Make Megatron-core usable on this machine and return the collective backend.

    Call it once, before any Megatron object is created.

    Raises:
        RuntimeError: if the installed Megatron-core is not the version for which the patches are
        written.
    """
    import megatron.core

    if megatron.core.__version__ != MEGATRON_VERSION:
        raise RuntimeError(
            f"megatron-core {megatron.core.__version__} is installed, but this code is verified "
            f"against {MEGATRON_VERSION}: pip install megatron-core=={MEGATRON_VERSION}"
        )
    _fix_checkpoint_writers()
    if has_cuda():
        _keep_norm_on_device()
        return "nccl"
    _install_cpu_shim()
    return "gloo"


def initialize_distributed(timeout_minutes: float = 30, *, in_order: bool = False) -> None:
    """Start the default process group from the launcher's environment.

    Without a launcher the group has one process and is invisible to other libraries.

    in_order: a GPU starts kernels in launch order. Megatron relies on this to overlap the
        collectives of tensor and context parallelism with matrix products
        (tensor_parallel/layers.py:526, 0.16.1). An existing CUDA_DEVICE_MAX_CONNECTIONS is
        not changed.
    """
    settings: dict[str, Any] = {"backend": prepare(), "timeout": timedelta(minutes=timeout_minutes)}
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if has_cuda():
        if in_order:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
    if "RANK" not in os.environ:
        settings |= {
            "store": torch.distributed.HashStore(),  # type: ignore[attr-defined]
            "rank": 0,
            "world_size": 1,
        }
    # No device_id: with it NCCL would connect each of Megatron's groups immediately, collectively
    # over all ranks, including unused groups and groups of one rank, and would serialise unbatched
    # sends of a pipeline.
    torch.distributed.init_process_group(**settings)
    if has_cuda():
        # Connects all ranks; later barriers use this device.
        torch.distributed.barrier(device_ids=[local_rank])


def peak_memory_bytes() -> int:
    """Return this process's peak memory in bytes.

    On a GPU this is the CUDA allocator's peak, on a CPU the peak of the resident set.
    """
    return torch.cuda.max_memory_allocated() if has_cuda() else peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss, which starts at the parent process's value.
        return next(
            int(line.split()[1]) * 1024
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM:")
        )
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def reset_peak_memory() -> None:
    """Release cached blocks and reset :func:`peak_memory_bytes`.

    The peak of a CPU process cannot be reset.
    """
    if has_cuda():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def memory_history(events: int = 100_000) -> Iterator[Callable[[Path], None]]:
    """Record the newest ``events`` events of the CUDA allocator; requires :func:`has_cuda`.

    Yields a function that writes the events and the current allocations to a file, while recording
    is on. Stacks contain only Python frames: by default torch also unwinds C++ frames and resolves
    all their symbols before it writes.

    Raises:
        OSError: if the yielded function cannot write the file.
    """
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=events)
    try:
        yield lambda path: torch.cuda.memory._dump_snapshot(str(path))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def device_memory_bytes() -> int:
    """Return the memory of the GPU in bytes, or of the machine if it has no GPU."""
    if has_cuda():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def device_cache_bytes() -> int:
    """Return the size of the GPU's L2 cache in bytes; 0 on a CPU."""
    return (
        torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        if has_cuda()
        else 0
    )


def synchronize() -> None:
    """Wait until the device has finished all submitted work."""
    if has_cuda():
        torch.cuda.synchronize()


class Moment:
    """A point in the device's work: an event on CUDA, the clock's time on a CPU.

    Creating one does not wait.
    """

    def __init__(self) -> None:
        self.clock = time.perf_counter()
        self.event = torch.cuda.Event(enable_timing=True) if has_cuda() else None
        if self.event is not None:
            self.event.record()

    def seconds_until(self, later: Moment) -> float:
        """Return the seconds of device work from this moment to ``later``. Waits for ``later``."""
        if self.event is None or later.event is None:
            return later.clock - self.clock
        later.event.synchronize()
        return self.event.elapsed_time(later.event) / 1000


class Copies:
    """A stream for copies to the device, which run in parallel with kernels.

    No effect on a CPU.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if has_cuda() else None

    def begun(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which copies use this stream."""
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def needed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make kernels that start from now on wait for the copies of these tensors.

        The memory of the tensors is not reused for another copy before these kernels have finished.
        """
        if self.stream is not None:
            reader = torch.cuda.current_stream()
            reader.wait_stream(self.stream)
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(reader)


def seed_rng(seed: int) -> None:
    """Seed every random state that a step could use. Requires Megatron's process groups."""
    from megatron.core import tensor_parallel

    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """Return every random state that a step could use, as CPU byte tensors.

    The key ``cuda`` exists only on a GPU.
    """
    from megatron.core import tensor_parallel

    state = {
        "torch": torch.get_rng_state(),
        "tracker": dict(tensor_parallel.get_cuda_rng_tracker().get_states()),
    }
    if has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore a state that :func:`rng_state` returned on the same kind of device."""
    from megatron.core import tensor_parallel

    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
    if has_cuda() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def transformer_config_overrides() -> dict[str, Any]:
    """Return machine-dependent Megatron settings: without CUDA, fused kernels are off."""
    if has_cuda():
        return {}
    return {
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        # gloo sends from the tensor's storage, which Megatron would free during the send.
        "deallocate_pipeline_outputs": False,
    }


class _TorchProxy(types.ModuleType):
    """``torch`` for a patched Megatron-core module, in which CUDA names mean the CPU."""

    def __init__(self, overrides: dict[str, Any]):
        super().__init__("torch")
        self.__dict__.update(overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _cuda_stand_in() -> types.ModuleType:
    """Return ``torch.cuda`` for patched modules.

    The current device is the CPU, and streams never wait.
    """
    cuda = _TorchProxy({})
    cuda.__dict__.update(
        current_device=lambda: torch.device("cpu"),
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        manual_seed=torch.manual_seed,
        get_rng_state=lambda *_: torch.get_rng_state(),
        set_rng_state=lambda state, *_: torch.set_rng_state(state),
        is_available=lambda: False,
    )
    cuda.__class__ = _CudaProxy
    return cuda


class _CudaProxy(_TorchProxy):
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


@contextlib.contextmanager
def _tensor_types_named_cuda() -> Iterator[None]:
    """Report CUDA type names for CPU tensors within the context.

    Megatron's optimizers accept parameters by the name of their CUDA type (optimizer.py:671-699,
    distrib_optimizer.py:361-435, clip_grads.py:167).
    """
    real = torch.Tensor.type

    def named(self: torch.Tensor, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None and not kwargs:
            return real(self).replace("torch.", "torch.cuda.", 1)
        return real(self, dtype, **kwargs)

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


def _within_cuda_names(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _tensor_types_named_cuda():
            return function(*args, **kwargs)

    return call


def _install_cpu_shim() -> None:
    """Patch the listed modules to run on the CPU. Idempotent: an installed proxy is detected."""
    core = {name: importlib.import_module(f"megatron.core.{name}") for name in PATCHED_MODULES}
    if any(isinstance(module.torch, _TorchProxy) for module in core.values()):
        return
    # Megatron was imported without `import_megatron`: its fusions would start a C++ build.
    if "torch._dynamo" in sys.modules:
        torch.compiler.set_stance("force_eager")
    proxy = _TorchProxy(
        {"cuda": _cuda_stand_in(), **{name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}}
    )
    for module in core.values():
        module.torch = proxy  # type: ignore[attr-defined]
    # rope_utils.py:64 and language_module.py:244 call .cuda() on a tensor.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    random = core["tensor_parallel.random"]
    # random.py:41-112 read and write the CUDA generator through torch._C.
    random._get_cuda_rng_state = (  # type: ignore[attr-defined]
        lambda *_, **__: torch.get_rng_state()
    )
    random._set_cuda_rng_state = (  # type: ignore[attr-defined]
        lambda state, *_, **__: torch.set_rng_state(state)
    )
    float16 = core["optimizer.optimizer"].Float16OptimizerWithFloat16Params
    float16.__init__ = _within_cuda_names(float16.__init__)
    distributed = core["optimizer.distrib_optimizer"].DistributedOptimizer
    distributed.__init__ = _within_cuda_names(distributed.__init__)
    clip = _within_cuda_names(core["optimizer.clip_grads"].clip_grad_by_total_norm_fp32)
    core["optimizer.clip_grads"].clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]
    core["optimizer.optimizer"].clip_grad_by_total_norm_fp32 = clip  # type: ignore[attr-defined]
    # utils.py:1205 sums squares with torch.norm. On the CPU its error is up to 2e-5 for a large
    # fp32 tensor in which few rows contribute most of the norm (an embedding's gradient). The
    # gradient norm, and therefore the clipping, would depend on how the tensor is split.
    core["optimizer.clip_grads"].l2_norm_impl = _l2_norm  # type: ignore[attr-defined]
    core["optimizer.clip_grads"].multi_tensor_scale_impl = _scale  # type: ignore[attr-defined]
    buffers = core["distributed.param_and_grad_buffer"]
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(buffers, name, _not_alone(getattr(buffers, name)))


def _not_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return the collective of a bucket's buffer, without its call in a group of one rank.

    The rank's share is a view of the entire buffer (param_and_grad_buffer.py:56, 0.16.1), so that
    nothing would change, but gloo copies the buffer twice. The handle of an asynchronous call is
    awaited later, so that call stays.
    """

    def call(output: torch.Tensor, given: torch.Tensor, **settings: Any) -> Any:
        alone = settings["group"].size() == 1 and output.data_ptr() == given.data_ptr()
        if alone and not settings["async_op"]:
            return None
        return collective(output, given, **settings)

    return call


def _keep_norm_on_device() -> None:
    """Replace upstream's norm and scaling of gradients where neither is a fused kernel.

    Without Transformer Engine and apex, upstream's norm copies a number per tensor to the host
    (utils.py:1205-1207, 0.16.1), and its scaling makes and copies a temporary per tensor
    (utils.py:1217).
    """
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _l2_norm
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = _scale


def _scale(
    _chunk_size: int, _flag: Any, tensor_lists: list[list[torch.Tensor]], scale: float
) -> None:
    """Multiply the tensors of the first list, which is also the second, in place."""
    torch._foreach_mul_(tensor_lists[0], scale)


def _l2_norm(
    _chunk_size: int, _flag: Any, tensor_lists: list[list[torch.Tensor]], _per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Return the Euclidean norm of all tensors together.

    Each part is computed in its own precision, and the sum over parts in float64. A part is a
    tensor on a GPU, which adds in a tree, and a block of a tensor on a CPU.
    """
    if tensor_lists[0][0].is_cuda:
        return torch.stack(torch._foreach_norm(tensor_lists[0])).double().norm().float().view(
            1
        ), None
    parts = []
    for tensor in tensor_lists[0]:
        flat = tensor.reshape(-1)
        full = flat.numel() // 1024 * 1024
        parts += [
            torch.linalg.vector_norm(blocks, dim=1)
            for blocks in (flat[:full].view(-1, 1024), flat[None, full:])
            if blocks.numel()
        ]
    return torch.cat(parts).double().norm().float().view(1), None


def _fix_checkpoint_writers() -> None:
    """Make checkpoint writers mark each tensor and report the real error of a failed write.

    Also pack a GPU's tensors on the host (`fem_megatron.megatron.staging`).

    Upstream (filesystem_async.py, 0.16.1): ``_write_item`` (386) raises the error that torch's zip
    writer reports at its end ("unexpected pos"), which hides the file system's error. Errors that
    ``write_preloaded_data_multiproc`` logs (326) are also raised, so the log entries are
    suppressed.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async as upstream

    writer = upstream.FileSystemWriterAsync
    if getattr(writer, "_writers_fixed", False):
        return
    write_item = upstream._write_item

    @functools.wraps(write_item)
    def fixed_write_item(transforms: Any, stream: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            written = write_item(transforms, stream, data, *args, **kwargs)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        if isinstance(data, torch.Tensor):
            stream.mark(written.storage_data.offset, stored(data))
        return written

    upstream._write_item = fixed_write_item
    writer.preload_tensors = staticmethod(_preloading_into_blocks(writer.preload_tensors))
    upstream.logger.setLevel(logging.CRITICAL)
    writer._writers_fixed = True


def _preloading_into_blocks(preload: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap upstream's ``preload_tensors`` so that it receives host copies of a GPU's tensors.

    Upstream (filesystem_async.py:212, 0.16.1) copies tensor by tensor. The copies are kept until
    the next save: forked writers may share their memory, which torch would otherwise reuse in the
    meantime.
    """
    kept: list[torch.Tensor] = []

    def preload_from_blocks(write_buckets: list[Any], non_blocking: bool = True) -> Any:
        kept.clear()
        tensors: dict[int, torch.Tensor] = {}
        for *_, (_, items) in write_buckets:
            tensors |= {id(tensor): tensor for _, tensor in items if tensor.is_cuda}
        kept.extend(staged([*tensors.values()]))
        copies = dict(zip(tensors, kept, strict=True))
        packed = []
        for file, key, (others, items) in write_buckets:
            on_host = [(item, copies.get(id(tensor), tensor)) for item, tensor in items]
            packed.append((file, key, (others, on_host)))
        return preload(packed, non_blocking)

    return preload_from_blocks
