"""verify: silent on whole data, and each injected fault named with its file."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from data_prep.indexed import index_bytes, read_index


@pytest.fixture
def data(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "data"))


def rewrite(path: Path, change: Callable[[bytearray], object]) -> None:
    raw = bytearray(path.read_bytes())
    change(raw)
    path.write_bytes(raw)


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def flip(raw: bytearray, at: int) -> None:
    raw[at] ^= 1


def truncate(raw: bytearray, by: int) -> None:
    del raw[-by:]


def edit_manifest(folder: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def rehash(folder: Path, name: str) -> None:
    """Make the manifest agree with the files, so that only what is inside them can tell."""

    def change(manifest: dict) -> None:  # type: ignore[type-arg]
        for kind in ("bin", "idx"):
            raw = (folder / f"{name}.{kind}").read_bytes()
            manifest["splits"][name] |= {f"{kind}_sha256": hashlib.sha256(raw).hexdigest(), f"{kind}_bytes": len(raw)}

    edit_manifest(folder, change)


def test_whole_data_passes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(data)]) == 0
    assert "fault" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: rewrite(d / "train.bin", lambda raw: truncate(raw, 1)), "train.bin: .*truncated"),
        (lambda d: rewrite(d / "train.bin", lambda raw: truncate(raw, 200)), "train.idx does not belong to train.bin"),
        (lambda d: rewrite(d / "train.bin", lambda raw: raw.extend(b"\0\0")), "train.bin: .*too long"),
        (lambda d: rewrite(d / "valid.bin", lambda raw: flip(raw, 50)), "valid.bin: content differs"),
        (lambda d: rewrite(d / "test.idx", lambda raw: flip(raw, 40)), "test.idx: content differs"),
        (lambda d: rewrite(d / "test.idx", lambda raw: truncate(raw, 8)), r"test.idx is \d+ bytes, its header says"),
        (lambda d: swap(d / "train.idx", d / "valid.idx"), "valid.idx does not belong to valid.bin"),
        (lambda d: swap(d / "train.bin", d / "valid.bin"), "train.idx does not belong to train.bin"),
        (lambda d: (d / "valid.idx").unlink(), "valid.idx is missing"),
        (lambda d: rewrite(d / "tokenizer" / "tokenizer.json", lambda raw: raw.extend(b"\n")), "tokenizer.json: content differs"),
        (lambda d: shutil.rmtree(d / "tokenizer"), "no such folder: .*tokenizer"),
        (lambda d: edit_manifest(d, lambda m: m.update(dtype="int32")), "ids are uint16, the manifest says int32"),
        (lambda d: edit_manifest(d, lambda m: m["tokenizer"].update(eod_id=5)), "EOD is 0, the manifest says 5"),
        (lambda d: edit_manifest(d, lambda m: m["splits"]["train"].update(documents=7)), "the manifest says 7 and"),
    ],
)
def test_fault_is_found_and_named(data: Path, damage: Callable[[Path], object], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    damage(data)
    assert main(["verify", str(data)]) == 1
    output = capsys.readouterr().out
    assert re.search(f"fault: .*{said}", output), output


def _replace_last_eod(folder: Path) -> None:
    ids = np.fromfile(folder / "test.bin", dtype="<u2")
    ids[-1] = 9
    ids.tofile(folder / "test.bin")


def _foreign_id(folder: Path) -> None:
    ids = np.fromfile(folder / "test.bin", dtype="<u2")
    ids[0] = 320
    ids.tofile(folder / "test.bin")


def _shift_boundaries(folder: Path) -> None:
    lengths = read_index(folder / "test.idx").lengths.copy()
    lengths[:2] += np.array([1, -1], dtype=np.int32)
    (folder / "test.idx").write_bytes(index_bytes(lengths, "uint16"))


def _shift_pointer(folder: Path) -> None:
    index = read_index(folder / "test.idx")
    rewrite(folder / "test.idx", lambda raw: flip(raw, 34 + 4 * len(index.lengths) + 8))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_replace_last_eod, "EOD stands"),
        (_foreign_id, "1 ids lie outside the vocabulary"),
        (_shift_boundaries, "1 documents do not end in EOD"),
        (_shift_pointer, "lengths and pointers disagree"),
    ],
)
def test_fault_that_no_hash_shows_is_found(
    data: Path, damage: Callable[[Path], None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(data)
    rehash(data, "test")
    assert main(["verify", str(data)]) == 1
    output = capsys.readouterr().out
    assert said in output and "content differs" not in output, output
