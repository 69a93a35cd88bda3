"""Compile gate: compile every Triton kernel for real GPUs and check its machine code.

The gate runs on a machine without a GPU.
"""
