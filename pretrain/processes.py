"""Ranks of one machine as processes that are forked after one import of the training code.

``python -m pretrain --processes N`` uses this module. The import takes nine seconds of a core,
which under torchrun every rank spends.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from fem_common.ports import server_port
from fem_common.signals import PDEATHSIG, prctl, taken
from pretrain.signals import STOP

GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL after a failure of another rank, as under torchrun
forked = False  # True in a rank that `run_ranks` started
PASSED_ON = (*STOP, signal.SIGUSR2)
ON_DEMAND = (  # modules that a rank imports after its start
    "megatron.core.datasets.helpers",
    "megatron.core.dist_checkpointing.strategies.torch",
    "pretrain.engines.megatron",
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization",
)


def import_trainer(more: Iterable[str] = ()) -> None:
    """Import what a rank imports, and the modules ``more``, so that forked processes share them.

    If torch is built for CUDA, import only torch: Megatron-core asks CUDA for devices, and CUDA
    cannot be used in a process that is forked after that.
    """
    from fem_megatron.megatron import platform, upstream

    if platform.built_for_cuda():
        return
    upstream.import_megatron()
    upstream.prepare()
    for name in ("pretrain.run", *ON_DEMAND, *more):
        import_module(name)
    gc.freeze()  # a collection in a forked process then neither visits nor copies these objects


def check_one_thread() -> None:
    """Raise RuntimeError if this process has several threads: a fork copies only one of them."""
    tasks = Path("/proc/self/task")
    if tasks.exists() and (count := len(os.listdir(tasks))) > 1:
        raise RuntimeError(f"this process has {count} threads, so it must not fork ranks")


def run_ranks(count: int, rank: Callable[[], int]) -> int:
    """Fork ``count`` ranks that call ``rank``, and return 0 or the exit code of the first failure.

    A rank has the variables that torchrun sets, and a session of its own. Stop signals and SIGUSR2
    are passed on to every rank. After a failure the other ranks receive SIGTERM, and SIGKILL after
    `GRACE_SECONDS`. Linux kills the ranks when this process is killed.

    Raises RuntimeError if this process has several threads.
    """
    check_one_thread()
    context, port = multiprocessing.get_context("fork"), server_port()
    ranks = [
        context.Process(target=_rank, args=(number, count, port, os.getpid(), rank))
        for number in range(count)
    ]

    def pass_on(number: int, _: FrameType | None) -> None:
        _signal(ranks, number)

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until the ranks can receive them
        for process in ranks:
            process.start()
        with taken(PASSED_ON, pass_on):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
            return _wait(ranks)
    finally:
        _signal(ranks, signal.SIGKILL)


def _wait(ranks: Sequence[BaseProcess]) -> int:
    code, end = 0, float("inf")
    while running := [process for process in ranks if process.exitcode is None]:
        wait([process.sentinel for process in running], timeout=1.0)
        bad = next((process.exitcode for process in ranks if process.exitcode), 0)
        if bad and not code:
            code, end = bad if bad > 0 else 128 - bad, time.monotonic() + GRACE_SECONDS
            _signal(ranks, signal.SIGTERM)
        elif time.monotonic() > end:
            _signal(ranks, signal.SIGKILL)
    return code


def _signal(ranks: Sequence[BaseProcess], number: int) -> None:
    for process in ranks:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)


def _rank(number: int, count: int, port: int, parent: int, rank: Callable[[], int]) -> None:
    """Call ``rank`` in a forked process with the launcher's variables, and exit with its result."""
    global forked
    forked = True
    prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent ended before prctl took effect
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.environ.update(
        RANK=str(number),
        LOCAL_RANK=str(number),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.exit(rank())
