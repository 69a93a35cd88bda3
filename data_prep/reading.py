"""data_prep: the progress line of work that is counted in bytes of known files. Nothing here knows what is read."""

from __future__ import annotations

from types import TracebackType
from typing import TextIO

from data_prep.progress import LiveLine, duration, size


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
