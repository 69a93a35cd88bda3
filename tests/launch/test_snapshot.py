"""The code snapshot: what is copied, that it runs without the checkout, and that an older one is replaced whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from fem_common.errors import UserError
from launch.job import read_json, snapshot
from launch.job.snapshot import LARGEST, REVISION, code_folder, read_code, source_files, take

GIT = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")


def git(root: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | {"GIT_CONFIG_GLOBAL": os.devnull}
    return subprocess.run([*GIT, "-C", str(root), *words], check=True, capture_output=True, text=True, env=environment).stdout.strip()


def fill(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with two rooms, changed and new files, ignored ones, and all that is not to be copied."""
    root = fill(
        tmp_path / "checkout",
        {
            ".gitignore": "__pycache__/\nprivate.py\n",
            "pretrain/__init__.py": "'old'\n",
            "pretrain/deleted.py": "",
            "kernels/table.json": "{}",
            "kernels/README.md": "words",
            "docs/a.py": "",
            "configs/run/demo.yaml": "name: demo",
            "configs/cluster/mine.yaml": "scheduler: local",
        },
    )
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "first")
    fill(
        root,
        {
            "pretrain/__init__.py": "'new'\n",
            "pretrain/added.py": "x = 'ünï'\n",
            "pretrain/private.py": "",
            "pretrain/__pycache__/a.py": "",
            "pretrain/näme.py": "",
            "kernels/huge.json": b" " * (LARGEST + 1),
            "kernels/weights.bin": b"\0",
        },
    )
    (root / "pretrain" / "deleted.py").unlink()
    (tmp_path / "elsewhere.py").write_text("")
    (root / "kernels" / "link.py").symlink_to(tmp_path / "elsewhere.py")
    return root


OURS = [
    "configs/cluster/mine.yaml",
    "configs/run/demo.yaml",
    "kernels/table.json",
    "pretrain/__init__.py",
    "pretrain/added.py",
    "pretrain/näme.py",
]


def copied(directory: Path) -> list[str]:
    folder = code_folder(directory)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != REVISION)


def test_sources_of_the_rooms_alone(checkout: Path, tmp_path: Path) -> None:
    names, left_out = source_files(checkout)
    assert names == OURS
    assert left_out == 4  # README.md, huge.json, weights.bin, link.py
    code = take(tmp_path / "run", checkout)
    assert copied(tmp_path / "run") == OURS
    assert [(code_folder(tmp_path / "run") / name).read_bytes() for name in OURS] == [(checkout / name).read_bytes() for name in OURS]
    assert (code.files, code.left_out) == (6, 4)


def test_the_revision_and_the_changes_give_the_files_back(checkout: Path, tmp_path: Path) -> None:
    code = take(tmp_path / "run", checkout)
    assert code.revision == git(checkout, "rev-parse", "HEAD")
    assert code.dirty is True
    assert read_code(tmp_path / "run") == code
    assert read_json(code_folder(tmp_path / "run") / REVISION)["revision"] == code.revision
    again = tmp_path / "again"
    git(tmp_path, "clone", "--quiet", str(checkout), str(again))
    git(again, "apply", str(tmp_path / "run" / "launch" / "changes.diff"))
    assert source_files(again)[0] == OURS
    assert take(tmp_path / "other", again).sha256 == code.sha256


def test_without_changes_there_is_no_diff(checkout: Path, tmp_path: Path) -> None:
    take(tmp_path / "run", checkout)
    assert (tmp_path / "run" / "launch" / "changes.diff").exists()
    git(checkout, "clean", "--quiet", "--force")
    git(checkout, "checkout", "--quiet", "--", ".")
    code = take(tmp_path / "run", checkout)
    assert code.dirty is False
    assert not (tmp_path / "run" / "launch" / "changes.diff").exists()
    assert copied(tmp_path / "run") == [*OURS[:4], "pretrain/deleted.py"]


def test_outside_of_a_checkout(checkout: Path, tmp_path: Path) -> None:
    """Installed packages: no git, all but caches and what is no source."""
    installed = tmp_path / "installed"
    subprocess.run(["cp", "-r", str(checkout), str(installed)], check=True)
    subprocess.run(["rm", "-rf", str(installed / ".git")], check=True)
    code = take(tmp_path / "run", installed)
    assert (code.revision, code.dirty) == (None, None)
    assert copied(tmp_path / "run") == sorted([*OURS, "pretrain/private.py"])
    assert not (tmp_path / "run" / "launch" / "changes.diff").exists()


def test_installed_below_another_checkout(checkout: Path, tmp_path: Path) -> None:
    """A virtual environment in some repository: that repository's revision, and what else is named configs, are not this code's."""
    inside = checkout / "venv" / "site"
    fill(inside, {"pretrain/__init__.py": "", "launch/a.py": "", "configs/other.yaml": ""})
    fill(checkout, {".gitignore": "venv/\n"})
    code = take(tmp_path / "run", inside)
    assert (code.revision, code.dirty, code.files) == (None, None, 2)


def test_a_snapshot_of_a_snapshot_knows_the_revision(checkout: Path, tmp_path: Path) -> None:
    first = take(tmp_path / "one", checkout)
    second = take(tmp_path / "two", code_folder(tmp_path / "one"))
    assert (second.revision, second.dirty, second.sha256) == (first.revision, first.dirty, first.sha256)


def test_the_digest_tells_contents_and_names(checkout: Path, tmp_path: Path) -> None:
    digests = [take(tmp_path / "run", checkout).sha256 for _ in range(2)]
    (checkout / "pretrain" / "added.py").write_text("x = 2\n")
    digests.append(take(tmp_path / "run", checkout).sha256)
    (checkout / "pretrain" / "added.py").rename(checkout / "pretrain" / "renamed.py")
    digests.append(take(tmp_path / "run", checkout).sha256)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_an_older_snapshot_is_replaced_whole(checkout: Path, tmp_path: Path) -> None:
    take(tmp_path / "run", checkout)
    (checkout / "pretrain" / "added.py").unlink()
    take(tmp_path / "run", checkout)
    assert copied(tmp_path / "run") == [name for name in OURS if name != "pretrain/added.py"]
    assert sorted(path.name for path in (tmp_path / "run" / "launch").iterdir()) == ["changes.diff", "code", "code.json"]


def test_an_interruption_leaves_the_older_one(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = take(tmp_path / "run", checkout)

    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(snapshot, "_revision", interrupted)
    (checkout / "pretrain" / "added.py").write_text("x = 2\n")
    with pytest.raises(KeyboardInterrupt):
        take(tmp_path / "run", checkout)
    assert read_code(tmp_path / "run") == before
    assert (code_folder(tmp_path / "run") / "pretrain" / "added.py").read_text() == "x = 'ünï'\n"
    assert sorted(path.name for path in (tmp_path / "run" / "launch").iterdir()) == ["changes.diff", "code", "code.json"]


def test_half_a_snapshot_is_none(checkout: Path, tmp_path: Path) -> None:
    take(tmp_path / "run", checkout)
    assert read_code(tmp_path / "run") is not None
    subprocess.run(["rm", "-rf", str(code_folder(tmp_path / "run"))], check=True)
    assert read_code(tmp_path / "run") is None


def test_nothing_to_copy(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of the packages"):
        take(tmp_path / "run", tmp_path)


def test_the_rooms_run_from_their_snapshot(tmp_path: Path) -> None:
    """The whole of this code: every command line answers, and nothing is imported from the checkout."""
    code = take(tmp_path / "run")
    assert code.files > 100
    folder = code_folder(tmp_path / "run")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    probe = "import importlib, sys; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    modules = ("launch.supervise.__main__", "launch.node.rank", "data_prep.__main__", "pretrain.__main__", "kernels", "tools.hf")
    done = subprocess.run(
        [sys.executable, "-c", probe, *modules], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    places = done.stdout.split()
    assert len(places) == len(modules)
    assert [place for place in places if not Path(place).is_relative_to(folder)] == []
