"""Planning: the parameters, FLOPs and memory that a run needs, from its configuration alone. No
torch.
"""
