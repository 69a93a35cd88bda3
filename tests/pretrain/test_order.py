"""Tests of the longest possible order of training samples, against the orders that megatron-core
draws.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pretrain.config import load_run
from pretrain.data.order import longest_order, passes_drawn
from pretrain.validate import Prepared, prepare
from tests.pretrain.conftest import DEMO
from tests.pretrain.data_folder import write_pair
from tests.pretrain.jobs import datasets_of

IDS = 60_000
pytestmark = pytest.mark.usefixtures("groups")


class Blend:
    """Sources with given numbers of tokens, each with separate ids that increase by one per
    token.
    """

    def __init__(
        self,
        folder: Path,
        length: int,
        tokens: list[int],
        weights: list[float],
        dice: random.Random,
    ) -> None:
        self.folder = folder
        first = 0
        sources = []
        folder.mkdir()
        for number, (count, weight) in enumerate(zip(tokens, weights, strict=True)):
            cuts = sorted(
                {first, first + count, *dice.sample(range(first, first + count), min(count, 9))}
            )
            documents = [[*range(start, end)] for start, end in zip(cuts, cuts[1:], strict=False)]
            write_pair(folder / str(number), documents)
            sources.append(f"{{prefix: {folder / str(number)}, weight: {weight}}}")
            first += count
        words = [
            "data.valid=[]",
            "data.test=[]",
            f"model.vocab_size={IDS}",
            f"data.seq_length={length}",
        ]
        self.prepared: Prepared = prepare(
            load_run(DEMO, [*words, f"data.train=[{', '.join(sources)}]"]), 1, plan_only=True
        )

    def longest(self, drawn: int, wanted: int) -> int:
        assert self.prepared.facts is not None
        return longest_order(self.prepared.config, self.prepared.facts, drawn, wanted)

    def one_pass(self, samples: int) -> bool:
        assert self.prepared.facts is not None
        return {*passes_drawn(self.prepared.config, self.prepared.facts, samples)} == {(1, False)}

    def order(self, samples: int) -> list[int]:
        """Return the first token of each sample."""
        made = datasets_of(self.prepared, samples, self.folder / "index")
        return [int(made.train[number]["tokens"][0]) for number in range(samples)]


@pytest.mark.parametrize("seed", range(3))
def test_an_order_that_is_accepted_as_longer_begins_with_the_shorter_one(
    tmp_path: Path, seed: int
) -> None:
    """Random blends, with lengths at and beyond the longest accepted one: within one pass over the
    data no token is read twice.
    """
    dice = random.Random(seed)
    for number in range(6):
        length, count = dice.randint(2, 24), dice.choice([1, 1, 2, 3])
        tokens = [dice.randint(length + 1, 40 * length) for _ in range(count)]
        blend = Blend(
            tmp_path / str(number),
            length,
            tokens,
            [dice.choice([1, 2, 9, 0.3]) for _ in range(count)],
            dice,
        )
        drawn = dice.randint(1, 50)
        longest = blend.longest(drawn, 3 * drawn)
        order = blend.order(longest)
        assert order[:drawn] == blend.order(drawn), (tokens, drawn, longest)
        if blend.one_pass(longest):
            assert len(set(order)) == longest
        if longest < 3 * drawn:
            assert blend.order(longest + 1)[:drawn] != order[:drawn] or drawn < 6, (
                "a shorter one may be the same by chance"
            )


@pytest.mark.parametrize(
    ("tokens", "weights", "drawn", "wanted", "longest"),
    [
        ([640], [1.0], 20, 40, 39),
        ([641], [1.0], 20, 40, 40),
        ([50_000, 340], [9.0, 1.0], 99, 201, 200),
    ],
)
def test_at_the_edge_of_a_pass(
    tmp_path: Path, tokens: list[int], weights: list[float], drawn: int, wanted: int, longest: int
) -> None:
    """The last label needs one more token, and Megatron draws samples of a blend's source in excess
    of its share.
    """
    blend = Blend(tmp_path / "blend", 16, tokens, weights, random.Random(0))
    assert blend.longest(drawn, wanted) == longest
    read_again = {*blend.order(wanted)[drawn:]} & {*blend.order(drawn)}
    assert bool(read_again) == (longest < wanted)
