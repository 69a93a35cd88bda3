"""launch: a rank's log: takes a command's bytes, writes whole stamped lines, and lets no secret through. Standard library alone."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from launch.failures import Findings

LINE_BYTES = 65536  # a line without an end is cut here


class Scribe:
    """The rank's log: takes the command's bytes, writes whole lines with a stamp, secrets hidden, and lets `Findings` see them.

    A carriage return starts the line anew, as on a terminal: of a progress bar its last state is kept. A log that cannot be
    written (a full disk) does not stop the command: its lines are lost, and are counted.
    """

    def __init__(self, path: Path, hidden: Sequence[str], findings: Findings) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._findings = findings
        self._hidden = _pattern(hidden)
        self._rest = bytearray()
        self._since = 0.0
        self.lost = 0
        self.last_output: float | None = None

    def feed(self, data: bytes) -> None:
        """Take what the command wrote."""
        if not data:
            return
        now = self.last_output = time.time()
        if not self._rest:
            self._since = now
        whole, end, rest = data.rpartition(b"\n")
        lines = bytes(self._rest + whole).split(b"\n") if end else []
        self._rest = bytearray(rest) if end else self._rest + rest
        if len(self._rest) > LINE_BYTES:
            lines.append(bytes(self._rest))
            self._rest.clear()
        if lines:
            self._since = now
            self._write(lines, now)

    def flush(self, at_least: float = 0.0) -> None:
        """Write the unfinished line, if it has waited for so many seconds."""
        now = time.time()
        if self._rest and now - self._since >= at_least:
            rest = bytes(self._rest)
            self._rest.clear()
            self._write([rest], now)

    def note(self, text: str) -> None:
        """A line of the keeper's own."""
        self.flush()
        self._put(b"%.3f [launch] %b\n" % (time.time(), text.encode(errors="replace")), 1)

    def hide(self, text: str) -> str:
        """The text with every secret's value as ***."""
        return self._hidden.sub(b"***", text.encode(errors="surrogateescape")).decode(errors="replace") if self._hidden else text

    def _write(self, lines: Sequence[bytes], now: float) -> None:
        stamped = bytearray()
        for line in lines:
            line = line.rstrip(b"\r").rpartition(b"\r")[2]
            line = self._hidden.sub(b"***", line) if self._hidden else line
            stamped += b"%.3f %b\n" % (now, line)
            self._findings.see(line.decode(errors="replace"), now)
        self._put(stamped, len(lines))

    def _put(self, stamped: bytes | bytearray, lines: int) -> None:
        """Append to the file, or count the lines as lost."""
        try:
            view = memoryview(stamped)
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            self.lost += lines


def _pattern(hidden: Sequence[str]) -> re.Pattern[bytes] | None:
    """What finds any of the values, as they are and as JSON, Python and URLs write them: the longest first."""
    forms: set[str] = set()
    for value in hidden:
        forms |= {value, json.dumps(value)[1:-1], repr(value)[1:-1], quote(value, safe="")}
    ordered = sorted((form.encode(errors="surrogateescape") for form in forms), key=lambda form: (-len(form), form))
    return re.compile(b"|".join(map(re.escape, ordered))) if ordered else None
