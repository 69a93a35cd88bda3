"""``python -m tools.bench.data_prep``: CPU seconds of data_prep and of the usual ways to Megatron's
.bin/.idx, on one corpus, in one run.

A measurement is always a complete command in a separate process. Tests never measure time.
"""
