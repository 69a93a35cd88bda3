"""Sizes of AFT's prior (LRNN-softmax). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from fem_megatron.shapes.priors.base import PriorShape

QUERIES = ("after", "inside")


@dataclass(frozen=True)
class AftShape(PriorShape):
    """p_t(i) ~ exp(k_i), a distribution for each value channel.

    width: channels of a head's q and of its k. query: "after" gates the read, o = sigmoid(q) * read (the paper, AFT); "inside" multiplies
    both sums by a normalised softplus query before the log (the released code).
    own_logits: q and k are twice as wide as the values and their second halves belong to F (the released code under budget (i)).
    """

    width: int
    query: str
    own_logits: bool = False

    @classmethod
    def of(cls, qk_head: int, value_head: int, query: str, *, free_energy: bool) -> AftShape:
        """As wide as the values; with ``query`` inside, twice that where the budget makes q and k so and there is an F to use it.

        Raises ValueError for another query.
        """
        if query not in QUERIES:
            raise ValueError(f"model.fem.aft_query={query!r} is not one of {', '.join(QUERIES)}")
        own = query == "inside" and free_energy and qk_head == 2 * value_head
        return cls(2 * value_head if own else value_head, query, own)

    def slices(self) -> dict[str, int]:
        """q and k, ``width`` each."""
        return {"q": self.width, "k": self.width}

    def reads(self) -> set[str]:
        return {"fem.aft_query"}

    def flops(self, length: int, streams: int, *, whole_square: bool) -> float:
        """None: a scan has no matrix products."""
        return 0.0

    def state_bytes(self, length: int, element: int, *, value: int, free_energy: bool) -> int:
        """A maximum and sums for each channel, fp32: 3 numbers, 2 more with F, 2 more where F has logits of its own."""
        return (3 + 2 * free_energy + 2 * self.own_logits) * value * max(4, element)
