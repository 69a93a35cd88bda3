"""Triton kernels of `ssm_read`. `function` contains the autograd function."""
