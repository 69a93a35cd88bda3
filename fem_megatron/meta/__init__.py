"""Layers run on meta tensors: counts of their work, on a machine that does not exist."""
