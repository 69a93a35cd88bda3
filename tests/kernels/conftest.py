"""Fixtures that give every test a fixed random seed and unused log filters."""

from __future__ import annotations

import logging

import pytest
import torch

from kernels.implementations import OncePerMessage, operations


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Seed torch's global generator, so that the order of the tests does not change their data."""
    torch.manual_seed(0)


@pytest.fixture
def messages(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Return caplog for the operations' loggers, with no message marked as already logged."""
    caplog.set_level(logging.INFO, "kernels")
    for name in (*operations(), "sum"):
        monkeypatch.setattr(logging.getLogger(f"kernels.{name}"), "filters", [OncePerMessage()])
    return caplog
