"""``python -m tools.bench.data_prep``: compare data_prep with other ways to Megatron's .bin/.idx.

All are measured in CPU seconds, on one corpus, in one run.

A measurement is always a complete command in a separate process. Tests never measure time.
"""
