"""Detect slow ranks: at an interval, compare the times of all ranks in one step.

The compared time begins with a step and ends before its gradients are reduced. It includes
data, forward and backward passes. During this time a rank does not wait for other data-parallel
replicas, but ranks of one replica wait for each other: tensor-parallel ranks in every layer,
pipeline stages in every micro-batch. A slow device therefore makes its entire replica slow, and the
step times identify the replica, not the rank. Pipeline stages differ in their times, so a rank is
compared only with ranks of the same stage.

Within a replica, and if only one replica exists, a second measure distinguishes the ranks: the time
of a small matrix product that each rank computes alone. It detects only slow computation on a
device. It does not detect slow data, memory or links, or other processes that use the CPU for a
while.
"""

from __future__ import annotations

import platform as host
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from megatron.core import parallel_state

from fem_common.files import append_json_line
from fem_common.text import ranges
from fem_megatron.megatron import platform
from pretrain.engines import StepTimes

NAME = "ranks.jsonl"
_TIMINGS = 5  # the fastest one counts


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank: host name, data-parallel replica and pipeline stage."""

    host: str
    replica: int
    stage: int


@dataclass(frozen=True)
class Slowest:
    """The slowest rank, with the measurements that were compared."""

    rank: int
    host: str
    ratio: float  # ratio of `seconds` to `median`
    seconds: float
    median: float  # of the compared ranks; the lower of two middle values
    compared: int  # number of compared ranks
    group: tuple[int, ...]  # ranks of its replica, including itself
    matmul_ratio: float  # ratio of its matrix product's time to the median of all ranks
    by: str  # measure of `ratio`: "step", or "matmul" with a single replica

    def message(self, limit: float) -> str:
        """Return one line for the console, given the ``limit`` from which a rank counts as slow."""
        who = f"slowest rank {self.rank} on node {self.host}"
        times = f"{self.ratio:.2f} times the median of {self.compared} ranks"
        against = f"({self.seconds:.3g} s against {self.median:.3g} s)"
        if self.by == "matmul":
            return f"{who}: {times} in a local matrix product {against}"
        if len(self.group) == 1:
            return f"{who}: {times} {against}"
        if self.matmul_ratio >= _matmul_limit(limit):
            which = f"{self.matmul_ratio:.2f} times the median in a local matrix product"
        else:
            which = "in a local matrix product none of them is slow"
        return (
            f"{who}: its ranks {ranges(self.group)}, which wait for each other, take {times} "
            f"{against}; {which}"
        )


def find_slowest(
    places: list[RankPosition], busy: list[float], matmul: list[float], limit: float
) -> Slowest:
    """Return the slowest rank by the ``busy`` seconds of its step.

    Within its replica, the ranks are distinguished by their ``matmul`` seconds: the result then
    names the rank with the slowest matrix product, with the step times of the replica's slowest
    rank. With a single replica only ``matmul`` is compared. Lists are indexed by rank.

    limit: the ratio from which a rank is reported as slow; within a replica, half of that excess in
    the matrix product is enough to identify a rank.
    """
    ranks = range(len(places))
    typical = median_low(matmul)
    if len({place.replica for place in places}) == 1:
        by, rank = "matmul", max(ranks, key=lambda r: matmul[r])
        seconds = matmul[rank]
        compared = matmul
        group = tuple(ranks)
    else:
        stages: dict[int, list[float]] = {}
        for place, own_seconds in zip(places, busy, strict=True):
            stages.setdefault(place.stage, []).append(own_seconds)
        by, rank = "step", max(ranks, key=lambda r: busy[r] / median_low(stages[places[r].stage]))
        seconds, compared = busy[rank], stages[places[rank].stage]
        group = tuple(r for r in ranks if places[r].replica == places[rank].replica)
        weakest = max(group, key=lambda r: matmul[r])
        if matmul[weakest] / typical >= _matmul_limit(limit):
            rank = weakest
    median = median_low(compared)
    return Slowest(
        rank,
        places[rank].host,
        seconds / median,
        seconds,
        median,
        len(compared),
        group,
        matmul[rank] / typical,
        by,
    )


class Stragglers:
    """Comparison of the ranks at every ``interval``-th step (0: never), written to ``ranks.jsonl``.

    All ranks must call its methods together.
    """

    def __init__(self, interval: int, limit: float, folder: Path | None) -> None:
        """Gather the positions of all ranks.

        ``folder``: the run directory; None on ranks that do not write.
        """
        self.interval = interval
        self.limit = limit
        self.folder = folder
        here = RankPosition(
            host.node(),
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        self.places: list[RankPosition] = [here] * torch.distributed.get_world_size()
        if interval and len(self.places) > 1:
            torch.distributed.all_gather_object(self.places, here)
        self.hosts_reported = False

    def due(self, step: int) -> bool:
        """Return True if the times of ``step`` are compared; always False with a single rank."""
        return bool(self.interval) and step % self.interval == 0 and len(self.places) > 1

    def compare(self, step: int, times: StepTimes) -> Slowest:
        """Compare the ranks in ``step``, write a line, and return the slowest rank.

        The result is the same on every rank.
        """
        own = torch.tensor(
            [times.busy, times.waiting, matmul_seconds()],
            dtype=torch.float64,
            device=platform.device(),
        )
        everyone = [torch.empty_like(own) for _ in self.places]
        torch.distributed.all_gather(everyone, own)
        busy, waiting, matmul = zip(*(entry.tolist() for entry in everyone), strict=True)
        found = find_slowest(self.places, list(busy), list(matmul), self.limit)
        if self.folder is not None:
            self._write(
                self.folder / NAME,
                step,
                {"seconds": busy, "waiting_seconds": waiting, "matmul_seconds": matmul},
                found,
            )
        return found

    def _write(
        self, path: Path, step: int, seconds: dict[str, tuple[float, ...]], found: Slowest
    ) -> None:
        line: dict[str, Any] = {"step": step}
        for name, values in seconds.items():
            line[name] = [float(f"{value:.4g}") for value in values]
        line["slowest"] = {
            "rank": found.rank,
            "host": found.host,
            "ratio": round(found.ratio, 3),
            "by": found.by,
            "matmul_ratio": round(found.matmul_ratio, 3),
            "group": found.group,
        }
        if not self.hosts_reported:
            line["hosts"] = [place.host for place in self.places]
            self.hosts_reported = True
        append_json_line(path, line)


@torch.no_grad()
def matmul_seconds() -> float:
    """Return the seconds of a small matrix product on this rank's device.

    The fastest of `_TIMINGS` timings counts. No random numbers are used.
    """
    size, times, dtype = (
        (2048, 8, torch.bfloat16) if platform.has_cuda() else (256, 1, torch.float32)
    )
    matrix = (
        torch.arange(size * size, device=platform.device())
        .remainder(251)
        .sub(125)
        .div(64)
        .to(dtype)
        .view(size, size)
    )
    product, best = torch.empty_like(matrix), float("inf")
    for _ in range(_TIMINGS):
        began = platform.Moment()
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)
        best = min(best, began.seconds_until(platform.Moment()))
    return best / times


def _matmul_limit(limit: float) -> float:
    """Return the ratio of a matrix product from which a rank counts as slow in its replica."""
    return 1 + (limit - 1) / 2
