"""Verbs of `python -m tools.scaling`, one module each."""
