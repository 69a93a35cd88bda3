"""Choose how a mixer reads sequences split over ranks (see `split`), and count its traffic.

The module uses sizes only and does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fem_megatron.shape import Shape, Training


@dataclass(frozen=True)
class SplitWidths:
    """Numbers of heads or channels of a mixer's reads, for the exchange of heads between ranks.

    In the exchange each rank receives all tokens of some heads, so the number of ranks must divide
    these widths. The keys of the dictionaries are the names used by ``Shape.split_widths``.

    always: widths of reads that must exchange heads.
    keyed: widths of reads with separate keys, which exchange heads unless keys are gathered.
    scanned: widths of scans and convolutions, which exchange heads unless they pass states.
    shared: numbers of key heads of the keyed reads, each read by several query heads. Fewer key
        heads than ranks are allowed: ranks then share a head.
    rings: True if the keyed reads use a softmax, so that their keys can pass around a ring.
    """

    always: dict[str, int] = field(default_factory=dict)
    keyed: dict[str, int] = field(default_factory=dict)
    scanned: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    rings: bool = False


class SplitKinds(NamedTuple):
    """Read method of a mixer for sequences split over ranks (`split.SequenceSplit`).

    gathers: True if reads with separate keys gather the keys of all tokens.
    states: True if scans pass states from chunk to chunk.
    ring: True if softmax reads pass keys around a ring.

    All other reads exchange heads.
    """

    gathers: bool
    states: bool
    ring: bool = False


@dataclass(frozen=True)
class Crossing:
    """Bytes of one forward pass that ranks sharing a sequence send, by kind of traffic.

    Per token:
        exchanged: bytes of tensors of which each of N ranks receives 1 / N.
        gathered, keys, angles: bytes that every rank receives. keys are gathered again in the
            backward pass; angles have no gradient.
        ring: numbers (not bytes) that pass around the ring. Their gradients pass in fp32.

    Per sequence:
        states: bytes of the state, which is sent after each of the rank's two chunks.
        span: bytes of the range of the values, which has no gradient.
    """

    exchanged: float = 0.0
    gathered: float = 0.0
    keys: float = 0.0
    angles: float = 0.0
    states: float = 0.0
    span: float = 0.0
    ring: float = 0.0

    def sent(self, training: Training, *, again: bool = False) -> float:
        """Return the bytes that a rank sends in the forward and backward pass of one micro-batch.

        The count is for one application of the layer.

        again: True if the backward pass recomputes the layer (train.recompute = full).
        """
        others, forward, tokens = training.ranks - 1, 1 + again, self._tokens(training)
        token = (
            (forward + 1) * (self.exchanged / training.ranks + self.gathered)
            + (forward + 2) * self.keys
            + forward * self.angles
        )
        gradients = tokens * self.ring * training.ranks * training.wide
        states = training.micro_batch * ((forward + 1) * 2 * self.states + forward * self.span)
        return (
            self.overlapped(training, again=again) + gradients + others * (tokens * token + states)
        )

    def overlapped(self, training: Training, *, again: bool = False) -> float:
        """Return the bytes of ``sent`` that overlap with the attention: a ring's keys and values.

        The ring's gradients and all other traffic do not overlap.
        """
        passes = 2 + again + training.again
        return self._tokens(training) * self.ring * (training.ranks - 1) * training.element * passes

    @staticmethod
    def _tokens(training: Training) -> float:
        return training.micro_batch * training.length / training.ranks


SPLIT_KINDS = ("all_to_all", "all_gather", "ring")


def split_kinds(
    mixer: Shape,
    *,
    tensor: int,
    context: int,
    requested: str | None = None,
    causal: bool = True,
    separate: bool = False,
) -> SplitKinds:
    """Choose the read method of a mixer for sequences split over ``context`` ranks.

    tensor: tensor-parallel ranks that share a layer.
    causal: True if tokens see only earlier tokens.
    separate: True if documents are read separately.
    requested: method from SPLIT_KINDS, or None. It applies if the mixer has a choice:

        all_gather  reads with separate keys gather the keys of all tokens
        ring        keys pass around a ring if the reads use a softmax
        all_to_all  all reads exchange heads
        None        scans pass states; reads with separate keys exchange heads if enough heads exist

    Raises:
        ValueError: if the method is impossible. The message names the width or the requested
        method.
    """
    ranks = tensor * context
    widths = mixer.cut_widths()
    states = requested != "all_to_all" and not separate
    words = f"parallel.context_parallel_size={context}" + (
        f" x tensor_model_parallel_size={tensor}" if tensor > 1 else ""
    )
    words = f"{words} does not divide"
    only = "separate documents are read by complete heads (all_to_all)"
    for name, width in (widths.always | ({} if states else widths.scanned)).items():
        if width % ranks:
            choice = (
                f"; {only}"
                if separate
                else "; leave parallel.context_parallel_kind out, so that states are passed"
            )
            raise ValueError(
                f"{words} {name}={width}, which is exchanged for "
                f"tokens{'' if name in widths.always else choice}"
            )
    keyed, ring = widths.keyed, requested == "ring" and widths.rings
    short = [f"{name}={width}" for name, width in keyed.items() if width % ranks]
    short += [
        f"{name}={width}"
        for name, width in widths.shared.items()
        if width % ranks and (width % tensor or ranks % width)
    ]
    if not keyed or (not short and requested != "all_gather" and not ring):
        return SplitKinds(gathers=False, states=states)
    if separate or not causal:
        why = f"{words} {short[0]}" if short else f"parallel.context_parallel_kind={requested}"
        raise ValueError(
            f"{why}, and "
            f"{only if separate else 'reads that are not causal use complete heads (all_to_all)'}"
        )
    if requested == "all_to_all":
        raise ValueError(
            f"{words} {short[0]}, as parallel.context_parallel_kind=all_to_all requires; "
            "all_gather does not"
        )
    return SplitKinds(gathers=True, states=states, ring=ring)
