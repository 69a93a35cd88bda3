"""The exported model's decoding states as transformers' caches: one that grows with the text, and one of a fixed size for compiled steps.

Copied beside the weights, as ``modeling_fem``. What a state holds is the layers' matter; here is when it is kept, reordered, forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from fem_megatron.config import ModelConfig
from fem_megatron.state import Room, State

from .configuration_fem import FemLMConfig


class FemCacheLayer(DynamicLayer):
    """One block's decoding state: named tensors, the batch first, and how many tokens they stand for."""

    is_croppable = False
    supports_early_init = False
    room: Room | None = None

    def __init__(self) -> None:
        super().__init__()
        self.state: State = {}
        self.tokens = 0

    def before(self, x: Tensor) -> None:
        """The block is about to read x [t, b, hidden]."""

    def after(self, x: Tensor) -> None:
        """The block has read them."""
        self.tokens += x.shape[0]

    def get_seq_length(self) -> int:
        """Tokens of the past."""
        return self.tokens

    def get_max_cache_shape(self) -> int:
        """Tokens that there is room for; -1: any number."""
        return -1

    get_max_length = get_max_cache_shape

    def reset(self) -> None:
        """Forgets the past."""
        self.state, self.tokens = {}, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Removes nothing: the state of an earlier step cannot be recovered from a later one."""
        if tokens_to_remove != 0:
            raise ValueError("this model's cache cannot go back to an earlier step")

    def offload(self) -> None:
        """Refused: the state stays where the layer is."""
        raise ValueError("this model's cache cannot be offloaded; its state is as `python -m pretrain --plan` says")

    prefetch = offload

    def update(self, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refused: the blocks write their states themselves."""
        raise ValueError("this model's blocks keep their own states: a FemCache has no keys and values to update")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i becomes what row beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows of the batch, in this order."""
        self.state = {name: value[indices.to(value.device)] for name, value in self.state.items()}

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        self.state = {name: value.repeat_interleave(repeats, dim=0) for name, value in self.state.items()}


class FemStaticCacheLayer(FemCacheLayer):
    """The same with room for so many tokens and no more."""

    is_compileable = True
    room: Room

    def __init__(self, places: int) -> None:
        super().__init__()
        self.room = Room(places, torch.zeros((), dtype=torch.int64))

    def before(self, x: Tensor) -> None:
        """At the start the count goes where the block is. Raises ValueError where the tokens have no room."""
        if not self.state and self.room.taken.device != x.device:
            self.room = Room(self.room.places, self.room.taken.to(x.device))
        if not torch.compiler.is_compiling():
            self.room.check(x.shape[0])

    def after(self, x: Tensor) -> None:
        """In place: a compiled step knows the tensor, not its number."""
        self.room.taken.add_(x.shape[0])

    def get_seq_length(self) -> int:
        """Tokens of the past; waits for the device."""
        return int(self.room.taken)

    def get_max_cache_shape(self) -> int:
        """Tokens that there is room for."""
        return self.room.places

    get_max_length = get_max_cache_shape

    def reset(self) -> None:
        """Forgets the past."""
        self.state = {}
        self.room.taken.zero_()


class FemCache(Cache):
    """One FemCacheLayer for each block. KV-caches grow with the text, the states of linear-time mixers do not."""

    def __init__(self, config: FemLMConfig) -> None:
        super().__init__(layers=[FemCacheLayer() for _ in range(config.num_hidden_layers)])

    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.state.values())  # type: ignore[union-attr]


class FemStaticCache(FemCache):
    """The same with room for ``max_cache_len`` tokens: each decoding step has the same shapes, so it is compiled once.

    A KV-cache holds max_cache_len + 1 places from the first token on, under a window too; the states of linear-time mixers are as ever.

    Raises:
        ValueError: under one place, or more than a mixer takes tokens.
    """

    def __init__(self, config: FemLMConfig, max_cache_len: int) -> None:
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len={max_cache_len}: at least 1")
        longest = [block.mixer.max_length() for block in ModelConfig.from_dict(config.model_fields()).blocks()]
        bounds = [bound for bound in longest if bound is not None]
        if bounds and max_cache_len > min(bounds):
            raise ValueError(f"max_cache_len={max_cache_len}, but this model's mixer takes {min(bounds)} tokens at most")
        Cache.__init__(self, layers=[FemStaticCacheLayer(max_cache_len) for _ in range(config.num_hidden_layers)])
