"""Coordinate check of muP: measure the size of activations at several widths and judge it."""
