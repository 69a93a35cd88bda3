"""The papers' own experiments on the layers that pretraining uses. No trainer of language models may come in: that is ``pretrain``."""
