"""Write the log of a rank, with time stamps and without secrets, and read all logs of an item.

Every line of a rank's log has a time stamp. The logs of the agents (torchrun and srun) have none:
their lines get the time when the file was last written or, while it is followed, the time when they
were read. Slurm's file also contains the supervisor's lines, which have a time.

When a rank's log is larger than `LOG_BYTES`, it is replaced by a file with its first quarter, a
marker line with the number of omitted bytes, and its last quarter. Readers continue after the last
line that they read or, if that line was omitted, at the marker line. Uses only the standard
library.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import io
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote

from launch.job import attempts, launch_folder, read_json
from launch.node.failures import Findings

LINE_BYTES = 65536  # a longer line is split
# limit of a rank's log; a longer one is reduced to its first and last quarter
LOG_BYTES = 1 << 26


class Scribe:
    """Writer of a rank's log.

    It adds a time stamp to the command's complete lines, hides secrets, and passes the lines to
    `Findings`. A carriage return restarts the line, as on a terminal: only the last state of a
    progress bar is written. A log that cannot be written (a full disk) does not stop the command:
    the lines are lost, and are counted. If a log cannot be shortened, it stays complete, and the
    next try is after another half of `LOG_BYTES`.
    """

    def __init__(self, path: Path, hidden: Sequence[str], findings: Findings) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, os.open(path, _LOG_FLAGS, 0o644)
        self._free_bytes = 0  # bytes that may be written before the next check of the size
        self._head = 0  # bytes of the first quarter up to the end of its last line
        self._left_out = 0  # bytes that are no longer in the log
        self._findings = findings
        self._hidden = _pattern(hidden)
        self._rest = bytearray()
        self._since = 0.0
        self.lost = 0
        self.last_output: float | None = None

    def feed(self, data: bytes) -> None:
        """Process bytes of the command's output: write the complete lines, and store the rest."""
        if not data:
            return
        now = self.last_output = time.time()
        if not self._rest:
            self._since = now
        full, end, rest = data.rpartition(b"\n")
        lines = bytes(self._rest + full).split(b"\n") if end else []
        self._rest = bytearray(rest) if end else self._rest + rest
        if len(self._rest) > LINE_BYTES:
            lines.append(bytes(self._rest))
            self._rest.clear()
        if lines:
            self._since = now
            self._write(lines, now)

    def flush(self, at_least: float = 0.0) -> None:
        """Write the unfinished line, if it has waited for at least ``at_least`` seconds."""
        now = time.time()
        if self._rest and now - self._since >= at_least:
            rest = bytes(self._rest)
            self._rest.clear()
            self._write([rest], now)

    def note(self, text: str) -> None:
        """Write a line of the process that runs the rank (`launch.node.rank`) to the log."""
        self.flush()
        self._put(b"%.3f [launch] %b\n" % (time.time(), text.encode(errors="replace")), 1)

    def hide(self, text: str) -> str:
        """Replace every secret's value in a text by ***."""
        return (
            self._hidden.sub(b"***", text.encode(errors="surrogateescape")).decode(errors="replace")
            if self._hidden
            else text
        )

    def _write(self, lines: Sequence[bytes], now: float) -> None:
        stamped = bytearray()
        for line in lines:
            line = line.rstrip(b"\r").rpartition(b"\r")[2]
            line = self._hidden.sub(b"***", line) if self._hidden else line
            stamped += b"%.3f %b\n" % (now, line)
            self._findings.see(line.decode(errors="replace"), now)
        self._put(stamped, len(lines))

    def _put(self, stamped: bytes | bytearray, lines: int) -> None:
        """Append stamped lines to the file. If that fails, count ``lines`` lines as lost."""
        try:
            _write_all(self._file, stamped)
            self._free_bytes -= len(stamped)
        except OSError:
            self.lost += lines
        if self._free_bytes < 0:
            self._shorten()

    def _shorten(self) -> None:
        """Shorten the log to its first and its last quarter if it is larger than `LOG_BYTES`.

        The new file is synced first, so that a full disk or a crash of the node loses no log.
        """
        temporary, quarter = self._path.with_name(f"{self._path.name}.tmp"), LOG_BYTES // 4
        try:
            status = os.fstat(self._file)
            self._free_bytes = LOG_BYTES - status.st_size
            # A device has size 0, and another process may have truncated the file.
            if self._free_bytes >= 0:
                return
            self._free_bytes = LOG_BYTES // 2
            head = os.pread(self._file, self._head or quarter, 0)
            head = head[: head.rfind(b"\n") + 1]
            # One more byte: the quarter may begin at the start of a line.
            tail = os.pread(self._file, quarter + 1, status.st_size - quarter - 1)
            tail = tail.partition(b"\n")[2]
            left_out = self._left_out + status.st_size - len(head) - len(tail)
            stamp = tail.partition(b" ")[0]  # that of the next line: times must not decrease
            marker = (
                b"%b [launch] %d bytes left out: a log keeps its first and its last %d MiB\n"
                % (stamp, left_out, quarter >> 20)
            )
            new = os.open(temporary, _LOG_FLAGS | os.O_TRUNC, stat.S_IMODE(status.st_mode))
            try:
                for part in (head, marker, tail):
                    _write_all(new, part)
                os.fsync(new)
                os.replace(temporary, self._path)
                self._file, new = new, self._file
                # The next reduction also removes the marker, which must not count as output.
                self._head = len(head)
                self._left_out = left_out - len(marker)
                self._free_bytes = LOG_BYTES - sum(map(len, (head, marker, tail)))
            finally:
                os.close(new)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()


_LOG_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


def _write_all(file: int, data: bytes | bytearray) -> None:
    """Write all bytes of ``data`` to a file descriptor.

    Raises:
        OSError: the file cannot be written.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _pattern(hidden: Sequence[str]) -> re.Pattern[bytes] | None:
    """Return a pattern that matches any of the secret values, or None if no value is given.

    The values are matched as plain text and in the spellings of JSON, Python and URLs. Longer
    values are tried first.
    """
    forms: set[str] = set()
    for value in hidden:
        forms |= {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")}
    ordered = sorted(
        (form.encode(errors="surrogateescape") for form in forms),
        key=lambda form: (-len(form), form),
    )
    return re.compile(b"|".join(map(re.escape, ordered))) if ordered else None


SUPERVISOR_LOG = "supervisor.log"  # in ITEM/launch: "<unix time> <text>"
_STAMP = re.compile(rb"(\d{9,11}\.\d{1,6}) ?")
_MARKER = re.compile(rb"^\d+\.\d+ \[launch\] \d+ bytes left out: ", re.MULTILINE)
_BLOCK = 1 << 16
# The second error: the file was replaced while it was read over NFS.
_GONE = (errno.ENOENT, errno.ESTALE)
_SUPERVISOR = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) launch: ")


@dataclass(frozen=True, order=True)
class Line:
    """A line of output with its time and source."""

    time: float  # unix time
    label: str  # "rank 3", "launch", "agents"
    text: str

    def __str__(self) -> str:
        return f"[{self.label}] {self.text}"


@dataclass(frozen=True)
class Source:
    """Log file with the label and the time range of the lines to read from it."""

    path: Path
    label: str
    since: float = 0.0  # lines outside these two unix times are another attempt's
    until: float = float("inf")
    # True for Slurm's file: a line gets the time of the supervisor's line before it, and the
    # supervisor's own lines are skipped, because supervisor.log contains them.
    of_slurm: bool = False

    def lines(self) -> Iterator[Line]:
        """Yield the lines that the file contains now, or no lines if it does not exist."""
        tail = Tail(self)
        try:
            with self.path.open("rb") as file:
                at = 0.0 if self.of_slurm else os.fstat(file.fileno()).st_mtime
                for raw in file:
                    at, line = self.parse(raw, at)
                    tail.offset, tail.last = tail.offset + len(raw), raw
                    if line:
                        yield line
        except OSError as error:
            if error.errno not in _GONE:
                raise
            yield from tail.read()  # the rest, from the file that replaced it

    def parse(self, raw: bytes, otherwise: float) -> tuple[float, Line | None]:
        """Return (time, line) of a raw line.

        The time is ``otherwise`` if the line has no stamp. The line is None if it is outside the
        source's time range, or if it is a supervisor's line in Slurm's file.
        """
        raw = raw.rstrip(b"\r\n")
        if self.of_slurm and (match := _SUPERVISOR.match(raw)):
            # The stamp is cut to seconds; the next second is an upper bound.
            return time.mktime(time.strptime(match[1].decode(), "%Y-%m-%d %H:%M:%S")) + 1.0, None
        stamp = None if self.of_slurm else _STAMP.match(raw)
        at, text = (float(stamp[1]), raw[stamp.end() :]) if stamp else (otherwise, raw)
        if not self.since <= at < self.until:
            return at, None
        return at, Line(at, self.label, text.decode(errors="replace"))


class Tail:
    """Reader of the lines that were added to a source since the last read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.offset = 0
        self._rest = b""
        self.last = b""  # the last complete line before the offset
        self._at, self._began = 0.0, False

    def skip_to_last(self, count: int) -> None:
        """Begin with the last ``count`` complete lines of the file."""
        try:
            with self.source.path.open("rb") as file:
                position = end = file.seek(0, os.SEEK_END)
                data = b""
                # One more line than requested, so that `last` is complete.
                while position > 0 and data.count(b"\n") <= count + 1:
                    position = max(0, position - _BLOCK)
                    file.seek(position)
                    data = file.read(end - position)
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return
        complete = data[: data.rfind(b"\n") + 1]
        # Not `splitlines`, which also splits at the carriage returns of progress bars.
        lines = io.BytesIO(complete).readlines()
        before = max(0, len(lines) - count)
        unfinished = len(data) - len(complete)
        self.offset = end - unfinished - sum(map(len, lines[before:]))
        self.last = lines[before - 1] if before else b""

    def read(self) -> list[Line]:
        """Return the complete lines that were added since the last read.

        This also works if a rank's log was shortened since then. Any other file that became shorter
        is read from its start.
        """
        try:
            with self.source.path.open("rb") as file:
                self._settle(file)
                file.seek(self.offset)
                data = file.read()
        except OSError as error:
            if error.errno not in _GONE:
                raise
            return []
        if not data:
            return []
        self.offset += len(data)
        *full, self._rest = (self._rest + data).split(b"\n")
        self.last = full[-1] + b"\n" if full else self.last
        now, lines = time.time(), []
        for raw in full:
            self._at, line = self.source.parse(
                raw, self._at if self.source.of_slurm and not self._began else now
            )
            if line:
                lines.append(line)
        self._began = True
        return lines

    def _settle(self, file: BinaryIO) -> None:
        """Correct the read offset if the file was replaced, so that other bytes precede the offset.

        The new offset is after the last line that was read, or at the marker line if that line was
        omitted, or 0.
        """
        seen = self.last + self._rest
        if os.pread(file.fileno(), len(seen), self.offset - len(seen)) == seen:
            return
        data = file.read() if _STAMP.match(self.last) else b""
        at, marker = data.rfind(self.last), _MARKER.search(data)
        if data and at >= 0:
            self.offset = at + len(self.last)
        else:
            self.offset = marker.start() if marker else 0
        self._rest = b""


class Follower:
    """Reader of the new lines of several sources.

    ``find`` returns the sources that exist at the time of the call, so their set may grow.
    """

    def __init__(self, find: Callable[[], Iterable[Source]], last: int | None = None) -> None:
        self._find, self._tails = find, dict[Path, Tail]()
        self._initial_count = last  # lines that the first call returns; None: all

    def read(self) -> list[Line]:
        """Return the new lines of all sources, ordered by time.

        The first call returns all lines, or only the last ``last`` lines of all sources together.
        """
        found = {source.path: source for source in self._find()}
        for path in found.keys() - self._tails.keys():
            tail = self._tails[path] = Tail(found[path])
            if self._initial_count is not None:
                tail.skip_to_last(self._initial_count)
        lines = [line for tail in self._tails.values() for line in tail.read()]
        # A source that `find` no longer returns is read once more, because it may have new lines.
        self._tails = {path: tail for path, tail in self._tails.items() if path in found}
        lines.sort(key=lambda line: line.time)
        if self._initial_count is not None:
            lines, self._initial_count = lines[max(0, len(lines) - self._initial_count) :], None
        return lines


def merged(sources: Iterable[Source]) -> Iterator[Line]:
    """Return an iterator over all lines of several sources, ordered by time."""
    return heapq.merge(*(source.lines() for source in sources), key=lambda line: line.time)


def rank_sources(attempt: Path, ranks: Collection[int] | None = None) -> list[Source]:
    """Return the log sources of an attempt's ranks. ``ranks`` selects some; None: all."""
    found = (
        (int(path.stem.rpartition("_")[2]), path)
        for path in sorted((attempt / "logs").glob("rank_[0-9]*.log"))
    )
    return [Source(path, f"rank {rank}") for rank, path in found if ranks is None or rank in ranks]


def agent_sources(attempt: Path) -> list[Source]:
    """Return the log sources of an attempt's agents (torchrun and srun) and pre-flight check."""
    others = (
        path
        for path in sorted((attempt / "logs").glob("*.log"))
        if not path.name.startswith("rank_")
    )
    return [Source(path, path.stem.replace("_", " ")) for path in others]


def slurm_source(path: Path, item: Path, attempt: Path | None = None) -> Source:
    """Return the source of Slurm's output file ``path``, without the supervisor's lines.

    attempt: select the time range of one attempt, as in `supervisor_source`.
    """
    return replace(supervisor_source(item, attempt), path=path, label="slurm", of_slurm=True)


def supervisor_source(item: Path, attempt: Path | None = None) -> Source:
    """Return the source of the log of an item's supervisor.

    attempt: select the lines between the start of this attempt and the next; None: all lines.
    """
    path = launch_folder(item) / SUPERVISOR_LOG
    if attempt is None:
        return Source(path, "launch")
    later = [started(other) for other in attempts(item) if other.name > attempt.name]
    return Source(path, "launch", started(attempt), min(later, default=float("inf")))


def started(attempt: Path) -> float:
    """Return the start time of an attempt from its record, or 0.0 if it has none yet."""
    return float((read_json(attempt / "attempt.json") or {}).get("started") or 0.0)
