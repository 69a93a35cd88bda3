"""Distributed pretraining: train a model from a configuration and data, and write checkpoints and
logs.

The package imports ``fem_megatron``, but no tools and no data preparation. Importing the package,
its configuration or its planner does not load torch.
"""
