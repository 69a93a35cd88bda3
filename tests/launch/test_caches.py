"""Tests of the default folder for compiled kernels: local to the node, and writable only by its
user.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.job import rank_log
from launch.node import caches
from tests.launch.test_rank import ROOT, Keep, keep, texts

__all__ = ["keep"]
SHOW = ("bash", "-c", 'echo "$TRITON_CACHE_DIR|$TORCHINDUCTOR_CACHE_DIR"')


@pytest.fixture
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove these variables from the environment of the tests."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("_nothing_set")
def test_compiled_kernels_are_kept_on_the_node(keep: Keep, tmp_path: Path) -> None:
    """A job's ranks and attempts share one private folder, created at the first compilation;
    existing variables are kept.
    """
    own = {"TMPDIR": str(tmp_path), "SLURMD_NODENAME": "node7"}
    one, two = (
        keep(*SHOW, SLURM_JOB_ID=job, LOCAL_RANK=rank, **own)
        for job, rank in (("11", "0"), ("12", "1"))
    )
    mine = keep(*SHOW, TRITON_CACHE_DIR="/mine", **own)
    local = keep(*SHOW, TRITON_HOME="/home", **own)
    assert [kept.wait() for kept in (one, two, mine, local)] == [0] * 4
    parent = tmp_path / f"launch_caches_{os.geteuid()}"
    (output,) = texts(one.log)
    folder = Path(output.partition("/triton|")[0])
    assert (
        folder.parent == parent
        and folder.name.startswith("node7_")
        and output == f"{folder}/triton|{folder}/inductor"
    )
    assert texts(two.log) == [output]
    assert texts(mine.log) == [f"/mine|{parent}/node7_local/inductor"] and texts(local.log) == [
        f"|{parent}/node7_local/inductor"
    ]
    assert parent.stat().st_mode & 0o777 == 0o700 and not any(parent.iterdir())


@pytest.mark.usefixtures("_nothing_set")
def test_without_a_temporary_folder_a_rank_runs_with_what_it_has(tmp_path: Path) -> None:
    none = (
        "import sys, tempfile; tempfile._candidate_tempdir_list = lambda: ['/proc']; from"
        " launch.node.rank import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", none, str(tmp_path), "--", *SHOW]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "4"},
        capture_output=True,
        text=True,
    )
    note, output = texts(rank_log(tmp_path, 4).read_text())
    assert (done.returncode, output) == (0, "|"), done.stderr
    assert note.startswith("[launch] no folder on this node for compiled kernels: ")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary folder, also of this process."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_compiled_kernels_are_not_loaded_from_where_others_can_write(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = temporary / f"launch_caches_{os.geteuid()}"

    def refused(expected: str) -> None:
        found, fault = caches.variables({}, "n1", ROOT)
        assert not found and fault is not None and expected in fault, fault

    (temporary / "theirs").mkdir(mode=0o700)
    parent.symlink_to(temporary / "theirs")
    refused("is not a directory")
    parent.unlink()
    parent.write_text("")
    refused("is not a directory")
    parent.unlink()
    parent.mkdir()
    for mode in (0o770, 0o702):
        parent.chmod(mode)
        refused("can be written by other users; remove it")
    parent.chmod(0o700)
    temporary.chmod(0o777)
    refused("no sticky bit")
    temporary.chmod(0o1777)
    assert caches.variables({}, "n1", ROOT)[1] is None
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: 12345)
        parent.rename(temporary / "launch_caches_12345")
        refused("belongs to another user")
    (temporary / "launch_caches_12345").rename(parent)
    seen = os.statvfs(parent)
    with monkeypatch.context() as patch:
        patch.setattr(
            "os.statvfs",
            lambda _: os.statvfs_result([*seen[:8], seen.f_flag | os.ST_NOEXEC, seen.f_namemax]),
        )
        refused("noexec")
    monkeypatch.chdir(temporary)
    refused("only the working directory can be written")
    assert caches.variables(
        {"TRITON_CACHE_DIR": "/a", "TORCHINDUCTOR_CACHE_DIR": "/b"}, "n1", ROOT
    ) == ({}, None)


def test_folders_of_compiled_kernels_that_nobody_uses_are_removed(temporary: Path) -> None:
    place = Path(caches.variables({}, "n1", ROOT)[0]["TRITON_CACHE_DIR"]).parent
    old, new = place.parent / "n1_old", place.parent / "n1_new"
    for folder, days in ((place, 99.0), (old, 30.1), (new, 29.9)):
        (folder / "triton" / "x").mkdir(parents=True)
        os.utime(folder, (time.time() - days * 86400,) * 2)
    caches.variables({"LOCAL_RANK": "1"}, "n1", ROOT)
    assert old.is_dir() and abs(place.stat().st_mtime - time.time()) < 600
    caches.variables({"LOCAL_RANK": "0"}, "n1", ROOT)
    assert {*place.parent.iterdir()} == {place, new}
