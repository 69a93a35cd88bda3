"""A private, real Slurm on this machine, and the tests that run against it. It knows nothing of what is submitted to it."""
