"""Find out from the ranks' output why a rank failed, and which rank of an attempt failed first.

One failure makes the other ranks fail too: their connection to the failed rank is closed, and
torchrun and Slurm end the remaining ranks. These later failures are not the cause. Uses only the
standard library, because it runs inside jobs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fem_common.exits import Exit
from launch.job import last_bytes, rank_log, read_json

TRACEBACK_BYTES = 8192
_LINE_CHARACTERS = 2000  # part of a line that is searched
# For a rank that a signal ended, an error more lines ago than this is not the cause.
_RECENT_LINES = 400
_ABORT_LINES = 20  # an error and the lines that follow from it

# A rank that fails after one of these signals was ended from outside.
_ENDING = ("SIGTERM", "SIGINT", "SIGHUP")
_STAMP = re.compile(rb"(\d+\.\d+) ")
# torch's prefix on each line of an exception in a distributed program
_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
_TRACEBACK = re.compile(r"^\s*(?:Original )?Traceback \(most recent call last\):")
_CHAIN = re.compile(
    r"^(During handling of the above exception|The above exception was the direct cause)"
)
_WEAK = re.compile(
    r"^(Exception ignored in|Exception ignored on|Error in atexit|Error in sys\.excepthook)"
)
_FATAL = re.compile(
    r"^(?P<fault>Fatal Python error: .*)"
    r"|^\s*(?P<what>what\(\):  .*)"
    r"|^(?P<program>[a-z_][\w.]*: error: .*)"
    r"|(?P<watchdog>Watchdog caught collective operation timeout.*)"
    r"|(?P<ecc>(?:[Uu]ncorrectable ECC|fallen off the bus|NVRM: Xid).*)"
)
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset|refused|aborted)|remote process exited|"
    r"nccl(?:Remote|System)Error|broken pipe|got 0 bytes"
    r"|(?:recvValue|sendBytes|recvBytes|sendBuf) failed|timed out waiting"
    r"|(?:socket|wait) time(?:d )?-?out|WorkNCCL.*timed out"
    r"|Watchdog caught collective|DistStoreError|DistNetworkError"
    r"|Application timeout caused pair closure",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"out ?of ?memory|MemoryError|Cannot allocate memory|bad_alloc", re.IGNORECASE)
_NODE = re.compile(
    r"ECC error|uncorrectable|fallen off the bus|\bXid\b|CUDA-capable device"
    r"|CUDA error: (?:hardware|unknown error|system|device not ready)"
    r"|NVML|driver shutting down|devices? unavailable|device\(s\) is/are busy",
    re.IGNORECASE,
)
# A rank's error after a process that it started was killed.
_KILLED_PROCESS = re.compile(
    r"DataLoader worker \(pid.*(?:killed by signal: Killed|exited unexpectedly)|BrokenProcessPool"
    r"|died with <Signals\.SIGKILL|SIGKILL\(-9\)"
)
# The error of a file system that became unavailable, in the form of Python, Rust, C++ and this
# project's commands ("FILE: reason"). A lost peer, over sockets or InfiniBand, may give the same
# reason, but without an error number and without a file before it.
_REASONS = (
    r"(?:Input/output error|Transport endpoint is not connected"
    r"|Cannot send after transport endpoint shutdown|Host is down"
    r"|Stale (?:NFS )?file handle|Remote I/O error)"
)
_PLACE = re.compile(
    r"(?:\[Errno |\(os error )(?:5|107|108|112|116|121)[\])]|Stale (?:NFS )?file handle"
    rf"|{_REASONS} \(\d+\)|(?<!\S)[^\s:]*/[^\s:]*: (?:{_REASONS}|Connection timed out)\b"
    r"|\[Errno 110\] Connection timed out: b?['\"]"
)
_NCCL = re.compile(r"nccl|ProcessGroup|collective operation|gloo", re.IGNORECASE)


@dataclass(frozen=True)
class Cause:
    """Error that a rank's output reports: message, time and traceback."""

    message: str  # one line
    time: float
    traceback: str | None  # the end of it, at most `TRACEBACK_BYTES`


@dataclass(frozen=True)
class Failure:
    """Failure of a rank: its error, exit code or signal, and the kind of the failure."""

    rank: int
    host: str
    message: str  # one line
    traceback: str | None
    kind: str  # config | diverged | busy | memory | node | place | nccl | signal | lost | exit
    time: float
    exit: int | None  # 128 + n after a signal n; None: not recorded, as its keeper died
    signal: str | None  # the signal's name
    lost_peer: bool  # the message only reports that another rank was lost
    reported: bool  # the rank reported the message itself


class Findings:
    """Parser that finds the reported error in a rank's output, line by line as the lines arrive."""

    def __init__(self) -> None:
        self.last_line = ""  # last line that is not empty
        self._lines = 0
        self._block: list[str] = []  # the current or last traceback
        self._open = self._weak_next = self._weak = False
        # Lines since the traceback's end. In a chain of exceptions they belong to it.
        self._between: list[str] = []
        self._began, self._indent = 0.0, 0
        self._cause: Cause | None = None
        self._cause_line = 0
        self._names_peer = False  # the next line is NCCL's description of the error

    def see(self, line: str, now: float) -> None:
        """Process the next line, written at the time `now`."""
        self._lines += 1
        line = _PREFIX.sub("", line[:_LINE_CHARACTERS].rstrip())
        self.last_line = line.strip() or self.last_line
        if _TRACEBACK.match(line):
            self._begin(line, now)
        elif self._open:
            self._block.append(line)
            if line and len(line) - len(line.lstrip()) <= self._indent:
                self._finish(line.strip())
        else:
            self._see_plain(line, now)

    def cause(self, signal: str | None) -> Cause | None:
        """Return the error that the output reports, or None, after the rank ended badly.

        signal: name of the signal that ended the rank, or None. The result is None for SIGKILL,
        which a rank cannot report, and for another signal if the reported error is not recent.
        """
        if (
            self._cause is None
            or signal == "SIGKILL"
            or (signal and not self._is_recent(_RECENT_LINES))
        ):
            return None
        return self._cause

    def _is_recent(self, lines: int) -> bool:
        return self._cause is not None and self._lines - self._cause_line <= lines

    def _begin(self, line: str, now: float) -> None:
        """Begin a traceback, or continue the previous one if the two are chained."""
        chained = self._open or any(_CHAIN.match(between) for between in self._between)
        self._block = [*self._block, *self._between, line] if chained else [line]
        if not chained:
            self._weak, self._began = self._weak_next, now
        self._indent = len(line) - len(line.lstrip())
        self._between = []
        self._open = True
        self._weak_next = False

    def _finish(self, line: str) -> None:
        """End a traceback, whose last line is the error.

        A weak traceback (an exception ignored by the interpreter, or an error at its exit) is
        skipped if an error is already known.
        """
        self._open = False
        if not (self._weak and self._cause):
            text = "\n".join(self._block).encode()[-TRACEBACK_BYTES:].decode(errors="ignore")
            self._found(Cause(line, self._began, text))

    def _see_plain(self, line: str, now: float) -> None:
        """Process a line outside any traceback."""
        self._between = [*self._between[-3:], line]
        self._weak_next = bool(_WEAK.match(line))
        fatal = _FATAL.search(line)
        if self._names_peer and line and self._cause:
            self._found(replace(self._cause, message=f"{self._cause.message} ({line.strip()})"))
        elif fatal and not (fatal["fault"] and self._is_recent(_ABORT_LINES)):
            # A crash's own message ("Aborted") is less informative than the error before it.
            traceback = (
                self._cause.traceback if self._cause and self._is_recent(_ABORT_LINES) else None
            )
            message = line if fatal["ecc"] else next(part for part in fatal.groups() if part)
            self._found(Cause(message.strip(), now, traceback))
        self._names_peer = line.strip() == "Last error:" and self._is_recent(_ABORT_LINES)

    def _found(self, cause: Cause) -> None:
        self._cause, self._cause_line = cause, self._lines


def kind_of(message: str, code: int | None, signal: str | None) -> str:
    """Return the kind of a failure.

    It is config, diverged, busy, memory, node, place, nccl, signal or exit.

    code: exit code. signal: name of the signal that ended the rank, or None.
    """
    named: dict[int | None, str] = {
        Exit.WRONG_INPUT: "config",
        Exit.DIVERGED: "diverged",
        Exit.IN_USE: "busy",
    }
    if code in named:
        return named[code]
    for kind, pattern in (("memory", _MEMORY), ("node", _NODE), ("place", _PLACE), ("nccl", _NCCL)):
        if pattern.search(message):
            return kind
    return "signal" if signal else "exit"


# ends the message of a rank that, or a process of which, the kernel killed
OUT_OF_MEMORY = ": out of memory (OOM kill)"


def killed_for_memory(error: str | None, code: int | None) -> str | None:
    """Return an error message if an out-of-memory kill may have ended a rank, otherwise None.

    This is the case if the exit code means SIGKILL, or ``error`` is about a killed process.
    """
    if code == Exit.KILLED:
        return f"killed by SIGKILL{OUT_OF_MEMORY}"
    return (
        f"{error.rstrip('. ')}{OUT_OF_MEMORY}" if error and _KILLED_PROCESS.search(error) else None
    )


def signalled_to_end(signalled: Mapping[str, float], at: float) -> bool:
    """Return True if a rank got a signal to end at or before the time ``at``.

    The mapping contains the signals that the rank got: name -> unix time of the first arrival.
    """
    return any(name in _ENDING and since <= at for name, since in signalled.items())


def blameless_signal(signal: str | None, traceback: str | None) -> bool:
    """Return True if a signal was only a consequence of an error that the traceback shows.

    gloo or NCCL may abort the interpreter (SIGABRT) after a Python exception.
    """
    return signal == "SIGABRT" and "Traceback (most recent call last)" in (traceback or "")


def records(attempt: Path) -> list[dict[str, Any]]:
    """Return the records of an attempt's ranks (ranks/rank_NNNNN.json), ordered by rank."""
    found = (read_json(path) for path in sorted((attempt / "ranks").glob("rank_*.json")))
    return [record for record in found if record is not None]


def failures(attempt: Path, *, running: bool = False) -> list[Failure]:
    """Return every rank that failed or vanished, the likely cause first.

    running: the attempt continues, so ranks without a recorded end have not vanished.

    The order is: ranks that failed on their own (with a reported error first), ranks that vanished
    with their keeper, ranks that report a lost peer, ranks that got a signal to end. Within each
    group the earliest is first.
    """
    found = []
    for record in records(attempt):
        if record.get("exit") == 0 or (running and record.get("ended") is None):
            continue
        failure = _failure(attempt, record)
        found.append((_order(failure, record), failure.time, failure.rank, failure))
    return [failure for *_, failure in sorted(found, key=lambda entry: entry[:3])]


def first_failure(attempt: Path, *, running: bool = False) -> Failure | None:
    """Return the failure that is most likely the cause, or None if no rank failed."""
    return next(iter(failures(attempt, running=running)), None)


def all_signalled(attempt: Path) -> bool:
    """Return True if ranks failed, but each of them only after a signal to end.

    In this case no rank was the cause.
    """
    failed = [record for record in records(attempt) if record.get("exit") != 0]
    return bool(failed) and all(
        _was_signalled(_failure(attempt, record), record) for record in failed
    )


def wrong_on(attempt: Path) -> tuple[str, ...]:
    """Return the hosts whose ranks report wrong input, if they are only some of the hosts.

    Return () if no host or every host reports wrong input.
    """
    hosts = {str(record.get("host")): False for record in records(attempt)}
    for record in records(attempt):
        hosts[str(record.get("host"))] |= record.get("exit") == Exit.WRONG_INPUT
    affected = tuple(host for host, wrong in hosts.items() if wrong)
    return affected if len(affected) < len(hosts) else ()


def last_stamp(log: Path) -> float | None:
    """Return the time of the last line in a rank's log, or None if it has none."""
    stamps = map(_STAMP.match, reversed(last_bytes(log, 1 << 17).splitlines()))
    return next((float(stamp[1]) for stamp in stamps if stamp), None)


def _failure(attempt: Path, record: dict[str, Any]) -> Failure:
    """Return the failure that a record describes."""
    rank = record["rank"]
    error = record.get("error")
    by = record.get("signal")
    code = record.get("exit")
    if error and blameless_signal(by, record.get("traceback")):
        by = None
    messages = {
        "rank": rank,
        "host": str(record.get("host")),
        "exit": code,
        "signal": by,
        "traceback": record.get("traceback"),
    }
    if record.get("ended") is None:
        seen = last_stamp(rank_log(attempt, rank)) or record.get("started") or 0.0
        message = "its process vanished without a report: killed from outside, or its node failed"
        return Failure(
            **messages, message=message, kind="lost", time=seen, lost_peer=False, reported=False
        )
    if error:
        message = f"{error} ({by})" if by and by not in error else error
    elif by:
        message = f"killed by {by}" + (
            ": the kernel's out-of-memory killer, or a user" if by == "SIGKILL" else ""
        )
    else:
        message = f"exited with {code}" + (
            f"; its last line: {record['last_line']}" if record.get("last_line") else ""
        )
    kind = kind_of(error or "", code, by)
    at = float(record.get("error_time") or record["ended"])
    return Failure(
        **messages,
        message=message,
        kind=kind,
        time=at,
        lost_peer=bool(_LOST_PEER.search(error or "")),
        reported=bool(error),
    )


def _order(failure: Failure, record: dict[str, Any]) -> int:
    """Return the sort key of a failure. It is smaller for a likelier cause."""
    if _was_signalled(failure, record):
        return 4
    if failure.lost_peer:
        return 3
    if failure.kind == "lost":
        return 2
    return 0 if failure.reported or failure.signal else 1


def _was_signalled(failure: Failure, record: dict[str, Any]) -> bool:
    """Return True if a rank got a signal to end before it failed."""
    return signalled_to_end(
        record.get("told") or {}, failure.time if record.get("ended") is not None else math.inf
    )
