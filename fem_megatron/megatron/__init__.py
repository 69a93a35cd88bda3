"""Adapters that turn the layers into a Megatron-core model on this machine.

No module of this package names a specific mixer.
"""
