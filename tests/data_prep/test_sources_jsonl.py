"""JSON lines: the same rows as Python's json gives, bad lines alone lost."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data_prep.sources import Columns, Rows, SourceFile, Span, Unreadable, open_files, spans
from data_prep.sources import jsonl as reader
from data_prep.sources.rows import Drop
from tests.data_prep.sources_made import Read, packed, parts, read_all, row

COLUMNS = Columns()
FIRST = b'{"text": "first", "id": "0", "score": 1.5, "meta": {"set": "a"}}'


def opened(path: Path, content: bytes, columns: Columns = COLUMNS) -> SourceFile:
    """A file of that content."""
    path.write_bytes(content)
    return open_files([str(path)], columns)[0]


def rows_of(path: Path, content: bytes, columns: Columns = COLUMNS) -> list[Read]:
    """All that is read of a file of that content."""
    file = opened(path, content, columns)
    return read_all(file, spans(file, columns, 1 << 40), columns)


def after_first(path: Path, lines: bytes, columns: Columns = COLUMNS) -> list[Read]:
    """What follows a good first line, places counted from there."""
    start = len(FIRST) + 1
    first, *others = rows_of(path, FIRST + b"\n" + lines, columns)
    assert first[0] == b"first"
    return [(*other[:-1], other[-1] - start) for other in others]


def messages(path: Path, lines: bytes, columns: Columns = COLUMNS) -> list[str]:
    """Of the lines after a good one that cannot be read."""
    file = opened(path, FIRST + b"\n" + lines, columns)
    return [part.message for part in parts(file, spans(file, columns, 1 << 40), columns) if isinstance(part, Unreadable)]


# --- against json.loads ---------------------------------------------------------------------------------------------------------------

PIECES = ['"', "\\", "\n", "\t", "\x00", "é", "東", "🙂", "a", " ", "\u2028", "\x7f", "{", "}", "[", "]", ":", ",", "word word word "]


def fuzzed_text(random_: random.Random) -> str:
    return "".join(random_.choices(PIECES, k=random_.randrange(30)))


def fuzzed_value(random_: random.Random, depth: int = 0) -> Any:
    kinds: list[Any] = [None, True, 0, -1, 10**40, 1.5, -2e-300, fuzzed_text(random_)]
    if depth < 4:
        kinds.append([fuzzed_value(random_, depth + 1) for _ in range(random_.randrange(3))])
        kinds.append({fuzzed_text(random_): fuzzed_value(random_, depth + 1) for _ in range(random_.randrange(3))})
        kinds.append({"text": "not this one", "id": "nor this"})
    return random_.choice(kinds)


def escaped(random_: random.Random, text: str) -> str:
    """A JSON string with some characters escaped that need not be."""
    ascii_only = random_.random() < 0.5

    def written(character: str) -> str:
        if random_.random() < 0.1:
            units = character.encode("utf-16-be").hex()
            return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
        return json.dumps(character, ensure_ascii=ascii_only)[1:-1]

    return f'"{"".join(map(written, text))}"'


def fuzzed_line(random_: random.Random) -> bytes:
    items = [("text", fuzzed_text(random_)), ("id", random_.choice([fuzzed_text(random_), None, random_.randrange(-(10**20), 10**20)]))]
    items += [(fuzzed_text(random_), fuzzed_value(random_)) for _ in range(random_.randrange(4))]
    items += [("text", fuzzed_text(random_))] * (random_.random() < 0.1)  # the last of a key's values counts
    if random_.random() < 0.1:
        items = [item for item in items if item[0] != "id"]
    random_.shuffle(items)
    space = random_.choice(["", " ", "\t "])
    pairs = (f"{space}{escaped(random_, key)}{space}:{space}{_written(random_, value)}" for key, value in items)
    return (f"{space}{{{','.join(pairs)}{space}}}{space}").encode()


def _written(random_: random.Random, value: Any) -> str:
    return escaped(random_, value) if isinstance(value, str) else json.dumps(value)


def expected_rows(content: bytes) -> list[Read]:
    """What json.loads says of each line."""
    found: list[Read] = []
    place = 0
    for number, line in enumerate(content.split(b"\n")):
        if line.strip(b" \t\r"):
            item = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
            identity = item.get("id")
            found.append((item["text"].encode(), None if identity is None else str(identity).encode(), place))
        place += len(line) + 1
    return found


@pytest.mark.parametrize("seed", range(6))
def test_fuzzed_lines_are_read_as_json_reads_them(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    lines = [fuzzed_line(random_) + random_.choice([b"", b"", b"\r"]) for _ in range(300)]
    lines += random_.choices([b"", b"\r", b" \t"], k=20)
    random_.shuffle(lines)
    content = (b"\xef\xbb\xbf" if seed % 2 else b"") + b"\n".join([FIRST, *lines]) + (b"\n" if seed % 3 else b"")
    expected = expected_rows(content)
    for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst"):
        assert rows_of(tmp_path / name, packed(name, content)) == expected
    file = opened(tmp_path / "x.jsonl", content)
    cuts = sorted(random_.sample(range(len(content)), 30))
    cut = [Span(start, stop, None, 0) for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    assert read_all(file, cut) == expected


@pytest.mark.parametrize("bytes_", [1, 7, 64, 1000])
def test_rows_do_not_depend_on_how_the_bytes_come(tmp_path: Path, bytes_: int) -> None:
    lines = [json.dumps(row(i, words=i % 7)).encode() for i in range(40)]
    content = b"\n".join(lines)
    stream = (content[i : i + bytes_] for i in range(0, len(content), bytes_))
    assert [line for _, _, line in reader.lines(stream, 0)] == lines


# --- bad lines ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a"', "Expecting ',' delimiter at its character"),
        (b'{"text": "a"} {"text": "b"}', "Extra data"),
        (b'{"text": "a"}null{"text": "b"}', "Extra data"),
        (b"null", "it is null, not an object"),
        (b"[]", "it is a list, not an object"),
        (b"12345678901234567890", "it is a number, not an object"),
        (b"\x00\x00\x00", "Expecting value"),
        (b'{"text": "a\tb"}', "Invalid control character"),
        (b'{"text": "\\x"}', "Invalid \\\\escape"),
        (b'{"text": 01}', "Expecting ',' delimiter"),
        (b'{"id": "1"}', "it has no 'text'"),
        (b'{"text": 3}', "its 'text' is a number, not text"),
        (b'{"text": ["a"]}', "its 'text' is a list, not text"),
        (b'{"text": "a", "id": 1.5}', "its 'id' is a number, neither text nor a whole number"),
        (b'{"text": "a", "id": true}', "its 'id' is true or false, neither text"),
        (b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "it is nested too deep"),
        (b"\xff\xfe{}", "Expecting value"),
    ],
)
def test_a_bad_line_is_lost_alone_and_named(tmp_path: Path, line: bytes, words: str) -> None:
    lines = b'{"text": "a", "id": "1"}\n' + line + b'\n{"text": "b", "id": "2"}\n'
    assert after_first(tmp_path / "x.jsonl", lines) == [
        (b"a", b"1", 0),
        (b"b", b"2", 26 + len(line)),
        ("malformed", 1, 25),
    ]
    (message,) = messages(tmp_path / "x.jsonl", lines)
    assert re.search(words, message)


@pytest.mark.parametrize(
    ("line", "text", "identity"),
    [
        (b'{"text": null, "id": "1"}', None, b"1"),
        (b'{"text": "a", "id": null}', b"a", None),
        (b'{"text": "a"}', b"a", None),
        (b'{"text": "a", "id": 0}', b"a", b"0"),
        (b'{"text": "a", "id": -0}', b"a", b"0"),
        (b'{"text": "a", "id": ' + b"9" * 5000 + b"}", b"a", b"9" * 5000),
        (b'{"text": "a", "x": ' + b"9" * 5000 + b"}", b"a", None),
        (b'{"text": "a", "x": NaN, "y": -Infinity}', b"a", None),
        (b'{"text": "a\\u0000b"}', b"a\x00b", None),
        (b'{"text": "\\ud83d\\ude42"}', "🙂".encode(), None),
        (b'{"text": "a", "text": "b", "id": "1", "id": 2}', b"b", b"2"),
        (b'{"text": ""}', b"", None),
    ],
)
def test_lines_that_are_rows(tmp_path: Path, line: bytes, text: bytes | None, identity: bytes | None) -> None:
    assert after_first(tmp_path / "x.jsonl", line) == [(text, identity, 0)]


@pytest.mark.parametrize(
    "text",
    [
        b"\\ud800",
        b"a\\udc00b",
        b"\\ude42\\ud83d",
        b"\\ud83d\\ud83d\\ude42",
        b"a\xff",
        b"\xed\xa0\x80",
        b"\xc3",
        b"\x80\\ud800",
        b"\x80\\udc80",
        b"\\udcc3\\udca9",
        b"\xc3\\udca9",
        b"\\udcc3\xa9",
        b"\xff \\udcc3\\udca9",
        b"\xf5",
    ],
)
def test_text_that_is_not_utf8_stays_so_and_touches_no_other_row(tmp_path: Path, text: bytes) -> None:
    lines = b'{"text": "a", "id": "1"}\n{"id": "2", "text": "' + text + b'"}\n{"text": "b\xc3\xa9", "id": "3"}\n'
    before, bad, after = after_first(tmp_path / "x.jsonl", lines)
    assert (before[0], bad[1], after[0]) == (b"a", b"2", "bé".encode())
    with pytest.raises(UnicodeDecodeError):
        bad[0].decode()


@pytest.mark.parametrize("url", [b"http", b"\xff"])
def test_escaped_surrogates_never_become_utf8(tmp_path: Path, url: bytes) -> None:
    line = b'{"text": "caf\\udcc3\\udca9", "id": "\\udcf0\\udc9f\\udc99\\udc82", "url": "' + url + b'"}'
    surrogates = ["caf\udcc3\udca9", "\udcf0\udc9f\udc99\udc82"]
    assert after_first(tmp_path / "x.jsonl", line) == [(*(text.encode("utf-8", "surrogatepass") for text in surrogates), 0)]


def test_bytes_that_are_not_utf8_elsewhere_in_a_line_do_no_harm(tmp_path: Path) -> None:
    line = b'{"text": "b\xc3\xa9", "id": "1", "url": "\xff\xfe"}'
    assert after_first(tmp_path / "x.jsonl", line) == [("bé".encode(), b"1", 0)]


def test_rows_come_in_order_and_bad_lines_after_those_before_them(tmp_path: Path) -> None:
    lines = [json.dumps(row(i, words=3)).encode() if i % 3 else b"bad" for i in range(5000)]
    file = opened(tmp_path / "x.jsonl", FIRST + b"\n" + b"\n".join(lines))
    found = parts(file, spans(file, COLUMNS, 1 << 40), COLUMNS)
    places = [part.places for part in found if isinstance(part, Rows)]
    assert [int(place) for some in places for place in some] == sorted(int(place) for some in places for place in some)
    bad = [part.place for part in found if isinstance(part, Unreadable)]
    assert bad == sorted(bad)
    assert len(bad) == 1667
    assert {part.reason for part in found if isinstance(part, Unreadable)} == {Drop.MALFORMED}


def test_a_line_above_the_limit_is_malformed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 3 << 20)
    big = b'{"id": "1", "text": "' + b"x" * (5 << 20) + b'"}'
    for lines in (big + b'\n{"text": "b"}', b'{"text": "b"}\n' + big):
        found = after_first(tmp_path / "x.jsonl", lines)
        assert sorted(map(len, found)) == [3, 3]
        assert ("malformed", 1, lines.index(big)) in found
        assert (b"b", None, lines.index(b'{"text": "b"}')) in found
        assert messages(tmp_path / "x.jsonl", lines) == ["it is longer than 3 MiB"]


# --- other columns --------------------------------------------------------------------------------------------------------------------


def column(path: Path, lines: list[bytes], name: str) -> pa.Array:
    """An extra column, its places and kind checked to be independent of the spans."""
    columns = Columns(extra=(name,))
    file = opened(path, b"\n".join(lines), columns)
    found = []
    for unit in (1 << 40, 1):
        got = [part for part in parts(file, spans(file, columns, unit), columns) if isinstance(part, Rows)]
        found.append(pa.concat_arrays([part.batch.column(name) for part in got]))
    assert found[0].equals(found[1]) or "nan" in str(found[0])
    return found[0]


def test_other_columns_have_the_type_of_their_first_value(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    numbers = column(
        path, [b'{"text":"a","id":1,"v":null}', b'{"text":"a","id":1,"v":3}', b'{"text":"a","id":1,"v":1.5}', b'{"text":"a"}'], "v"
    )
    assert (numbers.type, numbers.to_pylist()) == (pa.float64(), [None, 3.0, 1.5, None])
    truths = column(path, [b'{"text":"a","id":1,"v":true}', b'{"text":"a","v":false}'], "v")
    assert (truths.type, truths.to_pylist()) == (pa.bool_(), [True, False])
    words = [
        b'{"text":"a","id":1,"v":"en"}',
        b'{"text":"a","v":7}',
        b'{"text":"a","v":{"b":[1,null,"\xc3\xa9"]}}',
        b'{"text":"a","v":"\\ud800"}',
    ]
    texts = column(path, words, "v")
    assert (texts.type, texts.to_pylist()) == (pa.large_string(), ["en", "7", '{"b": ["1", null, "é"]}', "?"])
    nans = column(path, [b'{"text":"a","id":1,"v":NaN}', b'{"text":"a","v":1e999}'], "v")
    assert nans.type == pa.float64() and str(nans.to_pylist()) == "[nan, inf]"


def test_a_value_of_another_type_than_the_first_makes_its_line_malformed(tmp_path: Path) -> None:
    columns = Columns(extra=("score",))
    found = after_first(tmp_path / "x.jsonl", b'{"text":"a","id":"1","score":"3"}\n{"text":"b","score":2}', columns)
    assert found == [(b"b", None, 2.0, 34), ("malformed", 1, 0)]
    (message,) = messages(tmp_path / "x.jsonl", b'{"text":"a","id":"1","score":"3"}', columns)
    assert message == "its 'score' is text, not a number as in the first lines"


def test_nested_columns_by_dotted_name(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [
        b'{"id":1,"text":"a","meta":{"set":"A"}}',
        b'{"text":"a","meta":null}',
        b'{"text":"a","meta":{}}',
        b'{"text":"a","meta":"x"}',
        b'{"text":"a"}',
    ]
    assert column(path, lines, "meta.set").to_pylist() == ["A", None, None, None, None]
    lines = [b'{"id":1,"text":"a","meta.set":"literal","meta":{"set":"A"}}']
    assert column(path, lines, "meta.set").to_pylist() == ["literal"]
    nested = Columns(text="doc.body", id="doc.id")
    assert rows_of(path, b'{"doc":{"body":"a","id":5}}\n{"doc":{}}', nested) == [(b"a", b"5", 0), ("malformed", 1, 28)]


def test_text_may_be_the_id(tmp_path: Path) -> None:
    columns = Columns(id="text", extra=("score", "text"))
    assert rows_of(tmp_path / "x.jsonl", b'{"text":"a","score":1}\n{"text":"b"}', columns) == [(b"a", 1.0, 0), (b"b", None, 23)]
