"""``python -m tools.bench.traffic``: modelled step times of a GPU, without a GPU.

The times are computed from the bytes that a layer moves through the GPU's memory.

`fem_megatron.meta.trace` runs the real layers on meta tensors and counts their traffic; ``paper``
computes times from the counts.
"""
