"""Planning: compute parameters, FLOPs and memory of a run from its configuration alone.

The module does not import torch.
"""
