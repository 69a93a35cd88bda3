"""Shared helpers that every package uses. Importing fem_common loads only the standard library."""
