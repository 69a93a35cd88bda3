"""Training data: facts about the files, the index cache, packing, and batches."""
