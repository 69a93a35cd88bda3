"""A decoding state of a fixed size, so that every step has the same shapes and is compiled once. No mixer's mathematics here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fem_megatron.cut import Cut, Dims
from fem_megatron.documents import Documents
from kernels.machine import without_cudnn_attention


@dataclass(eq=False)
class Room:
    """Places for so many tokens, of which the first ``taken`` hold one: an int64 of no dimension, a tensor lest compiled steps know it.

    Not frozen: a module that torch.export traces assigns its own buffer to ``taken``.

    A KV-cache here has one place more. In it a step's single token stands again, so that the new tokens are the last of the keys, as every
    kernel has it, and what lies between them and the past is masked.
    """

    places: int
    taken: Tensor

    def check(self, length: int) -> None:
        """Raises ValueError where ``length`` more tokens have no place; waits for the device."""
        if (needed := int(self.taken) + length) > self.places:
            raise ValueError(
                f"the cache has room for {self.places} tokens, and {needed} are asked for: make it larger (max_cache_len)"
            )

    def first(self, new: Tensor, dim: int) -> Tensor:
        """A cache that holds the first tokens, ``new`` along ``dim``."""
        size = list(new.shape)
        size[dim] = self.places + 1
        cache = new.new_zeros(size)
        cache.narrow(dim, 0, new.shape[dim]).copy_(new)
        return cache

    def extend(self, cache: Tensor, new: Tensor, dim: int) -> Tensor:
        """Writes ``new`` behind the past -> [places + s along ``dim``], the new ones last."""
        length = new.shape[dim]
        cache.index_copy_(dim, self.taken + torch.arange(length, device=new.device), new)
        if length > 1:
            return torch.cat((cache.narrow(dim, 0, self.places), new), dim=dim)
        cache.narrow(dim, self.places, 1).copy_(new)
        return cache

    def valid(self, known: Tensor | None, batch: int, length: int, device: torch.device) -> Tensor:
        """Which of ``extend``'s keys are the past's and the ``length`` new ones', [batch, places + length] bool.

        known [batch, up to places] bool: False at padding, in the order of the text; None, or beyond it: no padding.
        """
        slot = torch.arange(self.places, device=device)
        now = self.taken + torch.arange(length, device=device)
        if known is None:
            known = torch.ones(batch, self.places, dtype=torch.bool, device=device)
        elif known.shape[1] < self.places:
            known = torch.nn.functional.pad(known, (0, self.places - known.shape[1]), value=True)
        return torch.cat((known & (slot < self.taken), known[:, now]), dim=1)

    def adjacent(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where each of ``extend``'s keys is found if the past is to end where the ``length`` new ones begin, and which are keys at all."""
        index = torch.arange(self.places + length, device=device)
        past = index - (self.places - self.taken)
        new = index >= self.places
        return torch.where(new, index, past.clamp_min(0)), new | (past >= 0)


State = dict[str, Tensor]
"""A decoding state: named tensors, the batch first. The layers own the names."""


@dataclass(frozen=True)
class Context:
    """What an update may know besides x.

    positions: [s] or [s, b], of the layer's tokens, None: 0, 1, 2, ...
    valid: [b, past + s] bool, False at padding, None: all are tokens. In a room [b, its places + s], once it holds a past.
    state: the layer's decoding state, which it reads and replaces; None: nothing is kept (training).
    past: tokens that the state stands for. causal: a token sees itself and what is before it.
    iteration, origin: of a block that is applied several times, which time this is (from 0) and its first input.
    memory: what an update keeps from one iteration to the next within a forward pass (momentum); with gradients, unlike the state.
    room: of a state that is written in place and never grows. touching: the keys of a room are read without a gap before the new ones.
    documents: of a sequence of several, none of which reads another (in training); None: a sequence is one.
    cut: where the layer's tokens are this rank's part of the sequence (in training); None: they are all.
    recompute: what reads other tokens, and MLPs, keep their inputs alone and are computed again in the backward pass.
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
    room: Room | None = None
    touching: bool = False
    documents: Documents | None = None
    recompute: bool = False
    cut: Cut | None = None

    def again(self, part: Callable[..., Tensor], *given: Any) -> Tensor:
        """``part(*given)``; under ``recompute`` the backward pass computes it again, by the same operations in the same order."""
        if not (self.recompute and torch.is_grad_enabled()):
            return part(*given)
        made: Tensor = checkpoint(
            part, *given, use_reentrant=False, preserve_rng_state=False
        )  # nothing is random
        return made

    def apart(
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
        """``read(valid, *tensors, *each)``, of every document by itself where there are several; valid as above, of the tensors' tokens.

        batch, time, heads: the dimensions of sequences, tokens and heads (or channels), which ``read`` takes in any number. each: what
        belongs to a head alone, heads first, or is one for all. keys: which of the tensors the tokens of others read, where these alone
        are read, by as many queries as there are, the last of the keys; () where a token's read is not told apart from what it is read by.
        passes: what ``read`` knows of earlier tokens it has by `scans` and `tokens_before` alone.
        cuDNN's attention, which plans each new shape anew, reads whole sequences without padding or a state alone.
        """
        documents = self.documents
        if (documents or self.cut) and (self.state is not None or self.valid is not None):
            what = "documents are read apart" if documents else "a sequence is cut"
            raise ValueError(f"{what} in training, without a decoding state and without padding")
        if passes and (cut := self.passing) is not None:
            return self.again(
                lambda *given: cut.side_by_side(read, given, each, Dims(batch, time, heads)),
                *tensors,
            )
        if self.cut is not None:
            return self.cut.apart(
                read, tensors, each, keys, Dims(batch, time, heads), replace(self, cut=None)
            )

        once = any(
            each is not None for each in (documents, self.state, self.valid)
        )  # lengths that change from call to call
        fixed = torch.compiler.is_compiling() or not (
            once or any(t.shape[time] % 128 for t in tensors if t is not None)
        )

        def whole(valid: Tensor | None, *given: Tensor | None) -> Tensor:
            with nullcontext() if fixed else without_cudnn_attention():
                return read(valid, *given, *each)

        if documents is None:
            return self.again(lambda *given: whole(self.valid, *given), *tensors)
        return self.again(
            lambda *given: documents.apart(
                whole, given, batch=batch, time=time, causal=self.causal
            ),
            *tensors,
        )

    @property
    def passing(self) -> Cut | None:
        """The cut, where scans pass states from chunk to chunk."""
        return (
            self.cut
            if self.cut is not None and self.cut.states and self.documents is None
            else None
        )

    def tokens_before(self, x: Tensor, count: int) -> Tensor:
        """The ``count`` tokens before those of x [s, b, c], in a read that ``passes``, [count, b, c]; zeros where there are none."""
        return (
            x.new_zeros(count, *x.shape[1:])
            if self.passing is None
            else self.passing.tokens_before(x, count)
        )

    def within(self, name: str) -> Context:
        """The same for a part of the layer, whose state lies under ``name``."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def recall(self, name: str) -> Tensor | None:
        """What the state holds under ``name``; None at the start and where nothing is kept."""
        return None if self.state is None else self.state.get(self.prefix + name)

    def keep(self, name: str, value: Tensor) -> None:
        """Put ``value`` (batch first) into the state, if there is one; of a part of a larger tensor a copy, so that the rest can go."""
        if self.state is None:
            return
        value, old = value.detach(), self.recall(name)
        if self.room is None:
            part = (
                torch.compiler.is_compiling() or value.untyped_storage().nbytes() > value.nbytes
            )  # a traced tensor has no storage
            self.state[self.prefix + name] = value.clone() if part else value
        elif old is None:
            self.state[self.prefix + name] = value.clone(memory_format=torch.contiguous_format)
        else:
            old.copy_(value)

    def extend(self, name: str, new: Tensor, dim: int = 1) -> Tensor:
        """All past values and ``new`` (batch first) along ``dim``; a KV-cache's step."""
        old = self.recall(name)
        if self.room is not None:
            return self._extend_in_room(self.room, name, old, new, dim)
        whole = new if old is None else torch.cat((old.to(new.dtype), new), dim=dim)
        self.keep(name, whole)
        return whole

    def _extend_in_room(
        self, room: Room, name: str, cache: Tensor | None, new: Tensor, dim: int
    ) -> Tensor:
        assert self.state is not None
        if cache is None:
            self.state[self.prefix + name] = room.first(new.detach(), dim)
            return new
        keys = room.extend(cache, new.to(cache.dtype), dim).to(new.dtype)
        return (
            keys.index_select(dim, room.adjacent(new.shape[dim], new.device)[0])
            if self.touching
            else keys
        )

    def without_gap(self, length: int) -> Context:
        """The same for a layer that counts how far a key is from the ``length`` new tokens by its place among the keys."""
        if self.room is None or self.valid is None or self.valid.shape[1] == length:
            return self
        index, keys = self.room.adjacent(length, self.valid.device)
        return replace(self, valid=self.valid[:, index] & keys, touching=True)

    def valid_now(self, length: int) -> Tensor | None:
        """valid of the ``length`` new tokens, [s, b]."""
        return None if self.valid is None else self.valid[:, -length:].T
