"""Triton's interpreter with the fixes and accelerations that the tests need."""

from tests.interpreter.run import interpret

__all__ = ["interpret"]
