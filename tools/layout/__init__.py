"""Search for the fastest parallel layout of a run on a given number of GPUs, by an analytic model
of a step.

The times are modelled, not measured. The package does not import torch.
"""
