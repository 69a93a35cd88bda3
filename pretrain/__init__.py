"""pretrain: a configuration and data in, checkpoints and logs out. Imports ``fem_megatron``; nothing of ``tools`` or ``data_prep`` may come in.

Importing the package, its configuration or its planner loads no torch.
"""
