"""What tests of the command line share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.requests import LOCAL, SLURM


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's working directory, with two profiles: local.yaml and slurm.yaml."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    (tmp_path / "local.yaml").write_text(LOCAL)
    (tmp_path / "slurm.yaml").write_text(SLURM)
    return tmp_path
