"""What operations say, as of a fresh process."""

from __future__ import annotations

import logging

import pytest
import torch

from kernels.implementations import OncePerMessage, operations


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator is the same in any order."""
    torch.manual_seed(0)


@pytest.fixture
def messages(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """The log of all operations, none of whose messages has been said yet."""
    caplog.set_level(logging.INFO, "kernels")
    for name in (*operations(), "sum"):
        monkeypatch.setattr(logging.getLogger(f"kernels.{name}"), "filters", [OncePerMessage()])
    return caplog
