"""Checkpoints: written, found, verified, read, resumed from."""
