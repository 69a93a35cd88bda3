"""Progress display of long work: one live line on a terminal (tqdm), or regular lines in a log."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any, TextIO

from fem_common.text import count, duration

TERMINAL_SECONDS, LOG_SECONDS = 0.2, 60.0
_bars: list[Any] = []  # tqdm's bars of the live lines of this process


def print_above(text: str) -> None:
    """Print ``text`` to stdout above the live lines of this process, if it has any."""
    # external_write_mode removes tqdm's lines from the terminal while the block prints.
    with _bars[-1].external_write_mode() if _bars else nullcontext():
        print(text, flush=True)


class Progress:
    """Display of progress, rate and remaining time; a context manager that closes the display.

    total: amount of work in ``unit``s, None if unknown.
    quiet: show no lines (--quiet, --json).
    stream: output stream; None means stderr.
    """

    def __init__(
        self,
        total: float | None,
        unit: str,
        title: str = "",
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        every: float = LOG_SECONDS,
    ) -> None:
        self.total = total
        self.unit = unit
        self.title = title
        self.done = 0.0
        self.stream = sys.stderr if stream is None else stream
        self.live = not quiet and self.stream.isatty()
        self.quiet, self.every = quiet, TERMINAL_SECONDS if self.live else every
        self.started = self.shown = time.monotonic()
        self._bar: Any = None

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return max(time.monotonic() - self.started, 1e-9)

    @property
    def left(self) -> float | None:
        """Estimated remaining seconds at the average rate so far; None if unknown."""
        return (
            self.elapsed * max(self.total - self.done, 0) / self.done
            if self.total is not None and self.done
            else None
        )

    @property
    def due(self) -> bool:
        """True if enough time has passed since the last line and the display is not quiet."""
        return not self.quiet and time.monotonic() - self.shown >= self.every

    def advance(self, step: float = 1, note: str = "") -> None:
        """Add ``step`` to the finished amount, and show a line if one is due."""
        self.update(self.done + step, note)

    def update(self, done: float, note: str = "") -> None:
        """Set the finished amount to ``done``, and show a line if one is due."""
        self.done = done
        if self.due:
            self.show(self.line(note))

    def line(self, note: str = "") -> str:
        """Return the progress line without printing it.

        Example: ``title: 1.2M of 3M tokens · 40% · 12k/s · note · 3m 05s left``.
        """
        of = "" if self.total is None else f" of {count(self.total)}"
        share = "" if not self.total else f"{100 * min(self.done / self.total, 1):.0f}%"
        left = "" if self.left is None else f"{duration(self.left)} left"
        parts = (
            f"{count(self.done)}{of} {self.unit}",
            share,
            f"{count(self.done / self.elapsed)}/s",
            note,
            left,
        )
        return (f"{self.title}: " if self.title else "") + " · ".join(filter(None, parts))

    def show(self, line: str) -> None:
        """Print ``line``; on a terminal it replaces the previous line.

        Errors of a closed terminal are ignored, so that the work continues.
        """
        self.shown = time.monotonic()
        if self.quiet:
            return
        with suppress(OSError, ValueError):
            if self.live:
                if self._bar is None:
                    from tqdm import tqdm

                    self._bar = tqdm(
                        file=self.stream, bar_format="{desc}", dynamic_ncols=True, leave=False
                    )
                    _bars.append(self._bar)
                self._bar.set_description_str(line)
            else:
                print(line, file=self.stream, flush=True)

    def close(self) -> float:
        """Clear the live line and return the seconds since the start."""
        with suppress(OSError, ValueError):
            if self._bar in _bars:
                _bars.remove(self._bar)
                self._bar.close()
        return self.elapsed

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
