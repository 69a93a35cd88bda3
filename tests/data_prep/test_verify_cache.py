"""verify --index-cache: a cache of other contents, or one whose files differ, is a fault; a cache of other data is not."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data_prep.conftest import make_documents, write_parquet
from tests.data_prep.damage import cut, flip, verify
from tests.data_prep.units_made import edit_json, encode_units, merge, plan_folder


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    rows = write_parquet(folder / "rows.parquet", make_documents(100, 40))
    out = encode_units(plan_folder(folder / "data", [rows], tokenizer))
    assert merge(out) == 0
    return out


@pytest.fixture
def data(tmp_path: Path, merged: Path) -> Path:
    return Path(shutil.copytree(merged, tmp_path / "data"))


def make_cache(folder: Path, data: Path, key: str = "k" * 32) -> Path:
    """An index cache as pretrain leaves it."""
    cache = folder / key
    cache.mkdir(parents=True)
    (cache / "train-indices.npy").write_bytes(bytes(range(200)))
    splits = json.loads((data / "manifest.json").read_text())["splits"]
    sources = [
        {"split": name, "prefix": os.path.abspath(data / name), "idx_sha256": splits[name]["idx_sha256"], "bin": splits[name][kind]}
        for name, kind in (("train", "bin_sha256"), ("valid", "bin_sample"))
    ]
    files = {"train-indices.npy": {"bytes": 200, "sha256": hashlib.sha256(bytes(range(200))).hexdigest()}}
    (cache / "complete.json").write_text(json.dumps({"format": 1, "sources": sources, "files": files}))
    return cache


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda c: edit_json(c / "complete.json", lambda v: v["sources"][0].update(idx_sha256="0")),
            "complete.json is stale: built from other",
        ),
        (
            lambda c: edit_json(c / "complete.json", lambda v: v["sources"][1].update(bin="0")),
            "complete.json is stale: built from other contents",
        ),
        (
            lambda c: edit_json(c / "complete.json", lambda v: v["sources"][1].update(prefix=v["sources"][1]["prefix"] + "2")),
            "no longer has",
        ),
        (lambda c: flip(c / "train-indices.npy", 100), "train-indices.npy: content differs"),
        (lambda c: cut(c / "train-indices.npy", 1), "train-indices.npy: 199 bytes, complete.json says 200"),
        (lambda c: (c / "train-indices.npy").unlink(), "train-indices.npy is missing"),
        (lambda c: (c / "complete.json").write_text("{"), "complete.json is damaged"),
        (lambda c: (c / "complete.json").write_text('{"format": 1, "sources": [{}], "files": {}}'), "complete.json is damaged"),
    ],
)
def test_a_stale_or_damaged_index_cache_is_found(
    tmp_path: Path, merged: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = make_cache(tmp_path / "caches", merged)
    options = ("--sample", "0", "--index-cache", str(tmp_path / "caches"))
    code, output = verify(merged, capsys, *options)
    assert code == 0 and "1 index caches (0 of other data, 0 unfinished)" in output, output
    damage(cache)
    code, output = verify(merged, capsys, *options)
    assert code == 1 and re.search(f"^fault: .*{said}.*build it again with: python -m data_prep index", output, re.MULTILINE), output


def test_caches_of_other_data_and_unfinished_ones_are_no_fault(
    tmp_path: Path, merged: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_cache(tmp_path / "caches", merged)
    edit_json(make_cache(tmp_path / "caches", data, "o" * 32) / "complete.json", lambda v: v["sources"][0].update(idx_sha256="0"))
    (tmp_path / "caches" / ".building-x").mkdir()
    (tmp_path / "caches" / ".lock").touch()
    code, output = verify(merged, capsys, "--sample", "0", "--index-cache", str(tmp_path / "caches"))
    assert code == 0 and "1 index caches (1 of other data, 1 unfinished)" in output, output


def test_the_cache_that_pretrain_leaves_is_read(tmp_path: Path, merged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """pretrain's own record of the same data, through its own code."""
    from pretrain.data.facts import Contents, SourceContents
    from pretrain.data.index_cache import IndexCache

    splits = json.loads((merged / "manifest.json").read_text())["splits"]
    of = {name: (os.path.abspath(merged / name), splits[name]["idx_sha256"], splits[name]["bin_sha256"]) for name in ("train", "valid")}
    cache = IndexCache(tmp_path / "caches", Contents(tuple(SourceContents(name, *told) for name, told in of.items())), ("seed", 1))
    with cache.building() as building:
        (building / "a.npy").write_bytes(b"indices")
        cache.publish(building)
    options = ("--sample", "0", "--index-cache", str(tmp_path / "caches"))
    code, output = verify(merged, capsys, *options)
    assert code == 0 and "1 index caches" in output, output
    flip(cache.folder / "a.npy", 0)
    assert verify(merged, capsys, *options)[0] == 1
