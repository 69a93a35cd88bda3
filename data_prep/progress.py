"""data_prep: one live line on a terminal, a line a minute in a log. Nothing here knows what is being done."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TextIO

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
