"""Picture of what every layer of a checkpoint does to some tokens.

The quantities are defined in fem_megatron.diagnostics.
"""
