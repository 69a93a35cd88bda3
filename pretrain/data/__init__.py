"""What is trained on: its facts on disk, its index cache, its batches."""
