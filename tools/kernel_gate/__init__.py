"""The compile gate: every Triton kernel built for real GPUs on a machine without one, and what the machine code says of itself."""
