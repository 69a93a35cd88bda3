"""Tests of a rank's log above its size limit: it keeps its first and last quarter, and readers
continue.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.node import logs
from launch.node.failures import Findings, last_stamp
from launch.node.logs import Line, Scribe, Source, Tail

LIMIT = 8000
LEFT_OUT = re.compile(r"\[launch\] (\d+) bytes left out: a log keeps its first and its last 0 MiB")


def numbers(lines: Sequence[Line]) -> list[int]:
    """Return the numbers in lines "line N ...", without markers."""
    return [int(line.text.split()[1]) for line in lines if not LEFT_OUT.fullmatch(line.text)]


def test_a_log_keeps_its_first_and_its_last_quarter_and_followers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seeds with about 10 replacements each. One follower reads after every write, one
    occasionally, one starts in the middle.
    """
    monkeypatch.setattr(logs, "LOG_BYTES", LIMIT)
    real = os.write
    for seed in range(5):
        chance, path = random.Random(seed), tmp_path / f"{seed}.log"
        source = Source(path, "a")
        scribe, always, seldom, late = (
            Scribe(path, (), Findings()),
            Tail(source),
            Tail(source),
            Tail(source),
        )
        seen, followed, joined = list[Line](), list[Line](), list[Line]()
        said = [f"line {number} {'x' * chance.randrange(150)}" for number in range(500)]
        data = "".join(f"{text}\n" for text in said).encode()
        half = len(data) // 2

        def write(file: int, view: memoryview) -> int:
            """Write a part of the bytes; followers read before the rest is written."""
            count = real(file, view[: chance.randrange(1, 400)])  # noqa: B023
            seen.extend(always.read())  # noqa: B023
            if chance.random() < 0.004:  # noqa: B023
                followed.extend(seldom.read())  # noqa: B023
            return count

        monkeypatch.setattr(os, "write", write)
        while data:
            scribe.feed(data[: (size := chance.randrange(1, 600))])
            data = data[size:]
            assert path.stat().st_size <= LIMIT
            if chance.random() < 0.02 or not data:
                followed += seldom.read()
                now = numbers(list(source.lines()))
                # Every line that is still in the log was also given.
                assert not {*now} - {*numbers(followed)}
            if half and len(data) < half:
                late.skip_to_last(5)
                half = 0
            if not half:
                joined += late.read()
        # No line that was read in time is missing, and no marker is given.
        assert [line.text for line in seen] == said
        given = numbers(followed)
        # Each line once, plus markers.
        assert given == sorted({*given}) and len(given) < len(followed)
        assert numbers(joined) == list(range(numbers(joined)[0], 500)) and numbers(joined)[0] > 200
        lines = list(source.lines())
        assert [line.time for line in lines] == sorted(line.time for line in lines)
        kept = numbers(lines)
        (at,) = [index for index, line in enumerate(lines) if LEFT_OUT.fullmatch(line.text)]
        gone = range(at, kept[at])
        assert kept == [*range(at), *range(kept[at], 500)]
        told = LEFT_OUT.fullmatch(lines[at].text)
        stamped = [len(f"1795296019.584 {text}\n") for text in said]
        assert told and int(told[1]) == sum(stamped[number] for number in gone)
        assert LIMIT / 4 - max(stamped) < sum(stamped[:at]) <= LIMIT / 4 and sum(
            stamped[kept[at] :]
        ) > LIMIT / 4 - max(stamped)
        assert last_stamp(path) == lines[-1].time and scribe.lost == 0
    assert sorted(tmp_path.iterdir()) == sorted(tmp_path.glob("?.log"))


def test_a_log_that_a_person_truncated_or_made_private_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LOG_BYTES", LIMIT)
    path = tmp_path / "a.log"
    scribe, tail, got = Scribe(path, (), Findings()), Tail(Source(path, "a")), list[Line]()
    for number in range(1000):
        if number == 250:
            os.truncate(path, 0)
            path.chmod(0o600)
        scribe.feed(b"line %d\n" % number)
        got += tail.read()
        if number == 500:
            # The log does not exceed the limit, so no line is removed.
            assert numbers(list(Source(path, "a").lines())) == list(range(250, 501))
    assert numbers(got) == list(range(1000))
    assert LEFT_OUT.search(path.read_text()) and path.stat().st_mode & 0o777 == 0o600


def test_a_reader_that_stopped_anywhere_continues_there_after_a_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader stops after each byte of the log; others start with its last lines but read them
    after the replacement.
    """
    monkeypatch.setattr(logs, "LOG_BYTES", 800)
    path = tmp_path / "a.log"
    scribe, source = Scribe(path, (), Findings()), Source(path, "a")
    for number in range(20):  # 40 bytes per line: the next line exceeds the limit
        scribe.feed(b"line %019d\n" % number)
    whole = path.read_bytes()
    readers = list[tuple[int, Tail]]()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        readers.append((size // 40, Tail(source)))
        assert numbers(readers[-1][1].read()) == list(range(size // 40))
    for count, block in itertools.product((1, 10, 19, 20), (1, 39, 1000)):
        monkeypatch.setattr(logs, "_BLOCK", block)
        readers.append((20 - count, Tail(source)))
        readers[-1][1].skip_to_last(count)
    scribe.feed(b"line %019d\n" % 20)
    for begin, tail in readers:
        assert numbers(tail.read()) == [
            number for number in (*range(5), *range(16, 21)) if number >= begin
        ]


@pytest.mark.parametrize("refuses", ["fsync", "replace"])
def test_a_disk_that_refuses_to_shorten_a_log_costs_no_line(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs, "LOG_BYTES", LIMIT)
    path = tmp_path / "a.log"
    scribe = Scribe(path, (), Findings())
    with monkeypatch.context() as full:
        full.setattr(os, refuses, refuse)
        for number in range(600):
            scribe.feed(b"line %d\n" % number)
    assert (
        numbers(list(Source(path, "a").lines())) == list(range(600)) and path.stat().st_size > LIMIT
    )
    for number in range(600, 1000):
        scribe.feed(b"line %d\n" % number)
    kept = numbers(list(Source(path, "a").lines()))
    assert path.stat().st_size <= LIMIT and kept[0] == 0 and kept[-1] == 999 and scribe.lost == 0
    assert [*tmp_path.iterdir()] == [path]


def test_a_log_that_is_replaced_while_it_is_read_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates NFS, where a file that another host has replaced can no longer be read."""

    class Stale:
        """Path of a log whose first file fails after some lines."""

        def __init__(self) -> None:
            self.opened = 0

        def open(self, _: str) -> Any:
            self.opened += 1
            return Failing(path) if self.opened == 1 else path.open("rb")

    class Failing:
        """An open log that is replaced after 20 lines."""

        def __init__(self, path: Path) -> None:
            self.file = path.open("rb")
            self.fileno = self.file.fileno

        def __enter__(self) -> Failing:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def __iter__(self) -> Iterator[bytes]:
            for _ in range(20):
                yield self.file.readline()
            for number in range(300, 600):
                scribe.feed(b"line %d\n" % number)
            raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(logs, "LOG_BYTES", LIMIT)
    path = tmp_path / "a.log"
    scribe = Scribe(path, (), Findings())
    for number in range(300):
        scribe.feed(b"line %d\n" % number)
    stale: Any = Stale()
    got = numbers(list(Source(stale, "a").lines()))
    assert (
        got == numbers(list(Source(path, "a").lines()))
        and got[0] == 0
        and got[-1] == 599
        and len(got) < 600
    )
