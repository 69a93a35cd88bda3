"""Triton kernels of `aft_read`. `function` contains the autograd function."""
