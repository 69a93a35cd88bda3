"""Triton kernels of `fem_attention`: imported only where they run. Nothing here chooses an implementation."""
