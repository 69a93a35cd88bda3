"""Tokens from a store: the samples of a local folder, through a real S3 server and a proxy that fails as networks and stores do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pretrain.conftest import SMALL, Command
from tests.pretrain.stores import Store
from tests.ranks import losses


def upload(store: Store, folder: Path, name: str = "data") -> str:
    """The URL of a folder's copy in the store."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.client.upload_file(str(path), store.name, f"{name}/{path.relative_to(folder)}")
    return f"s3://{store.name}/{name}"


@pytest.fixture
def here(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store, with its variables in this process."""
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    return store


def test_smoke(tiny_data: Path, tmp_path: Path, here: Store, capsys: pytest.CaptureFixture[str]) -> None:
    url = upload(here, tiny_data)
    data = lambda place: [f"data.{split}.0.prefix={place}/{split}" for split in ("train", "valid")]
    pretrain = Command([f"run_dir={tmp_path / 'run'}", *SMALL, "data.test=[]"], capsys)
    assert pretrain(*data(url)) == 0, pretrain.err
    print(pretrain.out)
    assert pretrain(*data(tiny_data), f"run_dir={tmp_path / 'local'}") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "local")
