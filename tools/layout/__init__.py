"""Search for the fastest parallel layout of a run on a given number of GPUs.

The time of a step is computed by an analytic model, not measured. The package does not import
torch.
"""
