"""Trainings of a few steps, one after another in the same processes, for comparisons of layouts and
engines: see `run_jobs`.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from fem_megatron.megatron import platform
from pretrain.config import load_run
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO
from tests.ranks import answer

MUON = "optimizer.name=muon"
TP2 = ["parallel.tensor_model_parallel_size=2"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
SP = ["parallel.sequence_parallel=true"]
CP2 = ["parallel.context_parallel_size=2"]
OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
PLAIN = ["parallel.use_distributed_optimizer=false"]


def deepspeed(stage: int) -> list[str]:
    return ["engine.name=deepspeed", f"engine.zero_stage={stage}"]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@dataclass(frozen=True)
class Job:
    """Steps of a run. save_after: save a checkpoint after these steps and continue; load: start
    from the checkpoint in this folder.

    norms: record the norms of all tensors in every step (`TensorNorms`). draw: initialise the
    weights for ``Done.initial`` although a checkpoint is loaded.
    """

    name: str
    overrides: list[str]
    steps: int = 3
    save_after: int | None = None
    load: str | None = None
    norms: bool = False
    draw: bool = False


@dataclass
class Done:
    """Results: (loss, grad norm) of each step; global name -> digest of the initial weight; output
    of `TensorNorms` for each step.

    scales: largest magnitudes at the end of rank 0's 8-bit maps, by the names of their weights
    (train.fp8=delayed).
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    initial: dict[str, str] = field(default_factory=dict)
    norms: list[dict[str, float]] = field(default_factory=list)
    scales: dict[str, list[float]] = field(default_factory=dict)


def asked(request: pytest.FixtureRequest, test: str, parameter: str) -> list[Any]:
    """Return the parameter values of one test's cases in this session: a module fixture computes
    only these.
    """
    found: list[pytest.Function] = [
        one
        for one in request.session.items
        if one.path == request.path and isinstance(one, pytest.Function)
    ]
    return [
        one.callspec.params[parameter]
        for one in found
        if one.originalname == test and hasattr(one, "callspec")
    ]


def quick_or_slow(names: Iterable[str], quick: Container[str]) -> list[Any]:
    """Return the cases of a parameter, marked slow unless they are among the quick ones."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


def run_all(jobs: Iterable[tuple[int, list[Job]]], folder: Path) -> dict[str, Done]:
    """Run pairs of (number of ranks, jobs), one after another, and return name -> result."""
    found: dict[str, Done] = {}
    for number, (world, some) in enumerate(jobs):
        if some:
            output = folder / f"ranks{world}.{number}"
            cache = str(folder / "cache")
            found |= answer(world, run_jobs, some, cache, output=output, patience=1400)
    return found


def run_jobs(jobs: list[Job], cache: str) -> dict[str, Done]:
    """Run jobs on every rank and return name -> result. Process groups of one layout are destroyed
    before the next ones are created.
    """
    platform.import_megatron()
    platform.initialize_distributed()
    answers = {}
    for job in jobs:
        began, clock = time.process_time(), time.monotonic()
        answers[job.name] = _run(job, Path(cache))
        print(
            f"{job.name}: {time.monotonic() - clock:.2f} s, {time.process_time() - began:.2f} of"
            " the CPU",
            flush=True,
        )
    torch.distributed.destroy_process_group()
    return answers


def _run(job: Job, cache: Path) -> Done:
    from pretrain.checkpoint.folder import Progress, find
    from pretrain.checkpoint.manager import Checkpoints
    from pretrain.data.datasets import batches, build_datasets
    from pretrain.data.facts import check_contents
    from pretrain.data.store_reader import StoreReader
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
    from pretrain.report.tensor_norms import TensorNorms
    from pretrain.run import make_engine
    from pretrain.run_directory import run_directory
    from pretrain.schedule import Schedule

    prepared = prepare(load_run(DEMO, job.overrides), torch.distributed.get_world_size())
    config, facts = prepared.config, prepared.facts
    assert facts is not None and config.model.vocab_size is not None
    initialize_model_parallel(config)
    schedule, done = Schedule.of(config), Done()
    engine = make_engine(config, schedule, draw=job.draw or job.load is None)
    if config.engine.name == "megatron":  # not for DeepSpeed: ZeRO-3 ranks hold slices
        done.initial = weights_digest(engine)
    checkpoints = Checkpoints(run_directory(config) / "checkpoints", config, lambda text: None)
    progress = Progress(0, 0, schedule.total_samples)
    if job.load:
        found = find(Path(job.load))
        checkpoints.load(engine, found)
        progress = found.progress
    contents = check_contents(facts)
    data = build_datasets(
        config,
        vocab_size=config.model.vocab_size,
        eod_id=facts.eod_id or 0,
        contents=contents,
        train_samples=progress.order_samples,
        default_cache=cache,
        say=lambda text: None,
        reader=StoreReader(config),
    )
    stream = batches(
        data.train,
        progress.consumed_samples,
        config.train.micro_batch_size,
        platform.device(),
        ends=data.ends,
    )
    norms = TensorNorms(engine, int(job.norms))
    for number in range(job.steps + 1):
        if number == job.save_after:
            checkpoints.save(engine, progress, contents.keys)
        if number == job.steps:
            break
        consumed = progress.consumed_samples + schedule.batch_samples
        with norms(number) as told:
            result = engine.train_step(stream, consumed)
        done.norms.append(told)
        assert not result.skipped
        progress = Progress(progress.step + 1, consumed, progress.order_samples)
        done.steps.append((result.loss, result.grad_norm))
    if engine.scales is not None:
        done.scales = dict(
            zip(engine.scales.names, engine.scales.history.amax(0).tolist(), strict=True)
        )
    checkpoints.close()
    engine.close()
    destroy_model_parallel()
    return done


@contextlib.contextmanager
def engine_of(overrides: list[str]) -> Iterator[Any]:
    """Yield a new engine in this process with its process groups."""
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
    from pretrain.run import make_engine
    from pretrain.schedule import Schedule

    platform.initialize_distributed()
    config = prepare(load_run(DEMO, overrides), torch.distributed.get_world_size()).config
    initialize_model_parallel(config)
    engine = make_engine(config, Schedule.of(config), print)
    try:
        yield engine
    finally:
        engine.close()
        destroy_model_parallel()
        torch.distributed.destroy_process_group()
        gc.collect()


def micro_batches(length: int, weight: float = 1.0) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the same two random sequences of the small tokenizer repeatedly, with one loss
    weight.
    """
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, 512, (2, length + 1), generator=generator)
        yield {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.full((2, length), weight),
            "position_ids": torch.arange(length).repeat(2, 1),
        }


def weights_digest(engine: Any) -> dict[str, str]:
    """Return global name -> hash of the full weight, gathered over the ranks from each rank's
    slices.
    """
    from megatron.core import parallel_state

    from fem_megatron.megatron.model import global_name

    # As arrays: pickling them takes a tenth of the time of tensors.
    mine: dict[str, tuple[int, int, Any]] = {}
    for model in engine.models:
        for name, weight in model.named_parameters():
            split = getattr(weight, "tensor_model_parallel", False)
            rank = parallel_state.get_tensor_model_parallel_rank() if split else 0
            mine[global_name(model, name)] = (
                rank,
                getattr(weight, "partition_dim", 0),
                weight.detach().float().numpy(),
            )
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    slices: dict[str, dict[int, tuple[int, Any]]] = {}
    for rank_slices in everyone:
        for name, (rank, dim, weight) in rank_slices.items():
            slices.setdefault(name, {})[rank] = (dim, weight)
    return {name: _digest(parts) for name, parts in slices.items()}


def _digest(parts: dict[int, tuple[int, Any]]) -> str:
    dim = parts[min(parts)][0]
    whole = numpy.concatenate([parts[rank][1] for rank in sorted(parts)], dim)
    return hashlib.sha256(whole.tobytes()).hexdigest()
