"""Triton kernels of `second_order_attention`: imported only where they run. Nothing here chooses an implementation."""
