"""The mixer of CONTRIBUTING.md, added to a copy of the repository as the page describes, passes the
tests of every mixer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrain.conftest import ROOT

ROOMS = (
    "configs",
    "data_prep",
    "fem_common",
    "fem_megatron",
    "kernels",
    "pretrain",
    "tests",
    "tools",
)
CONTRACT = (
    "tests/fem_megatron/test_catalogue.py",  # gradients, causality, plan
    "tests/fem_megatron/test_decoding.py",
    "tests/fem_megatron/test_tensor_parallel.py",
    "tests/pretrain/test_parity.py",  # trains, and gives the same at TP2 x PP2 as in one process
    # Exports, and the exported model gives the same logits as the model.
    "tests/tools/hf/test_model.py",
)


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the repository with the page's mixer."""
    for folder in ROOMS:
        # Other test processes write to __pycache__.
        shutil.copytree(
            ROOT / folder,
            tmp_path / folder,
            ignore=shutil.ignore_patterns("mutants", "slurm", "__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    *files, catalogue = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    mixer = tmp_path / "fem_megatron/mixers/running_mean"
    mixer.mkdir()
    for name, text in zip(("shape.py", "layer.py"), files, strict=True):
        (mixer / name).write_text(text)
    imported, entry = catalogue.splitlines(keepends=True)
    path = tmp_path / "fem_megatron/catalogue.py"
    text = path.read_text()
    first, registry = "from fem_megatron.mixers.attention.shape", "MIXERS: dict[str, Mixer] = {\n"
    assert text.count(first) == text.count(registry) == 1
    path.write_text(text.replace(first, imported + first).replace(registry, registry + entry))
    return tmp_path


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("files", "least"),
    [
        pytest.param(CONTRACT[:2], 8, id="one process"),
        pytest.param(CONTRACT, 25, id="all", marks=pytest.mark.slow),
    ],
)
def test_the_page_s_mixer_keeps_the_contract(
    house: Path, files: tuple[str, ...], least: int
) -> None:
    """The mixer has correct gradients, decodes step by step, trains, splits over ranks, and is
    exported.
    """
    # The mixer is part of two hybrid models; run only one of them.
    chosen = "running_mean and not CP2 and not ZeRO and not chunks and not gated_deltanet"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    done = subprocess.run(
        command,
        cwd=house,
        env=environment | {"PYTHONPATH": str(house)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= least and "skipped" not in done.stdout, (
        done.stdout
    )
