"""Timed operations (workloads) and the baselines that they are compared with.

A workload calls an operation like a layer of a model does. Workloads and baselines have names, so
that other processes can select them.
"""

from tools.bench.workloads.base import (
    LINEAR,
    STANDARD_ATTENTION,
    Baseline,
    Draw,
    Inputs,
    Outputs,
    Size,
    Workload,
)
from tools.bench.workloads.reads import READS
from tools.bench.workloads.scans import PLAIN_GLA, SCANS

__all__ = ["BASELINES", "WORKLOADS", "Baseline", "Draw", "Inputs", "Outputs", "Size", "Workload"]

BASELINES: dict[str, Baseline] = {**STANDARD_ATTENTION, **LINEAR, PLAIN_GLA.name: PLAIN_GLA}
WORKLOADS: dict[str, Workload] = {workload.name: workload for workload in (*READS, *SCANS)}
