"""launch: says when an attempt hangs: no first step, no further step, no end after a signal. Pure: it is told the time and what is seen.

Standard library alone: it runs inside jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_LONGEST_LOOK = 30.0  # seconds that may count between two looks: a machine that slept, or a job that was suspended, did not hang


@dataclass(frozen=True)
class Patience:
    """The profile's ``watchdog``, in seconds; 0: for ever."""

    start: float  # from the start to the first step
    step: float  # from a step to the next, or to the end
    save: float  # from a signal to the end

    @classmethod
    def of(cls, watchdog: Mapping[str, Any], *, steps: bool) -> Patience:
        """From a profile's values; without ``steps`` (a command) only the time after a signal is watched."""
        start, step, save = (60.0 * float(watchdog.get(f"{name}_minutes") or 0.0) for name in ("start", "step", "save"))
        return cls(start if steps else 0.0, step if steps else 0.0, save)


class Watchdog:
    """Watches one attempt."""

    def __init__(self, patience: Patience, now: float) -> None:
        self.patience = patience
        self._last_look = now
        self._waited = 0.0  # seconds since something moved
        self._mark: object = None
        self._stepped = self._told = False

    def tell(self) -> None:
        """A signal asked the attempt to end: from now on that is waited for."""
        if not self._told:
            self._told, self._waited = True, 0.0

    def look(self, now: float, mark: object, *, stepped: bool, step: int | None) -> str | None:
        """Seen at ``now`` (monotonic seconds): a ``mark`` that changes with every step. Why this is a hang, or None.

        ``stepped``: this attempt has done a step; ``step``: the last one.
        """
        self._waited += min(now - self._last_look, _LONGEST_LOOK)
        self._last_look = now
        if mark != self._mark or stepped != self._stepped:
            self._stepped = stepped
            if not self._told and (stepped or self._mark is None):
                self._waited = 0.0
            self._mark = mark
        if self._told:
            return self._verdict(self.patience.save, "not saved and ended within {} of the signal")
        if not self._stepped:
            return self._verdict(self.patience.start, "no first step within {} of the start")
        return self._verdict(self.patience.step, f"no step for {{}} after step {step}")

    def _verdict(self, patience: float, text: str) -> str | None:
        return text.format(duration(patience)) if patience and self._waited >= patience else None


def duration(seconds: float) -> str:
    """A time for people: ``20 minutes``, ``1.5 minutes``, ``6 s``."""
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
