"""Of a sequence that is cut over ranks (`cut`): how a mixer's reads are made, and what ranks send each other, from sizes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fem_megatron.shape import Shape, Training


@dataclass(frozen=True)
class CutWidths:
    """Numbers of heads or channels that are exchanged for tokens, as ``Shape.split_widths``, by the reads that do so.

    always: reads that cannot do without. keyed: those that name their keys, unless these are gathered. scanned: scans and convolutions,
    unless they pass states. shared: of the keyed, heads that several queries read; where they are fewer than ranks these share them.
    rings: whether the keyed are under a softmax, and their keys can go round.
    """

    always: dict[str, int] = field(default_factory=dict)
    keyed: dict[str, int] = field(default_factory=dict)
    scanned: dict[str, int] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    rings: bool = False


class CutKinds(NamedTuple):
    """How a mixer's reads are made of sequences cut over ranks; those that do neither exchange heads (`cut.Cut`)."""

    gathers: bool
    states: bool
    ring: bool = False


@dataclass(frozen=True)
class Crossing:
    """Bytes that a rank gives to others where sequences are cut, in one forward pass.

    Of a token: exchanged: each of N ranks gets 1 / N of it; gathered, keys, angles: each of them gets it all. keys: gathered anew in the
    backward pass. angles: which have no gradient. ring: numbers (not bytes) that go round, and whose gradients do, in fp32. Of a sequence:
    states: behind each of its rank's two chunks. span: without a gradient.
    """

    exchanged: float = 0.0
    gathered: float = 0.0
    keys: float = 0.0
    angles: float = 0.0
    states: float = 0.0
    span: float = 0.0
    ring: float = 0.0

    def sent(self, training: Training, *, again: bool = False) -> float:
        """Bytes that a rank sends of one application to a micro-batch, forwards and backwards.

        again: the layer is computed again in the backward pass (train.recompute = full).
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
        """Of ``sent``, what goes while the attention runs: a ring's keys and values; its gradients, and all others, are waited for."""
        passes = 2 + again + training.again
        return self._tokens(training) * self.ring * (training.ranks - 1) * training.element * passes

    @staticmethod
    def _tokens(training: Training) -> float:
        return training.micro_batch * training.length / training.ranks


CUT_KINDS = ("all_to_all", "all_gather", "ring")


def cut_kinds(
    mixer: Shape,
    *,
    tensor: int,
    context: int,
    asked: str | None = None,
    causal: bool = True,
    separate: bool = False,
) -> CutKinds:
    """How a mixer's reads are made of sequences cut over ``context`` ranks: as one of CUT_KINDS asks, where there is a choice.

    Where nothing is asked for, scans pass states, and reads that name their keys exchange heads if there are enough of them. all_gather:
    these gather keys. ring: their keys go round, if they can. all_to_all: all exchange heads. tensor: ranks that share a layer. separate:
    documents are read apart.

    Raises:
        ValueError: it cannot be made; the message names the width, or what was asked for.
    """
    ranks, widths, states = (
        tensor * context,
        mixer.cut_widths(),
        asked != "all_to_all" and not separate,
    )
    words = f"parallel.context_parallel_size={context}" + (
        f" x tensor_model_parallel_size={tensor}" if tensor > 1 else ""
    )
    words, only = (
        f"{words} does not divide",
        "documents that are read apart are read by whole heads (all_to_all)",
    )
    for name, width in (widths.always | ({} if states else widths.scanned)).items():
        if width % ranks:
            choice = (
                f"; {only}"
                if separate
                else "; leave parallel.context_parallel_kind out: states are passed"
            )
            raise ValueError(
                f"{words} {name}={width}, which is exchanged for tokens{'' if name in widths.always else choice}"
            )
    keyed, ring = widths.keyed, asked == "ring" and widths.rings
    short = [f"{name}={width}" for name, width in keyed.items() if width % ranks]
    short += [
        f"{name}={width}"
        for name, width in widths.shared.items()
        if width % ranks and (width % tensor or ranks % width)
    ]
    if not keyed or (not short and asked != "all_gather" and not ring):
        return CutKinds(gathers=False, states=states)
    if separate or not causal:
        why = f"{words} {short[0]}" if short else f"parallel.context_parallel_kind={asked}"
        raise ValueError(
            f"{why}, and {only if separate else 'reads both ways are of whole heads (all_to_all)'}"
        )
    if asked == "all_to_all":
        raise ValueError(
            f"{words} {short[0]}, as parallel.context_parallel_kind=all_to_all needs; all_gather does not"
        )
    return CutKinds(gathers=True, states=states, ring=ring)
