"""Triton kernels of `cem_attention`. `function` contains the autograd function."""
