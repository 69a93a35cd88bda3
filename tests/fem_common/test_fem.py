"""Tests of the command ``fem``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from fem_common import fem
from tests.test_house import ROOT, project


def called(*words: str) -> subprocess.CompletedProcess[str]:
    """Run ``fem`` as its script does; the script itself belongs to an installed environment."""
    code = "import sys; from fem_common.fem import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True
    )


def test_every_command_is_listed_and_runs_its_module() -> None:
    assert project()["scripts"] == {"fem": "fem_common.fem:main"}
    helped = called("--help").stdout
    for name, (module, purpose) in fem.COMMANDS.items():
        assert f"  {name} " in helped
        assert purpose in helped
        package = importlib.util.find_spec(module)
        assert package is not None, module
        if package.submodule_search_locations:
            assert importlib.util.find_spec(f"{module}.__main__"), module
    ours, direct = (
        called("data", "--help").stdout,
        subprocess.run(
            [sys.executable, "-m", "data_prep", "--help"], cwd=ROOT, capture_output=True, text=True
        ).stdout,
    )
    assert ours == direct
    assert "VERB" in ours
    wrong = called("curvs")
    assert (wrong.returncode, "did you mean curves?" in wrong.stderr) == (2, True)
    assert called("data", "nothing").returncode == 2  # the module's own exit code


def test_hints_are_commands_that_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the environment on the PATH, below the current folder, elsewhere; without ``fem``."""
    programs = tmp_path / "env" / "bin"
    programs.mkdir(parents=True)
    for name in ("python3", "fem"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python3"))
    monkeypatch.setenv("PATH", str(programs))
    assert fem.command_line("hf", "export", "a b") == "fem hf export 'a b'"
    monkeypatch.setenv("PATH", "")
    assert fem.command_line("hf") == f"{programs}/fem hf"
    monkeypatch.chdir(tmp_path)
    assert fem.command_line("hf") == "env/bin/fem hf"
    (programs / "fem").unlink()
    assert fem.command_line("hf") == "env/bin/python3 -m tools.hf"
