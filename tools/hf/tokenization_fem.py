"""Tokenizer class of an exported folder, which uses tokenizer.json unchanged.

tokenizer_config.json names this class in ``auto_map`` if transformers 5 would otherwise use the
class of the model type, which has another pre-tokenizer. Without ``trust_remote_code`` this file is
not read, but the entry in ``auto_map`` alone already prevents the replacement.
"""

from transformers import PreTrainedTokenizerFast as Opener

NAME = "tokenization_fem.PreTrainedTokenizerFast"


class PreTrainedTokenizerFast(Opener):
    """Tokenizer that is read from tokenizer.json.

    The class defines no constructor, because transformers 5 would call it to rebuild the tokenizer.
    """
