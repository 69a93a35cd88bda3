"""Tests of the file of document ids: one line per id with any content, found by number and id
across block boundaries.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from data_prep.prepared.document_ids import IdsWriter, line_of, lines_at, numbers_of
from tests.data_prep import conftest as base

IDS = [
    b"a",
    b"",
    b"two\nlines",
    b"two\\nlines",
    "東京".encode(),
    b"\xff",
    b"a",
    *(b"<urn:%d>" % number for number in range(50)),
    b"a",
]


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_a_document_is_found_by_number_and_by_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("data_prep.prepared.document_ids.BLOCK_BYTES", block)
    path = tmp_path / "train.ids"
    writer = IdsWriter(path)
    writer.add(IDS[:3])
    writer.add(IDS[3:])
    output, raw = writer.finish(), path.read_bytes()
    assert (output.bytes, output.sha256) == (len(raw), hashlib.sha256(raw).hexdigest())
    lines = raw.decode().split("\n")
    assert (
        lines[:8] == ["a", "", r"two\nlines", r"two\\nlines", "東京", r"\xff", "a", "<urn:0>"]
        and lines.pop() == ""
    )
    assert lines_at(path, range(100)) == dict(enumerate(lines)) and lines_at(path, [57, 2]) == {
        2: lines[2],
        57: "a",
    }
    for document_id in IDS:
        assert numbers_of(path, line_of(document_id)) == [
            number for number, each in enumerate(IDS) if each == document_id
        ]
    assert numbers_of(path, b"<urn:5") == numbers_of(path, b"urn:5>") == []


def test_texts_that_are_their_own_ids_are_not_written_twice(
    tmp_path: Path, rows: Path, tokenizer: Path
) -> None:
    options = f"{base.SMALL_UNITS} --id-column text"
    out = base.prepared(tmp_path / "data", [rows], tokenizer, options)
    assert not list(out.glob("*.ids")) and base.cli("verify", out).returncode == 0
