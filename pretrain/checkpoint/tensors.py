"""Write a checkpoint's sharded tensors, from all ranks, in Megatron's ``torch_dist`` format.

Megatron plans a save: which rank writes which shard. This module writes the files: each rank up to
``FILES`` files, in which every shard is a separate archive of ``torch.save``, and rank 0
``.metadata``, which locates the shards. Megatron's own writers are not used. They hide the file
system's errors behind those of torch's zip writer, report no checksums, and differ between
releases; since 0.17 asynchronous saves require another package or code that is deprecated.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import _split_by_size_and_type
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    determine_main_replica_uniform_distribution,
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from fem_common.errors import StorageError
from fem_common.files import named_errors
from fem_common.signals import PDEATHSIG, prctl
from fem_megatron.megatron import platform
from fem_megatron.megatron.staging import staged
from pretrain.checkpoint.folder import TENSORS, HashedFile
from pretrain.collectives import from_rank_0

FILES = 2  # files per rank, which are written in parallel
Files = dict[str, list[tuple[MetadataIndex, Tensor]]]  # name -> shards
Places = dict[MetadataIndex, _StorageInfo]


class TensorSave:
    """One save of a sharded state. All ranks create it and call its methods together.

    Creating it plans the save and copies nothing. `write` writes the files in this process, `start`
    in a forked one. `finish` completes the save.

    Args:
        folder: an existing empty folder.
        state: nested dictionaries of Megatron's ShardedTensors, as ``save_preprocess`` returns it.
        group: ranks among which the writing of replicated shards is divided.
    """

    def __init__(
        self, folder: Path, state: dict[str, Any], group: torch.distributed.ProcessGroup
    ) -> None:
        self.folder = folder
        self.rank = torch.distributed.get_rank()
        self.places: Places | str | None = None  # locations of this rank's shards, or an error
        self.process: BaseProcess | None = None
        shares = determine_main_replica_uniform_distribution(state, group)
        distribute_main_replicas_with_precomputed_distribution(state, group, shares)
        validate_sharding_integrity(determine_global_metadata(state)[1])
        own, _, _ = _replace_state_dict_keys_with_sharded_keys(state, keep_only_main_replica=True)
        planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        planner.set_up_planner(mcore_to_pyt_state_dict(own, False), is_coordinator=self.rank == 0)
        plan = planner.create_local_plan()
        plans = self._gather(plan)
        self.metadata: Metadata | None = planner.create_global_plan(plans)[1] if plans else None
        plan = planner.finish_plan(planner.create_decentralized_global_plan(plan))
        self.files: Files = {}
        for items in _split_by_size_and_type(FILES, plan.items):
            if items:
                self.files[f"__{self.rank}_{len(self.files)}{TENSORS}"] = [
                    (item.index, planner.resolve_data(item).detach()) for item in items
                ]

    def write(self) -> None:
        """Write this rank's files. Errors are kept for `finish`."""
        self.files = on_host(self.files)
        self.places = self._written()

    def start(self) -> None:
        """Write this rank's files in a forked process, which the kernel kills if this one ends.

        The tensors may change after this call: GPU tensors have been copied to the host, and the
        forked process has its own view of the host's memory.
        """
        self.files = on_host(self.files)
        try:
            self.process, self.result = in_background(self._written)
        except OSError as error:
            self.places = _text(error)

    def done(self) -> bool:
        """Return True if all ranks' files have been written, or writing them has failed."""
        ready = self.process is None or self.result.poll()
        slowest = torch.tensor([int(ready)], dtype=torch.int, device=platform.device())
        torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MIN)
        return bool(slowest.item())

    def finish(self) -> None:
        """Wait for all files, and write ``.metadata``.

        Raises:
            StorageError: on all ranks, with the reason of the first rank that failed.
        """
        if self.process is not None:
            self.places = result_of(self.process, self.result)
        self.files.clear()
        outcomes = self._gather(self.places)
        from_rank_0(lambda: self._write_metadata(outcomes))

    def _written(self) -> Places | str:
        """Write this rank's files, and return the locations of its shards, or an error text."""
        places: Places = {}
        try:
            with ThreadPoolExecutor(FILES) as executor:
                for part in executor.map(self._write_file, self.files):
                    places |= part
        except OSError as error:
            return _text(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return places

    def _write_file(self, name: str) -> Places:
        path = self.folder / name
        places: Places = {}
        with named_errors(path), HashedFile(path) as file:
            for index, tensor in self.files[name]:
                places[index] = write_tensor(file, tensor)
            file.flush()
            os.fsync(file.fileno())  # other nodes cannot sync what this one has not sent
        return places

    def _gather(self, own: Any) -> list[Any]:
        """Return all ranks' objects on rank 0, and an empty list elsewhere."""
        size = torch.distributed.get_world_size() if self.rank == 0 else 0
        gathered: list[Any] = [None] * size
        torch.distributed.gather_object(own, gathered or None)
        return gathered

    def _write_metadata(self, outcomes: Sequence[Places | str]) -> None:
        places: Places = {}
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                raise StorageError(f"{outcome} (rank {rank})")
            places |= outcome
        assert self.metadata is not None
        write_metadata(self.folder, self.metadata, places)


def on_host(files: Files) -> Files:
    """Return the files with each GPU tensor replaced by a copy in page-locked memory."""
    on_gpu = [tensor for shards in files.values() for _, tensor in shards if tensor.is_cuda]
    if not on_gpu:
        return files
    copies = iter(staged(on_gpu))
    copied = {
        name: [(index, next(copies) if tensor.is_cuda else tensor) for index, tensor in shards]
        for name, shards in files.items()
    }
    platform.synchronize()
    return copied


def _text(error: OSError) -> str:
    """Return an error's text without its number."""
    return str(error).removeprefix(f"[Errno {error.errno}] ")


def write_tensor(file: HashedFile, tensor: Tensor) -> _StorageInfo:
    """Append a CPU tensor as an archive of ``torch.save``, and return its location.

    Raises OSError.
    """
    begin = file.tell()
    # torch saves the complete storage of a view.
    if tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous():
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    try:
        torch.save(tensor.detach(), file)
    except RuntimeError as error:
        # torch's zip writer replaces the error by "unexpected pos".
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    file.mark(begin, platform.stored(tensor))
    return _StorageInfo(Path(os.fsdecode(file.name)).name, begin, file.tell() - begin)


def write_metadata(folder: Path, metadata: Metadata, places: Places) -> None:
    """Write ``.metadata``, which contains the locations of all shards. Raises OSError."""
    metadata.storage_data = places
    with named_errors(folder / ".metadata"):
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_background(function: Callable[[], Any]) -> tuple[BaseProcess, Connection]:
    """Call ``function`` in a forked process, which Linux kills when this process ends.

    Return the process and a connection with the function's result. The process collects no garbage:
    it would free the GPU tensors of its parent, which is an error of CUDA.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(function, sender, os.getpid()))
    collecting = gc.isenabled()
    gc.disable()
    try:
        process.start()
    finally:
        if collecting:
            gc.enable()
        sender.close()
    return process, receiver


def _call(function: Callable[[], Any], sender: Connection, parent: int) -> None:
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before prctl took effect
    sender.send(function())


def result_of(process: BaseProcess, connection: Connection) -> Any:
    """Return the result of `in_background`, or an error text if the process has no result."""
    try:
        return connection.recv()
    except EOFError:
        process.join()
        return f"the process that writes its files ended with exit code {process.exitcode}"
    finally:
        process.join()
        connection.close()
