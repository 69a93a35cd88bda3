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
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded now: no import is safe between fork and exec
Handler = Callable[[int, FrameType | None], Any] | signal.Handlers


@contextmanager
def taken(numbers: Iterable[int], handler: Handler) -> Iterator[None]:
    """Install ``handler`` for the signals ``numbers`` inside the block.

    The old handlers are restored after the block. Python allows this only in the main thread. If
    SIGHUP is ignored, for example under nohup, it stays ignored.
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


def prctl(option: int, value: int) -> None:
    """Call prctl on Linux; other systems are left unchanged. Safe between fork and exec.

    Errors are ignored: without support by the kernel, a process only has less protection.
    """
    if sys.platform == "linux":
        _LIBC.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, (value, 0, 0, 0)))
