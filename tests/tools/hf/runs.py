"""Run directories with a checkpoint of random weights, a log and data, and their exports, for the
tests of the export.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from pretrain.checkpoint.folder import Progress
from pretrain.checkpoint.writer import save_weights
from pretrain.config import DataConfig, OptimizerConfig, RunConfig, Source, TrainConfig
from tests.pretrain.data_folder import write_folder, write_manifest
from tests.tools.hf.checkpoints import hf
from tests.tools.hf.small import VOCAB, Held, random_state, small, write_tokenizer
from tools.hf.folder import json_object
from tools.hf.stock import exported

Folders = dict[str, Path]
"""Name -> its folder."""
STEP, SAMPLES, LENGTH = 12, 96, 16
RUNS = {"fem_softmax": torch.float32, "transformer": torch.float32, "fem_gla": torch.bfloat16}


def write_checkpoint(run: Path, config: RunConfig, state: dict[str, Tensor]) -> Path:
    """Write a step's folder below ``RUN/checkpoints``."""
    return save_weights(
        run / "checkpoints", state.items(), config, Progress(STEP, SAMPLES, 2 * SAMPLES), "data-key"
    )


def model_of(name: str) -> ModelConfig:
    """Return the model of a run; in the Transformer two queries share a key."""
    return small(name, num_query_groups=2) if name == "transformer" else small(name)


def run_of(model: ModelConfig, data: Path) -> RunConfig:
    """Return a run with two training sources, one of them without a manifest."""
    sources = (Source(str(data / "train"), 3.0), Source(str(data / "other"), 1.0))
    return RunConfig(
        name="of_two_sources",
        model=model,
        data=DataConfig(
            train=sources,
            valid=(Source(str(data / "valid")),),
            seq_length=LENGTH,
            tokenizer=str(data / "tokenizer"),
        ),
        train=TrainConfig(steps=20, global_batch_size=8, precision="fp32"),
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4),
    )


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Run directories with a log, and their data."""
    root = tmp_path_factory.mktemp("runs")
    data = write_folder(root / "data", vocab_size=VOCAB)
    shutil.rmtree(data / "tokenizer")
    manifest = json_object(data / "manifest.json")
    tokenizer = write_tokenizer(data / "tokenizer", VOCAB) / "tokenizer.json"
    manifest["tokenizer"]["sha256"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
    write_manifest(data, manifest)
    # The step was validated twice, because the run was resumed.
    report = [(STEP - 1, 9.0), (STEP, 3.5), (STEP, 3.0), (STEP + 1, 1.0)]
    log = "".join(
        f'{{"step": {step}, "loss": 1.0}}\n{{"step": {step}, "valid_loss": {loss}}}\n'
        for step, loss in report
    )
    for name, dtype in RUNS.items():
        config = run_of(model_of(name), data)
        write_checkpoint(root / name, config, random_state(config.model, dtype=dtype))
        (root / name / "metrics.jsonl").write_text(log + '{"step": 12, "valid_lo')
    return {name: root / name for name in ("data", *RUNS)}


@pytest.fixture(scope="session")
def exports(runs: Folders, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Exports of every run, created once; read-only."""
    out = tmp_path_factory.mktemp("exports")
    for name in RUNS:
        assert hf("export", runs[name], out / name) == 0
    return {name: out / name for name in RUNS}


@pytest.fixture
def copy(runs: Folders, tmp_path: Path) -> Path:
    """A copy of a run directory that a test may damage."""
    return Path(shutil.copytree(runs["fem_softmax"], tmp_path / "run"))


def step_of(run: Path) -> Path:
    """Return the only checkpoint of a run directory."""
    return run / "checkpoints" / f"step_{STEP:08d}"


def edit_manifest(run: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the checkpoint's manifest by ``change``."""
    (file,) = run.glob("checkpoints/step_*/manifest.json")
    manifest = json_object(file)
    change(manifest)
    file.write_text(json.dumps(manifest))


def files(folder: Path) -> dict[str, str]:
    """Return name -> digest of a folder's files."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def made(state: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return the expected tensors of the folder."""
    return {name: weight.contiguous() for name, weight in exported(Held(state), model).items()}
