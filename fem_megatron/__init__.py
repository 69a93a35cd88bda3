"""Layers, layer specs and complete models on Megatron-core.

The package imports ``kernels`` and must not import the trainer, the data preparation or the
launcher. Importing the package or its ``config`` does not load torch.
"""
