"""Triton kernels of `linear_attention`. `function` contains the autograd function."""
