"""``python -m tools.bench.traffic``: bytes that a layer moves through a GPU's memory, and modelled
step times, without a GPU.

`fem_megatron.trace` runs the real layers on meta tensors and counts their traffic; ``paper``
computes times from the counts.
"""
