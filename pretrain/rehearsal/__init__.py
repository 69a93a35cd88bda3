"""Rehearsal of a step of one rank without its machine: the training code runs on meta tensors in a
fake process group.
"""
