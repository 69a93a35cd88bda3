"""Temporary signal handlers, and names of signals.

The module uses only the standard library.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def taken(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Handle these signals with ``handler`` inside the block; restore the earlier handlers after
    it.

    Python allows this only in the main thread. If SIGHUP is ignored, for example under nohup, it
    stays ignored.
    """
    silenced = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if not (number == signal.SIGHUP and silenced)
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def signal_name(number: int) -> str:
    """Return the name of a signal, for example ``SIGKILL``.

    Most real-time signals have no name in Python; for those return ``signal 40``.
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
