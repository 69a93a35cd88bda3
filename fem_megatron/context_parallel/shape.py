"""Choice of read method and traffic for sequences split over ranks (`split`), from sizes only.

The module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fem_megatron.shape import Shape, Training


@dataclass(frozen=True)
class SplitWidths:
    """Numbers of heads or channels that reads exchange for tokens.

    Names are those of ``Shape.split_widths``.

    always: reads that must exchange heads.
    keyed: reads that name their keys, which exchange heads unless keys are gathered.
    scanned: scans and convolutions, which exchange heads unless they pass states.
    shared: heads of the keyed reads that several queries read; fewer heads than ranks are
        shared.
    rings: True if the keyed reads use a softmax, so that their keys can pass around a ring.
    """

    always: dict[str, int] = field(default_factory=dict)
    keyed: dict[str, int] = field(default_factory=dict)
    scanned: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    rings: bool = False


class SplitKinds(NamedTuple):
    """Read method of a mixer for sequences split over ranks (`split.SequenceSplit`).

    Reads that neither gather keys nor pass states exchange heads.
    """

    gathers: bool
    states: bool
    ring: bool = False


@dataclass(frozen=True)
class Crossing:
    """Bytes that a rank sends to other ranks in one forward pass, if sequences are split.

    Per token:
        exchanged: each of N ranks receives 1 / N of it.
        gathered, keys, angles: each rank receives all of it. keys are gathered again in the
            backward pass; angles have no gradient.
        ring: numbers (not bytes) that pass around the ring; their gradients do so in fp32.

    Per sequence:
        states: sent after each of the rank's two chunks.
        span: has no gradient.
    """

    exchanged: float = 0.0
    gathered: float = 0.0
    keys: float = 0.0
    angles: float = 0.0
    states: float = 0.0
    span: float = 0.0
    ring: float = 0.0

    def sent(self, training: Training, *, again: bool = False) -> float:
        """Return the bytes that a rank sends, forward and backward, for one application.

        The application is to one micro-batch.

        again: the layer is recomputed in the backward pass (train.recompute = full).
        """
        others, forward, tokens = training.ranks - 1, 1 + again, self._tokens(training)
        token = (
            (forward + 1) * (self.exchanged / training.ranks + self.gathered)
            + (forward + 2) * self.keys
            + forward * self.angles
        )
        gradients = tokens * self.ring * training.ranks * training.wide
        states = training.micro_batch * ((forward + 1) * 2 * self.states + forward * self.span)
        return self.beside(training, again=again) + gradients + others * (tokens * token + states)

    def beside(self, training: Training, *, again: bool = False) -> float:
        """Return the part of ``sent`` that overlaps with the attention: a ring's keys and values.

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
    asked: str | None = None,
    causal: bool = True,
    separate: bool = False,
) -> SplitKinds:
    """Choose the read method of a mixer for sequences split over ``context`` ranks.

    The requested method, one of SPLIT_KINDS, applies if the mixer has a choice. all_gather: reads
    that name their keys gather them. ring: keys pass around a ring if they can. all_to_all: all
    reads exchange heads. None: scans pass states, and reads that name their keys exchange heads if
    enough heads exist.

    tensor: ranks that share a layer.
    separate: documents are read separately.

    Raises:
        ValueError: if the method is impossible; the message names the width or the requested
        method.
    """
    ranks = tensor * context
    widths = mixer.cut_widths()
    states = asked != "all_to_all" and not separate
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
    keyed, ring = widths.keyed, asked == "ring" and widths.rings
    short = [f"{name}={width}" for name, width in keyed.items() if width % ranks]
    short += [
        f"{name}={width}"
        for name, width in widths.shared.items()
        if width % ranks and (width % tensor or ranks % width)
    ]
    if not keyed or (not short and asked != "all_gather" and not ring):
        return SplitKinds(gathers=False, states=states)
    if separate or not causal:
        why = f"{words} {short[0]}" if short else f"parallel.context_parallel_kind={asked}"
        raise ValueError(
            f"{why}, and "
            f"{only if separate else 'reads that are not causal use complete heads (all_to_all)'}"
        )
    if asked == "all_to_all":
        raise ValueError(
            f"{words} {short[0]}, as parallel.context_parallel_kind=all_to_all requires; "
            "all_gather does not"
        )
    return SplitKinds(gathers=True, states=states, ring=ring)
