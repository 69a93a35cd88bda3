"""``--resolve`` prints a configuration that stands by itself: read from any file, it is the same run in the same directory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fem_common.config import plain
from pretrain.__main__ import main
from pretrain.config import load_run
from pretrain.run_directory import run_directory
from tests.pretrain.conftest import DEMO, ROOT
from tests.pretrain.data_folder import write_folder
from tests.pretrain.test_config import RUNS

ODD = "name='1e5: $(touch x) \"{}'"  # text that YAML and shells may take for something else
OVERRIDES = [[], ["run_dir=x/{mixer}/ü y", ODD], ["run_dir=null", ODD, "checkpoint.load=../other/run"], ["run_dir=./a//b/"]]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_printed_file_is_the_same_run(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # no data here
    for number, overrides in enumerate(OVERRIDES):
        assert main([str(path), *overrides, "--resolve"]) == 0
        out, err = capsys.readouterr()
        assert err == "" and yaml.safe_load(out)["run_dir"]
        wanted = load_run(path, overrides)
        (tmp_path / f"{number}.yaml").write_text(out)
        found = load_run(tmp_path / f"{number}.yaml")
        assert run_directory(found) == run_directory(wanted)
        assert found == replace(wanted, run_dir=str(run_directory(wanted)))
        assert plain(found)["data"] == plain(wanted)["data"], "paths stay as they were written"
        assert main([str(tmp_path / f"{number}.yaml"), "--resolve"]) == 0
        assert capsys.readouterr().out == out, "resolving is done once"


def test_mistakes_are_one_line_and_data_that_is_there_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*overrides: str) -> str:
        assert main([DEMO, *overrides, "--resolve"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    monkeypatch.chdir(tmp_path)
    assert "is not a multiple of train.micro_batch_size" in said("parallel.world_size=7")
    assert "unknown key train.stepz" in said("train.stepz=1")
    assert "parallel.collective_timeout_minutes = 0: must be more than 0" in said("parallel.collective_timeout_minutes=0")
    assert "log.straggler_interval = -1: must be 0 or more" in said("log.straggler_interval=-1")
    assert "log.straggler_ratio = 0.9: must be 1 or more" in said("log.straggler_ratio=0.9")
    data = [f"data.train.0.prefix={write_folder(tmp_path / 'data') / 'train'}", "data.valid=[]", "data.test=[]", "data.seq_length=64"]
    assert main([DEMO, "--check"]) == 2, "the demo's data are not here"
    assert "data_prep run" in capsys.readouterr().err
    assert main([DEMO, *data, "--check"]) == 0 and capsys.readouterr().out.count("\n") == 1
    small = [*data, "model.vocab_size=512", "--plan", "--check"]
    assert main([DEMO, *small, "log.device=H100"]) == 0 and "fits H100" in capsys.readouterr().out.splitlines()[-1]
    assert main([DEMO, *small]) == 0 and "log.device is null" in capsys.readouterr().out.splitlines()[-1]
    assert main([DEMO, *small, "log.device=H100", "model.num_layers=3000", "model.hidden_size=3072"]) == 2
    out, err = capsys.readouterr()
    assert "parameters" in out and err.startswith("pretrain: error: log.device = H100 has 79 GiB of memory") and err.count("\n") == 1
    assert main([DEMO, *data, "--resolve"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["vocab_size"] is None, "what the data tells stays for the run to read"
    os.truncate(tmp_path / "data" / "train.bin", 10)
    assert "damaged or replaced" in said(*data)
    assert main([DEMO, *data, "--check"]) == 2


def test_nothing_heavy_is_imported() -> None:
    check = "import sys; from pretrain.__main__ import main; main(sys.argv[1:]); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check, DEMO, "--resolve"], cwd=ROOT, check=True, capture_output=True)
