"""Benchmarks: ratios to a named baseline that is measured in the same run.

Tests never measure time; only this package does.
"""
