"""What operations say, as of a fresh process."""

from __future__ import annotations

import logging

import pytest

from kernels.implementations import OncePerMessage, operations


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The log of all operations, none of whose messages has been said yet."""
    caplog.set_level(logging.INFO, "kernels")
    for name in (*operations(), "sum"):
        monkeypatch.setattr(logging.getLogger(f"kernels.{name}"), "filters", [OncePerMessage()])
    return caplog
