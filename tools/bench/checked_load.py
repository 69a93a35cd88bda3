"""``python -m tools.bench.checked_load``: measure the cost of checksums when loading a checkpoint.

The cost is the time that comparing the checksums adds to the load.

The benchmark writes the weights of a configuration (zeros, fp32) as a run's first checkpoint. One
process then loads the checkpoint with the run's reader, alternately with and without the
comparison, and the fastest load of each kind counts. A thread compares each part of the checkpoint
while the next part is read, so the cost is small if a core is free for the thread. The table also
shows the CPU time of that thread.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from fem_common.cli import run
from fem_common.text import gib, markdown_table
from fem_megatron.megatron import platform
from pretrain.config import load_run
from pretrain.plan.run_plan import parameter_shapes
from tools.bench import runner

PROGRAM = "tools.bench.checked_load"
RUN = "configs/run/fem_sm_1.3b_100bt.yaml"


def seconds(step: Path, *, compared: bool, cached: bool) -> tuple[float, float]:
    """Return (wall seconds to read all tensors of a checkpoint, CPU seconds of the comparison).

    step: folder of the checkpoint.
    compared: compare checksums; otherwise the second number is almost 0.
    cached: read the files from the page cache; otherwise from the disk.

    Tensors of the same shape share one target tensor, so that only one tensor of each shape is in
    memory.
    """
    from pretrain.checkpoint.reader import CheckedReader

    computed = 0.0

    class Timed(CheckedReader):
        @staticmethod
        def compare(*part: Any) -> None:
            nonlocal computed
            began = time.thread_time()
            if compared:
                CheckedReader.compare(*part)
            computed += time.thread_time() - began

    reader = Timed(step)
    stored = {
        name: one
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    targets = {one.size: torch.ones(one.size) for one in stored.values()}
    for file in step.iterdir():
        with file.open("rb") as content:
            os.posix_fadvise(
                content.fileno(), 0, 0, os.POSIX_FADV_WILLNEED if cached else os.POSIX_FADV_DONTNEED
            )
    began = time.perf_counter()
    try:
        load(
            {name: targets[one.size] for name, one in stored.items()},
            storage_reader=reader,
            no_dist=True,
        )
    except CheckpointException as error:  # torch wraps every exception in it, even of a signal
        raise next(failure for failure, _ in error.failures.values()) from None
    return time.perf_counter() - began, computed


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, run the benchmark and return the exit code."""
    parser = runner.command_line(
        PROGRAM, "Measure how much comparing checksums adds to the time of loading a checkpoint."
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help=f"overrides of {RUN}"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="folder for the temporary checkpoint (default: the system's temporary folder)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="loads of each kind (default: 5)")
    options = parser.parse_args(arguments)
    return run(PROGRAM, lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Write the checkpoint, time its loads from the page cache and from the disk, and print both.

    Return 0.

    Raises ConfigError or StorageError.
    """
    config, rows = load_run(RUN, options.overrides), []
    platform.import_megatron()  # before anything imports Megatron-core
    platform.prepare()
    from pretrain.checkpoint.folder import Progress
    from pretrain.checkpoint.writer import save_weights

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        weights = {
            name: torch.zeros(shape) for name, shape in parameter_shapes(config.model).items()
        }
        step = save_weights(Path(folder), weights.items(), config, Progress(0, 0, 0), "")
        size = sum(weight.nbytes for weight in weights.values())
        print(f"{size / 4e9:.2f}B parameters, {gib(size)}\n")
        heads = ("from", "load, s", "longer by comparing, s", "share", "comparing, s of a core")
        print(markdown_table(heads, []))
        for place, cached in (("disk", False), ("memory", True)):
            pairs = [
                [seconds(step, compared=compared, cached=cached) for compared in (True, False)]
                for _ in range(options.rounds)
            ]
            (whole, alone), (bare, _) = (min(side) for side in zip(*pairs, strict=True))
            longer = whole - bare
            rows.append(
                {
                    "from": place,
                    "bytes": size,
                    "seconds": whole,
                    "longer": longer,
                    "comparing": alone,
                }
            )
            print(
                f"| {place} | {whole:.2f} | {longer:.2f} | {longer / whole:.1%} | {alone:.2f} |",
                flush=True,
            )
    runner.write_json(
        options.json, {"suite": "checked_load", "machine": runner.facts(), "rows": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
