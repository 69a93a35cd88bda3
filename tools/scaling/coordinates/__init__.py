"""Coordinate check of muP: sizes of activations by width, and the verdict on each."""
