"""Two ranks that build small models at several layouts one after another, save each, and write down the engine's own logits.

Forked from a server that has imported everything once. Weights are off their start, so that no part of a model is near the identity, by as
much as keeps a layer's gain below one, as in training: else bf16's rounding would grow from layer to layer.
"""

from __future__ import annotations

import gc
import hashlib
import json
import multiprocessing
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.pretrain.data_folder import write_folder
from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[3]
LAYOUTS = {
    "DP2": [],
    "TP2": ["parallel.tensor_model_parallel_size=2"],
    "TP2+SP": ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"],
    "PP2": ["parallel.pipeline_model_parallel_size=2"],
}
VOCAB, LENGTH = 50, 16


@dataclass(frozen=True)
class Job:
    """One model at one layout. model: overrides of the model section."""

    mixer: str
    layout: str
    precision: str
    model: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its run directory."""
        return f"{self.mixer}-{self.layout}-{self.precision}"


def run_jobs(jobs: list[Job], folder: Path) -> None:
    """After it ``folder/NAME`` holds each job's checkpoint and ``folder/NAME.pt`` the logits [2, LENGTH, VOCAB] of ``prompt()``."""
    write_folder(folder / "data", vocab_size=VOCAB)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain.__main__", "pretrain.run"])
    listed = [{**vars(job), "name": job.name, "port": free_port()} for job in jobs]
    ranks = [context.Process(target=_rank, args=(rank, json.dumps(listed), str(folder))) for rank in range(2)]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120 + 10 * len(jobs))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    shutil.rmtree(folder / "data" / "tokenizer")  # the folder's own is none that transformers reads
    assert codes == [0, 0], "".join((folder / f"rank{rank}.txt").read_text()[-3000:] for rank in range(2))


def prompt() -> torch.Tensor:
    """Two rows of ids."""
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def _rank(rank: int, jobs: str, folder: str) -> None:
    output = os.open(f"{folder}/rank{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1}
    os.environ.update({key: str(value) for key, value in told.items()})
    torch.set_num_threads(1)
    from fem_megatron.megatron import platform

    platform.import_megatron()
    for job in json.loads(jobs):
        os.environ["MASTER_PORT"] = str(job["port"])
        platform.initialize_distributed()
        _run(job, Path(folder))


def _run(job: dict[str, Any], folder: Path) -> None:
    from megatron.core import parallel_state

    from pretrain.checkpoint.reader import Progress
    from pretrain.checkpoint.store import Checkpoints
    from pretrain.config import load_run
    from pretrain.engines.building import initialize_model_parallel
    from pretrain.engines.megatron import MegatronEngine
    from pretrain.run_directory import run_directory
    from pretrain.schedule import Schedule
    from pretrain.validate import prepare

    settings = [
        f"run_dir={folder / job['name']}",
        *(f"data.{split}.0.prefix={folder / 'data' / split}" for split in ("train", "valid")),
        "data.test=[]",
        f"data.seq_length={LENGTH}",
        "train.steps=2",
        "train.micro_batch_size=2",
        "train.global_batch_size=4",
        "optimizer.warmup_steps=0",
        f"train.precision={job['precision']}",
        f"model.mixer={job['mixer']}",
        *("model.hidden_size=32", "model.num_layers=2", "model.num_attention_heads=4", "model.ffn_hidden_size=48"),
        "model.make_vocab_size_divisible_by=32",
        *job["model"],
        *LAYOUTS[job["layout"]],
    ]
    config = prepare(load_run(ROOT / "configs/run/demo.yaml", settings), 2).config
    initialize_model_parallel(config)
    engine = MegatronEngine(config, Schedule.of(config))
    _off_the_start(engine)
    checkpoints = Checkpoints(run_directory(config) / "checkpoints", config, lambda text: None)
    checkpoints.save(engine, Progress(2, 8, 8), "")
    checkpoints.close()
    logits = _logits(engine)
    if logits is not None:
        torch.save(logits[..., :VOCAB].float(), folder / f"{job['name']}.pt")
    torch.distributed.barrier()
    engine.close()
    del engine
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    gc.collect()  # or the groups' threads of all jobs would be there at once
    print(job["name"], len(os.listdir("/proc/self/task")), flush=True)


@torch.no_grad()
def _off_the_start(engine: Any) -> None:
    """Every weight its start plus 0.1 x noise, the same at every layout: a rank keeps its slice of the whole noise."""
    from megatron.core import parallel_state

    from fem_megatron.megatron.model import global_name

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for chunk in engine.models:
        for name, weight in chunk.named_parameters():
            seed = int.from_bytes(hashlib.sha256(global_name(chunk, name).encode()).digest()[:4], "little")
            split = getattr(weight, "tensor_model_parallel", False)
            shape = list(weight.shape)
            dim = weight.partition_dim if split else 0
            shape[dim] *= size if split else 1
            noise = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
            weight.add_(noise.chunk(size, dim)[rank] if split else noise)


@torch.no_grad()
def _logits(engine: Any) -> torch.Tensor | None:
    """The engine's logits of ``prompt()`` through its own schedule, whole; on the last stage's first rank, else None."""
    from megatron.core import parallel_state

    ids, kept = prompt(), []

    def step(batches: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        def keep(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            kept.append(value)
            return torch.zeros(()), torch.ones((), dtype=torch.int), {}

        return chunk(ids, torch.arange(LENGTH).expand_as(ids), None), keep

    for chunk in engine.chunks:
        chunk.eval()
    options = {"num_microbatches": 1, "seq_length": LENGTH, "micro_batch_size": 2, "forward_only": True}
    engine.forward_backward(forward_step_func=step, data_iterator=iter(()), model=engine.chunks, **options)
    if not kept:
        return None
    size = parallel_state.get_tensor_model_parallel_world_size()
    parts = [torch.empty_like(kept[0]) for _ in range(size)]
    torch.distributed.all_gather(parts, kept[0].contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    return torch.cat(parts, dim=-1) if first else None
