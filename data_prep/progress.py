"""data_prep: one live line on a terminal, a line a minute in a log. Nothing here knows what is being done."""

from __future__ import annotations

import time
from typing import TextIO

TERMINAL_SECONDS = 0.2
LOG_SECONDS = 60.0


def duration(seconds: float) -> str:
    """Seconds as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def count(number: float) -> str:
    """A number with its magnitude: 950, 12.3k, 4.56M, 1.2B."""
    for size, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.0f}"


class Progress:
    """Documents, MB/s, tokens and time left, written to ``stream`` (usually stderr)."""

    def __init__(self, total_documents: int, stream: TextIO) -> None:
        self.total = total_documents
        self.stream = stream
        self.live = stream.isatty()
        self.started = self.shown = time.monotonic()

    def update(self, documents: int, text_bytes: int, tokens: int | None) -> None:
        """Show the counts reached so far (tokens where they are known), unless a line was shown a moment ago."""
        now = time.monotonic()
        if now - self.shown < (TERMINAL_SECONDS if self.live else LOG_SECONDS):
            return
        self.shown = now
        elapsed = now - self.started
        left = elapsed * (self.total - documents) / max(documents, 1)
        rate = text_bytes / 1e6 / elapsed
        known = "" if tokens is None else f" · {count(tokens)} tokens"
        line = f"{documents:,}/{self.total:,} documents · {rate:.1f} MB/s{known} · {duration(left)} left"
        self.stream.write(f"\r\x1b[K{line}" if self.live else f"{line}\n")
        self.stream.flush()

    def close(self) -> float:
        """Clear the live line; seconds since the start."""
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()
        return time.monotonic() - self.started
