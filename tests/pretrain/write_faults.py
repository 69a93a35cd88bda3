"""Saves with one failing file system call: ``python -m tests.pretrain.write_faults``, as
`failing_saves` starts it.

The library compiled from ``tests/fixtures/write_faults.c``, which counts such calls and lets one
fail, is preloaded in this process and the ranks forked from it. All tensors of step n contain the
number n, so a checkpoint shows which save each tensor belongs to.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fem_common.errors import StorageError
from pretrain.checkpoint.folder import Progress, damage, newest_good
from tests import ranks
from tests.ranks import answer

if TYPE_CHECKING:
    import torch  # only the server of the ranks imports it, because it takes seconds

ROOT = Path(__file__).resolve().parents[2]
SHORT = 0  # no error: a write takes half of its bytes; calls other than writes fail with EIO
ERRORS = (errno.EIO, errno.ENOSPC, SHORT, errno.EDQUOT, errno.ESTALE, errno.EROFS)
TINY = (
    *(
        "model.mixer=transformer",
        "model.hidden_size=8",
        "model.num_layers=1",
        "model.num_attention_heads=1",
        "model.ffn_hidden_size=8",
        "model.tie_embeddings=true",
    ),
    *(
        "data.seq_length=8",
        "data.valid=[]",
        "data.test=[]",
        "train.micro_batch_size=1",
        "train.global_batch_size=2",
    ),
    *(
        "train.steps=2",
        "train.precision=fp32",
        "optimizer.warmup_steps=0",
        "checkpoint.keep_last=1",
    ),
)
# The calls for each of the files written at the same time are counted separately, because the order
# of all their calls differs between saves.
OTHERS = "!(*.distcp|*.distcp.xxh3)"


@dataclass(frozen=True)
class Plan:
    """Plan of failures. files: pattern -> stride: calls 1, 1 + stride, ... on such files fail until
    a save meets none; ERRORS[first] first.
    """

    ranks: int
    asynchronous: bool
    files: dict[str, int]
    first: int = 0


@dataclass(frozen=True)
class Outcome:
    """Outcome of a save: the failed call (empty: none), its path below the folder of checkpoints,
    the error, and the save's message.
    """

    call: str
    path: str
    error: int
    error_message: str | None


class Faults:
    """Functions of the library for one folder of checkpoints; all ranks must call it together."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, ctypes.CDLL(None)
        self.library.fault_hit.restype = ctypes.c_char_p

    def arm(self, number: int, error: int, files: str) -> None:
        """Let the call with this number on files of this pattern fail; 0: none."""
        import torch

        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            self.library.fault_arm(
                ctypes.c_long(number), error, os.fsencode(self.folder), files.encode()
            )
        torch.distributed.barrier()

    def met(self) -> tuple[str, str]:
        """Return the failed call and its path, both empty if none failed, and disable further
        failures.
        """
        import torch

        torch.distributed.barrier()
        name, _, path = self.library.fault_hit().decode().partition(" ")
        self.arm(0, 0, "")
        return name, path.removeprefix(f"{self.folder}/")


def outcomes(plan: Plan, folder: Path, overrides: list[str]) -> list[Outcome]:
    """Return the outcome of one save after another on every rank, each at its own step and followed
    by one without a fault.

    Raises AssertionError if a save did harm.
    """
    from tests.pretrain.jobs import engine_of

    found, step = list[Outcome](), 1
    with engine_of(overrides) as engine:
        saves, faults = Saves(engine, folder), Faults(folder)
        saves.save(step)
        for files, stride in plan.files.items():
            number, met = 1, True
            while met:
                step += 1
                error = ERRORS[(plan.first + len(found)) % len(ERRORS)]
                faults.arm(number, error, files)
                report = saves.error_message(step, wait=number % 3)
                call, path = faults.met()
                outcome = Outcome(call.removesuffix("64"), path, error, report)
                saves.check(outcome, step)
                step += 1
                saves.save(step)
                assert (
                    sorted(os.listdir(folder)) == ["latest", f"step_{step:08d}"]
                    and damage(folder / f"step_{step:08d}") is None
                ), outcome
                met = bool(call)
                if met:
                    found.append(outcome)
                number += stride
        saves.checkpoints.close()
    return found


class Saves:
    """Checkpoints of one engine of which only the last is kept: no other exists if that one is
    incomplete.
    """

    def __init__(self, engine: Any, folder: Path) -> None:
        from pretrain.checkpoint.manager import Checkpoints

        self.engine, self.folder = engine, folder
        self.checkpoints = Checkpoints(folder, engine.config, lambda text: None)
        self.tensors: list[torch.Tensor] = [
            tensor for model in engine.models for tensor in model.parameters()
        ]
        self.tensors += [tensor for part in engine.split.held() for tensor in part.tensors.values()]

    def save(self, step: int, *, wait: int = 0) -> None:
        """Save the step. For an asynchronous save the tensors change before its end, which is
        awaited in one of 3 ways.
        """
        progress = Progress(step, step, 100)
        self._fill(step)
        self.checkpoints.save(self.engine, progress, {"data": ""})
        self._fill(0.5)
        if wait == 1:
            self.checkpoints.save(self.engine, progress, {"data": ""})
        elif wait == 2:
            self.checkpoints.close()
        self.checkpoints.complete(blocking=True)

    def error_message(self, step: int, *, wait: int) -> str | None:
        """Save and return the error message, equal on all ranks, or None."""
        import torch

        output = None
        try:
            self.save(step, wait=wait)
        except StorageError as failure:
            output = str(failure)
        everyone: list[str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, output)
        assert len({*everyone}) == 1, everyone
        return output

    def check(self, outcome: Outcome, step: int) -> None:
        """Check that the save failed with one line of the file system's words and the old or new
        checkpoint is complete, or that the new one is.
        """
        report, newest = outcome.error_message, self.newest()
        assert newest in ((step - 1, step) if report else (step,)), outcome
        assert {*os.listdir(self.folder)} <= {
            "latest",
            *(f"step_{one:08d}" for one in (step - 1, step)),
        }, outcome
        if report is not None:
            assert outcome.call and report.startswith(
                f"checkpoint {self.folder}/step_{step:08d} cannot be written: "
            ), outcome
            assert os.strerror(outcome.error or errno.EIO) in report and "\n" not in report, outcome

    def newest(self) -> int:
        """Return the step of the newest valid checkpoint, all of whose tensors belong to that step;
        ``latest`` also names a valid one.
        """
        import torch

        from pretrain.checkpoint.reader import damaged_tensors, read_common
        from tests.pretrain.test_sharded_checkpoints import everything

        torch.distributed.barrier()
        damaged: dict[Path, str] = {}
        found = newest_good(self.folder, damaged)
        assert found is not None and not damaged, damaged
        assert [*damaged_tensors(found.path, lambda read: None)] == []
        assert read_common(found.path) and json.loads((found.path / "metadata.json").read_text())
        latest = self.folder / (self.folder / "latest").read_text().strip()
        assert damage(latest) is None, latest
        of = {
            name: tensor.unique().tolist()
            for name, tensor in everything(found.path).items()
            if not name.endswith("step")
        }
        step = found.progress.step
        assert (
            len(of) >= len(self.tensors)
            and [name for name, values in of.items() if values != [step]] == []
        ), of
        torch.distributed.barrier()
        return step

    def _fill(self, value: float) -> None:
        import torch

        with torch.no_grad():
            for tensor in self.tensors:
                tensor.fill_(value)


def failing_saves(plans: list[Plan], folder: Path, library: Path) -> list[list[Outcome]]:
    """Return the outcomes of each plan, from separate processes. Raises AssertionError with their
    output if one did harm or hung.
    """
    source = ROOT / "tests/fixtures/write_faults.c"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"],
        check=True,
    )
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        "-m",
        "tests.pretrain.write_faults",
        str(folder),
        json.dumps([asdict(plan) for plan in plans]),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        [Outcome(**one) for one in report]
        for report in json.loads((folder / "outcomes.json").read_text())
    ]


def main(folder: Path, plans: list[dict[str, Any]]) -> None:
    """Run the plans and write the outcomes to ``outcomes.json``."""
    from tests.pretrain.data_folder import write_folder

    # Do not preload DeepSpeed: no plan uses it, and importing it takes seconds.
    ranks._context.set_forkserver_preload(["tests.pretrain.preloaded"])
    data, report = write_folder(folder / "data"), []
    for number, plan in enumerate(Plan(**each) for each in plans):
        asynchronous = f"checkpoint.async_save={str(plan.asynchronous).lower()}"
        overrides = [
            *TINY,
            asynchronous,
            f"run_dir={folder / 'run'}",
            f"data.train.0.prefix={data / 'train'}",
        ]
        output = folder / f"output_{number}"
        report.append(
            answer(
                plan.ranks,
                outcomes,
                plan,
                folder / f"plan_{number}",
                overrides,
                output=output,
                patience=300,
            )
        )
        for rank in range(plan.ranks):
            printed = Path(f"{output}.{rank}").read_text()
            assert "Traceback" not in printed and "Exception" not in printed, printed
    (folder / "outcomes.json").write_text(
        json.dumps([[asdict(one) for one in each] for each in report])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
