"""Tests of the code snapshot: its files, that it runs without the checkout, and that an older one
is replaced atomically.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fem_common.errors import UserError
from launch.job import read_json, snapshot
from launch.job.snapshot import LARGEST, REVISION, code_folder, read_code, source_files, take

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
OLD = {
    ".gitignore": "__pycache__/\nprivate.py\n",
    "pretrain/__init__.py": "'old'\n",
    "pretrain/deleted.py": "",
    "kernels/table.json": "{}",
    "kernels/README.md": "words",
    "docs/a.py": "",
    "configs/run/demo.yaml": "name: demo",
    "configs/cluster/mine.yaml": "scheduler: local",
}
NEW = {
    "pretrain/__init__.py": "'new'\n",
    "pretrain/added.py": "x = 'ünï'\n",
    "pretrain/private.py": "",
    "pretrain/__pycache__/a.py": "",
    "pretrain/näme.py": "",
    "kernels/huge.json": " " * (LARGEST + 1),
    "kernels/weights.bin": "\0",
}
OURS = (
    "configs/cluster/mine.yaml configs/run/demo.yaml kernels/table.json pretrain/__init__.py"
    " pretrain/added.py pretrain/näme.py".split()
)


def git(root: Path, *words: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("GIT_")
    } | {"GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run(
        [*GIT, "-C", str(root), *words], check=True, capture_output=True, text=True, env=environment
    ).stdout.strip()


def fill(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode())
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two packages, changed, new and ignored files, and files that must not be
    copied.
    """
    root = fill(tmp_path / "checkout", OLD)
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    fill(root, NEW)
    (root / "pretrain" / "deleted.py").unlink()
    (tmp_path / "elsewhere.py").write_text("")
    (root / "kernels" / "link.py").symlink_to(tmp_path / "elsewhere.py")
    return root


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Directory of a job."""
    return tmp_path / "run"


def copied(directory: Path) -> list[str]:
    folder = code_folder(directory)
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.name != REVISION
    )


def test_the_project_s_sources_are_copied_with_the_revision_and_the_changes_that_give_them_back(
    checkout: Path, job: Path
) -> None:
    assert source_files(checkout) == (OURS, 4)  # README.md, huge.json, weights.bin, link.py
    code = take(job, checkout)
    assert copied(job) == OURS and (code.files, code.left_out) == (6, 4)
    for name in OURS:
        assert (code_folder(job) / name).read_bytes() == (checkout / name).read_bytes()
    assert (code.revision, code.dirty) == (git(checkout, "rev-parse", "HEAD"), True)
    assert read_code(job) == code
    assert read_json(code_folder(job) / REVISION)["revision"] == code.revision
    again, diff = job.with_name("again"), job / "launch" / "changes.diff"
    git(job, "clone", "--quiet", str(checkout), str(again))
    git(again, "apply", str(diff))
    assert source_files(again)[0] == OURS
    assert take(job.with_name("other"), again).sha256 == code.sha256
    nested = take(job.with_name("two"), code_folder(job))  # a snapshot of a snapshot
    assert (nested.revision, nested.dirty) == (code.revision, code.dirty)
    assert nested.sha256 == code.sha256
    git(checkout, "clean", "--quiet", "--force")
    git(checkout, "checkout", "--quiet", "--", ".")
    assert take(job, checkout).dirty is False and not diff.exists()
    assert copied(job) == [*OURS[:4], "pretrain/deleted.py"]


def test_outside_of_a_checkout(checkout: Path, job: Path) -> None:
    """Installed packages without git: all files except caches and non-sources; in the environment
    of another repository, none of its files.
    """
    installed = job.with_name("installed")
    shutil.copytree(checkout, installed, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    code = take(job, installed)
    assert (code.revision, code.dirty) == (None, None)
    assert not (job / "launch" / "changes.diff").exists()
    assert copied(job) == sorted([*OURS, "pretrain/private.py"])
    inside = fill(
        checkout / "venv" / "site",
        {"pretrain/__init__.py": "", "launch/a.py": "", "configs/other.yaml": ""},
    )
    fill(checkout, {".gitignore": "venv/\n"})
    code = take(job, inside)
    assert (code.revision, code.dirty, code.files) == (None, None, 2)
    with pytest.raises(UserError, match="none of the packages"):
        take(job, job.parent)


def test_a_snapshot_is_replaced_whole_or_not_at_all(
    checkout: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest depends on contents and names. An interruption keeps the older snapshot, and an
    incomplete snapshot is not used.
    """
    added = checkout / "pretrain" / "added.py"
    digests = [take(job, checkout).sha256 for _ in range(2)]
    added.write_text("x = 2\n")
    digests.append(take(job, checkout).sha256)
    added.rename(added.with_name("renamed.py"))
    before = take(job, checkout)
    assert digests[0] == digests[1] and len({*digests, before.sha256}) == 3

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot, "_revision", interrupted)
    added.write_text("x = 3\n")
    with pytest.raises(KeyboardInterrupt):
        take(job, checkout)
    assert read_code(job) == before
    assert copied(job) == [*OURS[:4], "pretrain/näme.py", "pretrain/renamed.py"]
    names = {path.name for path in (job / "launch").iterdir()}
    assert names == {"changes.diff", "code", "code.json"}
    shutil.rmtree(code_folder(job))
    assert read_code(job) is None


def test_the_project_runs_from_its_snapshot(job: Path) -> None:
    """Every command line of this code runs from it, without an import from the checkout."""
    assert take(job).files > 100
    folder = code_folder(job)
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    probe = (
        "import importlib, sys; [print(importlib.import_module(name).__file__) for name in"
        " sys.argv[1:]]"
    )
    modules = (
        "launch.supervise.__main__ launch.node.rank data_prep.__main__ pretrain.__main__ kernels"
        " tools.hf".split()
    )
    done = subprocess.run(
        [sys.executable, "-c", probe, *modules],
        cwd=job,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (folder / "launch" / "job" / "templates" / "job.sh.j2").is_file()
    places = done.stdout.split()
    assert len(places) == len(modules)
    assert all(Path(place).is_relative_to(folder) for place in places)
