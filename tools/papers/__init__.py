"""The papers' experiments with the layers that pretraining uses. Must not contain a trainer of
language models; that is ``pretrain``.
"""
