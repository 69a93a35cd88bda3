"""Planning: compute parameters, FLOPs and memory of a run from its configuration alone.

The package does not import torch.
"""
