"""Rehearsal of a training step of one rank on any machine.

The training code runs on meta tensors in a simulated process group, so that memory and collectives
are known without the run's machine.
"""
