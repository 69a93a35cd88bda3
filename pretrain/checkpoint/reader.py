"""Read a checkpoint's tensors from disk without Megatron.

Checkpoints of any layout are read in one process, one tensor at a time. Reading executes no code:
``.metadata``, which the format stores as a pickle, may name only a few classes, and tensors are
read with torch's ``weights_only``. Every tensor's checksum is compared.
`pretrain.checkpoint.manager` writes checkpoints and reads them into an engine.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, Any, cast

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from fem_common.errors import ConfigError, StorageError, from_os_error, reason
from fem_megatron.config import ModelConfig
from fem_megatron.megatron.platform import stored
from pretrain.checkpoint.folder import find, parts_of

NOT_WEIGHTS = ("optimizer.", "rng.", "fp8.")
_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed.checkpoint.planner",
)
_METADATA_NAMES = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("megatron.core.dist_checkpointing.mapping", "ShardedObject"),
}
# Exceptions that damaged archives and pickles raise.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
)


class DamagedCheckpoint(ConfigError):
    """Error: a checkpoint's contents differ from what was written."""


class Weights:
    """The full (unsharded) weights of a step's folder of any layout, by their names in the model.

    shapes, dtypes: shape and dtype of every weight, in the order in which they were written.
    Tensors are on the CPU, in their stored dtype.

    Raises:
        ConfigError: ``.metadata`` is missing or damaged, or names a class that no checkpoint of
            this code contains.
    """

    def __init__(self, step: Path) -> None:
        self.step = step
        metadata = read_metadata(step / ".metadata")
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._stored = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata) and not name.startswith(NOT_WEIGHTS)
        }
        self.shapes = {name: tuple(stored.size) for name, stored in self._stored.items()}
        self.dtypes: dict[str, torch.dtype] = {
            name: stored.properties.dtype for name, stored in self._stored.items()
        }

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights with these names.

        A sharded weight needs extra memory for one shard while it is read.

        Raises:
            DamagedCheckpoint: a weight's bytes differ from what was written, or shards of it are
                missing.
            StorageError: a file system failed.
        """
        return {name: self._full_tensor(name) for name in names}

    def _full_tensor(self, name: str) -> Tensor:
        stored = self._stored[name]
        if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != math.prod(stored.size):
            raise self._damaged(name, "its shards do not cover it")
        if len(stored.chunks) == 1:
            return self._part(name, stored.chunks[0])
        whole = torch.empty(stored.size, dtype=self.dtypes[name])
        for chunk in stored.chunks:
            place = tuple(
                slice(start, start + size)
                for start, size in zip(chunk.offsets, chunk.sizes, strict=True)
            )
            whole[place] = self._part(name, chunk)
        return whole

    def _part(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        place = self._places.get(MetadataIndex(name, chunk.offsets))
        if place is None or Path(place.relative_path).name != place.relative_path:
            raise self._damaged(name, "no file of the folder contains it")
        try:
            with (self.step / place.relative_path).open("rb", buffering=0) as file:
                part = read_part(file, place)
        except OSError as error:
            raise StorageError(f"checkpoint {self.step} cannot be read: {reason(error)}") from None
        except DamagedCheckpoint as error:
            raise self._damaged(name, str(error)) from None
        if part.shape != chunk.sizes or part.dtype != self.dtypes[name]:
            raise self._damaged(
                name, f"{place.relative_path} contains another tensor at its offset"
            )
        return part

    def _damaged(self, name: str, why: str) -> DamagedCheckpoint:
        return DamagedCheckpoint(f"checkpoint {self.step} is damaged: {name}: {why}")


def read_part(file: IO[bytes], place: Any) -> Tensor:
    """Read one tensor, or one rank's shard of a tensor, and return it on the CPU.

    ``place`` is the `_StorageInfo` from ``.metadata`` that locates it in the open file. Every
    tensor is a separate zip archive with a checksum for each member. torch compares none of the
    checksums; this function compares all.

    Raises:
        DamagedCheckpoint: the bytes differ from those that were written.
        OSError: a file system failed.
    """
    part, checksum = _unchecked_part(file, place)
    compare(part, checksum, place)
    return part


def compare(part: Tensor, checksum: int | str, place: Any) -> None:
    """Raise DamagedCheckpoint unless the bytes of a tensor's storage match a checksum.

    checksum: the CRC-32 from the tensor's archive (int), or the XXH3-64 of the bytes (str). place:
    location of the tensor, for the error text.
    """
    content = stored(part)
    if (
        zlib.crc32(content) if isinstance(checksum, int) else xxhash.xxh3_64_hexdigest(content)
    ) != checksum:
        raise DamagedCheckpoint(f"{place.relative_path}: the bytes do not match their checksum")


def _unchecked_part(file: IO[bytes], place: Any) -> tuple[Tensor, int]:
    """Return a tensor like `read_part`, and its stored CRC-32, without comparing the two."""
    full = _Stretch(file, place.offset, place.length)
    stretch = cast(IO[bytes], full)
    try:
        with zipfile.ZipFile(stretch) as archive:
            (tensor,) = [
                member
                for member in archive.infolist()
                if member.filename.split("/")[1:] == ["data", "0"]
            ]
            for member in archive.infolist():
                if member is not tensor:  # other members are a few bytes; reading compares them
                    archive.read(member)
        stretch.seek(0)
        part = torch.load(stretch, map_location="cpu", weights_only=True)
    except Exception as error:
        if full.failure is not None:
            raise full.failure from None
        if not isinstance(error, _DAMAGE):
            raise
        why = str(error).splitlines()[0].partition(". ")[0] if str(error) else type(error).__name__
        raise DamagedCheckpoint(f"{place.relative_path}: {why}") from None
    return part.detach(), tensor.CRC


def _position(place: Any) -> tuple[str, int]:
    """Return the sort key by which each file is read from its beginning to its end."""
    return place.relative_path, place.offset


def damaged_tensors(step: Path, advance: Callable[[int], None]) -> Iterator[str]:
    """Read every tensor of a step's folder and yield an error text for each damaged one.

    ``advance`` is called with the number of bytes read.

    Raises:
        ConfigError: ``.metadata`` is missing or damaged.
        OSError: a file system failed.
    """
    places = read_metadata(step / ".metadata").storage_data
    for index, place in sorted(places.items(), key=lambda entry: _position(entry[1])):
        try:
            with (step / place.relative_path).open("rb", buffering=0) as file:
                read_part(file, place)
        except DamagedCheckpoint as error:
            yield f"{error} ({index.fqn})"
        advance(place.length)


class CheckedReader(FileSystemReader):
    """torch's reader of a step's folder with checksums, for Megatron.

    It executes no code, and compares every tensor with its XXH3-64 or CRC-32.
    """

    @cached_property
    def _metadata(self) -> Metadata:
        return read_metadata(Path(self.path) / ".metadata")

    def read_metadata(self, *unused: Any, **unused_too: Any) -> Metadata:
        """Return the checkpoint's metadata, which is read at the first call and then cached.

        Raises ConfigError (see the function `read_metadata`).
        """
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read the tensors that this rank needs, each file from its beginning to its end.

        A thread compares the checksum of one tensor while the next one is read.

        Raises:
            DamagedCheckpoint: the bytes differ from those that were written.
            OSError: a file system failed.
        """
        with ThreadPoolExecutor(1) as executor:
            compared = list[Future[None]]()
            for part, checksum, place in self._read(plan, planner):
                if len(compared) > 1:
                    compared.pop(0).result()
                compared.append(executor.submit(self.compare, part, checksum, place))
            for last in compared:
                last.result()
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    compare = staticmethod(compare)

    def _read(
        self, plan: LoadPlan, planner: LoadPlanner
    ) -> Iterator[tuple[Tensor, int | str, Any]]:
        """Yield (tensor, checksum, location) for every stored tensor that the plan needs.

        After each yield, the tensor is copied to its targets.
        """
        known = parts_of(Path(self.path))
        items = sorted(
            ((self.storage_data[item.storage_index], item) for item in plan.items),
            key=lambda entry: _position(entry[0]),
        )
        for name, entries in groupby(items, key=lambda entry: entry[0].relative_path):
            with (Path(self.path) / name).open("rb", buffering=0) as file:
                for _, wanted in groupby(
                    entries,
                    key=lambda entry: entry[0].offset,
                    # Often several stretches of one shard.
                ):
                    places = list(wanted)
                    place = places[0][0]
                    part, checksum = _unchecked_part(file, place)
                    yield part, known.get(name, {}).get(str(place.offset), checksum), place
                    for _, item in places:
                        stretches = zip(item.storage_offsets, item.lengths, strict=True)
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(
                            part[tuple(slice(start, start + length) for start, length in stretches)]
                        )
                        planner.commit_tensor(item, target)


def load_full_model_state(
    path: str | Path,
) -> tuple[dict[str, torch.Tensor], ModelConfig, dict[str, Any]]:
    """Return (weights, model configuration, manifest) of a checkpoint of any layout.

    The weights are full (unsharded), by their names in the model, on the CPU, in their stored
    dtype. One process suffices.

    Raises:
        ConfigError: ``path`` has no good checkpoint.
        StorageError: a file system failed.
    """
    found = find(Path(path))
    weights = Weights(found.path)
    return (
        weights.read(weights.shapes),
        ModelConfig.from_dict(found.manifest["config"]["model"]),
        found.manifest,
    )


class _Stretch(io.RawIOBase):
    """Section of a file with the interface of a file, because each section is a zip archive.

    failure: the exception that a read raised; torch replaces it by another one.
    """

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        super().__init__()
        self.file = file
        self.start = start
        self.length = length
        self.position = 0
        self.failure: BaseException | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        self.position = max(0, base + offset)
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read bytes into ``buffer`` without a copy, and return their number.

        As many bytes are read as the section still has and the buffer can contain.
        """
        view, got = memoryview(buffer).cast("B")[: max(0, self.length - self.position)], 0
        try:
            self.file.seek(self.start + self.position)
            readinto = self.file.readinto  # type: ignore[attr-defined]
            # One call reads at most 2 GiB.
            while got < len(view) and (count := readinto(view[got:])):
                got += count
        except BaseException as error:
            self.failure = error
            raise
        self.position += got
        return got


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that builds only the classes of a torch_dist ``.metadata``."""

    def find_class(self, module: str, name: str) -> Any:
        known_modules = {*_METADATA_MODULES, *(m for m, _ in _METADATA_NAMES)}
        found = None
        if "." not in name and module in known_modules:
            found = super().find_class(module, name)
        a_class_of_its_own = (
            module in _METADATA_MODULES and isinstance(found, type) and found.__module__ == module
        )
        if not (
            a_class_of_its_own
            or (module, name) in _METADATA_NAMES
            or (module == "torch" and isinstance(found, torch.dtype))
        ):
            raise ConfigError(
                f".metadata names {module}.{name}, which no checkpoint of this code contains: not "
                "reading it"
            )
        return found


def read_metadata(path: Path) -> Metadata:
    """Return the contents of a ``.metadata`` file, which may name only a few classes.

    Raises:
        ConfigError: the file is missing or damaged, or names a class that no checkpoint of this
            code contains.
    """
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
    except ConfigError:
        raise
    except FileNotFoundError:
        raise ConfigError(f"checkpoint {path.parent}: {path.name} is missing") from None
    except (*_DAMAGE, AttributeError, ImportError) as error:
        raise ConfigError(
            f"checkpoint {path.parent}: {path.name} is damaged ({type(error).__name__})"
        ) from None
    if not isinstance(metadata, Metadata):
        raise ConfigError(
            f"checkpoint {path.parent}: {path.name} is damaged (it contains a "
            f"{type(metadata).__name__})"
        )
    return metadata


def read_common(step: Path) -> dict[str, Any]:
    """Return the contents of ``common.pt`` in a step's folder: the optimizer's groups and steps.

    Raises:
        ConfigError: the file is missing or damaged.
        StorageError: a file system failed.
    """
    try:
        common = torch.load(step / "common.pt", map_location="cpu", weights_only=True)
    except OSError as error:
        raise from_os_error(error, f"checkpoint {step}: ") from None
    except _DAMAGE as error:
        raise ConfigError(
            f"checkpoint {step}: common.pt is damaged ({type(error).__name__})"
        ) from None
    if not isinstance(common, dict):
        raise ConfigError(
            f"checkpoint {step}: common.pt is damaged (it contains a {type(common).__name__})"
        )
    return common
