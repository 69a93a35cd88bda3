"""Picture of the energies, entropies and step norms of every layer of a checkpoint.

They are computed on some tokens of a data set. fem_megatron.diagnostics defines the quantities.
"""
