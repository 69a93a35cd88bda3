"""Compile gate: every Triton kernel is compiled for real GPUs on a machine without one, and its
machine code is checked.
"""
