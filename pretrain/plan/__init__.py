"""Planning: the parameters, FLOPs and memory that a run needs, from its configuration alone.

The module does not import torch.
"""
