"""Tests of averaged checkpoints against their float64 mean, from several layouts and engines; the
result is an ordinary checkpoint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretrain.__main__ import main as pretrain
from pretrain.checkpoint.folder import find
from pretrain.checkpoint.reader import load_full_model_state
from tests.pretrain.conftest import DEMO, SMALL, tiny_data
from tests.pretrain.jobs import Job, run_jobs
from tests.ranks import VARIABLES, answer, losses
from tests.tools.refusals import Refused
from tests.tools.refusals import refused as refused
from tools.checkpoint.__main__ import main
from tools.hf.__main__ import main as hf

__all__ = ["tiny_data"]
LAYOUTS = {
    "tensor": ["parallel.tensor_model_parallel_size=2"],
    "zero": ["engine.name=deepspeed", "engine.zero_stage=3"],
}


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of run directories: ``tensor`` and ``zero`` on two ranks, steps 2 and 3 of each;
    ``other`` has another model.
    """
    folder = tmp_path_factory.mktemp("runs")
    data = [f"data.{split}.0.prefix={tiny_data / split}" for split in ("train", "valid")]
    base = [*data, "data.test=[]", *SMALL]
    jobs = []
    for name, extra in {**LAYOUTS, "other": ["model.num_layers=4"]}.items():
        words = [*base, *extra, f"run_dir={folder / name}"]
        jobs += [Job(name, words, 3, save_after=step) for step in (2, 3)]
    for job in jobs:
        (folder / job.name).mkdir(exist_ok=True)
    answer(2, run_jobs, jobs, str(folder / "cache"), output=folder / "rank")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_full_model_state(folder)[0]


def merge(words: str) -> int:
    return main(["merge", *words.split()])


def mean(shares: list[float], folders: list[Path]) -> dict[str, torch.Tensor]:
    """Return the definition: a weighted sum divided by the sum of the shares, in float64, rounded
    once.
    """
    states = [weights(folder) for folder in folders]
    means = {}
    for name, tensor in states[0].items():
        parts = [share * state[name].double() for share, state in zip(shares, states, strict=True)]
        means[name] = (torch.stack(parts).sum(0) / sum(shares)).to(tensor.dtype)
    return means


@pytest.mark.slow
def test_the_average_is_the_float64_mean_of_checkpoints_from_any_layout_and_engine(
    runs: Path, tmp_path: Path
) -> None:

    def checkpoints(name: str) -> list[Path]:
        return [runs / name / "checkpoints" / f"step_{step:08d}" for step in (2, 3)]

    tensor, zero = map(checkpoints, LAYOUTS)
    assert not torch.equal(*(weights(step)["embedding.word_embeddings.weight"] for step in tensor))
    mixed = [tensor[0], zero[1], zero[0]]
    cases: list[tuple[str, list[float], list[Path]]] = [
        (f"--last 2 --of {runs}/tensor", [1, 1], tensor),
        (f"--last 2 --of {runs}/tensor --ema 0.25", [0.25, 1], tensor),
        (f"{' '.join(map(str, mixed))} --weights 3 1 0.5", [3, 1, 0.5], mixed),
    ]
    for number, (words, shares, folders) in enumerate(cases):
        out = tmp_path / str(number)
        assert merge(f"{words} --out {out}") == 0 == main(["verify", str(out)])
        ours, wanted = weights(out), mean(shares, folders)
        assert ours.keys() == wanted.keys()
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
        found = find(out)
        assert "rng_device" not in found.manifest  # without random states
        assert found.progress.step == 3
        steps = [find(folder).progress.step for folder in folders]
        assert [each["step"] for each in found.manifest["merged"]] == steps


@pytest.mark.slow
def test_nothing_but_the_average_is_reported(runs: Path, tmp_path: Path) -> None:
    """Run a separate process, in which Megatron-core would warn about packages that are not
    needed.
    """
    words = f"-m tools.checkpoint merge --last 2 --of {runs}/tensor --out {tmp_path}/merged"
    command = [sys.executable, *words.split()]
    assert not subprocess.run(command, check=True, capture_output=True, text=True).stderr


def test_an_average_is_exported_and_trained_on(runs: Path, tiny_data: Path, tmp_path: Path) -> None:
    """At another layout than its sources', with the other engine; a run started from it begins at
    its loss.
    """
    out = tmp_path / "merged"
    assert merge(f"--last 2 --of {runs}/zero --out {out}") == 0
    words = (
        f"data.train.0.prefix={tiny_data}/train data.valid=[] data.test=[] run_dir={tmp_path}/run"
        f" checkpoint.load={out} train.steps=2 optimizer.warmup_steps=1 log.diagnostics_interval=0"
    )
    for name in VARIABLES:
        os.environ.pop(name, None)
    assert pretrain([DEMO, *SMALL, *words.split()]) == 0
    fresh = 6.24  # ln 512: every token is equally likely
    assert losses(tmp_path / "run")[1][0] < fresh - 0.01
    assert hf(["export", str(out), str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_what_is_no_average_is_refused(runs: Path, tmp_path: Path, refused: Refused) -> None:
    step, out = runs / "tensor", f"--out {tmp_path}/out"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for wrong in (
        out,
        f"{step} --last 2 --of {step} {out}",
        f"--last 2 {out}",
        f"--last 3 --of {step} {out}",
        f"{step} {runs}/zero --weights 1 {out}",
        f"{step} --ema 1 {out}",
        f"{step} {runs}/other {out}",
        f"{step} --out {tmp_path}/full",
    ):
        refused(main, "tools.checkpoint", "merge", *wrong.split(), RUNS=runs)
    assert not (tmp_path / "out").exists()
