"""Verb ``verify`` and its checks of data folders."""
