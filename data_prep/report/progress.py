"""Progress displays of verbs: bytes read of known files, or units done, with rate and time left."""

from __future__ import annotations

from collections.abc import Iterable

from data_prep.prepared.layout import Unit
from data_prep.prepared.manifest import UnitEntry
from data_prep.sources.rows import Drop, Tally
from fem_common.progress import Progress
from fem_common.text import count, counted, duration, size


class Reading(Progress):
    """Progress line for reading ``total`` bytes, with MB/s and time left.

    A context manager that clears the line on exit.
    """

    def __init__(self, title: str, total: int) -> None:
        super().__init__(total, "bytes", title)

    def __enter__(self) -> Reading:
        return self

    def line(self, note: str = "") -> str:
        """Return the progress line: ``verifying · 1.2 GB of 3 GB · 900 MB/s · 2s left``."""
        left = "" if self.left is None else f" · {duration(self.left)} left"
        return (
            f"{self.title} · {size(self.done)} of {size(self.total or 0)} · "
            f"{self.done / self.elapsed / 1e6:,.0f} MB/s{left}"
        )


class Board:
    """Progress of an encoding run: units done, units in progress, and time left.

    entries: entries of the units that are done; the constructor's argument has those done before
    the run.
    """

    def __init__(self, entries: dict[Unit, UnitEntry], units: Iterable[Unit]) -> None:
        self.entries = entries
        self.total = sum(unit.text_bytes for unit in units)
        self.line = Progress(None, "")
        self.at_start = self.read = sum(unit.text_bytes for unit in entries)
        self.finished = tally_of(entries.values())
        self.working: dict[Unit, tuple[int, Tally]] = {}

    def step(self, unit: Unit, read: int, tally: Tally) -> None:
        """Record the progress of a unit: bytes of text read and counts so far."""
        self.working[unit] = min(read, unit.text_bytes), tally

    def done(self, unit: Unit, entry: UnitEntry) -> None:
        """Record that a unit is finished and its entry is written."""
        self.working.pop(unit, None)
        self.entries[unit] = entry
        self.finished += tally_of([entry])
        self.read += unit.text_bytes

    def tick(self) -> None:
        """Print the progress line if enough time has passed since the last one."""
        if self.line.due:
            self.line.show(self.state())

    def state(self) -> str:
        """Return the progress line of the run, including the units in progress."""
        done = self.read + sum(read for read, _ in self.working.values())
        rate = (done - self.at_start) / self.line.elapsed
        total = Tally()
        for tally in (self.finished, *(tally for _, tally in self.working.values())):
            total += tally
        left = (self.total - done) / rate if rate else None
        parts = [
            f"{total.documents:,} documents",
            f"{rate / 1e6:.1f} MB/s",
            f"{count(total.tokens)} tokens",
        ]
        parts += [f"{total.dropped.total():,} dropped", f"{100 * done / max(self.total, 1):.1f}%"]
        return " · ".join(parts if left is None else [*parts, f"{duration(left)} left"])

    def result(self) -> str:
        """Return one line with the totals of all finished units. The rate is that of this run."""
        total, seconds = self.finished, self.line.elapsed
        rate = (self.read - self.at_start) / 1e6 / seconds
        rows = (
            f"{total.rows:,} rows = {total.documents:,} documents + {total.dropped.total():,} "
            "dropped"
        )
        return (
            f"{counted(len(self.entries), 'unit')} done: {rows}, {count(total.tokens)} tokens; "
            f"{duration(seconds)}, {rate:.1f} MB/s"
        )


def tally_of(entries: Iterable[UnitEntry]) -> Tally:
    """Return the sum of the counts of several units."""
    total = Tally()
    for entry in entries:
        splits = entry.splits.values()
        total.rows += entry.rows
        total.documents += entry.documents
        total.tokens += sum(split.tokens for split in splits)
        total.text_bytes += sum(split.text_bytes for split in splits)
        total.dropped.update({Drop(reason): number for reason, number in entry.dropped.items()})
    return total
