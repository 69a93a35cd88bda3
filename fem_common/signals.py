"""Helpers for signals: temporary handlers, signal names, and Linux ``prctl``.

The module uses only the standard library.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PDEATHSIG, SUBREAPER, PTRACER = 1, 36, 0x59616D61  # from <linux/prctl.h>
_LIBC = ctypes.CDLL(None, use_errno=True)  # loading a library is not safe between fork and exec
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def taken(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Install ``handler`` for the signals ``numbers`` inside the block.

    The old handlers are restored after the block. Python allows this only in the main thread. If
    SIGHUP is ignored, for example under nohup, it stays ignored.
    """
    hangup_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    before: dict[int, Any] = {}
    try:
        for number in numbers:
            if number != signal.SIGHUP or not hangup_ignored:
                before[number] = signal.signal(number, handler)
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


def prctl(option: int, value: int) -> None:
    """Call prctl on Linux; do nothing on other systems. Safe between fork and exec.

    Errors are ignored: on a kernel without the option, the process runs without its protection.
    """
    if sys.platform == "linux":
        _LIBC.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, (value, 0, 0, 0)))
