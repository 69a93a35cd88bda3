"""Context of a layer's update, and a decoding state of fixed size.

With a fixed size every decoding step has the same shapes, so the step is compiled only once.
This module contains no mixer mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fem_megatron.context_parallel.split import Dims, SequenceSplit
from fem_megatron.documents import Documents
from kernels.machine import without_cudnn_attention


@dataclass(eq=False)
class Capacity:
    """Fixed number of token slots in a decoding state, of which the first ``taken`` are filled.

    places: number of slots.
    taken: int64 tensor without dimensions, so that compiled steps do not specialise on its value.
        The class is not frozen: a module traced by torch.export assigns its buffer to ``taken``.

    A KV-cache with a fixed capacity has one extra slot. It contains a copy of a step's single
    token, so that the new tokens are the last keys, as every kernel expects. The slots between the
    past and the new tokens are masked.
    """

    places: int
    taken: Tensor

    def check(self, length: int) -> None:
        """Raise ValueError if ``length`` more tokens do not fit. This waits for the device."""
        if (needed := int(self.taken) + length) > self.places:
            raise ValueError(
                f"the cache has room for {self.places} tokens, but {needed} are needed: make it "
                "larger (max_cache_len)"
            )

    def first(self, new: Tensor, dim: int) -> Tensor:
        """Return a new cache for all slots, filled with the first tokens ``new`` along ``dim``."""
        size = list(new.shape)
        size[dim] = self.places + 1
        cache = new.new_zeros(size)
        cache.narrow(dim, 0, new.shape[dim]).copy_(new)
        return cache

    def extend(self, cache: Tensor, new: Tensor, dim: int) -> Tensor:
        """Write the tokens ``new`` into the cache after the past, and return all keys.

        The result has size places + s along ``dim``: all slots, then the s new tokens.
        """
        length = new.shape[dim]
        cache.index_copy_(dim, self.taken + torch.arange(length, device=new.device), new)
        if length > 1:
            return torch.cat((cache.narrow(dim, 0, self.places), new), dim=dim)
        cache.narrow(dim, self.places, 1).copy_(new)
        return cache

    def valid(self, known: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
        """Return a mask of ``extend``'s keys, [batch, places + length] bool.

        True for tokens of the past and the ``length`` new tokens, except padding.

        known: [batch, up to places] bool, False at padding, in text order; missing entries are
            not padding.
        """
        slot = torch.arange(self.places, device=device)
        now = self.taken + torch.arange(length, device=device)
        if known is None:
            known = torch.ones(batch, self.places, dtype=torch.bool, device=device)
        elif known.shape[1] < self.places:
            known = torch.nn.functional.pad(known, (0, self.places - known.shape[1]), value=True)
        return torch.cat((known & (slot < self.taken), known[:, now]), dim=1)

    def adjacent(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return (index, is_key), which moves the past directly before the ``length`` new tokens.

        Both are [places + length]. index: source of each key among the keys of ``extend``. is_key:
        True if that source contains a token.
        """
        index = torch.arange(self.places + length, device=device)
        past = index - (self.places - self.taken)
        new = index >= self.places
        return torch.where(new, index, past.clamp_min(0)), new | (past >= 0)


State = dict[str, Tensor]
"""A decoding state: named tensors, the batch first. The layers own the names."""


@dataclass(frozen=True)
class Context:
    """Inputs of an update other than x.

    positions: [s] or [s, b], positions of the layer's tokens; None: 0, 1, 2, ...
    valid: [b, past + s] bool, False at padding; None: no padding. With a capacity that contains
        a past, [b, places + s].
    state: the layer's decoding state, which the layer reads and replaces; None: no state
        (training).
    past: number of earlier tokens that the state contains.
    causal: True if a token sees only itself and earlier tokens.
    iteration: for a repeated block, the number of the repetition (from 0).
    origin: first input of a repeated block.
    memory: values that an update passes from one iteration to the next within a forward
        pass (momentum). Unlike the state they have gradients.
    prefix: prefix of the names of the layer's tensors in the state.
    capacity: slots of a state that is written in place and never grows; None: the state grows.
    touching: True if the past keys of a fixed capacity must directly precede the new ones
        (``without_gap``).
    documents: documents of the sequence, read independently (training); None: a sequence is
        one document.
    split: this rank's part of the sequence, if sequences are split over ranks (training);
        None: the layer has full sequences.
    recompute: True if reads of other tokens and MLPs keep only their inputs, so that the
        backward pass recomputes them.
    """

    positions: Tensor | None = None
    valid: Tensor | None = None
    state: State | None = None
    past: int = 0
    causal: bool = True
    iteration: int = 0
    origin: Tensor | None = None
    memory: dict[str, Tensor] | None = None
    prefix: str = ""
    capacity: Capacity | None = None
    touching: bool = False
    documents: Documents | None = None
    recompute: bool = False
    split: SequenceSplit | None = None

    def again(self, part: Callable[..., Tensor], *given: Any) -> Tensor:
        """Return ``part(*given)``, recomputed in the backward pass if ``recompute`` is True."""
        if not (self.recompute and torch.is_grad_enabled()):
            return part(*given)
        # no RNG state: the operations are deterministic
        made: Tensor = checkpoint(part, *given, use_reentrant=False, preserve_rng_state=False)
        return made

    def per_document(
        self,
        read: Callable[..., Tensor],
        *tensors: Tensor | None,
        each: Sequence[Tensor | None] = (),
        keys: Collection[int] = (),
        passes: bool = False,
        batch: int = 0,
        time: int = 2,
        heads: int = 1,
    ) -> Tensor:
        """Return ``read(valid, *tensors, *each)``, separately for every document.

        batch, time, heads: dimensions of sequences, tokens and heads (or channels); ``read``
            accepts any sizes in these dimensions.
        each: tensors per head, heads first; a tensor with one head is shared by all heads.
        keys: indices of the tensors that contain keys or values; the queries are always the
            last keys. Empty if a read does not separate keys from queries.
        passes: True if ``read`` uses earlier tokens only through `scans` and `tokens_before`.

        cuDNN's attention creates a new execution plan for each new shape. It is therefore allowed
        only for full sequences without padding or a state, whose lengths are multiples of 128.

        Raises:
            ValueError: if documents are separate or sequences are split, and the context has a
            state or padding.
        """
        documents = self.documents
        if (documents or self.split) and (self.state is not None or self.valid is not None):
            what = "documents are read separately" if documents else "a sequence is split"
            raise ValueError(
                f"{what} only in training, without a decoding state and without padding"
            )
        if passes and (split := self.passing) is not None:
            return self.again(
                lambda *given: split.side_by_side(read, given, each, Dims(batch, time, heads)),
                *tensors,
            )
        if self.split is not None:
            return self.split.per_document(
                read, tensors, each, keys, Dims(batch, time, heads), replace(self, split=None)
            )

        # lengths change from call to call
        once = any(each is not None for each in (documents, self.state, self.valid))
        fixed = torch.compiler.is_compiling() or not (
            once or any(t.shape[time] % 128 for t in tensors if t is not None)
        )

        def whole(valid: Tensor | None, *given: Tensor | None) -> Tensor:
            with nullcontext() if fixed else without_cudnn_attention():
                return read(valid, *given, *each)

        if documents is None:
            return self.again(lambda *given: whole(self.valid, *given), *tensors)
        return self.again(
            lambda *given: documents.per_document(
                whole, given, batch=batch, time=time, causal=self.causal
            ),
            *tensors,
        )

    @property
    def passing(self) -> SequenceSplit | None:
        """The sequence split if scans pass states from chunk to chunk, else None."""
        return (
            self.split
            if self.split is not None and self.split.states and self.documents is None
            else None
        )

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """Return the ``count`` tokens before those of x [s, b, c], as [count, b, c].

        Missing tokens are zeros. Use it only within a read with ``passes=True``.
        """
        return (
            x.new_zeros(count, *x.shape[1:])
            if self.passing is None
            else self.passing.tokens_before(x, count)
        )

    def within(self, name: str) -> Context:
        """Return the context for a part of the layer, whose state has the prefix ``name``."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def recall(self, name: str) -> Tensor | None:
        """Return the state's tensor ``name``.

        Return None before the first tokens, or if the context has no state.
        """
        return None if self.state is None else self.state.get(self.prefix + name)

    def keep(self, name: str, value: Tensor) -> None:
        """Store ``value`` (batch first) in the state, if the context has one.

        A view of a larger tensor is copied, so that the larger tensor can be freed.
        """
        if self.state is None:
            return
        value, old = value.detach(), self.recall(name)
        if self.capacity is None:
            # A traced tensor has no storage.
            part = torch.compiler.is_compiling() or value.untyped_storage().nbytes() > value.nbytes
            self.state[self.prefix + name] = value.clone() if part else value
        elif old is None:
            self.state[self.prefix + name] = value.clone(memory_format=torch.contiguous_format)
        else:
            old.copy_(value)

    def extend(self, name: str, new: Tensor, dim: int = 1) -> Tensor:
        """Return all past values followed by ``new`` along ``dim``, and store the result.

        The first dimension is the batch. This is one step of a KV-cache in the state.
        """
        old = self.recall(name)
        if self.capacity is not None:
            return self._extend_within_capacity(self.capacity, name, old, new, dim)
        full = new if old is None else torch.cat((old.to(new.dtype), new), dim=dim)
        self.keep(name, full)
        return full

    def _extend_within_capacity(
        self, capacity: Capacity, name: str, cache: Tensor | None, new: Tensor, dim: int
    ) -> Tensor:
        assert self.state is not None
        if cache is None:
            self.state[self.prefix + name] = capacity.first(new.detach(), dim)
            return new
        keys = capacity.extend(cache, new.to(cache.dtype), dim).to(new.dtype)
        return (
            keys.index_select(dim, capacity.adjacent(new.shape[dim], new.device)[0])
            if self.touching
            else keys
        )

    def without_gap(self, length: int) -> Context:
        """Return a context in which the past keys directly precede the ``length`` new tokens.

        Use it in layers that derive a key's distance from its index among the keys.
        """
        if self.capacity is None or self.valid is None or self.valid.shape[1] == length:
            return self
        index, keys = self.capacity.adjacent(length, self.valid.device)
        return replace(self, valid=self.valid[:, index] & keys, touching=True)

    def valid_now(self, length: int) -> Tensor | None:
        """Return the mask of the ``length`` new tokens, [s, b] bool, or None without padding."""
        return None if self.valid is None else self.valid[:, -length:].T
