"""launch: the signals that a supervisor got: noted, not obeyed at once. Standard library alone: it runs inside jobs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from fem_common.signals import taken

SAVE = signal.SIGUSR1  # the time limit is near, the job is preempted, or someone asked
END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Signals:
    """What came, in order; the same one may come many times."""

    received: list[int] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether the ranks are to save and end."""
        return bool(self.received)

    @property
    def ends(self) -> int:
        """How often the end of this very process was asked for."""
        return sum(number in END for number in self.received)

    def forget(self) -> None:
        """What was asked for is done, and work goes on."""
        self.received.clear()

    def describe(self) -> str:
        """The signals' names, each once."""
        return ", ".join(dict.fromkeys(signal.Signals(number).name for number in self.received))


@contextmanager
def noted() -> Iterator[Signals]:
    """Note USR1, TERM, INT and HUP instead of ending; USR2 is the ranks' alone."""
    signals = Signals()

    def note(number: int, _: FrameType | None) -> None:
        signals.received.append(number)

    with taken((SAVE, *END), note), taken((signal.SIGUSR2,), signal.SIG_IGN):
        yield signals
