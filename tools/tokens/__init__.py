"""Lookup of the documents that a run's steps read, and of the steps that read a document.

It uses the run's index cache.

The package builds no index and reads no .bin file.
"""
