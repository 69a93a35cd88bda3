"""Adapters that turn the layers into a Megatron-core model on this machine.

No mixer is named in it.
"""
