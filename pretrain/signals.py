"""Handlers for the signals of a training process.

Four signals request a stop. SIGUSR2 prints stacks and requests a trace of a step. The module does
not import torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from fem_common.signals import taken

STOP = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_STDERR = 2
_HEARD = (
    b"pretrain: interrupted: saving after this step; once more ends it at once, without saving\n"
)


class Received(list[int]):
    """List of the numbers of the received stop signals, in order.

    ``profile`` is True if SIGUSR2 arrived since the last traced step.
    """

    profile = False


@contextmanager
def noted() -> Iterator[Received]:
    """Yield a list that collects the signals in ``STOP`` during the block.

    Signals that the process had blocked are unblocked. The signals do not end the process, except
    the second SIGINT (Ctrl-C), which ends it at once. SIGHUP stays ignored under nohup. SIGUSR2
    prints the Python stacks of all threads to stderr, also during a collective, and requests a
    trace of the next step; the process continues.
    """
    received = Received()
    owner = os.getpid()  # a forked checkpoint writer has the same handlers

    def note(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGINT and os.getpid() == owner:
            # The default handler also works while Python's handlers wait for a collective.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get("RANK", "0") == "0":
                os.write(_STDERR, _HEARD)

    def note_profile(number: int, _: object) -> None:
        received.profile = True

    with taken(STOP, note), taken([signal.SIGUSR2], note_profile):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True, chain=True)
        yield received


def ignore() -> None:
    """Ignore stop signals at the end of the process.

    A late signal then does not change the exit code.
    """
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
