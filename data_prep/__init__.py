"""Data preparation: encode text into Megatron ``.bin/.idx`` files.

Each verb of ``python -m data_prep`` is one module. The package requires only pyarrow, tokenizers
and numpy, without torch or megatron. Of the other packages of this repository it imports only
`fem_common`.
"""
