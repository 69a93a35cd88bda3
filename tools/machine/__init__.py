"""Check of a machine for training, which `launch doctor` starts as a separate process."""
