"""Shared fixtures of the evaluation's tests."""

from __future__ import annotations

from tests.tools.refusals import raised as raised
from tests.tools.refusals import refused as refused
