"""Ways to damage a data folder, and ``verify`` as a function."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from data_prep.__main__ import main
from data_prep.store.indexed import index_bytes, read_index, sample_digest
from tests.data_prep.units_made import edit_json


def change(path: Path, how: Callable[[bytearray], object]) -> None:
    """Change a file's bytes."""
    raw = bytearray(path.read_bytes())
    how(raw)
    path.write_bytes(raw)


def flip(path: Path, at: int) -> None:
    """Flip a bit."""
    change(path, lambda raw: raw.__setitem__(at, raw[at] ^ 1))


def cut(path: Path, by: int) -> None:
    """Take bytes off the end."""
    change(path, lambda raw: raw.__delitem__(slice(-by, None)))


def swap(one: Path, other: Path) -> None:
    """Exchange two files' contents."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def swap_pairs(one: Path, other: Path) -> None:
    """Exchange two pairs."""
    for kind in ("bin", "idx"):
        swap(one.with_name(f"{one.name}.{kind}"), other.with_name(f"{other.name}.{kind}"))


def pair_entry(folder: Path, name: str) -> dict[str, object]:
    """What can be said of a pair from its bytes alone."""
    said: dict[str, object] = {}
    for kind in ("bin", "idx"):
        raw = (folder / f"{name}.{kind}").read_bytes()
        said |= {f"{kind}_sha256": hashlib.sha256(raw).hexdigest(), f"{kind}_bytes": len(raw)}
    return said


def reseal(folder: Path, name: str) -> None:
    """Make the manifest agree with a pair's bytes, so that only what is inside them can tell."""
    said = pair_entry(folder, name) | {"bin_sample": sample_digest(folder / f"{name}.bin")}
    edit_json(folder / "manifest.json", lambda manifest: manifest["splits"][name].update(said))


def remake_index(folder: Path, name: str, how: Callable[[npt.NDArray[np.int32]], object]) -> None:
    """Write an .idx of changed lengths."""
    lengths = read_index(folder / f"{name}.idx").lengths.copy()
    how(lengths)
    (folder / f"{name}.idx").write_bytes(index_bytes(lengths, "uint16"))


def set_id(path: Path, at: int, value: int) -> None:
    """Put another id in a .bin."""
    set_ids(path, {at: value})


def set_ids(path: Path, values: dict[int, int]) -> None:
    """Put other ids in a .bin."""
    ids = np.fromfile(path, dtype="<u2")
    for at, value in values.items():
        ids[at] = value
    ids.tofile(path)


def remove(*paths: Path) -> None:
    """Remove files."""
    for path in paths:
        path.unlink()


def verify(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit code and output of ``verify``."""
    capsys.readouterr()
    code = main(["verify", str(folder), *options])
    return code, capsys.readouterr().out
