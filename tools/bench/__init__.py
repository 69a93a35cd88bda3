"""Benchmarks: ratios measured side by side in one run, each beside its named baseline. No test may time anything; this room does."""
