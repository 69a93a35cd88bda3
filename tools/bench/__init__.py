"""Benchmarks of the kernels, the trainer, the engines and the data preparation.

Results are ratios to a named baseline that is measured in the same run. Tests never measure time;
only this package does.
"""
