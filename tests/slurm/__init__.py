"""A private, real Slurm on this machine, and the tests that use it. The cluster does not depend on
the submitted jobs.
"""
