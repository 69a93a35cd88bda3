"""Draws what every layer of a checkpoint does to some tokens as one picture. What there is to see is in fem_megatron.diagnostics."""
