"""Properties of this machine: device, memory, streams, clocks and random states.

This is the only file that checks for a GPU. `fem_megatron.megatron.upstream` patches Megatron-core.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from kernels.implementations import check_overrides


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


def check_kernel_overrides() -> None:
    """Raise ValueError if FEM_KERNELS names an unknown operation or implementation."""
    check_overrides()


def stored(tensor: torch.Tensor) -> Any:
    """Return all bytes of a CPU tensor's storage, as torch saves them.

    The result is a uint8 array on the same memory.
    """
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()


def initialize_distributed(timeout_minutes: float = 30, *, in_order: bool = False) -> None:
    """Start the default process group from the launcher's environment.

    Without a launcher the group has one process and is invisible to other libraries.

    in_order: a GPU starts kernels in launch order. Megatron relies on this to overlap the
        collectives of tensor and context parallelism with matrix products
        (tensor_parallel/layers.py:526, 0.16.1). An existing CUDA_DEVICE_MAX_CONNECTIONS is
        not changed.
    """
    from fem_megatron.megatron.upstream import prepare

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
