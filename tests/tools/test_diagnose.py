"""``python -m tools.diagnose`` on a real run's checkpoint: its picture is a picture, its errors are one line."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.pretrain.conftest import Command, settings, tiny_data
from tests.pretrain.conftest import pretrain as pretrain_command
from tests.test_house import ROOT
from tools.diagnose import from_checkpoint
from tools.diagnose.__main__ import main
from tools.diagnose.picture import draw, shade, table

__all__ = ["pretrain_command", "settings", "tiny_data"]

VALUES = {
    "layer_00/iteration_00/mixer/step_norm": 1.0,
    "layer_00/iteration_00/mlp/step_norm": 2.0,
    "layer_00/iteration_01/mixer/step_norm": 3.0,
    "layer_10/mixer/beta_10": math.inf,
}


def test_rows_and_columns() -> None:
    rows, columns, numbers = table(VALUES)
    assert rows == ["layer 0, iteration 0", "layer 0, iteration 1", "layer 10"]
    assert columns == ["mixer: step norm", "mixer: beta 10%", "mlp: step norm"]
    nan = math.nan
    np.testing.assert_array_equal(numbers, [[1, nan, 2], [3, nan, nan], [nan, math.inf, nan]])
    # Least and greatest of a column; one number alone; what is not finite has no shade.
    np.testing.assert_array_equal(shade(numbers), [[0, nan, 0], [1, nan, nan], [nan, nan, nan]])


def test_one_picture_of_layers_and_quantities(tmp_path: Path) -> None:
    from matplotlib import image

    draw(VALUES, "a run, step 1", tmp_path / "small.png")
    draw({f"layer_{n:02}/mixer/q{m}": n * m for n in range(40) for m in range(8)}, "a run, step 1", tmp_path / "large.png")
    small, large = (image.imread(tmp_path / name) for name in ("small.png", "large.png"))
    assert large.shape[0] > 2 * small.shape[0] and large.shape[1] > small.shape[1], "rows and columns have room"
    assert small[..., :3].min() < 0.2 and small[..., :3].max() == 1.0


def test_of_a_run(pretrain_command: Command, tmp_path: Path) -> None:
    """In a process of its own, as it is used; the newest checkpoint, the run's own validation data."""
    mixers = ("model.pattern=[fem_softmax, cem]", "train.steps=2", "optimizer.warmup_steps=0", "checkpoint.interval=0")
    assert pretrain_command(*mixers) == 0
    out = tmp_path / "pictures" / "layers.png"
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "tools.diagnose", str(pretrain_command.run_dir), "--tokens", "24", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Two of FEM's eleven quantities and MLP's step norm, two of CEM's five and five.
    assert done.stdout == f"wrote {out}: {2 * 12 + 2 * 10} numbers of demo, step 2, 24 tokens of valid\n"
    assert out.read_bytes().startswith(b"\x89PNG")


def test_without_a_name_the_picture_is_below_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is left in the folder the command is called in, which may be a checkout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(from_checkpoint, "diagnose", lambda *_: from_checkpoint.Found(VALUES, "a run"))
    assert main(["mine/run"]) == 0
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")] == [Path("runs/diagnose/run.png")]
    assert capsys.readouterr().out.startswith("wrote runs/diagnose/run.png: ")


def test_wrong_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--out", str(tmp_path / "a.png")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tools.diagnose: error: ") and "no checkpoint there" in error and error.count("\n") == 1
    assert main([str(tmp_path), "--tokens", "1", "--out", str(tmp_path / "a.png")]) == 2
    assert "--tokens 1: must be at least 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--out", "picture.jpg"])
    assert "must end in .png" in capsys.readouterr().err


def test_data_that_is_not_there(tmp_path: Path) -> None:
    from fem_common.errors import ConfigError
    from tools.diagnose.from_checkpoint import data_of_run, first_tokens

    with pytest.raises(ConfigError, match="cannot be read .* --data PREFIX"):
        first_tokens(tmp_path / "none", 8)
    assert data_of_run({"train": [{"prefix": "t"}], "valid": [{"prefix": "v"}]}) == Path("v")
    assert data_of_run({"train": [{"prefix": "t"}], "valid": []}) == Path("t")


def test_tokens_come_across_documents(tmp_path: Path, tiny_data: Path) -> None:
    from tools.diagnose.from_checkpoint import first_tokens

    whole = np.fromfile(tiny_data / "valid.bin", dtype=np.uint16)
    np.testing.assert_array_equal(first_tokens(tiny_data / "valid", 1000), whole[:1000])
    assert len(first_tokens(tiny_data / "valid", 10**9)) == len(whole)
