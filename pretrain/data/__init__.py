"""Training data: its facts on disk, its index cache, its batches."""
