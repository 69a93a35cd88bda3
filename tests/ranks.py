"""Start ranks as real processes, forked from one server that has imported torch and Megatron-core.

Every test with several ranks uses this module: a fork costs milliseconds, whereas an
interpreter that imports torch, Megatron-core and the training code costs ten seconds of a core.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fem_common.ports import server_port

# Seconds to wait for any event: a hundred times the usual duration, because machines are shared. A
# correct program never waits that long.
PATIENCE = 300.0
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["pretrain.__main__", "pretrain.run", "tests.ranks", "tests.preloaded"]
)


@contextlib.contextmanager
def forked(
    world: int, function: Callable[..., Any], *given: Any, output: Path
) -> Iterator[list[BaseProcess]]:
    """Run ``function(*given)`` on ``world`` processes with torchrun's variables; kill them at the
    end.

    Each rank writes its output to ``OUTPUT.<rank>``, and its pickled result to
    ``OUTPUT.<rank>.answer``. The function, which must be at module level, and its arguments are
    pickled.
    """
    port, ranks = server_port(), list[BaseProcess]()
    for rank in range(world):
        environment = dict(
            zip(VARIABLES, map(str, (rank, rank, world, world, "127.0.0.1", port)), strict=True)
        )
        ranks.append(
            _context.Process(target=_rank, args=(environment, f"{output}.{rank}", function, given))
        )
    try:
        for process in ranks:
            process.start()
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def answer(
    world: int, function: Callable[..., Any], *given: Any, output: Path, patience: float = PATIENCE
) -> Any:
    """Return the result of ``function(*given)`` on rank 0, after all ranks have succeeded."""
    with forked(world, function, *given, output=output) as ranks:
        end = time.monotonic() + patience
        while any(rank.exitcode is None for rank in ranks) and not any(
            rank.exitcode for rank in ranks
        ):
            assert time.monotonic() < end, "waited for too long"
            multiprocessing.connection.wait(
                [rank.sentinel for rank in ranks if rank.exitcode is None], 1.0
            )
        printed = "\n".join(Path(f"{output}.{rank}").read_text()[-3000:] for rank in range(world))
        assert [rank.exitcode for rank in ranks] == [0] * world, printed
    return pickle.loads(Path(f"{output}.0.answer").read_bytes())


@contextlib.contextmanager
def started(
    world: int,
    arguments: list[str],
    output: Path,
    naps: dict[int, float] | None = None,
    held: tuple[int, Path] | None = None,
) -> Iterator[list[BaseProcess]]:
    """Run ``python -m pretrain ARGUMENTS`` on ``world`` ranks.

    naps: rank -> seconds by which its data is delayed before every micro-batch. held: a step, and a
    file without which the next step has no data, so that an event within a run is not a race.
    """
    with forked(world, _pretrain, arguments, naps or {}, held, output=output) as ranks:
        yield ranks


def ended(world: int, arguments: list[str], output: Path) -> tuple[list[int | None], list[str]]:
    """Return (exit codes, output) of all ranks of a run."""
    with started(world, arguments, output) as ranks:
        for rank in ranks:
            rank.join(PATIENCE)
        return [rank.exitcode for rank in ranks], [
            Path(f"{output}.{rank}").read_text() for rank in range(world)
        ]


def finished(world: int, arguments: list[str], output: Path) -> str:
    """Run ``pretrain`` on all ranks, require success and return the output of rank 0."""
    codes, printed = ended(world, arguments, output)
    assert codes == [0] * world, "\n".join(printed)
    return printed[0]


def _rank(
    environment: dict[str, str], output: str, function: Callable[..., Any], given: tuple[Any, ...]
) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment, OMP_NUM_THREADS="1")
    import torch

    # Exclude the imported objects from garbage collection: collections then visit only the test's
    # objects.
    gc.freeze()
    torch.set_num_threads(1)
    Path(f"{output}.answer").write_bytes(pickle.dumps(function(*given)))


def _pretrain(
    arguments: list[str], naps: dict[int, float], held: tuple[int, Path] | None = None
) -> None:
    from pretrain import run
    from pretrain.__main__ import main
    from pretrain.data.staging import Staged
    from pretrain.trainer import Trainer

    nap = naps.get(int(os.environ["RANK"]), 0.0)
    step, file = held or (math.inf, Path())

    class Slow(Trainer):
        """Trainer with delayed data."""

        def _stream(self, dataset: Any, first_sample: int) -> Staged:
            trainer = self

            class Late(Staged):
                def __next__(self) -> Any:
                    time.sleep(nap)
                    while (
                        dataset is trainer.data.train
                        and trainer.progress.step >= step
                        and not file.exists()
                    ):
                        time.sleep(0.01)
                    return super().__next__()

            return Late(super()._stream(dataset, first_sample))

    if nap or held:
        vars(run)["Trainer"] = Slow
    raise SystemExit(main(arguments))


def wait_until(holds: Callable[[], bool], ranks: list[BaseProcess], nap: float = 0.02) -> None:
    """Wait until ``holds`` is true while all ranks live; fail after `PATIENCE`."""
    deadline = time.monotonic() + PATIENCE
    while True:
        alive = all(rank.is_alive() for rank in ranks)
        if holds():  # checked once more after a rank has ended
            return
        assert alive, "a rank has ended"
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(nap)


def wait_for_lock(run_dir: Path) -> None:
    """Wait until a run directory is unlocked: children of a killed rank end a moment after it."""
    deadline = time.monotonic() + PATIENCE
    with (run_dir / "lock").open("w") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            assert time.monotonic() < deadline, "somebody holds the lock"
            time.sleep(0.05)


def send(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal to a rank."""
    assert process.pid is not None
    os.kill(process.pid, number)


def records(run_dir: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the complete lines of a JSON lines file in a run directory."""
    path = run_dir / name
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Return step -> (loss, gradient norm) from the metrics file of a run directory."""
    return {
        line["step"]: (line["loss"], line["grad_norm"])
        for line in records(run_dir)
        if "loss" in line
    }
