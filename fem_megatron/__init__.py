"""fem_megatron: layers, layer specs and whole models on Megatron-core. Imports ``kernels``; no trainer, no data, no launcher may come in.

Importing the package or its ``config`` loads no torch.
"""
