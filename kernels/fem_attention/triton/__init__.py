"""Triton kernels of `fem_attention`. `function` contains the autograd function."""
