"""Training, then an evaluation of it, as two jobs of a real Slurm: what comes of the second when the first ends well, and when not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from launch.job import attempts, launch_folder
from tests.pretrain.data_folder import write_folder
from tests.slurm.mini import MiniSlurm
from tests.slurm.training import DEMO, call, overrides, profile

SUITE = """
tasks:
- {task: valid_32, label: valid @32, kind: heldout, metric: nats_per_token, higher_is_better: false, context_lengths: [32]}
- {task: valid_16, label: valid @16, kind: heldout, metric: nats_per_token, higher_is_better: false, context_lengths: [16], stride: 8}
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two documents of random words."""
    ids = np.random.default_rng(0).integers(0, 63, 400).tolist()
    folder = write_folder(tmp_path / "data", vocab_size=64, documents=[[*ids[:300], 63], [*ids[300:], 63]])
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(63)} | {"</s>": 63}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder / "tokenizer")
    return folder


def test_an_evaluation_follows_its_training(cluster: MiniSlurm, data: Path, tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)
    lost = Path(shutil.copytree(data, tmp_path / "lost"))
    on = profile(tmp_path, "slurm", {"health": {"check": False}})

    def submit(*words: str | Path) -> str:
        return call("launch", "submit", "--cluster", on, "--parsable", *words, env=cluster.environment).strip()

    def chained(run: Path, data: Path) -> tuple[str, str]:
        """A training and its evaluation, both in the queue before the first begins."""
        training = [word for word in overrides(data, run) if "train.steps" not in word]
        first = submit(DEMO, *training, "train.steps=4", "--set", "slurm.options=[--hold]")
        evaluation = ("tools.evaluate", run, "--suite", tmp_path / "suite.yaml", "--out", run / "evaluation", "--device", "cpu")
        second = submit("--dependency", run, "--directory", tmp_path / f"{run.name}_evaluation", "--", *evaluation)
        return first, second

    good = chained(tmp_path / "good", data)
    bad = chained(tmp_path / "bad", lost)
    (lost / "valid.idx").unlink()  # wrong input, which ends a training before it imports torch
    for job in (good[0], bad[0]):
        cluster.run("scontrol", "release", job)

    assert cluster.wait(good[1], timeout=200) == "COMPLETED", (
        launch_folder(tmp_path / "good_evaluation") / f"slurm-{good[1]}.out"
    ).read_text()
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "good" / "evaluation").glob("*/[!.]*.json")}
    assert {name: result["label"] for name, result in results.items()} == {"valid_32": "valid @32", "valid_16": "valid @16"}
    assert {result["raw"]["tokens"] for result in results.values()} == {401}
    assert (tmp_path / "good" / "evaluation" / "table.md").is_file()
    states = [json.loads((launch_folder(tmp_path / name) / "state.json").read_text())["state"] for name in ("good", "good_evaluation")]
    assert states == ["finished", "finished"]

    assert cluster.wait(bad[0], timeout=200) == "FAILED"
    assert cluster.wait(bad[1]) == "CANCELLED", "Slurm ends what waits for a job that failed"
    assert attempts(tmp_path / "bad_evaluation") == []
    (row,) = [
        line
        for line in call("launch", "status", tmp_path / "bad_evaluation", env=cluster.environment).splitlines()
        if "bad_evaluation" in line
    ]
    assert "CANCELLED (Dependency" in row and "before the supervisor began" in row
