"""Batches from Megatron .bin/.idx files: megatron-core's GPTDataset and blends, an index cache keyed by content, an exact position.

The order of training samples is a function of the data, the seed and the number of samples the order was drawn for; position ``n`` in it
is all that a checkpoint has to remember. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import compile_helpers

from pretrain.config import RunConfig, Source

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Tokens:
    """What GPTDataset asks of a tokenizer. No padding: sequences are cut from one stream, so no id may be taken for padding."""

    vocab_size: int
    eod: int
    pad: int = -1
    unique_identifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Datasets:
    """The blends of a run; ``train_samples`` is the number of samples that the training order was drawn for."""

    train: GPTDataset
    valid: GPTDataset | None
    train_samples: int


def build_datasets(
    config: RunConfig, *, vocab_size: int, eod_id: int, content_key: str, train_samples: int, default_cache: Path
) -> Datasets:
    """Open (and on first use index) the training and validation blends; collective over all ranks.

    ``content_key`` identifies the files' contents: a regenerated .bin at the same path never meets a stale index.
    """
    valid_samples = config.train.eval_batches * config.train.global_batch_size
    sizes = [train_samples, valid_samples if config.data.valid else 0, 0]
    identity = json.dumps([content_key, sizes, config.data.seq_length, config.train.seed])
    root = Path(config.data.index_cache) if config.data.index_cache else default_cache
    folder = root / hashlib.sha256(identity.encode()).hexdigest()[:32]
    rank = torch.distributed.get_rank()
    complete = folder / "complete"
    if rank == 0 and not complete.exists():
        # Megatron's cache is not written atomically: what an interrupted run left is not trusted.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    settings = GPTDatasetConfig(
        random_seed=config.train.seed,
        sequence_length=config.data.seq_length,
        blend_per_split=[_blend(config.data.train), _blend(config.data.valid), None],
        path_to_cache=str(folder),
        tokenizer=_Tokens(vocab_size, eod_id),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    _ensure_helpers()
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
    torch.distributed.barrier()
    if rank == 0:
        complete.touch()
    return Datasets(train, valid, train_samples)


def _blend(sources: Sequence[Source]) -> tuple[list[str], list[float] | None] | None:
    if not sources:
        return None
    prefixes = [source.prefix for source in sources]
    return prefixes, [source.weight for source in sources] if len(sources) > 1 else None


def _ensure_helpers() -> None:
    """Megatron's index builder is a C++ extension; wheels carry it, a source install compiles it once."""
    try:
        import megatron.core.datasets.helpers_cpp  # noqa: F401
    except ImportError:
        if torch.distributed.get_rank() == 0:
            compile_helpers()
        torch.distributed.barrier()


def batches(dataset: GPTDataset, first_sample: int, micro_batch_size: int, device: torch.device) -> Iterator[Batch]:
    """Endless micro-batches of this data-parallel rank from position ``first_sample`` on.

    Every global batch takes consecutive samples; within it, rank r of d takes micro-batches r, r + d, r + 2d, ... so that the samples of a
    step do not depend on the layout. Tensors are int64 [micro_batch_size, seq_length]; loss_mask is float32.
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    position = first_sample + rank * micro_batch_size
    while True:
        samples = [dataset[(position + i) % len(dataset)] for i in range(micro_batch_size)]
        yield {key: torch.stack([sample[key] for sample in samples]).to(device, non_blocking=True) for key in samples[0]}
        position += size * micro_batch_size
