"""Tests of a rank's log above its size limit: it keeps its first and last quarter, and readers
continue.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.node import logs
from launch.node.failures import Findings, last_stamp
from launch.node.logs import Line, Scribe, Source, Tail

LIMIT = 8000
LEFT_OUT = re.compile(r"\[launch\] (\d+) bytes left out: a log keeps its first and its last 0 MiB")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the test's log, with a limit of `LIMIT` bytes."""
    monkeypatch.setattr(logs, "LOG_BYTES", LIMIT)
    return tmp_path / "a.log"


def scribe_of(path: Path) -> Scribe:
    """Return a scribe that hides no secrets."""
    return Scribe(path, (), Findings())


def feed(scribe: Scribe, numbers: Iterable[int]) -> None:
    """Write the lines "line N"."""
    for number in numbers:
        scribe.feed(b"line %d\n" % number)


def numbers(lines: Iterable[Line]) -> list[int]:
    """Return the numbers in lines "line N ...", without markers."""
    return [int(line.text.split()[1]) for line in lines if not LEFT_OUT.fullmatch(line.text)]


def kept(path: Path) -> list[int]:
    """Return the numbers of the lines that a log contains."""
    return numbers(Source(path, "a").lines())


def test_a_log_keeps_its_first_and_its_last_quarter_and_followers_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five seeds with about 10 replacements each. One follower reads after every write, one
    occasionally, one starts in the middle.
    """
    real = os.write
    for seed in range(5):
        chance, path = random.Random(seed), tmp_path / f"{seed}.log"
        source = Source(path, "a")
        scribe, (always, seldom, late) = scribe_of(path), (Tail(source) for _ in range(3))
        seen = list[Line]()
        followed = list[Line]()
        joined = list[Line]()
        output = [f"line {number} {'x' * chance.randrange(150)}" for number in range(500)]
        data = "".join(f"{text}\n" for text in output).encode()
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
                # Every line that is still in the log was also given.
                assert not {*kept(path)} - {*numbers(followed)}
            if half and len(data) < half:
                late.skip_to_last(5)
                half = 0
            if not half:
                joined += late.read()
        # No line that was read in time is missing, and no marker is given.
        assert [line.text for line in seen] == output
        given = numbers(followed)
        # Each line once, plus markers.
        assert given == sorted({*given}) and len(given) < len(followed)
        assert numbers(joined) == list(range(numbers(joined)[0], 500)) and numbers(joined)[0] > 200
        lines = list(source.lines())
        assert [line.time for line in lines] == sorted(line.time for line in lines)
        left = numbers(lines)
        (at,) = [index for index, line in enumerate(lines) if LEFT_OUT.fullmatch(line.text)]
        gone = range(at, left[at])
        assert left == [*range(at), *range(left[at], 500)]
        report = LEFT_OUT.fullmatch(lines[at].text)
        stamped = [len(f"1795296019.584 {text}\n") for text in output]
        assert report and int(report[1]) == sum(stamped[number] for number in gone)
        least = LIMIT / 4 - max(stamped)
        assert least < sum(stamped[:at]) <= LIMIT / 4 and sum(stamped[left[at] :]) > least
        assert last_stamp(path) == lines[-1].time and scribe.lost == 0
    assert sorted(tmp_path.iterdir()) == sorted(tmp_path.glob("?.log"))


def test_a_log_that_a_person_truncated_or_made_private_stays_so(path: Path) -> None:
    scribe = scribe_of(path)
    tail = Tail(Source(path, "a"))
    got = list[Line]()
    for number in range(1000):
        if number == 250:
            os.truncate(path, 0)
            path.chmod(0o600)
        feed(scribe, [number])
        got += tail.read()
        if number == 500:
            # The log does not exceed the limit, so no line is removed.
            assert kept(path) == list(range(250, 501))
    assert numbers(got) == list(range(1000))
    assert LEFT_OUT.search(path.read_text()) and path.stat().st_mode & 0o777 == 0o600


def test_a_reader_that_stopped_anywhere_continues_there_after_a_replacement(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader stops after each byte of the log; others start with its last lines but read them
    after the replacement.
    """
    monkeypatch.setattr(logs, "LOG_BYTES", 800)
    scribe, source = scribe_of(path), Source(path, "a")
    for number in range(20):  # 40 bytes per line: the next line exceeds the limit
        scribe.feed(b"line %019d\n" % number)
    full = path.read_bytes()
    readers = list[tuple[int, Tail]]()
    for size in range(len(full) + 1):
        path.write_bytes(full[:size])
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


def test_the_last_lines_of_a_file_with_progress_bars(path: Path) -> None:
    """A carriage return ends no line, and an unfinished line is not one of the last lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"first\nsecond\n1%\r2%\r3%\nunfinished")
    tail = Tail(Source(path, "a"))
    tail.skip_to_last(2)
    with path.open("ab") as file:
        file.write(b" until now\n")
    assert [line.text for line in tail.read()] == ["second", "1%\r2%\r3%", "unfinished until now"]


@pytest.mark.parametrize("refuses", ["fsync", "replace"])
def test_a_disk_that_refuses_to_shorten_a_log_costs_no_line(
    refuses: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    scribe = scribe_of(path)
    with monkeypatch.context() as full:
        full.setattr(os, refuses, refuse)
        feed(scribe, range(600))
    assert kept(path) == list(range(600)) and path.stat().st_size > LIMIT
    feed(scribe, range(600, 1000))
    left = kept(path)
    assert path.stat().st_size <= LIMIT and left[0] == 0 and left[-1] == 999 and scribe.lost == 0
    assert [*path.parent.iterdir()] == [path]


def test_a_log_that_is_replaced_while_it_is_read_is_read_to_its_end(path: Path) -> None:
    """Simulates NFS, where a file that another host has replaced can no longer be read."""
    scribe, opened = scribe_of(path), list[bool]()
    feed(scribe, range(300))

    class Stale(io.FileIO):
        """A log whose first file is replaced after 20 lines."""

        def __iter__(self) -> Iterator[bytes]:
            for _ in range(20):
                yield self.readline()
            feed(scribe, range(300, 600))
            raise OSError(errno.ESTALE, "Stale file handle")

    class Place:
        """Path of the log."""

        def open(self, mode: str) -> Any:
            opened.append(True)
            return Stale(path) if len(opened) == 1 else path.open(mode)

    place: Any = Place()
    got = kept(place)
    assert got == kept(path) and got[0] == 0 and got[-1] == 599 and len(got) < 600
