"""A mirror belongs to one run: other runs, forks and copies are refused before any data is mixed.
The mirrors are folders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fem_common.errors import ConfigError
from pretrain.checkpoint.folder import MANIFEST
from pretrain.checkpoint.mirroring import Mirroring
from pretrain.config import CheckpointConfig
from pretrain.run_directory import RUN_ID, identify
from tests.pretrain.conftest import Command, edit
from tests.pretrain.test_mirror import write_step
from tests.ranks import losses
from tools.checkpoint.__main__ import main

SHORT = ("train.steps=4", "optimizer.warmup_steps=0", "train.eval_interval=0")


def files(folder: Path) -> dict[Path, bytes]:
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def run_of(manifest: Path) -> str:
    return str(json.loads(manifest.read_text())["run"])


def forget(mirror: Path) -> None:
    """Change a mirror to the state that an older version created."""
    (mirror / "run" / RUN_ID).unlink()
    for path in mirror.glob(f"step_*/{MANIFEST}"):
        edit(path, lambda manifest: manifest.pop("run", None))


def test_other_runs_are_refused_and_a_lost_one_continues(pretrain: Command, tmp_path: Path) -> None:
    run = pretrain.run_dir
    other = tmp_path / "other"
    mirror = tmp_path / "demo"
    mirrored = (*SHORT, f"checkpoint.mirror={mirror}")
    elsewhere = (*SHORT, f"checkpoint.mirror={tmp_path}/{{name}}", f"run_dir={other}")

    def refused(*overrides: str, code: int = 2) -> str:
        before = files(mirror)
        output = pretrain.refused(*overrides, code=code)
        assert files(mirror) == before
        assert not list(other.rglob("step_*")) and not list(run.rglob("step_*")) * lost
        return output

    lost = False
    pretrain(*mirrored)
    assert (mirror / "run" / RUN_ID).read_text() == (run / RUN_ID).read_text()
    assert run_of(mirror / "step_00000004" / MANIFEST) == run_of(run / RUN_ID)
    assert f"belongs to another run, with run_dir {run}" in refused(*elsewhere, "optimizer.lr=1e-3")
    assert f"  mirror: {mirror}\n" in pretrain(*elsewhere, "--resolve")
    fork = ("--fork", str(other), "train.steps=6")
    assert "cannot use the parent's mirror" in pretrain(*fork, config=str(run), code=2)
    assert "belongs to another run" in refused(*fork, *mirrored[1:])

    shutil.rmtree(run)
    lost = True
    assert "step_00000004 is of a run with other settings: optimizer.lr 0.003 → 0.001" in refused(
        *mirrored, "optimizer.lr=1e-3"
    )
    output = refused(*elsewhere)
    assert output.strip().endswith(
        f"take it over: python -m tools.checkpoint fetch {other} {mirror.as_uri()}"
    )
    forget(mirror)
    assert (
        "is of another model: model.num_layers is 2 in the checkpoint, 1 now; restore"
        in refused(*elsewhere, "model.num_layers=1")
    )
    assert f"run_dir {run} → {other}" in refused(*elsewhere)
    assert main(["fetch", str(other), str(mirror)]) == 0
    pretrain(*elsewhere, "train.steps=6")
    assert "step_00000004 at step 4" in pretrain.out and list(losses(other)) == [1, 2, 3, 4, 5, 6]
    assert (
        run_of(mirror / "run" / RUN_ID)
        == run_of(other / RUN_ID)
        == run_of(mirror / "step_00000006" / MANIFEST)
    )

    shutil.rmtree(other)
    for path in mirror.glob("step_*/*.distcp"):
        path.write_bytes(b"damaged")
    output = refused(*elsewhere, code=1)
    assert f"no checkpoint in {mirror} is valid (step_00000006: " in output
    assert "step_00000004: " in output


def test_a_place_is_claimed_by_one_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Copies of the run directory are other runs, the original may move, and an older mirror is
    claimed by a run with its model and data.
    """
    one, two, copy, moved, mirror = (
        tmp_path / name for name in ("one", "two", "copy", "moved", "mirror")
    )
    write_step(one, 1)
    assert main(["mirror", str(one), str(mirror)]) == 0
    assert run_of(mirror / "run" / RUN_ID) == identify(one)
    write_step(two, 2)
    shutil.copytree(one, copy)
    write_step(copy, 3)
    for other in (two, copy):
        assert (
            main(["mirror", str(other), str(mirror)])
            == main(["fetch", str(other), str(mirror)])
            == 2
        )
        assert capsys.readouterr().err.count("belongs to another run, with run_dir") == 2
    assert identify(copy) != identify(one)
    one.rename(moved)
    write_step(moved, 4)
    assert main(["mirror", str(moved), str(mirror)]) == 0
    assert json.loads((mirror / "run" / RUN_ID).read_text()) == {
        "run": identify(moved),
        "run_dir": str(moved),
    }
    (mirror / "run" / RUN_ID).unlink()
    assert main(["mirror", str(two), str(mirror)]) == 0, (
        "of an older version, of the same model and data"
    )
    assert main(["mirror", str(moved), str(mirror)]) == 2
    assert main(["fetch", str(tmp_path / "new"), str(mirror)]) == 0
    assert identify(tmp_path / "new") == identify(two)
    # As if a run that began at the same time had written it.
    sender = Mirroring(CheckpointConfig(), str(mirror), moved, print)
    sender.start(0)
    assert sender.process is not None and sender.process.wait() == 2
    with pytest.raises(ConfigError, match="cannot be used by this run"):
        sender.check(4)
    for step in mirror.glob("step_*"):
        shutil.rmtree(step)
    assert main(["fetch", str(tmp_path / "newer"), str(mirror)]) == 1
    assert "latest: the checkpoint that it names does not exist" in capsys.readouterr().err
