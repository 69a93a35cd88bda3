"""pretrain: a configuration and data in, checkpoints and logs out. Imports ``fem_megatron``; no tool and no data preparation may come in.

Importing the package, its configuration or its planner loads no torch.
"""
