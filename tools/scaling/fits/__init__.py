"""Fits of a study: numpy and scipy in float64 on arrays; no files, no torch, no output."""
