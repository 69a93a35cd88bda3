"""Write the results of a rehearsal as text, JSON or a figure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fem_common.plot import COLOURS, INK, new_figure, plain_axes, save
from fem_common.text import aligned, counted, gib, si
from fem_common.text import size as size_of
from pretrain.plan.devices import memory_gib
from pretrain.plan.memory import StageMemory
from pretrain.rehearsal.record import ACTIVATIONS, HOLDERS
from pretrain.rehearsal.steps import Rank, Rehearsal, holder

_LARGEST = 12


def text(told: Rehearsal) -> str:
    """Return the rehearsal as text for the console."""
    room = memory_gib(told.device)
    lines = [
        f"{told.config.name} on {told.plan.world_size} x "
        f"{told.device}{'' if room is None else f', {room} GiB each'}: rehearsal of one step"
    ]
    for rank in told.ranks:
        lines += _rank_lines(told, rank)
    if told.excess:
        lines.append(f"DOES NOT FIT: {told.excess}")
    return "\n".join(lines)


def _rank_lines(told: Rehearsal, rank: Rank) -> Iterator[str]:
    peak, plan = rank.peak, told.plan.memory[rank.stage]
    yield (
        f"rank {rank.rank}, stage {rank.stage + 1} of "
        f"{told.config.parallel.pipeline_model_parallel_size}: {gib(peak.bytes)} at the peak, "
        f"{peak.phase} of {peak.part}; planned {gib(plan.total)}, "
        f"{100 * (plan.total / peak.bytes - 1):+.0f}% ({rank.seconds:.0f} s)"
    )
    rows = [["", "rehearsed", "planned"]]
    rows += [[name, gib(size), gib(getattr(plan, name))] for name, size in peak.by_holder().items()]
    yield from _table(rows)
    parts = _by_part(rank)
    yield "  activations: " + ", ".join(f"{name} {gib(size)}" for name, size in parts.items())
    yield "  largest"
    yield from _table(
        [[gib(size), f"{number} x", name, place] for name, place, number, size in _largest(rank)],
        left=[2, 3],
    )
    yield "  collectives of a step"
    yield from _table(
        [
            [f"{calls} x", size_of(size), kind, group, phase]
            for (phase, kind, group), calls, size in _sent(rank)
        ],
        left=[2, 3, 4],
    )
    forward, backward = (rank.flops(backward=which) for which in (False, True))
    yield f"  {len(rank.launches):,} kernels, which move {size_of(rank.moved)}"
    yield f"  {si(forward)}FLOP forward and {si(backward)}FLOP backward, without Triton kernels"
    yield f"  {counted(len(rank.reads), 'host read')}: {', '.join(rank.reads)}"
    yield "  " + ", ".join(f"{name}: {chosen}" for name, chosen in sorted(rank.chosen.items()))


def _table(rows: list[list[str]], left: list[int] | None = None) -> Iterator[str]:
    yield from (f"    {line}" for line in aligned(rows, left))


def _by_part(rank: Rank) -> dict[str, int]:
    """Return part of the model -> bytes of activations; layers with the same size are combined."""
    parts: dict[str, int] = defaultdict(int)
    for each in rank.peak.held:
        if holder(each) == ACTIVATIONS:
            parts[each.part or "the batch"] += each.bytes
    layers: dict[int, list[str]] = defaultdict(list)
    for name, size in parts.items():
        layers[size].append(name)
    return {
        name[0] if len(name) == 1 else f"{name[0]} to {name[-1].split()[-1]} each": size
        for size, name in layers.items()
    }


def _largest(rank: Rank) -> list[tuple[str, str, int, int]]:
    """Return the places in the code whose tensors use most memory at the peak.

    Each element is (holder, place of creation, number of tensors, bytes).
    """
    sizes, numbers = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in rank.peak.held:
        key = holder(each), f"{each.operation}, {each.place}"
        sizes[key] += each.bytes
        numbers[key] += 1
    return [(*key, numbers[key], size) for key, size in sizes.most_common(_LARGEST)]


def _sent(rank: Rank) -> list[tuple[tuple[str, str, str], int, int]]:
    """Return ((phase, kind, group), calls, total bytes) of the collectives between ranks.

    They have the order of the step. Collectives of a single rank are omitted.
    """
    calls, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in rank.collectives:
        if len(each.group) > 1:
            key = (
                each.phase,
                each.kind,
                f"{rank.groups.get(each.group, 'others')} of {len(each.group)}",
            )
            calls[key] += 1
            sizes[key] += each.bytes
    return [(key, calls[key], size) for key, size in sizes.items()]


def as_json(told: Rehearsal) -> dict[str, Any]:
    """Return all numbers of a rehearsal as a JSON value; sizes are in bytes per rank."""
    return {
        "name": told.config.name,
        "device": told.device,
        "world_size": told.plan.world_size,
        "excess": told.excess,
        "ranks": [
            {
                "rank": rank.rank,
                "stage": rank.stage,
                "peak": {
                    "bytes": rank.peak.bytes,
                    "phase": rank.peak.phase,
                    "part": rank.peak.part,
                    **rank.peak.by_holder(),
                },
                "planned": _planned(told.plan.memory[rank.stage]),
                "activations": _by_part(rank),
                "largest": [
                    dict(zip(("holder", "place", "tensors", "bytes"), each, strict=True))
                    for each in _largest(rank)
                ],
                "collectives": [
                    {"phase": phase, "kind": kind, "group": group, "calls": calls, "bytes": size}
                    for (phase, kind, group), calls, size in _sent(rank)
                ],
                "kernels": len(rank.launches),
                "moved": rank.moved,
                "flops": {
                    "forward": rank.flops(backward=False),
                    "backward": rank.flops(backward=True),
                },
                "host_reads": rank.reads,
                "implementations": rank.chosen,
                "seconds": rank.seconds,
            }
            for rank in told.ranks
        ],
    }


def _planned(stage: StageMemory) -> dict[str, int]:
    return {"bytes": stage.total, **{name: getattr(stage, name) for name in HOLDERS}}


def draw(told: Rehearsal, file: Path) -> None:
    """Write a PNG figure of the memory by holder during the step, one panel per kind of rank."""
    figure = new_figure((9.0, 1.0 + 2.6 * len(told.ranks)))
    room = memory_gib(told.device)
    for axes, rank in zip(
        figure.subplots(len(told.ranks), squeeze=False)[:, 0], told.ranks, strict=True
    ):
        places, levels = _through_the_step(rank)
        axes.stackplot(places, levels, labels=HOLDERS, colors=COLOURS, step="post", linewidth=0)
        axes.axhline(rank.peak.bytes / 2**30, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, places[-1])
        title = (
            f"rank {rank.rank}, stage {rank.stage + 1}: {gib(rank.peak.bytes)} in "
            f"{rank.peak.phase} of {rank.peak.part}"
        )
        axes.set_title(
            title + ("" if room is None else f", of {room} GiB"), loc="left", fontsize=10
        )
        plain_axes(axes, "", "GiB", grid="y")
        axes.legend(loc="upper right", fontsize=8, ncols=len(HOLDERS), frameon=False)
        axes.set_ylim(0, 1.25 * rank.peak.bytes / 2**30)
    axes.set_xlabel(
        f"tensors made and freed in one step of {told.config.name} on {told.plan.world_size} x "
        f"{told.device}"
    )
    save(figure, file)


def _through_the_step(rank: Rank) -> tuple[list[int], list[list[float]]]:
    """Return (ticks from the beginning of the step, GiB of each holder at each tick).

    The holders have the order of HOLDERS. The result has a few thousand ticks at most.
    """
    changes = [(each.born, holder(each), each.bytes) for each in rank.held]
    changes += [
        (each.gone, holder(each), -each.bytes) for each in rank.held if each.gone is not None
    ]
    now, points = dict.fromkeys(HOLDERS, 0), list[tuple[int, dict[str, int]]]()
    for tick, name, change in sorted(changes):
        now[name] += change
        if rank.begin <= tick < rank.end:
            points.append((tick - rank.begin, dict(now)))
    points = points[:: max(1, len(points) // 4000)]
    return [tick for tick, _ in points], [
        [each[name] / 2**30 for _, each in points] for name in HOLDERS
    ]
