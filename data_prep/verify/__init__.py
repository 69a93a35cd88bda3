"""Verb ``verify`` and its checks."""
