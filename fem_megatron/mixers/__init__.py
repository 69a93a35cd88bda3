"""Mixers, one folder each.

``shape`` contains the switches and sizes and is torch-free; ``layer`` contains the mathematics and
uses only torch. Neither imports Megatron-core.
"""
