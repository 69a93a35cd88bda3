"""Lookup of the documents that a run's steps read, and of the steps that read a document.

The package reads the index cache of the run, which contains the order of its samples. It builds no
index and reads no .bin file.
"""
