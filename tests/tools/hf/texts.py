"""A tokenizer of single bytes, so that any text has ids and a character may consist of several
tokens; and checkpoints of models for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fem_megatron.config import ModelConfig
from pretrain.config import DataConfig
from tests.tools.hf import checkpoints
from tests.tools.hf.small import small

ENTRIES = 257  # bytes, and the end of a text


def bytes_read(**special: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer: ids 0 .. 255 in the order of the byte-level alphabet, 256 ``<eod>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{"eos_token": "<eod>"} | special)


def byte_tokenizer(folder: Path, **special: str) -> Path:
    """Write it to a folder."""
    bytes_read(**special).save_pretrained(folder)
    return folder


def text_model(mixer: str, **changes: Any) -> ModelConfig:
    """Return a small model over the tokenizer's entries, padded to 288."""
    return small(mixer, vocab_size=ENTRIES, **changes)


def save(
    model: ModelConfig,
    out: Path,
    state: dict[str, Tensor] | None = None,
    *,
    tokenizer: bool = True,
    step: int = 12,
) -> Path:
    """Write an import's folder: a checkpoint with only weights, random by default, and its
    tokenizer.
    """
    checkpoints.save(model, out, state, step=step, data=DataConfig(seq_length=64))
    if tokenizer:
        byte_tokenizer(out / "tokenizer")
    return out
