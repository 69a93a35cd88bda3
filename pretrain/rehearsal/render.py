"""Write the results of a rehearsal as text, JSON or a figure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fem_common.costs import ACTIVATIONS, CONTENTS
from fem_common.plot import COLOURS, INK, new_figure, plain_axes, save
from fem_common.text import aligned, counted, gib, si
from fem_common.text import size as size_of
from pretrain.plan.devices import memory_gib
from pretrain.plan.run_plan import Plan
from pretrain.rehearsal.steps import Rank, Rehearsal, content

_LARGEST = 12


def text(rehearsal: Rehearsal) -> str:
    """Return the rehearsal as text for the console."""
    plan, memory_limit = rehearsal.plan, memory_gib(rehearsal.device)
    lines = [
        f"{plan.config.name} on {plan.world_size} x {rehearsal.device}"
        f"{'' if memory_limit is None else f', {memory_limit} GiB each'}: rehearsal of one step"
    ]
    for rank in rehearsal.ranks:
        lines += _rank_lines(plan, rank)
    if rehearsal.excess:
        lines.append(f"DOES NOT FIT: {rehearsal.excess}")
    return "\n".join(lines)


def _rank_lines(plan: Plan, rank: Rank) -> Iterator[str]:
    peak = rank.peak
    trace = rank.trace
    planned = plan.memory[rank.stage]
    yield (
        f"rank {rank.rank}, stage {rank.stage + 1} of "
        f"{plan.config.parallel.pipeline_model_parallel_size}: {gib(peak.bytes)} at the peak, "
        f"{peak.phase} of {peak.part}; planned {gib(planned.total)}, "
        f"{100 * (planned.total / peak.bytes - 1):+.0f}% ({rank.seconds:.0f} s)"
    )
    rows, memory = [["", "rehearsed", "planned"]], peak.memory.by_content()
    rows += [[name, gib(memory[name]), gib(size)] for name, size in planned.by_content().items()]
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
            for (phase, kind, group), calls, size in _collectives(rank)
        ],
        left=[2, 3, 4],
    )
    forward, backward = (trace.flops(backward=which) for which in (False, True))
    yield f"  {len(trace.launches):,} kernels, which move {size_of(trace.traffic())}"
    yield f"  {si(forward)}FLOP forward and {si(backward)}FLOP backward, without Triton kernels"
    yield f"  {counted(len(trace.reads), 'host read')}: {', '.join(trace.reads)}"
    yield "  " + ", ".join(f"{name}: {chosen}" for name, chosen in sorted(trace.chosen.items()))


def _table(rows: list[list[str]], left: list[int] | None = None) -> Iterator[str]:
    yield from (f"    {line}" for line in aligned(rows, left))


def _by_part(rank: Rank) -> dict[str, int]:
    """Return part of the model -> bytes of activations; layers with the same size are combined."""
    parts: dict[str, int] = defaultdict(int)
    for each in rank.peak.held:
        if content(each) == ACTIVATIONS:
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
        key = content(each), f"{each.operation}, {each.place}"
        sizes[key] += each.bytes
        numbers[key] += 1
    return [(*key, numbers[key], size) for key, size in sizes.most_common(_LARGEST)]


def _collectives(rank: Rank) -> list[tuple[tuple[str, str, str], int, int]]:
    """Return ((phase, kind, group), calls, total bytes) of the collectives between ranks.

    They have the order of the step. Collectives of a single rank are omitted.
    """
    calls, sizes = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for each in rank.trace.collectives:
        if len(each.group) > 1:
            key = (
                each.phase,
                each.kind,
                f"{rank.groups.get(each.group, 'others')} of {len(each.group)}",
            )
            calls[key] += 1
            sizes[key] += each.bytes
    return [(key, calls[key], size) for key, size in sizes.items()]


def as_json(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return all numbers of a rehearsal as a JSON value; sizes are in bytes per rank."""
    return {
        "name": rehearsal.plan.config.name,
        "device": rehearsal.device,
        "world_size": rehearsal.plan.world_size,
        "excess": rehearsal.excess,
        "ranks": [_rank_json(rehearsal, rank) for rank in rehearsal.ranks],
    }


def _rank_json(rehearsal: Rehearsal, rank: Rank) -> dict[str, Any]:
    peak = rank.peak
    trace = rank.trace
    planned = rehearsal.plan.memory[rank.stage]
    return {
        "rank": rank.rank,
        "stage": rank.stage,
        "peak": {
            "bytes": peak.bytes,
            "phase": peak.phase,
            "part": peak.part,
            **peak.memory.by_content(),
        },
        "planned": {"bytes": planned.total, **planned.by_content()},
        "activations": _by_part(rank),
        "largest": [
            dict(zip(("holder", "place", "tensors", "bytes"), each, strict=True))
            for each in _largest(rank)
        ],
        "collectives": [
            {"phase": phase, "kind": kind, "group": group, "calls": calls, "bytes": size}
            for (phase, kind, group), calls, size in _collectives(rank)
        ],
        "kernels": len(trace.launches),
        "moved": trace.traffic(),
        "flops": {
            "forward": trace.flops(backward=False),
            "backward": trace.flops(backward=True),
        },
        "host_reads": trace.reads,
        "implementations": trace.chosen,
        "seconds": rank.seconds,
    }


def draw(rehearsal: Rehearsal, file: Path) -> None:
    """Write a PNG figure of the memory by holder during the step, one panel per kind of rank."""
    figure = new_figure((9.0, 1.0 + 2.6 * len(rehearsal.ranks)))
    plan, memory_limit = rehearsal.plan, memory_gib(rehearsal.device)
    for axes, rank in zip(
        figure.subplots(len(rehearsal.ranks), squeeze=False)[:, 0], rehearsal.ranks, strict=True
    ):
        places, levels = _through_the_step(rank)
        axes.stackplot(places, levels, labels=CONTENTS, colors=COLOURS, step="post", linewidth=0)
        axes.axhline(rank.peak.bytes / 2**30, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, places[-1])
        title = (
            f"rank {rank.rank}, stage {rank.stage + 1}: {gib(rank.peak.bytes)} in "
            f"{rank.peak.phase} of {rank.peak.part}"
        )
        axes.set_title(
            title + ("" if memory_limit is None else f", of {memory_limit} GiB"),
            loc="left",
            fontsize=10,
        )
        plain_axes(axes, "", "GiB", grid="y")
        axes.legend(loc="upper right", fontsize=8, ncols=len(CONTENTS), frameon=False)
        axes.set_ylim(0, 1.25 * rank.peak.bytes / 2**30)
    axes.set_xlabel(
        f"tensors made and freed in one step of {plan.config.name} on {plan.world_size} x "
        f"{rehearsal.device}"
    )
    save(figure, file)


def _through_the_step(rank: Rank) -> tuple[list[int], list[list[float]]]:
    """Return (ticks from the beginning of the step, GiB of each holder at each tick).

    The holders have the order of CONTENTS. The result has a few thousand ticks at most.
    """
    now, points = dict.fromkeys(CONTENTS, 0), list[tuple[int, dict[str, int]]]()
    for tick, each, change in rank.changes():
        now[content(each)] += change
        if rank.begin <= tick < rank.end:
            points.append((tick - rank.begin, dict(now)))
    points = points[:: max(1, len(points) // 4000)]
    ticks = [tick for tick, _ in points]
    return ticks, [[levels[name] / 2**30 for _, levels in points] for name in CONTENTS]
