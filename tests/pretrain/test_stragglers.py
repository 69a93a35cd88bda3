"""Who is named as the slowest rank, at every layout; times and places are made up here, the real ranks are in test_two_ranks."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from pretrain.report.stragglers import Place, find_slowest, matmul_seconds

LAYOUTS = [(dp, tp, pp) for dp, tp, pp in product((1, 2, 3, 8), (1, 2, 8), (1, 4)) if dp * tp * pp > 1]


def job(dp: int, tp: int, pp: int, dice: random.Random, slow: int, busy_factor: float, matmul_factor: float) -> tuple[list[Place], ...]:
    """Megatron's order of ranks (TP fastest, PP slowest); two ranks a node; stages of very different times; 2 % of noise."""
    places = [Place(f"node{(s * dp + r) * tp // 2}", r, s) for s in range(pp) for r in range(dp) for _ in range(tp)]
    busy = [0.3 * (2 - place.stage / pp) * dice.uniform(1, 1.02) for place in places]
    busy = [time * (busy_factor if place.replica == places[slow].replica else 1) for time, place in zip(busy, places, strict=True)]
    matmul = [1e-3 * dice.uniform(1, 1.02) for _ in places]
    matmul[slow] *= matmul_factor
    return places, busy, matmul  # type: ignore[return-value]


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
def test_a_slow_device_is_named_at_every_layout(dp: int, tp: int, pp: int) -> None:
    dice = random.Random(dp * 100 + tp * 10 + pp)
    for slow in dice.sample(range(dp * tp * pp), min(5, dp * tp * pp)):
        places, busy, matmul = job(dp, tp, pp, dice, slow, 1.5, 1.5)
        found = find_slowest(places, busy, matmul, 1.2)  # type: ignore[arg-type]
        assert (found.rank, found.host) == (slow, places[slow].host)
        assert found.ratio == pytest.approx(1.5, rel=0.03)
        assert found.group == tuple(r for r, place in enumerate(places) if place.replica == places[slow].replica)
        assert found.by == ("step" if dp > 1 else "matmul")


@pytest.mark.parametrize(("dp", "tp", "pp"), [layout for layout in LAYOUTS if layout[0] > 1])
def test_slow_data_names_the_replica_and_does_not_pretend_to_more(dp: int, tp: int, pp: int) -> None:
    dice = random.Random(dp * 100 + tp * 10 + pp)
    slow = dice.randrange(dp * tp * pp)
    places, busy, matmul = job(dp, tp, pp, dice, slow, 1.3, 1.0)
    found = find_slowest(places, busy, matmul, 1.2)  # type: ignore[arg-type]
    assert slow in found.group and found.ratio == pytest.approx(1.3, rel=0.03)
    assert ("none of them is slow" in found.message(1.2)) == (tp * pp > 1)


@pytest.mark.parametrize(("dp", "tp", "pp"), LAYOUTS)
def test_nobody_is_slow_by_the_stage_it_has(dp: int, tp: int, pp: int) -> None:
    places, busy, matmul = job(dp, tp, pp, random.Random(0), 0, 1.0, 1.0)
    assert find_slowest(places, busy, matmul, 1.2).ratio < 1.03  # type: ignore[arg-type]


def test_what_people_read() -> None:
    places = [Place("h100-07" if rank == 13 else "h100-01", rank, 0) for rank in range(64)]
    busy, matmul = [0.315] * 64, [1e-3] * 64
    busy[13] = 0.412
    expected = "slowest rank 13 on node h100-07: 1.31 times the median of 64 ranks (0.412 s against 0.315 s)"
    assert find_slowest(places, busy, matmul, 1.2).message(1.2) == expected
    pairs = [Place(f"n{rank // 4}", rank // 2 % 2, rank // 4) for rank in range(8)]
    busy = [1.0, 1.0, 1.4, 1.4, 0.5, 0.5, 0.7, 0.7]
    said = find_slowest(pairs, busy, [1.0] * 7 + [1.25], 1.2).message(1.2)
    together = "with ranks 2-3, 6-7, which wait for each other, 1.40 times the median of 4 ranks (1.4 s against 1 s)"
    assert said == f"slowest rank 7 on node n1: {together}; itself 1.25 times in a matrix product by itself"
    said = find_slowest([Place("a", 0, 0), Place("b", 0, 0)], [1.0, 1.0], [1e-3, 2e-3], 1.2).message(1.2)
    assert said == "slowest rank 1 on node b: 2.00 times the median of 2 ranks in a matrix product by itself (0.002 s against 0.001 s)"


def test_the_probe_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    assert 0 < matmul_seconds() < 10
    assert torch.equal(torch.get_rng_state(), before)
