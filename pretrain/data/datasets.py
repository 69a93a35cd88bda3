"""Batches from Megatron .bin/.idx files: megatron-core's GPTDataset and blends, an index cache keyed by content, an exact position.

The order of training samples is a function of the data, the seed and the number of samples the order was drawn for; position ``n`` in it
is all that a checkpoint has to remember. Knows no model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import invalidate_caches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import compile_helpers

from pretrain.config import RunConfig, Source
from pretrain.data.facts import Contents
from pretrain.data.index_cache import NOT_THERE, IndexCache, index_cache, samples_of_splits
from pretrain.ranks import from_rank_0

Batch = dict[str, torch.Tensor]
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")  # of a sample; a blend's samples name their source too


@dataclass(frozen=True)
class _Tokens:
    """What GPTDataset asks of a tokenizer. No padding: sequences are cut from one stream, so no id may be taken for padding."""

    vocab_size: int
    eod: int
    pad: int = -1
    unique_identifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Datasets:
    """The blends of a run; ``train_samples`` is the number of samples that the training order was drawn for.

    ``cache`` is the folder of their index, ``built``: it was built just now.
    """

    train: GPTDataset
    valid: GPTDataset | None
    train_samples: int
    cache: Path
    built: bool


def build_datasets(
    config: RunConfig,
    *,
    vocab_size: int,
    eod_id: int,
    contents: Contents,
    train_samples: int,
    default_cache: Path,
    say: Callable[[str], None],
) -> Datasets:
    """Open (and on first use index) the training and validation blends; collective over all ranks.

    ``contents`` identifies what the files hold: a regenerated .bin at the same path never meets a stale index.

    Raises:
        ConfigError: the index cache's place is wrong, or not to be written to.
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
    cache = index_cache(config, contents, train_samples, default_cache, megatron.core.__version__)
    built = _fill(cache, settings, sizes, say)
    train, valid, _ = _open(cache.folder, settings, sizes)
    return Datasets(train, valid, train_samples, cache.folder, built)


def _fill(cache: IndexCache, settings: GPTDatasetConfig, sizes: Sequence[int], say: Callable[[str], None]) -> bool:
    """Build the index where it is not there whole; whether that was so. Collective."""
    fault = from_rank_0(cache.fault)
    if fault is None:
        return False
    if fault == NOT_THERE:
        say(f"index cache {cache.folder}: building it, once for this data, seed and length")
    else:
        say(f"index cache {cache.folder}: {fault}; building it again")
    started = time.monotonic()
    with ExitStack() as stack:
        folder = from_rank_0(lambda: stack.enter_context(cache.building()))
        _open(folder, settings, sizes)
        torch.distributed.barrier()  # other ranks may still be opening files in a folder that is about to be renamed
        from_rank_0(lambda: cache.publish(folder))
    say(f"index cache {cache.folder}: built in {time.monotonic() - started:.1f} s")
    return True


def _open(folder: Path, settings: GPTDatasetConfig, sizes: Sequence[int]) -> list[Any]:
    """Megatron's datasets of the three splits, their indices read from the folder, or built into it; collective."""
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, replace(settings, path_to_cache=str(folder))).build()


def _blend(sources: Sequence[Source]) -> tuple[list[str], list[float] | None] | None:
    if not sources:
        return None
    prefixes = [os.path.abspath(source.prefix) for source in sources]  # Megatron names the cache's files by them
    return prefixes, [source.weight for source in sources] if len(sources) > 1 else None


def _ensure_helpers() -> None:
    """Megatron's index builder is a C++ extension; wheels carry it, a source install compiles it once a host that lacks it; collective."""
    for compiles in (torch.distributed.get_rank() == 0, os.environ.get("LOCAL_RANK", "0") == "0"):  # one after another: hosts may share it
        if compiles and find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()
        torch.distributed.barrier()
        invalidate_caches()


def batches(dataset: GPTDataset, first_sample: int, micro_batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Endless micro-batches of this data-parallel rank from position ``first_sample`` on.

    Every global batch takes consecutive samples; within it, rank r of d takes micro-batches r, r + d, r + 2d, ... so that the samples of a
    step do not depend on the layout. Tensors are int64 [micro_batch_size, seq_length]; loss_mask is float32.
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    position = first_sample + rank * micro_batch_size
    while True:
        samples = [dataset[(position + i) % len(dataset)] for i in range(micro_batch_size)]
        yield {key: torch.stack([sample[key] for sample in samples]).to(device, non_blocking=True) for key in FIELDS}
        position += size * micro_batch_size
