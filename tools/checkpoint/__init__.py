"""Commands for checkpoints as files: inspect, verify, convert, merge and mirror them.

No model is built, and only ``merge`` computes with tensors.
"""
