"""Tests of JSON lines, plain and compressed.

The rows equal those of Python's json. Only bad lines are lost, and damaged streams are read up to
the damage.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from data_prep.sources import Columns, Rows, Span, Unreadable, spans
from data_prep.sources import jsonl as reader
from data_prep.sources.streams import chunks
from tests.data_prep.sources_made import COLUMNS, WHOLE, Read, opened, packed, parts, read_all, row
from tests.wording import Wording

FIRST = b'{"text": "first", "id": "0", "score": 1.5, "meta": {"set": "a"}}'


def after_first(
    path: Path, lines: bytes, columns: Columns = COLUMNS
) -> tuple[list[Read], list[str]]:
    """Return the rows after a valid first line, with places relative to it, and the messages of
    unreadable lines.
    """
    file, start = opened(path, FIRST + b"\n" + lines, columns), len(FIRST) + 1
    first, *others = read_all(file, WHOLE, columns)
    output = [
        part.message
        for part in parts(file, spans(file, columns, WHOLE), columns)
        if isinstance(part, Unreadable)
    ]
    assert first[0] == b"first"
    return [(*other[:-1], other[-1] - start) for other in others], output


# --- against json.loads ---------------------------------------------------------------------------

PIECES = [*'"\\\n\t\x00é東🙂a \u2028\x7f{}[]:,', "word word word "]


def fuzzed_text(random_: random.Random) -> str:
    return "".join(random_.choices(PIECES, k=random_.randrange(30)))


def fuzzed_value(random_: random.Random, depth: int = 0) -> Any:
    kinds: list[Any] = [
        None,
        True,
        0,
        -1,
        10**40,
        1.5,
        -2e-300,
        fuzzed_text(random_),
        {"text": "not this one", "id": "nor this"},
    ]
    if depth < 4:
        kinds.append([fuzzed_value(random_, depth + 1) for _ in range(random_.randrange(3))])
        kinds.append(
            {
                fuzzed_text(random_): fuzzed_value(random_, depth + 1)
                for _ in range(random_.randrange(3))
            }
        )
    return random_.choice(kinds)


def escaped(random_: random.Random, value: Any) -> str:
    """Return JSON in which some characters of a string are escaped without need."""
    ascii_only = random_.random() < 0.5
    if not isinstance(value, str):
        return json.dumps(value)

    def character(sign: str) -> str:
        if random_.random() < 0.1:
            units = sign.encode("utf-16-be").hex()
            return "".join(f"\\u{units[i : i + 4]}" for i in range(0, len(units), 4))
        return json.dumps(sign, ensure_ascii=ascii_only)[1:-1]

    return f'"{"".join(map(character, value))}"'


def fuzzed_line(random_: random.Random) -> bytes:
    items = [
        ("text", fuzzed_text(random_)),
        ("id", random_.choice([fuzzed_text(random_), None, random_.randrange(-(10**20), 10**20)])),
    ]
    items = items[: 2 - (random_.random() < 0.1)] + [
        (fuzzed_text(random_), fuzzed_value(random_)) for _ in range(random_.randrange(4))
    ]
    items += [("text", fuzzed_text(random_))] * (
        random_.random() < 0.1
    )  # the last value of a key is used
    random_.shuffle(items)
    space = random_.choice(["", " ", "\t "])
    pairs = (
        f"{space}{escaped(random_, key)}{space}:{space}{escaped(random_, value)}"
        for key, value in items
    )
    return f"{space}{{{','.join(pairs)}{space}}}{space}".encode()


def expected_rows(content: bytes) -> list[Read]:
    """Return the rows that json.loads gives for the lines."""
    found: list[Read] = []
    place = 0
    for line in content.split(b"\n"):
        if line.strip(b" \t\r"):
            item = json.loads(line.decode("utf-8" if place else "utf-8-sig"))
            identity = item.get("id")
            found.append(
                (item["text"].encode(), None if identity is None else str(identity).encode(), place)
            )
        place += len(line) + 1
    return found


@pytest.mark.parametrize("seed", range(6))
def test_fuzzed_lines_are_read_as_json_reads_them(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    lines = [fuzzed_line(random_) + random_.choice([b"", b"", b"\r"]) for _ in range(300)]
    lines += random_.choices([b"", b"\r", b" \t"], k=20)
    random_.shuffle(lines)
    content = (
        (b"\xef\xbb\xbf" if seed % 2 else b"")
        + b"\n".join([FIRST, *lines])
        + (b"\n" if seed % 3 else b"")
    )
    expected = expected_rows(content)
    for name in ("x.jsonl", "x.jsonl.gz", "x.jsonl.zst"):
        assert read_all(opened(tmp_path / name, packed(name, content))) == expected
    cuts = sorted(random_.sample(range(len(content)), 30))
    cut = [
        Span(start, stop, None, 0)
        for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True)
    ]
    assert read_all(opened(tmp_path / "x.jsonl", content), cut) == expected
    for size in (1, 7, 64, 1000):
        stream = (content[i : i + size] for i in range(0, len(content), size))
        assert [line for _, _, line in reader.lines(stream, 0)] == content.removesuffix(
            b"\n"
        ).split(b"\n")


# --- bad lines ------------------------------------------------------------------------------------

BAD = [
    *b"""{"text": "a"
{"text": "a"} {"text": "b"}
{"text": "a"}null{"text": "b"}
null
[]
12345678901234567890
\x00\x00\x00
{"text": "a\tb"}
{"text": "\\x"}
{"text": 01}
{"id": "1"}
{"text": 3}
{"text": ["a"]}
{"text": "a", "id": 1.5}
{"text": "a", "id": true}""".split(b"\n"),
    b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"\xff\xfe{}",
    b'{"text": "a", "id": "1", "score": "3"}',
]


def test_a_bad_line_is_lost_alone_and_named(tmp_path: Path, wording: Wording) -> None:
    for line in BAD:
        lines = b'{"text": "a", "id": "1"}\n' + line + b'\n{"text": "b", "id": "2"}\n'
        found, (output,) = after_first(tmp_path / "x.jsonl", lines, Columns(extra=("score",)))
        assert found == [
            (b"a", b"1", None, 0),
            (b"b", b"2", None, 26 + len(line)),
            ("malformed", 1, 25),
        ]
        wording(f"{line[:40].decode(errors='replace')} -> {output}")


GOOD: dict[bytes, tuple[bytes | None, bytes | None]] = {
    b'{"text": null, "id": "1"}': (None, b"1"),
    b'{"text": "a", "id": null}': (b"a", None),
    b'{"text": "a"}': (b"a", None),
    b'{"text": "a", "id": -0}': (b"a", b"0"),
    b'{"text": "a", "id": ' + b"9" * 5000 + b', "x": ' + b"9" * 5000 + b"}": (b"a", b"9" * 5000),
    b'{"text": "a", "x": NaN, "y": -Infinity}': (b"a", None),
    b'{"text": "a\\u0000b"}': (b"a\x00b", None),
    b'{"text": "\\ud83d\\ude42"}': ("🙂".encode(), None),
    b'{"text": "a", "text": "b", "id": "1", "id": 2}': (b"b", b"2"),
    b'{"text": ""}': (b"", None),
    b'{"text": "b\xc3\xa9", "id": "1", "url": "\xff\xfe"}': ("bé".encode(), b"1"),
}


def test_lines_that_are_rows(tmp_path: Path) -> None:
    for line, (text, identity) in GOOD.items():
        assert after_first(tmp_path / "x.jsonl", line) == ([(text, identity, 0)], [])


NOT_UTF8 = (
    b"\\ud800|a\\udc00b|\\ude42\\ud83d|\\ud83d\\ud83d\\ude42|a\xff|\xed\xa0\x80|\xc3|\x80\\ud800|"
    b"\x80\\udc80|\\udcc3\\udca9|\xc3\\udca9|\\udcc3\xa9|\xff \\udcc3\\udca9|\xf5"
).split(b"|")


def test_text_that_is_not_utf8_stays_so_and_touches_no_other_row(tmp_path: Path) -> None:
    for text in NOT_UTF8:
        lines = (
            b'{"text": "a", "id": "1"}\n{"id": "2", "text": "'
            + text
            + b'"}\n{"text": "b\xc3\xa9", "id": "3"}\n'
        )
        (before, bad, after), _ = after_first(tmp_path / "x.jsonl", lines)
        assert (before[0], bad[1], after[0]) == (b"a", b"2", "bé".encode())
        with pytest.raises(UnicodeDecodeError):
            bad[0].decode()
    for url in (b"http", b"\xff"):  # escaped surrogates never become UTF-8
        line = (
            b'{"text": "caf\\udcc3\\udca9", "id": "\\udcf0\\udc9f\\udc99\\udc82", "url": "'
            + url
            + b'"}'
        )
        ((text, identity, _),), _ = after_first(tmp_path / "x.jsonl", line)
        assert (text, identity) == tuple(
            output.encode("utf-8", "surrogatepass")
            for output in ("caf\udcc3\udca9", "\udcf0\udc9f\udc99\udc82")
        )


def test_rows_come_in_order_and_bad_lines_after_those_before_them(tmp_path: Path) -> None:
    lines = [json.dumps(row(i, words=3)).encode() if i % 3 else b"bad" for i in range(5000)]
    file = opened(tmp_path / "x.jsonl", FIRST + b"\n" + b"\n".join(lines))
    found = parts(file, spans(file, COLUMNS, WHOLE))
    places = [int(place) for part in found if isinstance(part, Rows) for place in part.places]
    bad = [part.place for part in found if isinstance(part, Unreadable)]
    assert places == sorted(places) and bad == sorted(bad) and len(bad) == 1667


def test_a_line_above_the_limit_is_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 3 << 20)
    big = b'{"id": "1", "text": "' + b"x" * (5 << 20) + b'"}'
    for lines in (big + b'\n{"text": "b"}', b'{"text": "b"}\n' + big):
        found, output = after_first(tmp_path / "x.jsonl", lines)
        assert sorted(found, key=str) == [
            ("malformed", 1, lines.index(big)),
            (b"b", None, lines.index(b'{"text": "b"}')),
        ]
        assert output == ["it is longer than 3 MiB"]


# --- other columns --------------------------------------------------------------------------------


def test_other_columns_have_the_type_of_their_first_value_whatever_the_spans(
    tmp_path: Path,
) -> None:
    def column(name: str, *items: str) -> pa.Array:
        columns, found = Columns(extra=(name,)), []
        lines = "\n".join(f'{{"text": "a", "id": 1{"," * bool(item)}{item}}}' for item in items)
        file = opened(tmp_path / "x.jsonl", lines.encode("utf-8", "surrogateescape"), columns)
        for unit in (WHOLE, 1):
            got = [
                part
                for part in parts(file, spans(file, columns, unit), columns)
                if isinstance(part, Rows)
            ]
            found.append(pa.concat_arrays([part.batch.column(name) for part in got]))
        assert str(found[0]) == str(found[1])
        return found[0]

    numbers = column("v", '"v":null', '"v":3', '"v":1.5', "")
    assert (numbers.type, numbers.to_pylist()) == (pa.float64(), [None, 3.0, 1.5, None])
    assert str(column("v", '"v":NaN', '"v":1e999').to_pylist()) == "[nan, inf]"
    assert column("v", '"v":true', '"v":false').equals(pa.array([True, False]))
    words = column("v", '"v":"en"', '"v":7', '"v":{"b":[1,null,"é"]}', '"v":"\\ud800"')
    assert (words.type, words.to_pylist()) == (
        pa.large_string(),
        ["en", "7", '{"b": ["1", null, "é"]}', "?"],
    )
    nested = column("meta.set", '"meta":{"set":"A"}', '"meta":null', '"meta":{}', '"meta":"x"', "")
    assert nested.to_pylist() == ["A", None, None, None, None]
    assert column("meta.set", '"meta.set":"literal","meta":{"set":"A"}').to_pylist() == ["literal"]
    columns = Columns("doc.body", "doc.id")
    file = opened(tmp_path / "x.jsonl", b'{"doc":{"body":"a","id":5}}\n{"doc":{}}', columns)
    assert read_all(file, WHOLE, columns) == [(b"a", b"5", 0), ("malformed", 1, 28)]
    columns = Columns(id="text", extra=("score", "text"))
    file = opened(tmp_path / "x.jsonl", b'{"text":"a","score":1}\n{"text":"b"}', columns)
    assert read_all(file, WHOLE, columns) == [(b"a", 1.0, 0), (b"b", None, 23)]


# --- packed streams -------------------------------------------------------------------------------


def noisy(number: int) -> bytes:
    """Return lines that compress poorly, so that many bytes precede a truncation."""
    random_ = random.Random(number)
    return (
        b"\n".join(
            json.dumps({"text": random_.randbytes(1000).hex(), "id": str(i)}).encode()
            for i in range(1000)
        )
        + b"\n"
    )


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_streams_are_unpacked_as_they_were_packed_whatever_the_members(
    tmp_path: Path, suffix: str
) -> None:
    """The streams contain empty members, zeros between and after gzip members, and skippable zstd
    frames.
    """
    random_ = random.Random(6)
    for _ in range(60):
        full, contents = b"", []
        for _ in range(random_.randrange(1, 6)):
            contents.append(
                random_.choice([random_.randbytes(3), b"\0", bytes(5)])
                * random_.choice([0, 1, 90, 70_000])
            )
            skipped = struct.pack("<II", 0x184D2A5F, 70_000) + random_.randbytes(70_000)
            between = (
                bytes(random_.choice([0, 0, 1, 5, 70_000]))
                if suffix == "gz"
                else random_.choice([b"", skipped])
            )
            full += packed(f"x.{suffix}", contents[-1]) + between
        (tmp_path / "x").write_bytes(full)
        with (tmp_path / "x").open("rb") as file:
            assert b"".join(chunks(file, f"jsonl.{suffix}")) == b"".join(contents)


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_stream_that_ends_early_is_read_as_far_as_it_goes(
    tmp_path: Path, suffix: str, share: float
) -> None:
    content, name = noisy(1), f"x.jsonl.{suffix}"
    full = packed(name, content)
    *rows, last = read_all(opened(tmp_path / name, full[: int(len(full) * share)]))
    lines = content.split(b"\n")
    assert [text for text, _, _ in rows] == [
        json.loads(line)["text"].encode() for line in lines[: len(rows)]
    ]
    assert (
        last == ("cut_off", 1, sum(len(line) + 1 for line in lines[: len(rows)]))
        and share * len(content) - last[2] < 200_000
    )


def test_damage_within_a_stream_or_behind_it_cuts_the_rest_off(tmp_path: Path) -> None:
    content = noisy(2)
    texts = [json.loads(line)["text"].encode() for line in content.splitlines()]
    for name in ("x.jsonl.gz", "x.jsonl.zst"):
        full = packed(name, content)
        middle = len(full) // 2
        for damaged, least in (
            (full[:middle] + bytes(1000) + full[middle + 1000 :], 400),
            (full + b"garbage behind the end", 998),
        ):
            file = opened(tmp_path / name, damaged)
            *rows, last = read_all(file)
            assert len(rows) >= least or name.endswith("gz")
            assert [text for text, _, _ in rows[:400]] == texts[: min(400, len(rows))] and last[
                :2
            ] == ("cut_off", 1)
            *_, fault = parts(file, spans(file, COLUMNS, 1))
            assert isinstance(fault, Unreadable)
            assert fault.message.startswith(
                f"{file.path} is damaged at byte {last[2]} of its uncompressed content ("
            )
            assert fault.message.endswith("): the rest is lost; fetch or compress it again")
