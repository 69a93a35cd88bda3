"""Saves during which one call to the file system fails: ``python -m tests.pretrain.write_faults``, as `failing_saves` starts it.

The library made from ``tests/fixtures/write_faults.c``, which counts such calls and lets one fail, is loaded before all others, here and
in the ranks that are forked from here. All tensors of step n hold the number n, so that a checkpoint says which save each came from.
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
from tests.ranks import answer

if TYPE_CHECKING:
    import torch  # imported by the ranks' server alone: it takes seconds

ROOT = Path(__file__).resolve().parents[2]
SHORT = 0  # no error: half of a write's bytes are taken; another call than a write fails with EIO
ERRORS = (errno.EIO, errno.ENOSPC, SHORT, errno.EDQUOT, errno.ESTALE, errno.EROFS)
TINY = (
    *("model.mixer=transformer", "model.hidden_size=8", "model.num_layers=1", "model.num_attention_heads=1", "model.ffn_hidden_size=8", "model.tie_embeddings=true"),
    *("data.seq_length=8", "data.valid=[]", "data.test=[]", "train.micro_batch_size=1", "train.global_batch_size=2"),
    *("train.steps=2", "train.precision=fp32", "optimizer.warmup_steps=0", "checkpoint.keep_last=1"),
)
# Files that are written at the same time are counted each for itself: the order of all their calls is another at every save.
OTHERS = "!(*.distcp)"


@dataclass(frozen=True)
class Plan:
    """Of the files of each pattern the 1st, 1 + stride-th, ... call fails, until a save meets none; with the errors in turn, from first."""

    ranks: int
    files: list[str]
    asynchronous: bool
    stride: int = 1
    first: int = 0


@dataclass(frozen=True)
class Outcome:
    """Of a save: the call that failed (empty: none), below the folder of checkpoints; with which error; what the save said, if it failed."""

    call: str
    path: str
    error: int
    told: str | None


class Faults:
    """The library's functions, by the folder of checkpoints; collective."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.library = folder, ctypes.CDLL(None)
        self.library.fault_hit.restype = ctypes.c_char_p

    def arm(self, number: int, error: int, files: str) -> None:
        """The call of this number on files of this pattern fails; none: 0."""
        import torch

        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            self.library.fault_arm(ctypes.c_long(number), error, os.fsencode(self.folder), files.encode())
        torch.distributed.barrier()

    def met(self) -> tuple[str, str]:
        """The call that failed, and the path it was on; both empty: none. From then on none fails."""
        import torch

        torch.distributed.barrier()
        name, _, path = self.library.fault_hit().decode().partition(" ")
        self.arm(0, 0, "")
        return name, path.removeprefix(f"{self.folder}/")


def outcomes(plan: Plan, folder: Path, overrides: list[str]) -> list[Outcome]:
    """What became of one save after another, each at a step of its own; AssertionError where one did harm. On every rank."""
    from pretrain.checkpoint.store import Checkpoints
    from tests.pretrain.jobs import engine_of

    found, step = list[Outcome](), 1
    with engine_of(overrides) as engine:
        checkpoints, faults = Checkpoints(folder, engine.config, lambda text: None), Faults(folder)
        held = [tensor for model in engine.models for tensor in model.parameters()]
        held += [tensor for part in engine.split.held() for tensor in part.tensors.values()]

        def save(*, then: int = 0) -> None:
            """Step n with tensors of n. Asynchronously they change at once, and the end is waited for in one of three ways."""
            _fill(held, step)
            checkpoints.save(engine, Progress(step, step, 100), "")
            _fill(held, 0.5)
            if then == 1:
                checkpoints.save(engine, Progress(step, step, 100), "")
            elif then == 2:
                checkpoints.close()
            checkpoints.complete(blocking=True)

        save()
        for files in plan.files:
            number = 1
            while True:
                step, told = step + 1, None
                error = ERRORS[(plan.first + len(found)) % len(ERRORS)]
                faults.arm(number, error, files)
                try:
                    save(then=number % 3)
                except StorageError as failure:
                    told = str(failure)
                call, path = faults.met()
                where = f"{call} {path} {error}: {told}"
                newest = _newest(folder, where)
                assert newest in ((step - 1, step) if told else (step,)), where
                expected = os.strerror(error or errno.EIO)
                assert told is None or told.startswith(f"checkpoint {folder}/step_{step:08d} cannot be written: "), where
                assert told is None or (expected in told and "\n" not in told), where
                step += 1
                save()
                assert _newest(folder, where) == step and sorted(os.listdir(folder)) == ["latest", f"step_{step:08d}"], where
                if not call:
                    assert told is None
                    break
                found.append(Outcome(call, path, error, told))
                number += plan.stride
        checkpoints.close()
    return found


def _fill(tensors: list[torch.Tensor], value: float) -> None:
    import torch

    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(value)


def _newest(folder: Path, where: str) -> int:
    """The step of the newest good checkpoint, which is whole, all its tensors of that step; nothing half written lies beside it."""
    import torch

    from pretrain.checkpoint.reader import damaged_tensors
    from tests.pretrain.test_sharded_checkpoints import everything

    torch.distributed.barrier()
    damaged: dict[Path, str] = {}
    found = newest_good(folder, damaged)
    assert found is not None and not damaged, f"{where}; {damaged}"
    step = found.progress.step
    assert [*damaged_tensors(found.path, lambda read: None)] == [], where
    tensors = everything(found.path)
    assert len(tensors) > 10 and all((tensor == step).all() for name, tensor in tensors.items() if not name.endswith("step")), where
    names = sorted(os.listdir(folder))
    latest = (folder / "latest").read_text().strip()
    assert damage(folder / latest) is None, f"{where}; latest is {latest}"
    assert {*names} <= {"latest", f"step_{step - 1:08d}", f"step_{step:08d}"}, f"{where}; {names}"
    torch.distributed.barrier()
    return step


def failing_saves(plans: list[Plan], folder: Path) -> list[list[Outcome]]:
    """Each plan's outcomes, from processes of its own. AssertionError, with what they wrote: one of them did harm, hung or said too much."""
    library = folder / "write_faults.so"
    source = ROOT / "tests/fixtures/write_faults.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.pretrain.write_faults", str(folder), json.dumps([asdict(plan) for plan in plans])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [[Outcome(**one) for one in told] for told in json.loads((folder / "outcomes.json").read_text())]


def main(folder: Path, plans: list[dict[str, Any]]) -> None:
    """Runs the plans, and leaves what came of them in ``outcomes.json``."""
    from tests.pretrain.data_folder import write_folder

    data, told = write_folder(folder / "data"), []
    for number, plan in enumerate(Plan(**each) for each in plans):
        asynchronous = f"checkpoint.async_save={str(plan.asynchronous).lower()}"
        overrides = [*TINY, asynchronous, f"run_dir={folder / 'run'}", f"data.train.0.prefix={data / 'train'}"]
        output = folder / f"output_{number}"
        told.append(answer(plan.ranks, outcomes, plan, folder / f"plan_{number}", overrides, output=output, patience=500))
        for rank in range(plan.ranks):
            said = Path(f"{output}.{rank}").read_text()
            assert "Traceback" not in said and "rror" not in said, said
    (folder / "outcomes.json").write_text(json.dumps([[asdict(one) for one in each] for each in told]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
