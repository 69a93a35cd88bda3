"""Ranks of a run as real processes with output files of their own, forked from a server that has imported everything once."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

PATIENCE = 120.0


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextlib.contextmanager
def started(world: int, arguments: list[str], output: Path, naps: dict[int, float] | None = None) -> Iterator[list[BaseProcess]]:
    """``python -m pretrain ARGUMENTS`` on ``world`` ranks, which write to ``OUTPUT.<rank>``; killed at the end.

    ``naps``: rank -> seconds that its data takes before every micro-batch.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pretrain.__main__", "pretrain.run"])
    port = free_port()
    ranks: list[BaseProcess] = []
    for rank in range(world):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        told = {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", **{key: str(value) for key, value in environment.items()}}
        ranks.append(context.Process(target=_rank, args=(arguments, told, f"{output}.{rank}", (naps or {}).get(rank, 0.0))))
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def finished(world: int, arguments: list[str], output: Path) -> str:
    """Such ranks until they have all ended with 0; what rank 0 wrote."""
    with started(world, arguments, output) as ranks:
        for rank in ranks:
            rank.join(PATIENCE)
        told = Path(f"{output}.0").read_text()
        assert [rank.exitcode for rank in ranks] == [0] * world, told
    return told


def _rank(arguments: list[str], environment: dict[str, str], output: str, nap: float) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment)
    import torch

    from pretrain import run
    from pretrain.__main__ import main
    from pretrain.trainer import Trainer

    torch.set_num_threads(1)

    class Slow(Trainer):
        """Waits for its data."""

        def _stream(self, dataset: Any, first_sample: int) -> Iterator[Any]:
            for batch in super()._stream(dataset, first_sample):
                time.sleep(nap)
                yield batch

    if nap:
        vars(run)["Trainer"] = Slow
    raise SystemExit(main(arguments))


def wait_until(holds: Callable[[], bool], ranks: list[BaseProcess], nap: float = 0.02) -> None:
    """Until ``holds`` while all ranks live; fails after two minutes."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "waited for too long"
        assert all(rank.is_alive() for rank in ranks), "a rank has ended"
        time.sleep(nap)


def send(process: BaseProcess, number: signal.Signals) -> None:
    """A signal to a rank."""
    assert process.pid is not None
    os.kill(process.pid, number)


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The whole lines of a JSON lines file in a run directory."""
    path = run_dir / name
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Step -> (loss, grad norm)."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in records(run_dir) if "loss" in line}
