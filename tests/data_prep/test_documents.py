"""Tests of the conversion of rows to documents.

The result equals plain Python on fuzzed rows for any batches. Further tests cover splits and
user-defined masks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_prep.encode.documents import (
    BAD_ROWS_LISTED,
    Selection,
    Settings,
    add_settings_arguments,
    settings_of,
)
from data_prep.encode.splits import SPLITS, Split, fitting, hash64, hash_ids
from data_prep.prepared.records import read
from data_prep.sources import Rows
from data_prep.sources.rows import BadRow, Drop
from fem_common.errors import UserError
from tests.data_prep import conftest as base

PIECES = "plain |é|東京|🙂|\x00|\U0010ffff|\ud7ff\ue000\uffff".encode().split(b"|")
# A lone surrogate, half of one, an overlong NUL and slash, beyond U+10FFFF, truncated,
# a stray continuation, latin-1.
BROKEN = (
    b"\xed\xa0\x80|\xed\xbf\xbf|\xc0\x80|\xe0\x80\xaf|\xf4\x90\x80\x80|\xf0\x9f\x98|\x80|caf\xe9|\xff"
).split(b"|")


@dataclass(frozen=True)
class Row:
    """Row before its conversion to Arrow."""

    place: int
    text: bytes | None
    id: bytes | None
    score: float | None = None
    language: str | None = None


def fuzz(number: int, seed: int = 0, broken: float = 0.15) -> list[Row]:
    """Return rows of every kind.

    Some are empty, null, not UTF-8, or without id, score or language, and some have several faults.
    """
    random_ = random.Random(seed)

    def text() -> bytes | None:
        kind = random_.random()
        if kind < 0.1:
            return None if kind < 0.05 else b""
        parts = random_.choices(PIECES, k=random_.randint(1, 12))
        if random_.random() < broken:
            parts.insert(random_.randint(0, len(parts)), random_.choice(BROKEN))
        return b"".join(parts)

    def maybe(value: Any) -> Any:
        return None if random_.random() < 0.1 else value

    scores, languages = [0.5, 2.5, 3.0, math.nan], ["en", "fr", "EN"]
    return [
        Row(
            7 * i,
            text(),
            maybe(f"id-{seed}-{i}".encode()),
            maybe(random_.choice(scores)),
            maybe(random_.choice(languages)),
        )
        for i in range(number)
    ]


def arrow(rows: list[Row], form: str = "plain") -> Rows:
    """Convert rows to the form of sources. ``sliced``: as a slice of a longer batch."""
    sliced = form == "sliced"
    rows = [rows[0], *rows] if sliced else rows
    kinds = {
        "text": pa.large_binary(),
        "id": pa.large_binary(),
        "score": pa.float64(),
        "language": pa.string(),
    }
    columns = {
        name: pa.array([getattr(row, name) for row in rows], kind) for name, kind in kinds.items()
    }
    return Rows(
        np.array([row.place for row in rows], np.int64)[sliced:],
        pa.RecordBatch.from_pydict(columns).slice(int(sliced)),
    )


def batch_of(**columns: Any) -> Rows:
    """Return rows with these columns, and with default texts and ids if they are not given."""
    number = len(next(iter(columns.values())))
    columns = {"text": ["a"] * number, "id": [str(i) for i in range(number)]} | columns
    columns |= {name: pa.array(columns[name]).cast(pa.large_binary()) for name in ("text", "id")}
    return Rows(np.arange(number) * 10, pa.RecordBatch.from_pydict(columns))


def is_utf8(text: bytes) -> bool:
    return text.decode(errors="ignore").encode() == text


def verdict(row: Row, settings: Settings) -> Drop | None:
    """Return the first reason that applies to a row, or None. This is the reference definition."""
    size = len(row.text or b"")
    language = settings.languages and row.language not in settings.languages
    holds = {
        Drop.NULL_TEXT: row.text is None,
        Drop.EMPTY_TEXT: not row.text,
        Drop.INVALID_UTF8: not is_utf8(row.text or b""),
        Drop.NULL_ID: settings.id_column == "id" and row.id is None,
        Drop.ABOVE_MAX_BYTES: size > settings.max_bytes,
        Drop.BELOW_MIN_BYTES: size < settings.min_bytes,
        Drop.BELOW_MIN_SCORE: settings.min_score is not None
        and not (row.score or 0) >= settings.min_score,
        Drop.OTHER_LANGUAGE: language,
    }
    return next((reason for reason, held in holds.items() if held), None)


ALL_FILTERS = Settings(
    min_score=2.5,
    languages=("en", "EN"),
    min_bytes=12,
    max_bytes=60,
    valid_percent=20,
    test_percent=30,
)
SETTINGS = {
    "none": Settings(valid_percent=30, test_percent=10),
    "all": ALL_FILTERS,
    "text as id": replace(ALL_FILTERS, id_column="text", min_bytes=0, languages=()),
    "one split": Settings(min_bytes=10, max_bytes=40, valid_percent=0, test_percent=0),
}


RARELY = (("none", "batches"), ("one split", "batches"))


@pytest.mark.parametrize(
    ("form", "name"),
    [
        pytest.param(form, name, marks=[pytest.mark.slow] if (name, form) in RARELY else [])
        for form in ("plain", "sliced", "all valid", "batches")
        for name in SETTINGS
    ],
)
def test_every_row_is_one_document_or_one_drop(name: str, form: str) -> None:
    settings = SETTINGS[name]
    rows = fuzz(2000, seed=1, broken=0.0 if form == "all valid" else 0.15)
    random_ = random.Random(3)
    cuts = []
    if form == "batches":  # some are empty
        cuts = sorted(random_.choices(range(len(rows) + 1), k=700))
    selection = Selection(settings)
    found = list[tuple[Any, ...]]()
    dropped = Counter[Drop]()
    bad = list[BadRow]()
    for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        full = arrow(rows, form) if form != "batches" else arrow(rows)
        documents, reasons, bads = selection.of(
            Rows(full.places[start:stop], full.batch.slice(start, stop - start))
        )
        assert documents.texts.type == pa.large_string() and documents.ids.type == pa.large_binary()
        documents.texts.validate(full=True)
        columns = (
            documents.texts.to_pylist(),
            documents.ids.to_pylist(),
            documents.splits.tolist(),
            documents.places.tolist(),
        )
        found += zip(*columns, strict=True)
        assert documents.text_bytes == sum(len(text.encode()) for text in columns[0])
        dropped, bad = dropped + reasons, bad + bads
    verdicts = [verdict(row, settings) for row in rows]
    kept = [row for row, reason in zip(rows, verdicts, strict=True) if reason is None]
    texts = [row.text or b"" for row in kept]
    ids = texts if settings.id_column == "text" else [row.id or b"" for row in kept]
    splits = [SPLITS.index(settings.split.of(document_id)) for document_id in ids]
    places = [row.place for row in kept]
    decoded = [text.decode() for text in texts]
    assert found == list(zip(decoded, ids, splits, places, strict=True))
    assert 100 < len(kept) < len(rows)
    assert dropped == Counter(reason for reason in verdicts if reason) and all(dropped.values())
    expected = [
        (row.place, reason)
        for row, reason in zip(rows, verdicts, strict=True)
        if reason and not reason.requested
    ]
    listed = [(row.place, row.reason) for row in bad[:BAD_ROWS_LISTED]]
    assert listed == expected[:BAD_ROWS_LISTED] and len(expected) > BAD_ROWS_LISTED
    assert form == "batches" or len(bad) == BAD_ROWS_LISTED


def test_every_invalid_sequence_is_found_and_no_valid_one() -> None:
    """All sequences of two bytes, and sequences near the limits of three and four bytes, agree with
    Python's decoder.
    """
    texts = [bytes([a, b]) for a in range(0x70, 256) for b in range(256)]
    texts += [
        bytes([a, b, c])
        for a in range(0xE0, 0xF0)
        for b in range(0x7E, 0xC2)
        for c in (0x7F, 0x80, 0xBF, 0xC0)
    ]
    texts += [
        bytes([a, b, 0x80, c])
        for a in range(0xEF, 0xF6)
        for b in range(0x7E, 0xC2)
        for c in (0x7F, 0x80, 0xBF, 0xC0)
    ]
    documents, dropped, _ = Selection(Settings()).of(
        arrow([Row(i, text, b"id") for i, text in enumerate(texts)])
    )
    expected = [i for i, text in enumerate(texts) if is_utf8(text)]
    assert (
        documents.places.tolist() == expected
        and dropped == {Drop.INVALID_UTF8: len(texts) - len(expected)}
        and expected
    )


def test_bad_rows_state_what_is_wrong_and_a_row_at_a_limit_is_in() -> None:
    rows = [
        Row(10, b"good", b"1"),
        Row(20, b"caf\xe9 au lait", b"2"),
        Row(30, b"abcd", None),
        Row(40, b"four", b"3"),
        Row(50, b"fivee", b"4"),
    ]
    documents, dropped, bad = Selection(Settings(min_bytes=4, max_bytes=4)).of(arrow(rows))
    assert bad == [
        BadRow(20, Drop.INVALID_UTF8, "byte 3: invalid continuation byte"),
        BadRow(30, Drop.NULL_ID),
    ]
    assert documents.places.tolist() == [10, 40] and dropped[Drop.ABOVE_MAX_BYTES] == 1


SCORES = [
    [1, 3, None],
    pa.array([1.0, 3.0, None], pa.float32()),
    ["1", "3e0", "three"],
    ["", "3", None],
]


def test_a_filter_takes_a_column_of_any_type_that_can_be_read_so() -> None:
    for scores in SCORES:
        documents, dropped, bad = Selection(Settings(min_score=2, score_column="rating")).of(
            batch_of(rating=pa.array(scores))
        )
        assert documents.places.tolist() == [10] and (dropped, bad) == (
            {Drop.BELOW_MIN_SCORE: 2},
            [],
        )
    for column in (pa.nulls(2), pa.array([True, False]), pa.array([1.5, None])):
        rows = batch_of(
            score=pa.array([True, None]) if column.null_count < 2 else column, language=column
        )
        assert Selection(Settings(languages=("en",))).of(rows)[1] == {Drop.OTHER_LANGUAGE: 2}
        assert Selection(Settings(min_score=0)).of(rows)[1] == {Drop.BELOW_MIN_SCORE: 2}
        assert Selection(Settings()).of(rows)[1] == {}


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shares",
    [(0, 0), (2, 2), (0, 5), (5, 0), (1e-9, 1e-12), (33.333, 66.666), (99.999999, 0), (12.5, 25)],
)
def test_split_of_hashes_is_split_of_ids_to_the_last_bit(
    shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    split, random_ = Split(*shares), random.Random(5)
    borders = [
        int(share / 100 * 2**64)
        for share in (split.test_percent, split.test_percent + split.valid_percent)
    ]
    hashes = {0, 1, 2**63, 2**64 - 1} | {
        border + step for border in borders for step in range(-3000, 3000)
    }
    inside = sorted(value for value in hashes if 0 <= value < 2**64) + [
        random_.randrange(2**64) for _ in range(2000)
    ]
    expected = []
    for value in inside:
        monkeypatch.setattr("data_prep.encode.splits.hash64", lambda _, value=value: value)
        expected.append(split.of(b""))
    assert [SPLITS[index] for index in split.of_hashes(np.array(inside, np.uint64))] == expected
    assert set(split.names) >= set(expected)


def test_hashes_are_hash64_of_each_id() -> None:
    ids = [b"", b"a", "é".encode(), bytes(1000), b"doc-1"]
    for purpose in (b"", b"tokenizer"):
        for array in (
            pa.array(ids, pa.large_binary()),
            pa.array([b"x", b"y", *ids, b"z"], pa.large_binary())[2:7],
        ):
            assert hash_ids(array, purpose).tolist() == [hash64(value, purpose) for value in ids]
    assert hash64(b"doc-1") == 0x56F47A285F34F541  # a split must never move between versions
    assert hash_ids(pa.array([], pa.large_binary())).tolist() == []


def test_the_shares_that_fit_leave_no_split_empty() -> None:
    random_ = np.random.default_rng(3)
    for _ in range(200):
        hashes = random_.integers(0, 2**64, size=random_.integers(3, 2000), dtype=np.uint64)
        split = Split(*random_.choice([0.0, 0.001, 0.05, 2.0, 30.0], size=2).tolist())
        found = fitting(split, hashes)
        assert found or len(hashes) < 20
        if found:
            assert len(np.unique(found.of_hashes(hashes))) == len(found.names) == len(split.names)
            assert (
                found.valid_percent >= split.valid_percent
                and found.test_percent >= split.test_percent
            )


# --- settings and masks ---------------------------------------------------------------------------


def parse(*options: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    return settings_of(parser.parse_args(base.words_of(*options)))


def test_options_become_settings() -> None:
    assert parse() == Settings() and Settings().columns.extra == ()
    settings = parse(
        "--text-column t --id-column i --score-column s --min-score 2.5 --language-column l",
        "--language en --language fr --language en",
        "--min-bytes 3 --max-bytes 9 --valid-percent 1 --test-percent 0",
    )
    assert settings == Settings(
        "t", "i", "s", "l", 2.5, ("en", "fr"), 3, 9, valid_percent=1.0, test_percent=0.0
    )
    assert (settings.columns.text, settings.columns.id, settings.columns.extra) == (
        "t",
        "i",
        ("s", "l"),
    )
    assert read(Settings, json.loads(json.dumps(settings.as_json()))) == settings
    assert Settings(
        min_score=1, languages=("en",), score_column="x", language_column="x"
    ).columns.extra == ("x",)


DEDUPLICATE = """
from pathlib import Path
import pyarrow as pa
import pyarrow.compute as pc

files, columns, seen = ("duplicates.txt",), ("url", "id"), []
listed = Path(__file__).with_name("duplicates.txt").read_text().split()
duplicates = pa.array(listed, pa.large_string())

def keep(batch, places, path):
    kinds = [str(kind) for kind in batch.schema.types]
    seen.append((batch.to_pydict(), kinds, places.tolist(), places.dtype.name, path))
    return pc.invert(pc.is_in(batch.column("id"), value_set=duplicates))
"""


def masked(folder: Path, code: str, *options: str) -> Settings:
    """Return the settings of a command line with --mask."""
    (folder / "mask.py").write_text(code)
    return parse(f"--mask {folder}/mask.py:keep", *options)


def test_a_mask_sees_the_rows_that_all_else_lets_pass_and_the_columns_it_wants(
    tmp_path: Path,
) -> None:
    (tmp_path / "duplicates.txt").write_text("id-4 id-99")
    settings = masked(tmp_path, DEDUPLICATE, "--min-bytes 2")
    assert settings.columns.extra == ("url",)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "duplicates.txt",
        "mask.py",
    ]  # the filter leaves only this file
    texts = pa.array([b"one", None, b"\xff\xff", b"2", b"three", b"four"], pa.large_binary())
    ids = pa.array([b"\xff1", b"id-1", b"id-2", b"id-3", b"id-4", b"id-5"], pa.large_binary())
    selection = Selection(settings)
    documents, dropped, bad = selection.of(
        batch_of(text=texts, id=ids, url=pa.array(["u0", "u1", "u2", "u3", "bad", "u5"])),
        "x.parquet",
    )
    assert (
        documents.texts.to_pylist() == ["one", "four"]
        and documents.ids.to_pylist() == [b"\xff1", b"id-5"]
        and len(bad) == 2
    )
    assert dropped == {
        Drop.NULL_TEXT: 1,
        Drop.INVALID_UTF8: 1,
        Drop.BELOW_MIN_BYTES: 1,
        Drop.MASKED: 1,
    }
    assert selection.mask is not None
    ((batch, kinds, *where),) = selection.mask.function.__globals__["seen"]
    assert batch == {
        "url": ["u0", "bad", "u5"],
        "id": ["\ufffd1", "id-4", "id-5"],
        "text": ["one", "three", "four"],
    }
    assert dict(zip(batch, kinds, strict=True)) == {
        "url": "string",
        "id": "large_string",
        "text": "large_string",
    }
    assert where == [[0, 40, 50], "int64", "x.parquet"]


def test_text_as_id_and_no_rows_left_for_the_mask(tmp_path: Path) -> None:
    code = (
        "import pyarrow as pa\ndef keep(batch, places, path):\n    assert len(places)\n    return "
        "pa.array([v > 'b' for v in batch['text'].to_pylist()])\n"
    )
    selection = Selection(masked(tmp_path, code, "--id-column text"))
    assert selection.of(batch_of(text=[b"a", b"c"]))[0].ids.to_pylist() == [b"c"]
    assert selection.of(batch_of(text=pa.array([None, b""], pa.binary())))[1] == {
        Drop.NULL_TEXT: 1,
        Drop.EMPTY_TEXT: 1,
    }
    for answer in (
        "np.array([True, False, True])",
        "pa.array([True, False, True])",
        "pa.chunked_array([[True], [False, True]])",
    ):
        code = (
            "import numpy as np\nimport pyarrow as pa\ndef keep(batch, places, path):\n    "
            f"return {answer}\n"
        )
        documents, dropped, _ = Selection(masked(tmp_path, code)).of(batch_of(text=["a", "b", "c"]))
        assert documents.texts.to_pylist() == ["a", "c"] and dropped == {Drop.MASKED: 1}


def test_the_masks_hash_covers_what_it_reads_and_a_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "duplicates.txt").write_text("id-1")
    settings = masked(tmp_path, DEDUPLICATE)
    assert settings.mask_sha256 == masked(tmp_path, DEDUPLICATE).mask_sha256
    assert "mask.py" not in str(settings.deciding()) and settings.deciding()["mask"] == "keep"
    for name, other in (("duplicates.txt", "id-2"), ("mask.py", DEDUPLICATE + "\n")):
        before = (tmp_path / name).read_text()
        (tmp_path / name).write_text(other)
        with pytest.raises(
            UserError, match=r"mask.py \(--mask\) or a file it names has changed since"
        ):
            Selection(settings)
        (tmp_path / name).write_text(before)
        assert Selection(read(Settings, settings.as_json())).mask is not None
