"""Pretraining: reads a configuration and data, writes checkpoints and logs.

It imports ``fem_megatron``, but no tools and no data preparation. Importing the package, its
configuration or its planner does not load torch.
"""
