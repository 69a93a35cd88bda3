"""Is this machine fit for training: what is installed, what DeepSpeed has compiled, and what to do about the rest."""
