"""Watch an attempt from start to end.

Pass signals on to the ranks, observe the run's steps, and detect hangs. After a hang, have stacks
dumped and end the ranks. Uses only the standard library.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from fem_common.signals import taken
from launch.job import rank_log
from launch.node.failures import all_signalled
from launch.node.logs import Source, Tail
from launch.node.rank import oom_counter, oom_kills
from launch.node.stacks import stopped_ranks
from launch.supervise.classify import Observed, memory_limit
from launch.supervise.journal import Journal
from launch.supervise.place import Attempt, Place, Running
from launch.supervise.run_files import RunState, has_stepped, read_state

SAVE = signal.SIGUSR1  # the time limit is near, a preemption, or a user's request
END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class Signals:
    """Signals that this process received, in order. The same signal may occur several times."""

    received: list[int] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """True if the ranks are to save and end."""
        return bool(self.received)

    @property
    def ends(self) -> int:
        """Number of signals that request the end of this process."""
        return sum(number in END for number in self.received)

    def forget(self) -> None:
        """Discard the received signals, because their request is done and work continues."""
        self.received.clear()

    def describe(self) -> str:
        """Return the signals' names, each once."""
        return ", ".join(dict.fromkeys(signal.Signals(number).name for number in self.received))


@contextmanager
def noted() -> Iterator[Signals]:
    """Record USR1, TERM, INT and HUP in the yielded `Signals`, instead of ending this process.

    USR2 is ignored, because it is meant for the ranks.
    """
    signals = Signals()

    def note(number: int, _: FrameType | None) -> None:
        signals.received.append(number)

    with taken((SAVE, *END), note), taken((signal.SIGUSR2,), signal.SIG_IGN):
        yield signals


# Longest time that counts between two observations. A suspended machine or job is no hang.
_LONGEST_LOOK = 30.0


class Watchdog:
    """Detector of a hang of one attempt: reports when no progress was observed for too long."""

    def __init__(self, start: float, step: float, save: float, now: float) -> None:
        """Set the time limits in seconds. 0 means no limit.

        start: until the first step. step: between steps. save: from a signal to the end.
        now: the present time (monotonic seconds).
        """
        self.start = start
        self.step = step
        self.save = save
        self._last_observation = now
        self._waited = 0.0  # seconds since the last progress
        self._mark: object = None
        self._stepped = self._saving = False

    def begin_saving(self) -> None:
        """Record that a signal requested the attempt's end.

        After that, the time limit for saving applies.
        """
        if not self._saving:
            self._saving, self._waited = True, 0.0

    def observe(self, now: float, mark: object, *, stepped: bool, step: int | None) -> str | None:
        """Record an observation and return an error text if it shows a hang, otherwise None.

        now: time of the observation (monotonic seconds).
        mark: a value that changes with every step.
        stepped: True if this attempt has made a step.
        step: number of the last step, or None.
        """
        self._waited += min(now - self._last_observation, _LONGEST_LOOK)
        self._last_observation = now
        if mark != self._mark or stepped != self._stepped:
            self._stepped = stepped
            if not self._saving and (stepped or self._mark is None):
                self._waited = 0.0
            self._mark = mark
        if self._saving:
            return self._verdict(self.save, "not saved and ended within {} of the signal")
        if not self._stepped:
            return self._verdict(self.start, "no first step within {} of the start")
        return self._verdict(self.step, f"no step for {{}} after step {step}")

    def _verdict(self, patience: float, text: str) -> str | None:
        return text.format(duration(patience)) if patience and self._waited >= patience else None


def duration(seconds: float) -> str:
    """Return a time in words: ``20 minutes``, ``1.5 minutes``, ``6 s``."""
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"


POLL_SECONDS = 0.1
LOOK_SECONDS = 1.0  # between reads of the run's files
# Between signals to the ranks, because a rank that was still starting did not get the last one.
REPEAT_SECONDS = 5.0
DUMP_SECONDS = 45.0  # limit for all ranks' stacks
# Time after SIGTERM on Slurm: SIGKILL follows within KillWait, and the job must be requeued before.
LAST_SECONDS = 3.0


class Watch:
    """Runs one attempt: starts the ranks and watches them until they have ended."""

    def __init__(
        self,
        attempt: Attempt,
        place: Place,
        signals: Signals,
        journal: Journal,
        stop: Callable[[], str | None],
    ) -> None:
        self.attempt = attempt
        self.place = place
        self.signals = signals
        self.journal = journal
        self._stop = stop  # returns why a user stopped the item, or None
        self._is_run = attempt.job.kind == "run"
        self._directory = attempt.item.path
        self._signalled_at: float | None = None
        self._ended_at: float | None = None

    def run(self, before: RunState, *, show: bool) -> Observed:
        """Start the ranks, wait until they have ended, and return the observations.

        before: state of the run's files before the start. show: print rank 0's output.

        Raises:
            PlaceError: the ranks cannot be started.
        """
        counter = oom_counter()
        kills = oom_kills(counter)
        running = self.place.start(self.attempt)
        try:
            code, hang, cut = self._stay(
                running,
                before,
                Tail(Source(rank_log(self.attempt.folder, 0), "rank 0")) if show else None,
            )
        except BaseException:
            running.kill()
            raise
        after = read_state(self._directory)
        cancelled = (cut and not self.place.can_requeue) or self._stop() is not None
        well = code == 0 or (
            after.writer != before.writer and after.state in ("complete", "stopped")
        )
        message = (
            not well
            and self.place.can_requeue
            and (hang is None or cut)
            and all_signalled(self.attempt.folder)
        )
        taken = (
            not well
            and not cancelled
            and (hang is None or cut)
            and taken_away(self.place, self.signals, signalled=message)
        )
        down = {}
        if code != 0:
            for node, why in self.place.down_nodes().items():
                if node in self.attempt.nodes:
                    down[node] = why
        return Observed(
            code,
            before,
            after,
            signalled=self._signalled_at is not None,
            hang=hang,
            down=down,
            cancelled=cancelled or (message and self.place.cancelled()),
            taken=taken,
            oom_kill=oom_kills(counter) > kills,
            limit=memory_limit(self.attempt.job.profile, self.attempt.environment),
        )

    def _stay(
        self, running: Running, before: RunState, tail: Tail | None
    ) -> tuple[int | None, str | None, bool]:
        """Wait until the ranks have ended, and return (exit code, hang, cut).

        hang: the reason for which the ranks were ended as hung, otherwise None.
        cut: True if the attempt is over because of signals, before its ranks ended (`_pass_on`).
        """
        profile: Mapping[str, Any] = self.attempt.job.section("watchdog")
        start, step, save = (
            60.0 * float(profile.get(f"{name}_minutes") or 0.0)
            for name in ("start", "step", "save")
        )
        looked = time.monotonic()
        watchdog = Watchdog(
            start if self._is_run else 0.0, step if self._is_run else 0.0, save, looked
        )
        while (code := running.poll()) is None:
            now = time.monotonic()
            if self._pass_on(running, watchdog, now):
                return (
                    None,
                    "not saved and ended before the job's end" if self.place.can_requeue else None,
                    True,
                )
            if now - looked >= LOOK_SECONDS:
                looked = now
                hang = self._observe(watchdog, before, now)
                if hang:
                    stopped = self._end_hang(running, hang)
                    return running.poll(), f"{hang}; {stopped}" if stopped else hang, False
            _show(tail)
            time.sleep(POLL_SECONDS)
        _show(tail)
        return code, None, False

    def _pass_on(self, running: Running, watchdog: Watchdog, now: float) -> bool:
        """Pass a received signal on to the ranks, so that they save and end.

        Return True if the attempt is over because no time is left to wait for its end, or because
        the ranks were killed.
        """
        if not self.signals.any:
            return False
        if self._signalled_at is None:
            what = "saving" if self._is_run else "ending"
            self.journal.log(f"{self.signals.describe()}: {what}")
            self.journal.state("saving", f"{self.signals.describe()}: {what}")
            watchdog.begin_saving()
        if self._signalled_at is None or now - self._signalled_at >= REPEAT_SECONDS:
            self._signalled_at = now
            running.signal(signal.SIGUSR1 if self._is_run else signal.SIGTERM)
        if not self.signals.ends:
            return False
        self._ended_at = self._ended_at or now
        if self.place.can_requeue:
            return now - self._ended_at >= LAST_SECONDS
        if self.signals.ends > 1 or self._stop() is not None:
            running.kill()
            return True
        return False

    def _observe(self, watchdog: Watchdog, before: RunState, now: float) -> str | None:
        """Read the run's files and return the watchdog's error text, or None without a hang."""
        if not self._is_run:
            return watchdog.observe(now, None, stepped=False, step=None)
        state = read_state(self._directory)
        return watchdog.observe(
            now, (state.step, state.metrics), stepped=has_stepped(before, state), step=state.step
        )

    def _end_hang(self, running: Running, why: str) -> str | None:
        """Have the stacks of every rank written to dumps/, then end all ranks.

        Return a text that names the ranks that SIGSTOP or a debugger had stopped, otherwise None.
        """
        self.journal.log(f"hang: {why}; every rank is signalled to dump its stacks")
        running.signal(signal.SIGUSR2)
        ranks = self.attempt.job.world_size
        deadline = time.monotonic() + DUMP_SECONDS
        sizes = None
        while running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
            last = sizes
            dumps = (self.attempt.folder / "dumps").glob("rank_*.txt")
            sizes = sorted(path.stat().st_size for path in dumps)
            if len(sizes) >= ranks and sizes == last:
                break
        self.journal.log(
            f"stacks of {len(sizes or ())} of {ranks} ranks are in "
            f"{self.attempt.folder / 'dumps'}; ending the attempt"
        )
        running.kill()
        stopped = stopped_ranks(self.attempt.folder / "dumps")
        if not stopped:
            return None
        return (
            f"{'rank' if len(stopped) == 1 else 'ranks'} {', '.join(map(str, stopped))} stopped: "
            "by SIGSTOP, or a debugger"
        )


def taken_away(place: Place, signals: Signals, *, signalled: bool = False) -> bool:
    """Return True if an attempt that ended badly lost its allocation.

    The queue reports the loss. If the queue reports no end, a signal to end that this process or
    the ranks got counts as a loss. Return False if the queue reports the time limit or a user's
    cancel.
    """
    if not place.can_requeue:
        return False
    reason = place.taken()
    return reason is True or (reason is None and (bool(signals.ends) or signalled))


def _show(tail: Tail | None) -> None:
    """Print the log's new lines. A terminal that closed does not end the run."""
    with contextlib.suppress(OSError, ValueError):
        for line in tail.read() if tail else ():
            print(line.text, flush=True)
