"""Record the memory and the collectives of a rank's steps.

`Recorder` intercepts every dispatched torch operation. It can also record a real run without
changing it, so that the collectives of both can be compared call by call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fem_common.costs import bytes_sent
from fem_megatron.meta.trace import META, POINTWISE, TRACING, Dispatched, Trace, caller, traffic_of

TRACING.add(__file__)

SETUP, FORWARD, BACKWARD, REDUCTION, UPDATE = PHASES = (
    "setup",
    "forward",
    "backward",
    "reduction",
    "update",
)


@dataclass
class Held:
    """Memory of a tensor from its creation to its release.

    phase, part, operation, place: phase of the step, part of the model, operation and source line
    that created it. born, gone: ticks of the recorder at the creation and the release; gone is None
    while the memory is allocated.
    """

    bytes: int
    phase: str
    part: str
    operation: str
    place: str
    born: int
    gone: int | None = None
    content: str = ""  # one of fem_common.costs.CONTENTS; empty if unknown


@dataclass(frozen=True)
class Collective:
    """A collective call.

    group: ranks of the process group. bytes: size of this rank's largest tensor. peer: the other
    rank of a send or receive, else None.
    """

    phase: str
    kind: str
    group: tuple[int, ...]
    bytes: int
    peer: int | None = None

    @property
    def sent(self) -> float:
        """Bytes that this rank sends."""
        return bytes_sent(self.kind, self.bytes, len(self.group))


@dataclass
class StepTrace(Trace):
    """Trace of a rank's operations that also records the phase of the step.

    ``stage`` is ``setup``, ``forward`` (including the backward pass), ``reduction`` or ``update``.
    """

    stage: str = SETUP
    part: str = ""
    collectives: list[Collective] = field(default_factory=list)
    muted: bool = False

    @property
    def phase(self) -> str:
        """Phase of the step to which the running operation belongs."""
        running = torch._C._current_graph_task_id() != -1
        return BACKWARD if running and self.stage == FORWARD else self.stage

    def launched(self, kernel: Any, given: dict[str, Any]) -> None:
        """Ignore the launch of a Triton kernel.

        Recording it would keep its arguments, tensors of the step, in memory.
        """

    def add(self, name: str, traffic: float, kind: str = POINTWISE, flops: float = 0.0) -> None:
        """Record a kernel."""
        self.backward = self.phase == BACKWARD
        super().add(name, traffic, kind, flops)

    def restart(self) -> None:
        """Forget everything that was recorded."""
        super().restart()
        self.collectives.clear()


class Recorder(Dispatched):
    """Recorder of all collectives, and of the memory of all tensors on one device.

    These are meta tensors in a rehearsal, or CPU tensors in a real run.
    """

    trace: StepTrace

    def __init__(self, trace: StepTrace, device: torch.device = META) -> None:
        super().__init__(trace)
        self.device = device
        self.held: list[Held] = []
        self.here: dict[int, tuple[Held, Any]] = {}
        self.tick = 0

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the operation and record it."""
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs)
        if self.trace.muted:
            return func(*args, **kwargs)
        out = super().run(func, args, kwargs)
        self.note(out, func.__name__.partition(".")[0])
        return out

    def fused(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` wrapped so that a call counts as one kernel.

        Its intermediate tensors are not recorded.
        """

        def call(*args: Any) -> Any:
            self.trace.muted = True
            try:
                out = function(*args)
            finally:
                self.trace.muted = False
            self.trace.add(
                name, traffic_of([t for t in tree_leaves((args, out)) if isinstance(t, Tensor)])
            )
            self.note(out, name)
            return out

        return call

    def note(self, made: Any, operation: str) -> None:
        """Record the memory of new tensors."""
        for storage in self._storages(made):
            key = storage._cdata
            if key not in self.here and storage.nbytes():
                phase, part = self.trace.phase, self.trace.part
                held = Held(storage.nbytes(), phase, part, operation, caller(), self.tick)
                self.here[key] = held, weakref.ref(storage, partial(self._gone, key))
                self.held.append(held)
                self.tick += 1

    def known(self, tensors: Any, content: str) -> None:
        """Set the content of the memory of these tensors, unless it is already set.

        content: one of fem_common.costs.CONTENTS.
        """
        for storage in self._storages(tensors):
            if storage._cdata in self.here:
                held, _ = self.here[storage._cdata]
                held.content = held.content or content

    def forget(self, tensors: Any) -> None:
        """Count the memory of these tensors as zero."""
        for storage in self._storages(tensors):
            self.here[storage._cdata][0].bytes = 0

    def _storages(self, tensors: Any) -> Iterator[torch.UntypedStorage]:
        """Yield the memory of the tensors on the recorder's device."""
        for t in tree_leaves(tensors):
            if isinstance(t, Tensor) and (t.is_meta if self.device == META else t.is_cpu):
                yield t.untyped_storage()

    def _gone(self, key: int, _: object) -> None:
        held, _ = self.here.pop(key)
        held.gone = self.tick
        self.tick += 1

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        group = next(each for each in args if not isinstance(each, Tensor | list | int))
        if not isinstance(group, torch.distributed.ProcessGroup):
            group = torch.distributed.ProcessGroup.unbox(group)
        ranks = tuple(torch.distributed.get_process_group_ranks(group))
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        size = max((t.numel() * t.element_size() for t in tensors), default=0)
        kind = func.overloadpacket.__name__.strip("_")
        peer = ranks[args[2]] if kind in ("send", "recv") else None
        if kind != "barrier":
            self.trace.collectives.append(
                Collective(self.trace.phase, NAMES.get(kind, kind), ranks, size, peer)
            )
        if not any(t.is_meta for t in tensors) and torch.distributed.get_backend() != "fake":
            return func(*args, **kwargs)
        work = torch._C._distributed_c10d.FakeWork().boxed()
        return (args[0], work) if len(func._schema.returns) > 1 else work


NAMES = {
    "allreduce": "all-reduce",
    "allgather_base": "all-gather",
    "allgather": "all-gather",
    "allgather_into_tensor_coalesced": "all-gather",
    "reduce_scatter_tensor_coalesced": "reduce-scatter",
    "allreduce_coalesced": "all-reduce",
    "reduce_scatter_base": "reduce-scatter",
    "broadcast": "broadcast",
    "recv": "receive",
}
"""Name of a collective in torch -> common name."""
