"""data_prep: one live line on a terminal, a line a minute in a log. Nothing here knows what is being done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TextIO

from data_prep.sources.rows import Drop, Tally
from data_prep.store.layout import Unit
from data_prep.store.manifest import UnitEntry

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 60.0


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(of: int, what: str) -> str:
    """How many there are of what: 1 unit, 2,000 units."""
    return f"{of:,} {what}{'s' * (of != 1)}"


def count(number: float) -> str:
    """A number with its magnitude: 950, 12.3k, 4.56M, 1.2B."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """Bytes with their magnitude: 950 B, 12.3 kB, 4.56 MB, 1.2 GB, 3 TB."""
    for unit, suffix in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:.3g} {suffix}"
    return f"{number:.0f} B"


class LiveLine:
    """A line that is written over on a terminal, and written once a minute elsewhere; ``stream`` is usually stderr."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.live = stream.isatty()
        self.started = self.shown = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def due(self) -> bool:
        """Whether it is time for another line."""
        return time.monotonic() - self.shown >= (TERMINAL_SECONDS if self.live else LOG_SECONDS)

    def show(self, line: str) -> None:
        """Write the line."""
        self.shown = time.monotonic()
        self._write(f"\r\x1b[K{line}" if self.live else f"{line}\n")

    def close(self) -> float:
        """Clear the live line; seconds since the start."""
        if self.live:
            self._write("\r\x1b[K")
        return self.elapsed

    def _write(self, text: str) -> None:
        with suppress(OSError):  # a terminal that was closed must not end the work before its signal does
            self.stream.write(text)
            self.stream.flush()


class Progress:
    """Documents, MB/s, tokens and time left of work on ``total_bytes`` bytes (about) of text or of files."""

    def __init__(self, total_bytes: int, stream: TextIO) -> None:
        self.total = total_bytes
        self.line = LiveLine(stream)

    def update(self, documents: int, done_bytes: int, tokens: int | None) -> None:
        """Show the counts reached so far (tokens where they are known), unless a line was shown a moment ago."""
        if not self.line.due:
            return
        elapsed, done = self.line.elapsed, min(done_bytes, self.total)
        left = elapsed * (self.total - done) / max(done, 1)
        known = "" if tokens is None else f" · {count(tokens)} tokens"
        share = f"{100 * done / max(self.total, 1):.0f}%"
        self.line.show(f"{documents:,} documents · {done_bytes / 1e6 / elapsed:.1f} MB/s{known} · {share} · {duration(left)} left")

    def close(self) -> float:
        """Clear the live line; seconds since the start."""
        return self.line.close()


def summary(documents: int, rate: float, tokens: int, dropped: int, share: float, seconds_left: float | None) -> str:
    """How far encoding is, in one line; ``rate``: bytes of text a second, ``share``: done of all text, 0 to 1."""
    left = "" if seconds_left is None else f" · {duration(seconds_left)} left"
    return f"{documents:,} documents · {rate / 1e6:.1f} MB/s · {count(tokens)} tokens · {dropped:,} dropped · {100 * share:.1f}%{left}"


class Reading:
    """Bytes read so far of ``total``, MB/s and time left; ``what`` begins the line and may change. Leaving it clears the line."""

    def __init__(self, what: str, total: int, stream: TextIO) -> None:
        self.what, self.total, self.done = what, total, 0
        self.line = LiveLine(stream)

    def advance(self, number: int) -> None:
        """So many more bytes are read; show it, unless a line was shown a moment ago."""
        self.done += number
        if self.line.due:
            rate = self.done / self.line.elapsed
            left = duration(max(self.total - self.done, 0) / max(rate, 1e-9))
            self.line.show(f"{self.what} · {size(self.done)} of {size(self.total)} · {rate / 1e6:,.0f} MB/s · {left} left")

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.line.close()


class Board:
    """What a run shows: the units that are done, those in work, and the time left. ``entries``: those done at the start."""

    def __init__(self, entries: dict[Unit, UnitEntry], units: Iterable[Unit]) -> None:
        self.entries = entries
        self.total = sum(unit.text_bytes for unit in units)
        self.line = LiveLine(sys.stderr)
        self.at_start = self.read = sum(unit.text_bytes for unit in entries)
        self.finished = tally_of(entries.values())
        self.working: dict[Unit, tuple[int, Tally]] = {}

    def step(self, unit: Unit, read: int, tally: Tally) -> None:
        """A unit in work has got so far."""
        self.working[unit] = min(read, unit.text_bytes), tally

    def done(self, unit: Unit, entry: UnitEntry) -> None:
        """A unit's entry is written."""
        self.working.pop(unit, None)
        self.entries[unit] = entry
        self.finished += tally_of([entry])
        self.read += unit.text_bytes

    def tick(self) -> None:
        """Show the line if it is time."""
        if self.line.due:
            self.line.show(self.state())

    def state(self) -> str:
        """How far all is, units in work included."""
        done = self.read + sum(read for read, _ in self.working.values())
        rate = (done - self.at_start) / self.line.elapsed
        total = Tally()
        for tally in (self.finished, *(tally for _, tally in self.working.values())):
            total += tally
        left = (self.total - done) / rate if rate else None
        return summary(total.documents, rate, total.tokens, total.dropped.total(), done / max(self.total, 1), left)

    def result(self) -> str:
        """What the units done come to, in a line; the rate is this run's."""
        total, seconds = self.finished, self.line.elapsed
        rate = (self.read - self.at_start) / 1e6 / seconds
        rows = f"{total.rows:,} rows = {total.documents:,} documents + {total.dropped.total():,} dropped"
        return f"{counted(len(self.entries), 'unit')} done: {rows}, {count(total.tokens)} tokens; {duration(seconds)}, {rate:.1f} MB/s"


def tally_of(entries: Iterable[UnitEntry]) -> Tally:
    """The counts of units together."""
    total = Tally()
    for entry in entries:
        splits = entry.splits.values()
        total.rows += entry.rows
        total.documents += entry.documents
        total.tokens += sum(split.tokens for split in splits)
        total.text_bytes += sum(split.text_bytes for split in splits)
        total.dropped.update({Drop(reason): number for reason, number in entry.dropped.items()})
    return total
