"""The signals of a training process: SIGTERM and SIGUSR1 ask it to stop, SIGUSR2 makes it show where it is. No torch."""

from __future__ import annotations

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

STOP = (signal.SIGTERM, signal.SIGUSR1)
_STDERR = 2


@contextmanager
def noted() -> Iterator[list[int]]:
    """SIGTERM and SIGUSR1 are noted in the list, not obeyed, however often they come; a process that blocks them gets them from here on.

    On SIGUSR2 all threads' Python stacks go to stderr and the process goes on, also while it waits inside a collective.
    """
    received: list[int] = []
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in STOP}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
    faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True, chain=False)
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore() -> None:
    """Nothing is left to stop: a signal that still comes must not turn a good end into a bad exit code."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
