"""``python -m tools.bench.diagnostics_cost``: measure the cost of the per-layer diagnostics.

The cost is the time that the diagnostics add to a training step, relative to the step without them.
Steps with and without diagnostics alternate in one process, on random tokens. Diagnostics run only
once per log.diagnostics_interval steps; the last column of the output is the cost divided by this
interval. The configuration selects the diagnostics: ``log.diagnostics=[tensors]`` measures the
norms of all tensors.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch

from fem_common.cli import run
from fem_common.text import markdown_table
from fem_megatron.catalogue import MIXERS
from fem_megatron.megatron import platform
from pretrain.config import RunConfig, load_run
from pretrain.validate import validate
from tools.bench import runner

PROGRAM = "tools.bench.diagnostics_cost"
RUN = "configs/run/demo.yaml"
VOCABULARY = 4096


def seconds(config: RunConfig, pairs: int) -> tuple[float, float]:
    """Return (median seconds of a step without diagnostics, median seconds that diagnostics add).

    pairs: number of steps of each kind.
    """
    from pretrain.engines.megatron import MegatronEngine
    from pretrain.report.loggers import Watch
    from pretrain.report.observer import Observer, together
    from pretrain.report.tensor_norms import TensorNorms
    from pretrain.schedule import Schedule
    from tools.bench.engines.rank import random_batches

    engine = MegatronEngine(config, Schedule.of(config))
    named: dict[str, Watch] = {
        "layers": Observer(engine.models, 1),
        "tensors": TensorNorms(engine, 1),
    }
    look = together(*(named[name] for name in config.log.diagnostics))
    stream = random_batches(config)
    plain, longer = [], []
    for number in range(pairs + 1):
        took = []
        for watching in (False, True):
            began = time.perf_counter()
            with look(1) if watching else nullcontext():
                # train_step waits for the device, since it returns the loss.
                engine.train_step(stream, config.train.global_batch_size)
            took.append(time.perf_counter() - began)
        if number:  # the first pair warms up
            plain.append(took[0])
            longer.append(took[1] - took[0])
    return statistics.median(plain), statistics.median(longer)


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments, run the benchmark and return the exit code."""
    parser = runner.command_line(
        PROGRAM, "Measure the cost of the per-layer diagnostics relative to a training step."
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help=f"overrides of {RUN}"
    )
    parser.add_argument(
        "--mixers", nargs="+", metavar="NAME", choices=list(MIXERS), help="default: all but fla.*"
    )
    parser.add_argument("--pairs", type=int, default=5, help="steps of each kind (default: 5)")
    options = parser.parse_args(arguments)
    return run(PROGRAM, lambda: measure(options))


def measure(options: argparse.Namespace) -> int:
    """Time the mixers one after the other, print a row for each, and return 0.

    Raises:
        ConfigError: the configuration is wrong.
    """
    names = options.mixers or [name for name in MIXERS if not name.startswith("fla.")]
    platform.import_megatron()  # before anything imports Megatron-core
    platform.initialize_distributed()
    from pretrain.engines.building import destroy_model_parallel, initialize_model_parallel

    rows: list[dict[str, Any]] = []
    try:
        for name in names:
            config = load_run(
                RUN, [f"model.mixer={name}", f"model.vocab_size={VOCABULARY}", *options.overrides]
            )
            validate(config, 1)
            interval = max(1, config.log.diagnostics_interval)
            if not rows:
                initialize_model_parallel(config)
                heads = ("mixer", "step, s", "diagnostics, s", "diagnostics / step")
                print(markdown_table([*heads, f"every {interval} steps"], []))
            step, look = seconds(config, options.pairs)
            share = look / step
            rows.append(
                {"mixer": name, "step_seconds": step, "look_seconds": look, "interval": interval}
            )
            print(
                f"| {name} | {step:.3f} | {look:.3f} | {share:.2f} | {share / interval:.2%} |",
                flush=True,
            )
    finally:
        destroy_model_parallel()
        torch.distributed.destroy_process_group()
    runner.write_json(
        options.json, {"suite": "diagnostics_cost", "machine": runner.facts(), "rows": rows}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
