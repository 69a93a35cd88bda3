"""Mixers, with one folder for each family.

In each folder, ``shape`` contains configuration keys and sizes without torch, and ``layer``
contains the mathematics in plain torch. Neither imports Megatron-core.
"""
