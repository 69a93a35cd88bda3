"""The tokenizer class of an exported folder: tokenizer.json as it is.

Named in tokenizer_config.json's ``auto_map`` where transformers 5 would otherwise replace the class by that of the model type, with
another pre-tokenizer. Without ``trust_remote_code`` the entry alone has this effect, and this file is not read.
"""

from transformers import PreTrainedTokenizerFast as Opener

NAME = "tokenization_fem.PreTrainedTokenizerFast"


class PreTrainedTokenizerFast(Opener):
    """Opens tokenizer.json. Has no constructor, which transformers 5 would call to build the tokenizer anew."""
