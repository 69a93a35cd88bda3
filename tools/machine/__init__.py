"""Checks of whether a machine can train, which `launch doctor` runs in a separate process."""
