"""Runs of the trainer on generated tokens, and the comparison of their losses.

Each run is a process of ``python -m pretrain``.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fem_megatron.megatron import platform
from tools.bench.runner import ROOT
from tools.bench.training import command, step_rows

RUN = "configs/run/demo.yaml"
VOCABULARY = 512
SMALL = [
    *(
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.num_attention_heads=2",
        "model.ffn_hidden_size=128",
    ),
    "model.tie_embeddings=true",
]
TINY = [  # overrides everything else in a dry run
    *(
        "model.num_layers=1",
        "model.hidden_size=32",
        "model.num_attention_heads=2",
        "model.ffn_hidden_size=64",
    ),
    *("data.seq_length=64", "train.micro_batch_size=1", "train.global_batch_size=2"),
]
ENDING = 10.0  # seconds that a run gets to stop after its limit
LAST_LINES = 3


class TrainerError(Exception):
    """Failure of a run, or a result that the run should not have; the message is one line."""


def train(arguments: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """Perform one task of the kind "train" in the suite's working folder.

    `tools.bench.gpu_suite.plan` defines the tasks.

    limit: seconds that the task may take.

    Returns {"losses": {step: loss}, "tokens_per_second", "good"}. A run that is compared with
    another run also has {"worst": largest relative difference of a loss, "bound", "equal": True if
    all losses are identical}. Raises TrainerError.
    """
    work, out = (Path(os.environ[name]) for name in ("GPU_SUITE_WORK", "GPU_SUITE_OUT"))
    folder = work / arguments["run"]
    if folder.exists():
        shutil.rmtree(folder)
    if "begin" in arguments:
        _copy_run(work / arguments["begin"][0], folder, arguments["begin"][1])
    on_cpu = arguments.get("cpu", False)
    printed = _pretrain(_command(work, folder, arguments), on_cpu=on_cpu, limit=limit)
    device = "cpu" if on_cpu else platform.device_name()
    if f"x {device} (" not in printed:
        raise TrainerError(f"the run did not train on {device}")
    rows = _rows(folder)
    losses = {step: row["loss"] for step, row in rows.items()}
    if (
        not losses
        or max(losses) != arguments["steps"]
        or not all(map(math.isfinite, losses.values()))
    ):
        raise TrainerError(
            f"losses of steps 1 to {arguments['steps']} are missing or not finite: {losses}"
        )
    found: dict[str, Any] = {
        "losses": losses,
        "tokens_per_second": rows[max(rows)]["tokens_per_second"],
        "good": True,
    }
    if arguments.get("learns"):
        found["good"] = losses[max(losses)] < losses[min(losses)]
    if "against" in arguments:
        found |= _compare(losses, _rows(work / arguments["against"]), arguments)
    if arguments.get("trace"):
        (trace,) = (folder / "profile").glob("*.json.gz")
        shutil.copyfile(trace, out / "trace.json.gz")
    return found


def _compare(
    losses: Mapping[int, float],
    others: Mapping[int, Mapping[str, float]],
    arguments: Mapping[str, Any],
) -> dict[str, Any]:
    """Compare the losses of a run with those of another run at the same steps.

    Steps before the checkpoint from which the run continued are left out. Return the keys "worst",
    "bound", "equal" and "good" of `train`'s result.
    """
    first = arguments["begin"][1] if "begin" in arguments else 0
    pairs = [(loss, others[step]["loss"]) for step, loss in losses.items() if step > first]
    worst = max(abs(own - other) / abs(other) for own, other in pairs)
    equal = all(own == other for own, other in pairs)
    return {
        "worst": worst,
        "bound": arguments["bound"],
        "equal": equal,
        "good": worst <= arguments["bound"],
    }


def _copy_run(source: Path, folder: Path, step: int) -> None:
    """Copy a run's folder without its other checkpoints than that of ``step``.

    Raises TrainerError if that checkpoint is missing.
    """
    kept = f"step_{step:08d}"
    if not (source / "checkpoints" / kept).is_dir():
        raise TrainerError(f"the run that this one continues has no checkpoint of step {step}")
    shutil.copytree(source, folder, symlinks=True)
    for path in (folder / "checkpoints").iterdir():
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _command(work: Path, folder: Path, arguments: Mapping[str, Any]) -> list[str]:
    data, settings = work / "data", arguments["settings"]
    mixer = next(
        (text.removeprefix("model.mixer=") for text in settings if text.startswith("model.mixer=")),
        "",
    )
    if mixer:  # the settings that it needs at this size, as in the table of all mixers
        from tools.bench.mixers import SETTINGS

        settings = [*SETTINGS.get(mixer, ()), *settings]
    return command(
        RUN,
        folder,
        data,
        arguments["steps"],
        [
            f"model.vocab_size={VOCABULARY}",
            "checkpoint.keep_last=3",
            "optimizer.warmup_steps=2",
            *SMALL,
            *settings,
            *(TINY if arguments.get("tiny") else ()),
        ],
    )


def _pretrain(words: list[str], *, on_cpu: bool, limit: float) -> str:
    """Run ``pretrain`` and return its output.

    Raises TrainerError with the last lines of the output if the run fails; the entire output is in
    the suite's log.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = process.communicate(timeout=max(1.0, limit - ENDING))
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        print(printed, file=sys.stderr, flush=True)
        raise TrainerError(f"the run took longer than {limit - ENDING:.0f} s") from None
    if process.returncode:
        print(" ".join(words), printed, sep="\n", file=sys.stderr, flush=True)
        raise TrainerError(
            f"pretrain ended with {process.returncode}: "
            f"{' / '.join(printed.strip().splitlines()[-LAST_LINES:])}"
        )
    return printed


def _rows(folder: Path) -> dict[int, dict[str, float]]:
    """Return the rows of `step_rows`. Raises TrainerError if they cannot be read."""
    try:
        return step_rows(folder)
    except (OSError, ValueError) as error:
        raise TrainerError(f"no losses can be read of the run {folder.name}: {error}") from None
