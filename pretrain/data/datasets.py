"""Read batches from Megatron .bin/.idx files, starting at an exact position.

Batches are read through megatron-core's GPTDataset and blends, and through an index cache with a
key that depends on the contents of the files. The order of training samples is a function of the
data, the seed and the number of samples for which the order was generated. A checkpoint therefore
records only the position in the order. This module does not depend on a model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split, compile_helpers

from fem_common.errors import ConfigError
from fem_common.stores import is_url
from fem_megatron.context_parallel.split import own_tokens
from fem_megatron.documents import Documents
from fem_megatron.megatron import upstream
from fem_megatron.state import Context
from pretrain.collectives import from_rank_0
from pretrain.config import DataConfig, RunConfig, Source
from pretrain.data.facts import Contents
from pretrain.data.index_cache import NOT_THERE, IndexCache, index_cache, samples_of_splits
from pretrain.data.packing import pack, passes
from pretrain.data.stage_documents import stage_documents
from pretrain.data.store_cache import identity
from pretrain.data.store_reader import StoredFile, StoreReader

Batch = dict[str, Any]
# Fields of a sample; the samples of a blend also name their source.
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
_COUNTED = "counted"  # 1 for a label that the loss mask of its source counts
_UNCOUNTED = 1 << 40  # added to the ids that do not count, which are below 2**32
_AHEAD = 16  # micro-batches requested from a store before they are used
# Samples above which building the index cache is announced; fewer take about a second.
ANNOUNCED_SAMPLES = 1_000_000


@dataclass(frozen=True)
class _Tokens:
    """The attributes of a tokenizer that GPTDataset reads.

    Sequences are cut from one stream without padding, so ``pad`` is not a valid id.
    """

    vocab_size: int
    eod: int
    pad: int = torch.iinfo(torch.int64).min
    unique_identifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Datasets:
    """The training and validation data of a run, opened with its index.

    train_samples: number of samples for which the training order was generated. cache: folder of
    the index. built: True if this call built the index. reader: reader of the sources in object
    stores. ends: handling of document ends, see `Ends`.
    """

    train: GPTDataset
    valid: GPTDataset | None
    train_samples: int
    cache: Path
    built: bool
    reader: StoreReader
    ends: Ends | None


def build_datasets(
    config: RunConfig,
    *,
    vocab_size: int,
    eod_id: int,
    contents: Contents,
    train_samples: int,
    default_cache: Path,
    log: Callable[[str], None],
    reader: StoreReader,
    needs: Sequence[Mapping[str, int]] = (),
) -> Datasets:
    """Open the training and validation blends; build their index at the first use.

    All ranks must call it together.

    ``contents`` identifies the files' contents, so that a regenerated .bin at the same path never
    uses an outdated index. ``needs``: one mapping from source to tokens for each stage up to the
    present one. The present stage reads documents that the earlier stages did not read
    (`stage_documents`).

    Raises:
        ConfigError: the index cache's location is invalid or not writable.
        StorageError: a file system failed.
    """
    sizes = samples_of_splits(config, train_samples)
    settings = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.data.seq_length,
        blend_per_split=[_blend(config.data.train), _blend(config.data.valid), None],
        tokenizer=_Tokens(vocab_size, eod_id),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    _ensure_helpers()
    cache = index_cache(config, contents, train_samples, default_cache, upstream.installed(), needs)
    kind = _kind(reader, PackedGPTDataset if config.data.packing == "best_fit" else GPTDataset)
    kind = _separate_documents(kind, needs) if needs else kind
    built = _fill(cache, kind, settings, sizes, log)
    train, valid, _ = _open(cache.folder, kind, settings, sizes)
    masked = {source.prefix for source in contents.sources if source.mask}
    for blend in filter(None, (train, valid)):
        for source in getattr(blend, "datasets", [blend]):
            if source.dataset_path in masked:
                source.dataset.bin_reader = _Masked(source, reader)
    return Datasets(
        train, valid, train_samples, cache.folder, built, reader, Ends.of(config.data, eod_id)
    )


@dataclass(frozen=True)
class Ends:
    """Effect of the end of a document, the token ``eod_id``, on the model.

    The three flags mean, in this order: each document is read separately; each document begins at
    position 0; the prediction of the token after an end counts in the loss.
    """

    eod_id: int
    separate: bool
    positions: bool
    loss: bool

    @classmethod
    def of(cls, data: DataConfig, eod_id: int) -> Ends | None:
        """Return the document handling from the configuration, or None if ends have no effect."""
        separate = data.documents == "separate"
        made = cls(
            eod_id,
            separate,
            separate if data.reset_positions is None else data.reset_positions,
            data.eod_loss,
        )
        return made if made.separate or made.positions or not made.loss else None

    def found(self, batch: Batch) -> torch.Tensor:
        """Return the positions after which no document continues, [b, s] bool."""
        ends, after = batch["tokens"] == self.eod_id, batch["loss_mask"] == 0
        return (ends & ~after) | (after & ~F.pad(after[:, :-1], (1, 0)))  # padding is one document

    def applied(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        """Return the ``context`` for the model's mixers, and update the loss mask of ``batch``.

        If the prediction after a document's end does not count, its positions are set to 0 in
        ``batch["loss_mask"]``. The batch is on the CPU, the context on ``device``. Return {} if the
        mixers need no context.
        """
        ends = self.found(batch)
        if not self.loss:
            batch["loss_mask"] = batch["loss_mask"].masked_fill(ends, 0.0)
        if not (self.separate or self.positions):
            return {}
        documents = Documents.of(ends.roll(1, dims=1)).to(device)
        return {
            "context": Context(
                documents.positions if self.positions else None,
                documents=documents if self.separate else None,
            )
        }


def look_ahead(batch: Batch, depth: int, ends: torch.Tensor | None) -> Batch:
    """Return the labels and loss masks of ``depth`` modules of multi-token prediction.

    Both fields are [depth * b, s], module after module (`fem_megatron.megatron.mtp.Ahead`). A
    prediction counts if its token counts in the main loss, and if no document ends before the last
    token that the module reads.

    ends: positions after which no document continues, [b, s]; None if predictions may cross them.
    """
    labels, mask = batch["labels"], batch["loss_mask"]
    crossed = torch.zeros_like(labels, dtype=torch.bool)
    found: Batch = {"labels_ahead": [], "mask_ahead": []}
    for _ in range(depth):
        if ends is not None:
            crossed = crossed | ends
            ends = F.pad(ends[:, 1:], (0, 1))
        labels, mask = (F.pad(field[:, 1:], (0, 1)) for field in (labels, mask))
        found["labels_ahead"].append(labels)
        found["mask_ahead"].append(mask.masked_fill(crossed, 0.0))
    return {key: torch.cat(fields) for key, fields in found.items()}


class PackedGPTDataset(GPTDataset):
    """Dataset of a source that is packed best-fit (`pretrain.data.packing`).

    document_index and sample_index are the arrays `pieces` and `first` of a `Packing`.
    ``shuffle_index`` contains complete epochs. The rest of a sequence is padding with token 0,
    whose labels do not count.

    If the continuation of a cut document follows another document in a sequence, its first token
    does not count as a label either, since it cannot be predicted. A subclass in which each stage
    reads different documents packs only those in ``indices``.
    """

    separate = False

    def _build_document_sample_shuffle_indices(self) -> tuple[Any, Any, Any]:
        base = (
            f"{self.config.path_to_cache}/{self.unique_description_hash}-"
            f"{type(self).__name__}-{self.index_split.name}"
        )
        paths = [Path(f"{base}-{name}_index.npy") for name in ("document", "sample", "shuffle")]
        if not all(path.is_file() for path in paths):  # on rank 0, which runs first
            seed = self.config.random_seed
            lengths = self.dataset.sequence_lengths
            packing = pack(
                lengths[self.indices] if self.separate else lengths,
                self.config.sequence_length,
                seed,
            )
            if self.separate:
                packing.pieces[:, 0] = self.indices[packing.pieces[:, 0]]
            order = passes(len(packing.first) - 1, self.num_samples or 0, seed)
            arrays: list[np.ndarray[Any, Any]] = [packing.pieces, packing.first, order]
            for path, array in zip(paths, arrays, strict=True):
                np.save(path, array)
            Path(f"{base}-description.txt").write_text(self.unique_description)
        documents, samples, shuffle = (np.load(path, mmap_mode="r") for path in paths)
        return documents, samples, shuffle

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        length = self.config.sequence_length
        row = int(self.shuffle_index[idx])
        at = 0
        text, counts = torch.zeros(length + 1, dtype=torch.int64), torch.zeros(length + 1)
        for document, before in self.document_index[
            self.sample_index[row] : self.sample_index[row + 1]
        ].tolist():
            start = before * length
            size = min(int(self.dataset.sequence_lengths[document]) - start, length + 1)
            end = at + size
            text[at:end] = torch.from_numpy(
                self.dataset.get(document, start, size).astype(np.int64)
            )
            counts[at + (start > 0) : end] = 1.0
            at = end
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": counts[1:],
            "position_ids": torch.arange(length),
        }


class _Masked:
    """A .bin file with its loss mask, in the interface of `StoredFile`.

    _UNCOUNTED is added to the ids that do not count in the loss (`_counted` subtracts it), so that
    the mask passes through Megatron's datasets.
    """

    def __init__(self, source: GPTDataset, reader: StoreReader) -> None:
        self.ids, path = source.dataset.bin_reader, source.dataset_path
        self.stored = StoredFile(reader, path, mask=True) if is_url(path) else None
        self.local = None if is_url(path) else np.memmap(f"{path}.mask", np.uint8, "r")

    def read(self, dtype: Any, count: int, offset: int) -> np.ndarray[Any, Any]:
        """Return ``count`` ids from byte ``offset`` of the .bin on, int64 [count]."""
        ids = self.ids.read(dtype, count, offset).astype(np.int64)
        first = offset // np.dtype(dtype).itemsize
        if self.stored is None:
            assert self.local is not None
            mask = self.local[first : first + count]
        else:
            mask = self.stored.read(np.uint8, count, first)
        return ids + _UNCOUNTED * (mask == 0)


def _counted(sample: Batch) -> Batch:
    """Return a sample with its ids and the field ``counted``, float32 (see `_Masked`)."""
    uncounted = {key: sample[key] > _UNCOUNTED // 2 for key in ("tokens", "labels")}
    ids = {key: sample[key] - _UNCOUNTED * flags for key, flags in uncounted.items()}
    return sample | ids | {_COUNTED: (~uncounted["labels"]).float()}


def _kind(reader: StoreReader, base: type[GPTDataset]) -> type[GPTDataset]:
    """Return the dataset class of the sources, a subclass of ``base`` if any source is in a store.

    Megatron includes the class name in its index files' names.
    """
    if not reader.urls:
        return base

    class StoredGPTDataset(base):
        """Dataset that opens the local files of a URL and reads its tokens through ``reader``."""

        @staticmethod
        def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
            if not is_url(dataset_path):
                return GPTDataset.build_low_level_dataset(dataset_path, config)
            opened = IndexedDataset(reader.local(dataset_path), mmap=False)
            opened.bin_reader = StoredFile(reader, dataset_path)
            return opened

    return StoredGPTDataset


def _separate_documents(
    base: type[GPTDataset], needs: Sequence[Mapping[str, int]]
) -> type[GPTDataset]:
    """Return the dataset class of sources in which each stage reads different documents.

    needs: for each stage up to the present one, the tokens that it reads from each source.
    """
    taken = [{identity(prefix): tokens for prefix, tokens in need.items()} for need in needs]

    class StageGPTDataset(base):
        """Dataset of the training documents that the last stage in ``needs`` reads."""

        separate = True

        def __init__(
            self,
            dataset: IndexedDataset,
            path: str,
            documents: Any,
            samples: int | None,
            split: Split,
            config: GPTDatasetConfig,
        ):
            if split is Split.train:
                documents = stage_documents(
                    dataset.sequence_lengths,
                    [need.get(path, 0) for need in taken],
                    config.random_seed,
                )
            super().__init__(dataset, path, documents, samples, split, config)

    return StageGPTDataset


def _fill(
    cache: IndexCache,
    kind: type[GPTDataset],
    settings: GPTDatasetConfig,
    sizes: Sequence[int],
    log: Callable[[str], None],
) -> bool:
    """Build the index unless a complete one exists, and return True if it was built.

    All ranks must call it together.
    """
    fault = from_rank_0(cache.fault)
    if fault is None:
        return False
    announced = True
    if fault != NOT_THERE:
        log(f"index cache {cache.folder}: {fault}; building it again")
    elif sum(sizes) >= ANNOUNCED_SAMPLES:
        log(f"index cache {cache.folder}: building it, once for this data, seed and length")
    else:
        announced = False
    started = time.monotonic()
    with ExitStack() as stack:
        folder = from_rank_0(lambda: stack.enter_context(cache.building()))
        _open(folder, kind, settings, sizes)
        # Other ranks may still be opening files in the folder, which is renamed next.
        torch.distributed.barrier()
        from_rank_0(lambda: cache.publish(folder))
    if announced:
        log(f"index cache {cache.folder}: built in {time.monotonic() - started:.1f} s")
    return True


def _open(
    folder: Path, kind: type[GPTDataset], settings: GPTDatasetConfig, sizes: Sequence[int]
) -> list[Any]:
    """Return Megatron's datasets of training, validation and test.

    All ranks must call it together. The indices are read from the folder, or built in it if they
    are missing.
    """
    return BlendedMegatronDatasetBuilder(
        kind, list(sizes), lambda: True, replace(settings, path_to_cache=str(folder))
    ).build()


def _blend(sources: Sequence[Source]) -> tuple[list[str], list[float] | None] | None:
    if not sources:
        return None
    # Megatron includes the prefixes in the names of index files.
    prefixes = [identity(source.prefix) for source in sources]
    return prefixes, [source.weight for source in sources] if len(sources) > 1 else None


def _ensure_helpers() -> None:
    """Compile Megatron's C++ index builder if it is missing; all ranks must call it together.

    Wheels of Megatron contain the builder. After an installation from source it is compiled once on
    each host that lacks it.
    """
    # Rank 0 first, then one rank per host, since hosts may share the installation.
    for compiles in (torch.distributed.get_rank() == 0, os.environ.get("LOCAL_RANK", "0") == "0"):
        if compiles and find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()
        torch.distributed.barrier()
        invalidate_caches()


def _own_part(batch: Batch, known: dict[str, Any]) -> tuple[Batch, dict[str, Any]]:
    """Return this context-parallel rank's part of a batch and of the context of its mixers.

    The positions in the context are those of the rank's own tokens. The documents in the context
    remain those of full sequences.
    """
    cut = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    context = known.get("context")
    if context is not None and context.positions is not None:
        known = {"context": replace(context, positions=own_tokens(context.positions, *cut, 0))}
    return {key: own_tokens(field, *cut, 1) for key, field in batch.items()}, known


def _check_ids(batch: Batch, samples: Sequence[Batch], dataset: GPTDataset) -> None:
    """Raise ConfigError if a batch on the CPU has a token id outside the vocabulary.

    A sharded embedding would silently ignore the id.
    """
    size = dataset.config.tokenizer.vocab_size
    ranges = [torch.aminmax(batch[key]) for key in ("tokens", "labels")]
    if all(least >= 0 and most < size for least, most in ranges):
        return
    for sample in samples:
        ids = torch.cat((sample["tokens"], sample["labels"]))
        for wrong in ids[(ids < 0) | (ids >= size)][:1].tolist():
            source = dataset.datasets[sample["dataset_id"]] if "dataset_id" in sample else dataset
            raise ConfigError(
                f"{source.dataset_path} contains token id {wrong}, but model.vocab_size = {size} "
                f"has ids 0 to {size - 1}; set model.vocab_size to that of the tokenizer that "
                "wrote the data, or write the data again with this model's tokenizer"
            )


def batches(
    dataset: GPTDataset,
    first_sample: int,
    micro_batch_size: int,
    device: torch.device,
    reader: StoreReader | None = None,
    ends: Ends | None = None,
    mtp_depth: int = 0,
) -> Iterator[Batch]:
    """Yield endless micro-batches of this data-parallel rank from position ``first_sample`` on.

    Every global batch takes consecutive samples; within it, rank r of d takes micro-batches r, r +
    d, r + 2d, ... so that the samples of a step do not depend on the layout. Tensors are int64
    [micro_batch_size, seq_length / CP]; loss_mask is float32, 0 for labels that a source's mask
    excludes. ``reader``: the datasets' reader, which requests samples before they are used.
    ``ends``: see `Ends.applied`. ``mtp_depth``: number of modules of multi-token prediction, whose
    fields are added (`look_ahead`).
    """
    rank = parallel_state.get_data_parallel_rank()
    size = parallel_state.get_data_parallel_world_size()
    position = planned = first_sample + rank * micro_batch_size
    while True:
        while (
            reader is not None
            and reader.urls
            and planned <= position + _AHEAD * size * micro_batch_size
        ):
            with reader.planning():
                for i in range(micro_batch_size):
                    dataset[(planned + i) % len(dataset)]
            planned += size * micro_batch_size
        samples = [
            _counted(dataset[(position + i) % len(dataset)]) for i in range(micro_batch_size)
        ]
        batch = {
            key: torch.stack([sample[key] for sample in samples]) for key in (*FIELDS, _COUNTED)
        }
        _check_ids(batch, samples, dataset)
        cuts = None
        if mtp_depth and ends and (ends.separate or not ends.loss):
            cuts = ends.found(batch)
        known = {} if ends is None else ends.applied(batch, device)
        # After `ends`, which find padding by the loss mask.
        batch["loss_mask"] = batch["loss_mask"] * batch.pop(_COUNTED)
        if mtp_depth:
            batch |= look_ahead(batch, mtp_depth, cuts)
        if parallel_state.get_context_parallel_world_size() > 1:
            batch, known = _own_part(batch, known)
        if device.type == "cuda":
            batch = {key: field.pin_memory() for key, field in batch.items()}
        yield {key: field.to(device, non_blocking=True) for key, field in batch.items()} | known
        position += size * micro_batch_size
