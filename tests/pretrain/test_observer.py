"""Tests of the diagnostics in training: they are logged at the interval, are equal at every
parallel layout, and do not change training. Also tests of the profiler's traces.
"""

from __future__ import annotations

import gzip
import inspect
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fem_megatron.megatron import platform
from pretrain.config import ProfileConfig
from pretrain.report.profile import Profiler
from pretrain.signals import Received
from tests.pretrain.conftest import DEMO, Command
from tests.ranks import finished, losses, records

# Every family of mixers in one model; its pipeline stages contain different families.
MIXERS = (
    "fem_softmax, cem, mha2nd1st, hyperset, transformer, energy_linear, fem_aft, fem_mamba,"
    " fem_gla, differential"
)
HYBRID = [
    f"model.pattern=[{MIXERS}]",
    "model.num_layers=10",
    "train.steps=1",
    "optimizer.warmup_steps=0",
    "checkpoint.interval=0",
]
HYBRID += ["log.diagnostics_interval=1"]


def diagnostics_by_step(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the logged diagnostics by step."""
    found = {}
    for line in records(run_dir):
        values = {key: value for key, value in line.items() if key.startswith("diagnostics/")}
        if values:
            found[int(line["step"])] = values
    return found


def test_at_the_interval_and_training_does_not_notice(pretrain: Command, tmp_path: Path) -> None:
    short = ("train.steps=4", "train.recompute=full")
    looked = ("log.diagnostics_interval=2", "log.diagnostics=[layers, tensors]")
    pretrain(
        *short,
        *looked,
        "log.tensorboard=true",
        "log.interval=1",
        "log.profile.steps=[2,3]",
        "log.profile.memory=true",
    )
    traces = sorted((pretrain.run_dir / "profile").iterdir())
    assert [trace.name for trace in traces] == [
        f"step_{step:08}_rank_00000.json.gz" for step in (2, 3)
    ]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert "aten::mm" in {event["name"] for event in events}
    assert (
        f"step 3: trace: {traces[1]}\nstep 3: no memory snapshot: this rank computes on a CPU"
        in pretrain.out
    )
    seen = diagnostics_by_step(pretrain.run_dir)
    assert list(seen) == [2, 4]
    names = set(seen[2])
    assert names == set(seen[4])
    assert {name.split("/")[1] for name in names} == {f"layer_{number:02}" for number in range(2)}
    assert {
        "diagnostics/layer_01/mixer/free_energy_gap",
        "diagnostics/layer_00/mlp/step_norm",
    } <= names
    assert all(math.isfinite(value) for readings in seen.values() for value in readings.values())
    assert "diagnostics" not in pretrain.out and "tensors/" not in pretrain.out
    norm = "tensors/decoder.layers.1.mixer.in_proj.weight/update"
    norms = {line["step"]: line[norm] for line in records(pretrain.run_dir) if norm in line}
    assert list(norms) == [2, 4] and min(norms.values()) > 0
    events = EventAccumulator(str(pretrain.run_dir / "tensorboard"))
    events.Reload()
    # TensorBoard stores float32.
    for name, wanted in (
        (
            "diagnostics/layer_01/mixer/free_energy_gap",
            [readings["diagnostics/layer_01/mixer/free_energy_gap"] for readings in seen.values()],
        ),
        (norm, list(norms.values())),
        ("loss", [loss for loss, _ in losses(pretrain.run_dir).values()]),
    ):
        assert [event.value for event in events.Scalars(name)] == pytest.approx(wanted, rel=1e-6)
    never = tmp_path / "never"
    pretrain(*short, "log.diagnostics_interval=0", f"run_dir={never}")
    assert diagnostics_by_step(never) == {} and not (never / "profile").exists()
    assert losses(never) == losses(pretrain.run_dir), "to the last bit"


@pytest.mark.parametrize(
    "failure", [None, OSError("full"), RuntimeError("torch"), KeyboardInterrupt()], ids=repr
)
def test_a_trace_is_whole_before_the_memory_snapshot_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException | None
) -> None:
    """The trace is complete before the memory snapshot begins, and remains if the snapshot fails or
    is interrupted. A failure of the snapshot does not end the run.

    Two functions of torch are replaced, because the test has no GPU.
    """
    recorded, history = list[Any](), torch.cuda.memory._record_memory_history
    name = tmp_path / "profile/step_00000007_rank_00000"
    trace, snapshot = name.with_suffix(".json.gz"), name.with_suffix(".pickle")

    def record(*given: Any, **named: Any) -> None:
        # Raises unless the installed torch accepts the arguments.
        inspect.signature(history).bind(*given, **named)
        recorded.append((given, named))

    def dump(path: str) -> None:
        assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] and len(recorded) == 1
        Path(path).write_bytes(b"part of it")
        if failure:
            raise failure

    monkeypatch.setattr(platform, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)

    def run(*, memory: bool) -> list[str]:
        with Profiler(ProfileConfig(steps=(7,), memory=memory), tmp_path, Received())(7) as report:
            torch.ones(2).sum()
        return report

    assert run(memory=False) == [f"step 7: trace: {trace}"] and recorded == []
    trace.unlink()
    with (
        pytest.raises(KeyboardInterrupt)
        if isinstance(failure, KeyboardInterrupt)
        else nullcontext()
    ):
        line = f"no memory snapshot: {failure}" if failure else f"memory snapshot: {snapshot}"
        assert run(memory=True) == [f"step 7: trace: {trace}", f"step 7: {line}"]
        assert snapshot.exists() == (failure is None)
    assert trace.exists()
    assert recorded == [((), {"stacks": "python", "max_entries": 100_000}), ((), {"enabled": None})]


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_same_at_every_layout(pretrain: Command, stages: int, tmp_path: Path) -> None:
    """Diagnostics of the first step with TP 2 and SP (and PP 2) are those of one process; the
    initial weights are equal at every layout.
    """
    several = tmp_path / "several"
    layout = [
        "tensor_model_parallel_size=2",
        f"pipeline_model_parallel_size={stages}",
        "sequence_parallel=true",
    ]
    pretrain(*HYBRID)
    arguments = [
        *pretrain.settings,
        *HYBRID,
        f"run_dir={several}",
        *(f"parallel.{key}" for key in layout),
    ]
    finished(2 * stages, [DEMO, *arguments], tmp_path / "out")
    wanted, found = diagnostics_by_step(pretrain.run_dir)[1], diagnostics_by_step(several)[1]
    assert list(found) == list(wanted)
    # fp32 sums in a different order; a wrong gather would be off by 0.1 or more.
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
