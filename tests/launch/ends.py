"""Ends of attempts, for tests of the policy."""

from __future__ import annotations

from typing import Any

from launch.supervise.policy import End, Failure


def failed(message: str = "boom", *, kind: str = "exit", step: int | None = 7, host: str | None = "n1", code: int = 1, **end: Any) -> End:
    """An attempt that failed."""
    return End("failed", Failure(kind, message, rank=0, host=host, step=step, exit=code), **end)


def killed(host: str, **end: Any) -> End:
    """An attempt one of whose ranks somebody killed."""
    return failed("killed by SIGKILL", kind="signal", host=host, code=137, **end)
