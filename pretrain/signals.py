"""The signals of a training process: four ask it to save and stop, SIGUSR2 makes it show where it is, and trace a step. No torch."""

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
    """The stop signals' numbers, as they come. profile: SIGUSR2 came since a step was traced last."""

    profile = False


@contextmanager
def noted() -> Iterator[Received]:
    """The signals of ``STOP`` are noted in the list, not obeyed; a process that blocks them gets them from here on.

    However often they come, but for SIGINT (Ctrl-C): the second one ends the process at once. SIGHUP stays ignored under nohup. On SIGUSR2
    all threads' Python stacks go to stderr and the process goes on, also while it waits inside a collective; its next step is traced.
    """
    received = Received()
    owner = os.getpid()  # a forked checkpoint writer has the same handlers

    def note(number: int, _: object) -> None:
        received.append(number)
        if number == signal.SIGINT and os.getpid() == owner:
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # also where Python's handlers have to wait for a collective
            if os.environ.get("RANK", "0") == "0":
                os.write(_STDERR, _HEARD)

    def note_profile(number: int, _: object) -> None:
        received.profile = True

    with taken(STOP, note), taken([signal.SIGUSR2], note_profile):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP)
        faulthandler.register(signal.SIGUSR2, file=_STDERR, all_threads=True, chain=True)
        yield received


def ignore() -> None:
    """Nothing is left to stop: a signal that still comes must not turn a good end into a bad exit code."""
    for number in STOP:
        signal.signal(number, signal.SIG_IGN)
