"""What the tests of the evaluation share."""

from __future__ import annotations

from tests.tools.refusals import raised as raised
from tests.tools.refusals import refused as refused
