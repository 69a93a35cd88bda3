"""Tests of ``python -m tools.diagnose`` on a real run's checkpoint: it writes a picture, and its
errors are one line.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import image

from tests.pretrain.conftest import Command, settings, tiny_data
from tests.pretrain.conftest import pretrain as pretrain_command
from tests.tools.refusals import Refused, raised, refused
from tools.diagnose.__main__ import main
from tools.diagnose.from_checkpoint import data_of_run, first_tokens
from tools.diagnose.picture import draw, shade, table

__all__ = ["pretrain_command", "raised", "refused", "settings", "tiny_data"]

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
    # The first column has its smallest and largest number, the others one number or none that is
    # finite; other numbers have no shade.
    np.testing.assert_array_equal(shade(numbers), [[0, nan, 0], [1, nan, nan], [nan, nan, nan]])


def test_one_picture_of_layers_and_quantities(tmp_path: Path) -> None:
    draw(VALUES, "a run, step 1", tmp_path / "small.png")
    draw(
        {f"layer_{n:02}/mixer/q{m}": n * m for n in range(40) for m in range(8)},
        "a run, step 1",
        tmp_path / "large.png",
    )
    small, large = (image.imread(tmp_path / name) for name in ("small.png", "large.png"))
    assert large.shape[0] > 2 * small.shape[0], "rows and columns have room"
    assert large.shape[1] > small.shape[1], "rows and columns have room"
    assert small[..., :3].min() < 0.2 and small[..., :3].max() == 1.0


def test_of_a_run(
    pretrain_command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the newest checkpoint and the run's validation data, the picture is below runs/, not in
    the working directory.
    """
    mixers = (
        "model.pattern=[fem_softmax, cem]",
        "model.num_layers=4",
        "train.steps=2",
        "optimizer.warmup_steps=0",
        "checkpoint.interval=0",
    )
    pretrain_command(*mixers)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    try:
        assert main([str(pretrain_command.run_dir), "--tokens", "24"]) == 0
    finally:  # a command's process would end now; this process continues
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    # Two layers of FEM, with 13 quantities and 2 of the MLP; two layers of CEM, with 7 and 6.
    numbers = f"{2 * 15 + 2 * 13} numbers of demo, step 2, 24 tokens of valid"
    assert (
        capsys.readouterr().out
        == f"wrote runs/diagnose/{pretrain_command.run_dir.name}.png: {numbers}\n"
    )
    (picture,) = Path("runs/diagnose").iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_wrong_input_is_one_line(
    tmp_path: Path, tiny_data: Path, refused: Refused, raised: Refused
) -> None:
    for arguments in (
        ["--out", tmp_path / "a.png"],
        ["--tokens", "1", "--out", tmp_path / "a.png"],
        ["--out", "picture.jpg"],
    ):
        refused(main, "tools.diagnose", tmp_path, *arguments)
    raised(first_tokens, tmp_path / "none", 8)
    # Tokens continue across documents.
    full = np.fromfile(tiny_data / "valid.bin", dtype=np.uint16)
    np.testing.assert_array_equal(first_tokens(tiny_data / "valid", 1000), full[:1000])
    assert len(first_tokens(tiny_data / "valid", 10**9)) == len(full)
    assert data_of_run({"train": [{"prefix": "t"}], "valid": [{"prefix": "v"}]}) == Path("v")
    assert data_of_run({"train": [{"prefix": "t"}], "valid": []}) == Path("t")
