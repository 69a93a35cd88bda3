"""launch: whether the process that wrote a state.json is still the one of that number. Standard library alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SLACK = 2.0  # seconds between two clocks' readings of one moment


def process_of(state: Mapping[str, Any] | None) -> int | None:
    """The process id in a state that a supervisor on this machine wrote, if that very process lives; None: it does not, or is elsewhere.

    A process that got the number later started after the state was written.
    """
    if not state or state.get("host") != socket.gethostname() or not isinstance(state.get("pid"), int):
        return None
    started = start_time(state["pid"])
    return state["pid"] if started is not None and started <= float(state.get("time") or 0.0) + SLACK else None


def start_time(pid: int) -> float | None:
    """When a process started, in unix time; None where it is over (a zombie is over)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        uptime = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, IndexError, ValueError):
        return None
    if fields[0] in "ZX":
        return None
    return time.time() - uptime + int(fields[19]) / os.sysconf("SC_CLK_TCK")
