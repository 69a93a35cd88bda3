"""Experiments of the papers on small models built from the layers that pretraining uses.

This package contains no trainer of language models at scale; that is ``pretrain``.
"""
