"""``python -m tools.bench.data_prep``: compare data_prep with other ways to Megatron's .bin/.idx.

All pipelines encode the same corpus in the same run, and their CPU seconds are compared. A
measurement is always a complete command in a separate process. Tests never measure time.
"""
