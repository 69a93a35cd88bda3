"""Runs several layouts one after another in the same processes, all from one checkpoint: ``python parity_worker.py JOBS.json OUT.json``.

Each job is {name, overrides, steps, save?: folder, load?: folder}; the answer maps its name to the losses and grad norms of its steps and
to a digest of the fresh initialisation. Started by torchrun, or alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from fem_megatron.megatron import platform
from pretrain.config import load_run
from pretrain.validate import prepare

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    jobs = json.loads(Path(sys.argv[1]).read_text())
    platform.import_megatron()
    platform.initialize_distributed()
    answers = {job["name"]: run_job(job) for job in jobs}
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from pretrain.checkpoint.reader import Progress, find
    from pretrain.checkpoint.store import Checkpoints
    from pretrain.data.datasets import batches, build_datasets
    from pretrain.data.facts import check_contents
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel, make_engine
    from pretrain.run_directory import run_directory
    from pretrain.schedule import Schedule

    world = torch.distributed.get_world_size()
    prepared = prepare(load_run(ROOT / "configs/run/demo.yaml", job["overrides"]), world)
    config, facts = prepared.config, prepared.facts
    assert facts is not None and config.model.vocab_size is not None
    initialize_model_parallel(config)
    schedule = Schedule.of(config)
    engine = make_engine(config, schedule)
    initial = weights_digest(engine) if config.engine.name == "megatron" else {}  # ZeRO-3 holds slices
    checkpoints = Checkpoints(run_directory(config) / "checkpoints", config, lambda text: None)
    progress = Progress(0, 0, schedule.total_samples)
    if job.get("load"):
        found = find(Path(job["load"]))
        checkpoints.load(engine, found)
        progress = found.progress
    contents = check_contents(facts)
    data = build_datasets(
        config,
        vocab_size=config.model.vocab_size,
        eod_id=facts.eod_id or 0,
        contents=contents,
        train_samples=progress.order_samples,
        default_cache=Path(sys.argv[2]).parent / "cache",
        say=lambda text: None,
    )
    stream = batches(data.train, progress.consumed_samples, config.train.micro_batch_size, platform.device())
    steps = []
    for _ in range(job["steps"]):
        consumed = progress.consumed_samples + schedule.batch_samples
        result = engine.train_step(stream, consumed)
        assert not result.skipped
        progress = Progress(progress.step + 1, consumed, progress.order_samples)
        steps.append([result.loss, result.grad_norm])
    if job.get("save"):
        checkpoints.save(engine, progress, contents.key)
    checkpoints.close()
    engine.close()
    destroy_model_parallel()
    return {"steps": steps, "initial": initial}


def weights_digest(engine: Any) -> dict[str, str]:
    """Name in the whole model -> hash of the whole weight, gathered over the ranks from each rank's own slices."""
    from megatron.core import parallel_state

    from fem_megatron.megatron.model import global_name

    mine: dict[str, tuple[int, int, torch.Tensor]] = {}
    for model in engine.models:
        for name, weight in model.named_parameters():
            split = getattr(weight, "tensor_model_parallel", False)
            rank = parallel_state.get_tensor_model_parallel_rank() if split else 0
            mine[global_name(model, name)] = (rank, getattr(weight, "partition_dim", 0), weight.detach())
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    slices: dict[str, dict[int, tuple[int, torch.Tensor]]] = {}
    for rank_slices in everyone:
        for name, (rank, dim, weight) in rank_slices.items():
            slices.setdefault(name, {})[rank] = (dim, weight)
    return {name: digest(parts) for name, parts in slices.items()}


def digest(parts: dict[int, tuple[int, torch.Tensor]]) -> str:
    dim = parts[min(parts)][0]
    whole = torch.cat([parts[rank][1] for rank in sorted(parts)], dim)
    return hashlib.sha256(whole.contiguous().float().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
