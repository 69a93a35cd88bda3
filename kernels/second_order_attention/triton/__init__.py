"""Triton kernels of `second_order_attention`. `function` contains the autograd function."""
