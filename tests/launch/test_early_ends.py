"""The batch script where the supervisor cannot be started: a run leaves the node, which may be what is wrong, and only so often."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from launch.cluster.profile import Profile
from launch.job.render import render
from tests.launch import hostile
from tests.launch.hostile import given, run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """See `hostile.make_root`."""
    return hostile.make_root(tmp_path)


def scontrol(root: Path) -> str:
    """PATH with a scontrol that writes down how it is called, and sends what Slurm sends at a requeue; node3 is excluded already."""
    (root / "bin").mkdir(exist_ok=True)
    asked = '#!/bin/bash\nprintf "%s|" "$@" >> "$CALLS"; echo >> "$CALLS"\n[ "$1" = requeue ] && kill "$PPID"\ntrue\n'
    for name, text in (("scontrol", asked), ("squeue", "#!/bin/bash\necho node3\n")):
        (root / "bin" / name).write_text(text)
        (root / "bin" / name).chmod(0o755)
    return f"{root}/bin:{os.environ['PATH']}"


EARLY = {
    "folder": ("{}", "working_directory"),
    "snapshot": ("{}", "code"),
    "module": ("setup: {modules: [absent]}", None),
    "line": ("setup: {lines: ['[ $SLURMD_NODENAME = node2 ] || exit 7']}", None),
    "interpreter": ("host_python: /gone/python", None),
}  # a profile, and the folder of the job that is not there


@pytest.mark.parametrize(("text", "folder"), EARLY.values(), ids=EARLY)
@pytest.mark.parametrize(("array", "name"), [({}, "12"), ({"SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "0"}, "11_0")])
def test_a_run_leaves_a_node_that_cannot_start_its_supervisor(
    text: str, folder: str | None, array: dict[str, str], name: str, root: Path
) -> None:
    profile = given(root, text)
    job = hostile.job(root, profile, **({folder: f"{root}/gone"} if folder else {}))
    shutil.rmtree(root / "gone", ignore_errors=True)
    script, calls = render(job, profile), root / "calls"
    slurm = {"PATH": scontrol(root), "CALLS": str(calls), "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "node1", **array}
    for restarts in ({}, {"SLURM_RESTART_COUNT": "2"}):
        done = run(script, root, **slurm, **restarts)
        assert done.returncode == 0, done.stderr
        assert b"launch: the supervisor did not start on node1: back to the queue, without that node" in done.stderr
        assert calls.read_text().splitlines() == [f"requeue|{name}|", f"update|JobId={name}|ExcNodeList=node3,node1|"]
        calls.unlink()
    # It is not the node's fault, is no run that may start anew, or the user ended it.
    assert run(script, root, **slurm, SLURM_RESTART_COUNT="3").returncode == 2
    assert run(render(dataclasses.replace(job, kind="command"), profile), root, **slurm).returncode != 0
    assert not calls.exists() and not (root / "record").exists()


def test_a_run_that_is_cancelled_as_it_starts_does_not_come_back(root: Path) -> None:
    profile = given(root, "setup: {lines: ['kill $$']}")
    done = run(render(hostile.job(root, profile), profile), root, PATH=scontrol(root), CALLS=f"{root}/calls", SLURM_JOB_ID="12")
    assert done.returncode == 143 and not (root / "calls").exists() and not (root / "record").exists()


def test_a_supervisor_that_ends_does_not_start_anew(root: Path) -> None:
    (root / "recorder").write_text("#!/bin/bash\nexit 1\n")
    script = render(hostile.job(root, Profile()), Profile())
    done = run(script, root, PATH=scontrol(root), CALLS=f"{root}/calls", SLURM_JOB_ID="12")
    assert done.returncode == 1 and not (root / "calls").exists()
