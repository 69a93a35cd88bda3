"""Signals: handlers for a while, and names. Standard library alone."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def taken(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """``handler`` takes these signals meanwhile, in the main thread. A SIGHUP that nohup has silenced stays so."""
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
    """``SIGKILL``; of a real-time signal, most of which Python has no name for, ``signal 40``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
