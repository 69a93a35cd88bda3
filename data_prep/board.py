"""data_prep: what a run shows of itself: counts, rate and time left. Knows units and their entries, no file and no process."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from data_prep.drops import Drop, Tally
from data_prep.layout import Unit
from data_prep.manifest import UnitEntry
from data_prep.progress import LiveLine, count, counted, duration, summary


class Board:
    """What a run shows: the units that are done, those in work, and the time left. ``entries``: those done at the start."""

    def __init__(self, entries: dict[Unit, UnitEntry], units: Iterable[Unit]) -> None:
        self.entries = entries
        self.total = sum(unit.text_bytes for unit in units)
        self.line = LiveLine(sys.stderr)
        self.at_start = self.read = sum(unit.text_bytes for unit in entries)
        self.finished = tally_of(entries.values())
        self.working: dict[Unit, tuple[int, Tally]] = {}

    def step(self, unit: Unit, read: int, tally: Tally) -> None:
        """A unit in work has got so far."""
        self.working[unit] = min(read, unit.text_bytes), tally

    def done(self, unit: Unit, entry: UnitEntry) -> None:
        """A unit's entry is written."""
        self.working.pop(unit, None)
        self.entries[unit] = entry
        self.finished += tally_of([entry])
        self.read += unit.text_bytes

    def tick(self) -> None:
        """Show the line if it is time."""
        if self.line.due:
            self.line.show(self.state())

    def state(self) -> str:
        """How far all is, units in work included."""
        done = self.read + sum(read for read, _ in self.working.values())
        rate = (done - self.at_start) / self.line.elapsed
        total = Tally()
        for tally in (self.finished, *(tally for _, tally in self.working.values())):
            total += tally
        left = (self.total - done) / rate if rate else None
        return summary(total.documents, rate, total.tokens, total.dropped.total(), done / max(self.total, 1), left)

    def result(self) -> str:
        """What the units done come to, in a line; the rate is this run's."""
        total, seconds = self.finished, self.line.elapsed
        rate = (self.read - self.at_start) / 1e6 / seconds
        rows = f"{total.rows:,} rows = {total.documents:,} documents + {total.dropped.total():,} dropped"
        return f"{counted(len(self.entries), 'unit')} done: {rows}, {count(total.tokens)} tokens; {duration(seconds)}, {rate:.1f} MB/s"


def tally_of(entries: Iterable[UnitEntry]) -> Tally:
    """The counts of units together."""
    total = Tally()
    for entry in entries:
        splits = entry.splits.values()
        total.rows += entry.rows
        total.documents += entry.documents
        total.tokens += sum(split.tokens for split in splits)
        total.text_bytes += sum(split.text_bytes for split in splits)
        total.dropped.update({Drop(reason): number for reason, number in entry.dropped.items()})
    return total
