"""data_prep: text in, Megatron ``.bin/.idx`` out. Each verb of ``python -m data_prep`` is one file here.

Needs pyarrow, tokenizers and numpy alone: no torch, no megatron, and of the other rooms `fem_common` alone may come in.
"""
