"""``python -m tools.bench.data_prep``: data_prep beside the usual ways to Megatron's .bin/.idx, in CPU seconds, on one corpus, in one run.

Figures and how they are made live here; what is measured is always a whole command in its own process. No test may time anything.
"""
