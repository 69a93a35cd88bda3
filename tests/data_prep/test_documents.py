"""Rows to documents: equal to plain Python on fuzzed rows, whatever the batches; settings that make no sense are refused."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_prep.encode.documents import BAD_ROWS_LISTED, Selection, Settings, add_settings_arguments, settings_of
from data_prep.encode.splits import SPLITS, Split, hash64, hash_ids
from data_prep.sources import Rows
from data_prep.sources.rows import BadRow, Drop
from fem_common.errors import UserError

# Invalid: a lone surrogate, half of one, an overlong NUL and slash, past U+10FFFF, cut short, a stray continuation, latin-1.
PIECES: list[bytes] = [
    b"plain ",
    "é".encode(),
    "東京".encode(),
    "🙂".encode(),
    b"\x00",
    "\U0010ffff".encode(),
    "\ud7ff\ue000\uffff".encode(),
]
BROKEN = [
    b"\xed\xa0\x80",
    b"\xed\xbf\xbf",
    b"\xc0\x80",
    b"\xe0\x80\xaf",
    b"\xf4\x90\x80\x80",
    b"\xf0\x9f\x98",
    b"\x80",
    b"caf\xe9",
    b"\xff",
]


@dataclass(frozen=True)
class Row:
    """A row before it is Arrow's."""

    place: int
    text: bytes | None
    id: bytes | None
    score: float | None
    language: str | None


def fuzz(number: int, seed: int = 0, broken: float = 0.15) -> list[Row]:
    """Rows of every kind: some empty, null, not UTF-8, without id, without score or language, some of them with several faults."""
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

    return [
        Row(
            7 * i,
            text(),
            maybe(f"id-{seed}-{i}".encode()),
            maybe(random_.choice([0.5, 2.5, 3.0, math.nan])),
            maybe(random_.choice(["en", "fr", "EN"])),
        )
        for i in range(number)
    ]


def arrow(rows: list[Row], dictionary: bool = False, sliced: bool = False) -> Rows:
    """Rows as sources give them; ``sliced``: as a view into a longer batch."""
    rows = [rows[0], *rows] if sliced else rows
    columns: dict[str, pa.Array] = {
        "text": pa.array([row.text for row in rows], pa.large_binary()),
        "id": pa.array([row.id for row in rows], pa.large_binary()),
        "score": pa.array([row.score for row in rows], pa.float64()),
        "language": pa.array([row.language for row in rows], pa.string()),
    }
    if dictionary:
        columns = {name: column.dictionary_encode() for name, column in columns.items()}
    batch = pa.RecordBatch.from_pydict(columns)
    return Rows(np.array([row.place for row in rows], np.int64)[sliced:], batch.slice(int(sliced)))


def verdict(row: Row, settings: Settings) -> Drop | None:
    """The definition: the first reason that holds."""
    document_id = row.text if settings.id_column == "text" else row.id
    if row.text is None:
        return Drop.NULL_TEXT
    if not row.text:
        return Drop.EMPTY_TEXT
    try:
        row.text.decode()
    except UnicodeDecodeError:
        return Drop.INVALID_UTF8
    if document_id is None:
        return Drop.NULL_ID
    if len(row.text) > settings.max_bytes:
        return Drop.ABOVE_MAX_BYTES
    if len(row.text) < settings.min_bytes:
        return Drop.BELOW_MIN_BYTES
    if settings.min_score is not None and (row.score is None or not row.score >= settings.min_score):
        return Drop.BELOW_MIN_SCORE
    if settings.languages and row.language not in settings.languages:
        return Drop.OTHER_LANGUAGE
    return None


ALL_FILTERS = Settings(min_score=2.5, languages=("en", "EN"), min_bytes=12, max_bytes=60, valid_percent=20, test_percent=30)
SETTINGS = {
    "none": Settings(valid_percent=30, test_percent=10),
    "score": Settings(min_score=3.0),
    "language": Settings(languages=("en",)),
    "bytes": Settings(min_bytes=10, max_bytes=40),
    "all": ALL_FILTERS,
    "text as id": replace(ALL_FILTERS, id_column="text", min_bytes=0),
    "one split": Settings(valid_percent=0, test_percent=0),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("form", ["plain", "dictionary", "sliced", "all valid"])
def test_every_row_is_one_document_or_one_drop(name: str, form: str) -> None:
    settings = SETTINGS[name]
    rows = fuzz(2000, seed=1, broken=0.0 if form == "all valid" else 0.15)
    documents, dropped, bad = Selection(settings).of(arrow(rows, dictionary=form == "dictionary", sliced=form == "sliced"))
    verdicts = [verdict(row, settings) for row in rows]
    kept = [row for row, reason in zip(rows, verdicts, strict=True) if reason is None]
    assert 100 < len(kept) < len(rows)
    ids = [row.text if settings.id_column == "text" else row.id for row in kept]
    assert documents.texts.type == pa.large_string() and documents.ids.type == pa.large_binary()
    assert documents.texts.null_count == 0
    documents.texts.validate(full=True)
    assert documents.texts.to_pylist() == [(row.text or b"").decode() for row in kept]
    assert documents.ids.to_pylist() == ids
    assert documents.places.tolist() == [row.place for row in kept]
    assert [SPLITS[split] for split in documents.splits] == [settings.split.of(document_id or b"") for document_id in ids]
    assert documents.text_bytes == sum(len(row.text or b"") for row in kept)
    assert dropped == Counter(reason for reason in verdicts if reason)
    assert all(dropped.values())
    expected = [(row.place, reason) for row, reason in zip(rows, verdicts, strict=True) if reason and not reason.asked_for]
    assert [(row.place, row.reason) for row in bad] == expected[:BAD_ROWS_LISTED]


@pytest.mark.parametrize("name", ["all", "none"])
def test_batches_make_no_difference(name: str) -> None:
    rows, selection, random_ = fuzz(600, seed=2), Selection(SETTINGS[name]), random.Random(3)
    texts, ids, splits, places, dropped, bad = [], [], [], [], Counter[Drop](), []
    at = 0
    while at < len(rows):
        step = random_.choice([1, 1, 2, 3, 50])
        documents, reasons, bads = selection.of(arrow(rows[at : at + step], sliced=random_.random() < 0.5))
        texts += documents.texts.to_pylist()
        ids += documents.ids.to_pylist()
        splits += documents.splits.tolist()
        places += documents.places.tolist()
        dropped += reasons
        bad += bads
        at += step
    whole, reasons, bads = selection.of(arrow(rows))
    assert (texts, ids) == (whole.texts.to_pylist(), whole.ids.to_pylist())
    assert (splits, places) == (whole.splits.tolist(), whole.places.tolist())
    assert dropped == reasons
    assert bad[:BAD_ROWS_LISTED] == bads and len(bads) == BAD_ROWS_LISTED


def test_no_row_at_all() -> None:
    for rows in (Rows(np.empty(0, np.int64), arrow(fuzz(1)).batch.slice(1)), arrow([Row(0, None, b"a", 3.0, "en")])):
        documents, dropped, _ = Selection(ALL_FILTERS).of(rows)
        assert (len(documents.texts), len(documents.ids), len(documents.splits), len(documents.places)) == (0, 0, 0, 0)
        assert documents.text_bytes == 0
        assert dropped.total() == len(rows.places)


def test_every_invalid_sequence_is_found_and_no_valid_one() -> None:
    """All sequences of two bytes, and around the borders of three and four: Python's decoder is the judge."""
    texts = [bytes([a, b]) for a in range(0x70, 256) for b in range(256)]
    texts += [bytes([a, b, c]) for a in range(0xE0, 0xF0) for b in range(0x7E, 0xC2) for c in (0x7F, 0x80, 0xBF, 0xC0)]
    texts += [bytes([a, b, 0x80, c]) for a in range(0xEF, 0xF6) for b in range(0x7E, 0xC2) for c in (0x7F, 0x80, 0xBF, 0xC0)]
    rows = [Row(i, text, b"id", None, None) for i, text in enumerate(texts)]
    documents, dropped, _ = Selection(Settings()).of(arrow(rows))
    expected = [i for i, text in enumerate(texts) if text.decode(errors="ignore").encode() == text]
    assert 0 < len(expected) < len(texts)
    assert documents.places.tolist() == expected
    assert dropped == {Drop.INVALID_UTF8: len(texts) - len(expected)}


def test_bad_rows_say_what_is_wrong() -> None:
    rows = [Row(10, b"good", b"1", None, None), Row(20, b"caf\xe9 au lait", b"2", None, None), Row(30, b"a", None, None, None)]
    _, _, bad = Selection(Settings()).of(arrow(rows))
    assert bad == [BadRow(20, Drop.INVALID_UTF8, "byte 3: invalid continuation byte"), BadRow(30, Drop.NULL_ID)]


@pytest.mark.parametrize("kind", [pa.int8(), pa.int64(), pa.uint64(), pa.string(), pa.large_string(), pa.binary()])
def test_ids_of_every_kind_hash_as_their_text(kind: pa.DataType) -> None:
    values = [1, 22, 103]
    ids = pa.array([value if pa.types.is_integer(kind) else str(value) for value in values], kind)
    batch = pa.RecordBatch.from_pydict({"text": pa.array(["a", "b", "c"]), "id": ids})
    documents, _, _ = Selection(Settings(valid_percent=40, test_percent=40)).of(Rows(np.arange(3), batch))
    assert documents.ids.to_pylist() == [b"1", b"22", b"103"]


SCORES = [[1, 3, None], pa.array([1.0, 3.0, None], pa.float32()), ["1", "3e0", "three"], pa.array(["", "3", None]).dictionary_encode()]


@pytest.mark.parametrize("column", [pa.array(scores) for scores in SCORES], ids=lambda column: str(column.type))
def test_score_of_any_number_type(column: pa.Array) -> None:
    batch = pa.RecordBatch.from_pydict({"text": ["a"] * len(column), "id": ["b"] * len(column), "rating": column})
    selection = Selection(Settings(min_score=2, score_column="rating"))
    documents, dropped, bad = selection.of(Rows(np.arange(len(column)), batch))
    assert documents.places.tolist() == [1]
    assert (dropped, bad) == ({Drop.BELOW_MIN_SCORE: 2}, [])


def test_columns_that_no_filter_can_use() -> None:
    columns = {"text": ["a", "b"], "id": ["1", "2"], "score": pa.array([[1.0], [2.0]]), "language": pa.array([["en"], None])}
    batch = pa.RecordBatch.from_pydict(columns)
    for settings, said in (
        (Settings(min_score=1), "column 'score' is list<.*>, not a number; name the score's column with --score-column"),
        (Settings(languages=("en",)), "column 'language' is list<.*>, not text; name it with --language-column"),
    ):
        with pytest.raises(UserError, match=said):
            Selection(settings).of(Rows(np.arange(2), batch))
    for column in (pa.array([True, False]), pa.array([1.5, None])):
        batch = pa.RecordBatch.from_pydict(columns | {"score": pa.array([True, None]), "language": column})
        assert Selection(Settings(languages=("en",))).of(Rows(np.arange(2), batch))[1] == {Drop.OTHER_LANGUAGE: 2}
        assert Selection(Settings(min_score=0)).of(Rows(np.arange(2), batch))[1] == {Drop.BELOW_MIN_SCORE: 2}


def test_column_of_nulls_alone_passes_no_filter() -> None:
    batch = pa.RecordBatch.from_pydict({"text": ["a", "b"], "id": ["1", "2"], "score": pa.nulls(2), "language": pa.nulls(2)})
    for settings, reason in ((Settings(min_score=-1e9), Drop.BELOW_MIN_SCORE), (Settings(languages=("en",)), Drop.OTHER_LANGUAGE)):
        assert Selection(settings).of(Rows(np.arange(2), batch))[1] == {reason: 2}
    assert Selection(Settings()).of(Rows(np.arange(2), batch))[1] == {}


# --- splits --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(0, 0), (2, 2), (0, 5), (5, 0), (1e-9, 1e-12), (33.333, 66.666), (99.999999, 0), (12.5, 25)])
def test_split_of_hashes_is_split_of_ids_to_the_last_bit(shares: tuple[float, float], monkeypatch: pytest.MonkeyPatch) -> None:
    split = Split(*shares)
    borders = [int(share / 100 * 2**64) for share in (split.test_percent, split.test_percent + split.valid_percent)]
    hashes = {0, 1, 2**63, 2**64 - 1} | {border + step for border in borders for step in range(-3000, 3000)}
    inside = sorted(value for value in hashes if 0 <= value < 2**64)
    inside += [random.Random(5).randrange(2**64) for _ in range(2000)]
    expected = []
    for value in inside:
        monkeypatch.setattr("data_prep.encode.splits.hash64", lambda _, value=value: value)
        expected.append(split.of(b""))
    assert [SPLITS[index] for index in split.of_hashes(np.array(inside, np.uint64))] == expected
    assert set(split.names) >= set(expected)


def test_hashes_are_hash64_of_each_id() -> None:
    ids = [b"", b"a", "é".encode(), bytes(1000), b"doc-1"]
    for purpose in (b"", b"tokenizer"):
        for array in (pa.array(ids, pa.large_binary()), pa.array([b"x", b"y", *ids, b"z"], pa.large_binary())[2:7]):
            assert hash_ids(array, purpose).tolist() == [hash64(value, purpose) for value in ids]
    assert hash64(b"doc-1") == 0x56F47A285F34F541  # a split must never move between versions
    assert hash_ids(pa.array([], pa.large_binary())).tolist() == []


# --- settings ------------------------------------------------------------------------------------------------------------------------


def parse(*options: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    return settings_of(parser.parse_args(options))


def test_options_become_settings() -> None:
    assert parse() == Settings()
    options = "--text-column t --id-column i --score-column s --min-score 2.5 --language-column l --language en --language fr --language en"
    more = "--min-bytes 3 --max-bytes 9 --valid-percent 1 --test-percent 0"
    settings = parse(*options.split(), *more.split())
    assert settings == Settings("t", "i", "s", "l", 2.5, ("en", "fr"), 3, 9, valid_percent=1.0, test_percent=0.0)
    assert (settings.columns.text, settings.columns.id, settings.columns.extra) == ("t", "i", ("s", "l"))
    assert Settings.from_json(json.loads(json.dumps(settings.as_json()))) == settings
    assert Settings().columns.extra == ()
    assert Settings(min_score=1, languages=("en",), score_column="x", language_column="x").columns.extra == ("x",)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--min-score nan", "--min-score is nan; it must be a finite number"),
        ("--min-bytes -1", "--min-bytes is -1; it must be at least 0"),
        ("--max-bytes 0", "--max-bytes is 0; it must be at least 1"),
        ("--min-bytes 10 --max-bytes 9", "--max-bytes is 9; it must be at least --min-bytes, 10"),
        ("--valid-percent -1", "--valid-percent is -1.0; it must be at least 0 and below 100"),
        ("--test-percent inf", "--test-percent is inf"),
        ("--valid-percent 60 --test-percent 40", "leave nothing to train on"),
        ("--language=", "--language is empty"),
        ("--text-column=", "--text-column is empty; name a column"),
        ("--mask dedup.py", "--mask is 'dedup.py'; it must be FILE.py:FUNCTION"),
    ],
)
def test_nonsense_is_refused_in_one_line(options: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        parse(*options.split())
    assert "\n" not in str(raised.value)
