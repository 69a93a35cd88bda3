"""Program of one rank of the engine benchmark, started by torchrun.

It builds the engine, trains, and writes its answer into the job's folder after each step.

On a CPU, memory and time are measured one after the other, with different settings of glibc's
malloc. For memory, malloc returns freed blocks to the system, so that the peak is the memory in use
and not what malloc retains. For time, malloc has the settings that it reaches by itself, which are
faster. On CUDA, CUDA's allocator reports the peak.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fem_common.errors import ConfigError
from fem_common.files import write_whole
from fem_megatron.megatron import platform
from pretrain.config import RunConfig
from tools.bench.engines.variants import SETTLING, Answer, Job, configuration

if TYPE_CHECKING:
    from pretrain.engines import Engine

BATCHES = 4  # different micro-batches, used in turn
LONGER = (
    60  # seconds after the job's limit, at which it gets SIGTERM, until the process ends itself
)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h


def measure(job: Job, answer: Answer, write: Callable[[], None]) -> None:
    """Build the engine of ``job``, train, and write the measurements into ``answer``.

    ``write()`` is called after the engine is built and after every step. The keys of ``answer``
    are:

    building: seconds for building the engine.
    untimed: seconds of each step before the timed steps.
    seconds: seconds of each timed step.
    peak_bytes: device memory after the warm-up (CUDA's allocator, or on a CPU the growth of the
        resident set).
    host_bytes: growth of the host's memory, on CUDA only.

    Raises:
        ConfigError: DeepSpeed's ops cannot be compiled or loaded, or DeepSpeed refuses its
        settings.
        RuntimeError: a step was skipped.
    """
    from pretrain.engines.building import initialize_distributed, initialize_model_parallel
    from pretrain.run import make_engine
    from pretrain.schedule import Schedule

    config = configuration(job)
    schedule, cuda = Schedule.of(config), platform.has_cuda()
    initialize_distributed(config)
    initialize_model_parallel(config)
    _import_engine(config)
    gc.collect()
    _allocate(mapped_from=2**20, kept=2**17)
    before = resident_bytes()
    platform.reset_peak_memory()
    began = time.perf_counter()
    engine = make_engine(config, schedule)
    answer |= {"rank": torch.distributed.get_rank(), "threads": torch.get_num_threads()}
    answer |= {
        "building": time.perf_counter() - began,
        "before_bytes": before,
        "untimed": [],
        "seconds": [],
    }
    write()
    stream = random_batches(config)

    def take(steps: int, kind: str) -> None:
        for seconds, loss in take_steps(engine, stream, steps):
            answer[kind].append(seconds)
            answer["loss"] = loss
            write()

    take(job.warmup, "untimed")
    peak, grown = platform.peak_memory_bytes(), platform.peak_resident_bytes() - before
    answer |= {"peak_bytes": peak if cuda else grown, "host_bytes": grown if cuda else None}
    _allocate(mapped_from=2**25, kept=2**26)
    take(SETTLING, "untimed")
    take(job.steps, "seconds")


def take_steps(
    engine: Engine, stream: Iterator[dict[str, torch.Tensor]], steps: int
) -> Iterator[tuple[float, float]]:
    """Perform ``steps`` steps and yield (seconds, loss) of each. All ranks begin a step together.

    Raises RuntimeError if a step was skipped.
    """
    for _ in range(steps):
        torch.distributed.barrier()
        platform.synchronize()
        began = time.perf_counter()
        result = engine.train_step(stream, 1)
        platform.synchronize()
        seconds = time.perf_counter() - began
        if result.skipped:
            raise RuntimeError(
                f"a step was skipped: loss {result.loss}, gradient norm {result.grad_norm}"
            )
        yield seconds, result.loss


def random_batches(config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Return an endless iterator of random micro-batches, different on each data-parallel rank.

    It repeats BATCHES micro-batches, which are all generated before the first is returned.
    """
    from megatron.core import parallel_state

    rng = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    assert config.model.vocab_size is not None
    shape, device = (config.train.micro_batch_size, config.data.seq_length), platform.device()
    made = []
    for _ in range(BATCHES):
        tokens = torch.randint(config.model.vocab_size, (shape[0], shape[1] + 1), generator=rng).to(
            device
        )
        positions = torch.arange(shape[1], device=device).expand(shape)
        mask = torch.ones(shape, device=device)
        made.append(
            {
                "tokens": tokens[:, :-1],
                "labels": tokens[:, 1:],
                "loss_mask": mask,
                "position_ids": positions,
            }
        )
    return itertools.cycle(made)


def resident_bytes() -> int:
    """Return the bytes of memory that the process uses, or the peak if /proc does not exist."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return platform.peak_resident_bytes()
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _allocate(*, mapped_from: int, kept: int) -> None:
    """Set the thresholds of glibc's malloc; no effect on other systems.

    mapped_from: blocks of this many bytes or more are returned to the system when they are freed.
    kept: free bytes at the top of the heap that are not returned to the system.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mapped_from)
        mallopt(M_TRIM_THRESHOLD, kept)


def _import_engine(config: RunConfig) -> None:
    """Import the engine's libraries, so that their memory is not counted as the engine's."""
    if config.engine.name == "deepspeed":
        from pretrain.engines.deepspeed_ops import check_ops, prepare_environment

        prepare_environment()
        obstacle = check_ops(config.engine.offload_optimizer)
        if obstacle is not None:
            raise ConfigError(obstacle)
        importlib.import_module("deepspeed")
    importlib.import_module(f"pretrain.engines.{config.engine.name}")


def main() -> int:
    """Measure the job in the folder given as argument, and return the exit code.

    The folder's answerRANK.json is updated after every step; after a failure its key ``gap``
    contains the reason.
    """
    folder = Path(sys.argv[1])
    job = Job.from_json(json.loads((folder / "job.json").read_text(encoding="utf-8")))
    # Raise an exception, so that a rank that is compiling a DeepSpeed op removes its lock file.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Write the stack of a rank that is ended to the log.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    signal.alarm(job.limit + LONGER)  # the parent process may no longer exist
    answer: Answer = {}

    def write() -> None:
        write_whole(folder / f"answer{os.environ['RANK']}.json", json.dumps(answer), synced=False)

    try:
        platform.import_megatron()
        measure(job, answer, write)
    except Exception as error:
        # Any error of an engine is recorded, so that the other variants are still measured.
        traceback.print_exc()
        text = (str(error).strip() or "no message").splitlines()[0]
        answer["gap"] = (
            text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
        )
        write()
        return 1
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
