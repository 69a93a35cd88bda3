"""Tokenizer class of an exported folder: reads tokenizer.json unchanged.

Named in ``auto_map`` of tokenizer_config.json if transformers 5 would otherwise replace the class
by that of the model type, which has another pre-tokenizer. Without ``trust_remote_code`` the entry
alone has this effect, and this file is not read.
"""

from transformers import PreTrainedTokenizerFast as Opener

NAME = "tokenization_fem.PreTrainedTokenizerFast"


class PreTrainedTokenizerFast(Opener):
    """Opens tokenizer.json. It has no constructor, because transformers 5 would call it to rebuild
    the tokenizer.
    """
