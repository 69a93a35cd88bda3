"""Triton kernels of `symmetric_attention`: imported only where they run. Nothing here chooses an implementation."""
