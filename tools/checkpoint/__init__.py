"""Checkpoints as files: what one holds, and the same one for another engine or optimizer. No model is built here, no tensor is computed."""
