"""Ranks' records and tracebacks, as they are left on disk, for tests of who reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.job import rank_record, write_json

RESET = "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337"


def record(attempt: Path, rank: int, at: float, **values: Any) -> None:
    """A rank's record that ended at a time."""
    known = {"rank": rank, "host": f"node{rank // 2}", "started": 1000.0, "ended": at, "exit": 1, "signal": None, "told": {}, "error": None}
    write_json(rank_record(attempt, rank), {**known, "error_time": at if values.get("error") else None, "traceback": None, **values})


def trace(error: str, prefix: str = "") -> str:
    """A traceback as Python writes it."""
    return "\n".join(f"{prefix}{line}" for line in ["Traceback (most recent call last):", '  File "a.py", line 3, in f', "    g()", error])
