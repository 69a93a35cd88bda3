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
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch

from fem_megatron.megatron import platform, upstream
from pretrain.config import load_run
from pretrain.validate import Prepared, prepare
from tests.pretrain.conftest import DEMO
from tests.ranks import answer

if TYPE_CHECKING:
    from pretrain.data.datasets import Datasets

MUON = "optimizer.name=muon"
TP2 = ["parallel.tensor_model_parallel_size=2"]
PP2 = ["parallel.pipeline_model_parallel_size=2"]
SP = ["parallel.sequence_parallel=true"]
CP2 = ["parallel.context_parallel_size=2"]
OVERLAP = ["parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true"]
PLAIN = ["parallel.use_distributed_optimizer=false"]


# Steps before a start; steps after it until the first checkpoint; steps after it in total.
BEFORE, FIRST, STEPS = 4, 2, 4
Case = tuple[str, int, list[str]]
# Four families of mixers in one model.
FAMILIES = [
    "model.pattern=[fem_softmax, hyperset, mamba2, cem]",
    "model.num_layers=4",
    "model.mlp=swiglu",
    "model.tie_embeddings=true",
]


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


def values_of_cases(request: pytest.FixtureRequest, test: str, parameter: str) -> list[Any]:
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


def datasets_of(prepared: Prepared, samples: int, cache: Path, **given: Any) -> Datasets:
    """Return the datasets of a prepared run, with an order for ``samples`` samples."""
    from pretrain.data.datasets import build_datasets
    from pretrain.data.facts import check_contents
    from pretrain.data.store_reader import StoreReader

    config, facts = prepared.config, prepared.facts
    assert facts is not None and config.model.vocab_size is not None
    settings: dict[str, Any] = {
        "vocab_size": config.model.vocab_size,
        "eod_id": facts.eod_id or 0,
        "contents": check_contents(facts),
        "reader": StoreReader(config),
        "log": lambda text: None,
    }
    return build_datasets(
        config, train_samples=samples, default_cache=cache, **{**settings, **given}
    )


def run_all(jobs: Iterable[tuple[int, list[Job]]], folder: Path) -> dict[str, Done]:
    """Run pairs of (number of ranks, jobs), one after another, and return name -> result."""
    found: dict[str, Done] = {}
    for number, (world, some) in enumerate(jobs):
        if some:
            output = folder / f"ranks{world}.{number}"
            cache = str(folder / "cache")
            found |= answer(world, run_jobs, some, cache, output=output, patience=1400)
    return found


def from_starts(
    base: list[str],
    folder: Path,
    starts: dict[str, list[str]],
    cases: dict[str, Case],
    resumed: Iterable[str],
    moves: dict[str, Case],
) -> dict[str, Done]:
    """Run cases that begin at checkpoints of runs in one process, and return name -> result.

    starts: name of such a run -> its settings. cases: name -> (start, number of ranks, settings).
    resumed: the cases that are resumed from their first checkpoint, with the name "CASE, resumed".
    moves: name -> (case from whose first checkpoint the run begins, number of ranks, settings).
    """

    def job(
        name: str, settings: list[str], steps: int, load: str = "", save_after: int | None = None
    ) -> Job:
        overrides = [*base, *settings, f"run_dir={folder / name}"]
        return Job(name, overrides, steps, save_after, str(folder / load) if load else None)

    later = {f"{name}, resumed": (name, *cases[name][1:]) for name in resumed} | moves
    saved = {case for case, *_ in later.values()}
    first = [job(name, settings, BEFORE + STEPS, "", BEFORE) for name, settings in starts.items()]
    jobs: dict[int, list[Job]] = {4: [], 2: [], 1: []}  # in this order: no move is to more ranks
    for name, (start, world, settings) in cases.items():
        save_after = FIRST if name in saved else None
        jobs[world].append(job(name, settings, STEPS, start, save_after))
    for name, (case, world, settings) in later.items():
        jobs[world].append(job(name, settings, STEPS - FIRST, case))
    return run_all([(1, first), *jobs.items()], folder)


def run_jobs(jobs: list[Job], cache: str) -> dict[str, Done]:
    """Run jobs on every rank and return name -> result. Process groups of one layout are destroyed
    before the next ones are created.
    """
    upstream.import_megatron()
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
    from pretrain.data.datasets import batches
    from pretrain.data.facts import check_contents
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel
    from pretrain.report.tensor_norms import TensorNorms
    from pretrain.run import make_engine
    from pretrain.run_directory import run_directory
    from pretrain.schedule import Schedule

    prepared = prepare(load_run(DEMO, job.overrides), torch.distributed.get_world_size())
    config = prepared.config
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
    assert prepared.facts is not None
    contents = check_contents(prepared.facts)
    data = datasets_of(prepared, progress.order_samples, cache, contents=contents)
    stream = batches(
        data.train,
        progress.consumed_samples,
        config.train.micro_batch_size,
        platform.device(),
        ends=data.ends,
        mtp_depth=config.model.mtp_depth,
    )
    norms = TensorNorms(engine, int(job.norms))
    for number in range(job.steps + 1):
        if number == job.save_after:
            checkpoints.save(engine, progress, contents.keys)
        if number == job.steps:
            break
        consumed = progress.consumed_samples + schedule.batch_samples
        with norms(number) as report:
            result = engine.train_step(stream, consumed)
        done.norms.append(report)
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


def micro_batches(
    length: int, weight: float = 1.0, depth: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the same two random sequences of the small tokenizer repeatedly, with one loss weight.

    depth: number of modules of multi-token prediction.
    """
    from pretrain.data.datasets import look_ahead

    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, 512, (2, length + 1), generator=generator)
        batch = {
            "tokens": tokens[:, :-1],
            "labels": tokens[:, 1:],
            "loss_mask": torch.full((2, length), weight),
            "position_ids": torch.arange(length).repeat(2, 1),
        }
        yield batch | (look_ahead(batch, depth, None) if depth else {})


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
    full = numpy.concatenate([parts[rank][1] for rank in sorted(parts)], dim)
    return hashlib.sha256(full.tobytes()).hexdigest()
