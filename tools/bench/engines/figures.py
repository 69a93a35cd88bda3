"""Figures of a variant from its rounds, ratios to the Megatron engine, and their table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fem_megatron.megatron import platform
from pretrain.plan.devices import peak_tflops
from tools.bench import runner
from tools.bench.engines.runs import Round, is_partial
from tools.bench.engines.variants import BASELINE, Job, plan_of, planned
from tools.bench.runner import Spread

MIB = 2**20
COLUMNS = (
    "engine|step, s|÷ megatron|over the rounds|tokens/s|MFU|"
    "peak, MiB|÷ megatron|plan, MiB|peak ÷ plan|loss"
).split("|")


@dataclass(frozen=True)
class Figures:
    """Figures of one variant.

    steps: median seconds of a step in each round.
    peaks: peak bytes of device memory of the rank that uses most, median over the rounds.
    hosts: peak bytes of host memory of each rank in runs on a GPU, with the libraries; None on a
        CPU.
    planned, planned_host: bytes of device and host memory of one rank according to the plan.
    tokens: tokens per step, over all ranks.
    loss: loss of the last step, to check that all engines train equally.
    flops_per_token: FLOPs per token of training according to the plan.
    peak_flops: peak FLOP/s of all ranks' devices by the data sheet; None if unknown (a CPU).
    partial: the time limit ended a round before its last step; only its completed steps count.
    """

    steps: tuple[float, ...]
    peaks: tuple[int, ...]
    hosts: tuple[int, ...] | None
    planned: int
    planned_host: int
    tokens: int
    loss: float
    flops_per_token: float = 0.0
    peak_flops: float | None = None
    partial: bool = False

    @property
    def step(self) -> float:
        """Seconds of a step in the median round."""
        return statistics.median(self.steps)

    @property
    def peak(self) -> int:
        """Peak bytes of device memory of the rank that uses most."""
        return max(self.peaks)

    @property
    def mfu(self) -> float | None:
        """Model FLOP/s divided by the devices' peak (see `pretrain.report.metrics.Meter`).

        None if the peak is unknown.
        """
        if not self.peak_flops:
            return None
        return self.tokens / self.step * self.flops_per_token / self.peak_flops


def of(job: Job, rounds: Sequence[Round], *, cuda: bool) -> Figures:
    """Return the figures of a variant from its rounds."""
    plan, memory = plan_of(job, cuda=cuda), planned(job, cuda=cuda)
    peak = peak_tflops(plan.config.log.device or platform.device_name())
    hosts = [each.hosts for each in rounds if each.hosts is not None]
    return Figures(
        steps=tuple(statistics.median(each.seconds) for each in rounds),
        peaks=(int(statistics.median(each.peak for each in rounds)),),
        hosts=tuple(map(max, zip(*hosts, strict=True))) if hosts else None,
        planned=memory.total,
        planned_host=memory.host,
        tokens=plan.schedule.step_tokens,
        loss=rounds[-1].loss,
        flops_per_token=plan.train_flops,
        peak_flops=peak * 1e12 * job.ranks if peak else None,
        partial=any(is_partial(job, each) for each in rounds),
    )


def time_ratio(own: Figures, base: Figures) -> Spread:
    """Return the ratio of the step times of ``own`` and ``base`` over the rounds.

    Only rounds that both variants completed are used. Ratios within a round cancel changes of the
    machine's load.
    """
    return Spread.of([mine / theirs for mine, theirs in zip(own.steps, base.steps, strict=False)])


def as_json(name: str, found: Figures | str, base: Figures | None) -> dict[str, Any]:
    """Return a variant's row of the JSON.

    found: figures of the variant, or the reason why none exist (written under the key ``cannot``).
    base: figures of the baseline for the ratios, or None.
    """
    if isinstance(found, str):
        return {"variant": name, "cannot": found}
    ratio = time_ratio(found, base) if base else None
    return {
        "variant": name,
        "step_seconds": found.step,
        "rounds": list(found.steps),
        "step_ratio": ratio.median if ratio else None,
        "step_ratio_range": [ratio.least, ratio.most] if ratio else None,
        "tokens_per_second": found.tokens / found.step,
        "flops_per_token": found.flops_per_token,
        "mfu": found.mfu,
        "partial": found.partial,
        "peak_bytes": list(found.peaks),
        "peak_ratio": found.peak / base.peak if base else None,
        "host_bytes": None if found.hosts is None else list(found.hosts),
        "plan_bytes": found.planned,
        "plan_host_bytes": found.planned_host,
        "loss": found.loss,
    }


def table(measured: Mapping[str, Figures | str]) -> str:
    """Return an aligned table of all variants. Rows without figures contain the reason instead.

    measured: variant -> its figures, or the reason why none exist.
    """
    found = measured.get(BASELINE)
    base = None if isinstance(found, str) else found
    hosts = any(isinstance(each, Figures) and each.hosts is not None for each in measured.values())
    columns = list(COLUMNS)
    if hosts:
        columns.append("host, MiB")
    if any(isinstance(each, str) for each in measured.values()):
        columns.append("cannot run")
    rows = []
    for name, each in measured.items():
        if isinstance(each, str):
            cells = [name, *([""] * (len(columns) - 2)), each]
        else:
            cells = _cells(name, each, base, hosts)
        rows.append([*cells, *([""] * (len(columns) - len(cells)))])
    return runner.table(columns, rows)


def _cells(name: str, own: Figures, base: Figures | None, hosts: bool) -> list[str]:
    ratio = time_ratio(own, base) if base else None
    cells = [
        f"{name} (partial)" if own.partial else name,
        f"{own.step:.3f}",
        f"{ratio.median:.2f}" if ratio else "",
        f"{ratio.least:.2f} to {ratio.most:.2f}" if ratio and ratio.rounds > 1 else "",
        f"{own.tokens / own.step:,.0f}",
        "" if own.mfu is None else f"{own.mfu:.1%}",
        f"{own.peak / MIB:,.0f}",
        f"{own.peak / base.peak:.2f}" if base else "",
        f"{own.planned / MIB:,.0f}",
        f"{own.peak / own.planned:.2f}",
        f"{own.loss:.4f}",
    ]
    return [*cells, f"{max(own.hosts) / MIB:,.0f}"] if hosts and own.hosts else cells
