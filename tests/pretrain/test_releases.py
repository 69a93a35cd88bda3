"""Tests of supported releases of Megatron-core and torch that `make setup` does not install.

`make build/megatron-VERSION` and `make build/torch-VERSION` write one into a folder. Processes with
the folder first in PYTHONPATH use it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fem_common.errors import UserError
from fem_megatron.megatron import upstream
from tests.pretrain.conftest import DEMO, QUIET
from tests.ranks import losses

ROOT = Path(__file__).parents[2]
OLDEST_TORCH = "2.11.0"
NEWEST = "0.19.2"
BETWEEN = ("0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0")
# Files whose quick tests also run on the newest Megatron-core and on the oldest torch.
FILES = (
    "fem_megatron/test_model.py",
    "pretrain/test_checkpoint_faults.py",
    "pretrain/test_checkpoint_tensors.py",
    "pretrain/test_checkpoints.py",
    "pretrain/test_deepspeed.py",
    "pretrain/test_graphs.py",
    "pretrain/test_muon.py",
    "pretrain/test_parity.py",
    "pretrain/test_resume.py",
    "pretrain/test_spikes.py",
    "tools/hf/test_export.py",
    "tools/hf/test_export_weights.py",
    "tools/hf/test_layouts.py",
    "tools/hf/test_verify.py",
    "tools/test_checkpoint_convert.py",
)
# Files whose slow tests run as well: those of failures that one rank meets and all must report.
WITH_SLOW = {"pretrain/test_checkpoint_faults.py"}
# Layouts with every kind of parallelism, and the stages of ZeRO.
SHORT = "test_equals_one_process and tied and not chunks"
SMALL = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_attention_heads=2",
    "model.ffn_hidden_size=64",
    "data.seq_length=64",
    "train.micro_batch_size=2",
    "train.global_batch_size=4",
    "train.precision=fp32",
    "optimizer.lr=3e-3",
    "optimizer.min_lr=3e-3",  # constant, so that the number of steps may change
    "optimizer.warmup_steps=0",
    "checkpoint.async_save=true",
    *QUIET,
)


def on_release(release: str, *command: str) -> str:
    """Run ``python COMMAND`` with ``build/RELEASE`` first in PYTHONPATH, and return its output.

    release: such as megatron-0.19.2, which make unpacks, or "" for the environment's packages. The
    variables of pytest's workers are removed, so that a pytest in the command is independent.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PYTHON"))}
    path = [str(ROOT)]
    if release:
        path.insert(0, str(ROOT / "build" / release))
        make = ["make", "-s", f"PYTHON={sys.executable}", f"build/{release}"]
        made = subprocess.run(make, cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    return done.stdout


def installed(release: str) -> dict[str, str]:
    """Return the versions of torch and Megatron-core that a process uses with a release."""
    show = "import json; from fem_megatron.megatron import upstream; "
    show += "print(json.dumps(upstream.versions()))"
    versions: dict[str, str] = json.loads(on_release(release, "-c", show).splitlines()[-1])
    return versions


def passes(release: str, *arguments: str) -> bool:
    """Run pytest with a release; it must succeed. Return True if at least one test ran."""
    output = on_release(release, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    return " passed" in output.splitlines()[-1]


def test_releases_are_compared_by_number() -> None:
    supported = ["0.16.1", "0.17.0rc0", "0.19.2", "0.19.10", "0.16.1+local"]
    refused = ["0.16.0", "0.9.9", "0.20.0rc0", "0.20.0", "1.0"]
    assert [version for version in supported + refused if upstream.is_supported(version)] == (
        supported
    )


def test_make_unpacks_the_releases_of_these_tests() -> None:
    rule = f"test-all: lint build/megatron-{NEWEST} build/torch-{OLDEST_TORCH} "
    assert rule in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_an_unsupported_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "installed", lambda: "0.20.0")
    for refuse in (upstream.import_megatron, upstream.prepare):
        with pytest.raises(UserError, match=r"0\.20\.0 is installed, .* 0\.16\.1 or newer, below"):
            refuse()


@pytest.mark.slow
@pytest.mark.parametrize("version", [*BETWEEN, NEWEST])
def test_a_release_trains_at_every_layout_as_in_one_process(version: str) -> None:
    release = f"megatron-{version}"
    assert installed(release)["megatron-core"] == version
    assert passes(release, "tests/pretrain/test_parity.py", "-k", SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_newest_release_passes_the_tests_of(file: str) -> None:
    slow = ("-m", "not slurm") if file in WITH_SLOW else ()
    assert passes(f"megatron-{NEWEST}", f"tests/{file}", *slow)


@pytest.mark.slow
@pytest.mark.parametrize("file", [*FILES, "kernels/test_compile.py", "tools/hf/test_cache.py"])
def test_the_oldest_torch_passes_the_tests_of(file: str) -> None:
    release = f"torch-{OLDEST_TORCH}"
    if not (ROOT / "build" / release).exists():
        pytest.skip(f"needs 4.5 GB, which make build/{release} downloads")
    assert installed(release)["torch"].startswith(OLDEST_TORCH)
    assert passes(release, f"tests/{file}")


@pytest.mark.slow
def test_the_demo_runs_on_the_newest_release(tmp_path: Path) -> None:
    on_release(f"megatron-{NEWEST}", "-m", "tools.demo", "--out", str(tmp_path / "demo"))


@pytest.mark.slow
def test_a_run_moves_to_the_newest_release_and_back(tiny_data: Path, tmp_path: Path) -> None:
    """The losses are those of a straight run on the oldest release, to the bit: both releases
    compute a step in the same order. Each move is reported.
    """

    def trained(release: str, name: str, steps: int) -> str:
        given = (f"run_dir={tmp_path / name}", f"train.steps={steps}", *SMALL)
        prefixes = (f"data.{part}.0.prefix={tiny_data / part}" for part in ("train", "valid"))
        return on_release(release, "-m", "pretrain", DEMO, *prefixes, "data.test=[]", *given)

    oldest = upstream.installed()
    trained("", "straight", 6)
    trained("", "moved", 1)
    assert "was written with" not in trained("", "moved", 2)
    forth = trained(f"megatron-{NEWEST}", "moved", 4)
    assert f"was written with megatron-core {oldest} (now {NEWEST}): training continues" in forth
    back = trained("", "moved", 6)
    assert f"was written with megatron-core {NEWEST} (now {oldest}): training continues" in back
    assert losses(tmp_path / "moved") == losses(tmp_path / "straight")
    manifest = json.loads((tmp_path / "moved/checkpoints/step_00000006/manifest.json").read_text())
    assert manifest["versions"] == upstream.versions()
