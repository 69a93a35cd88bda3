"""Small tokenizers whose pre-tokenizers differ from every class's default, and models of each
family of exports.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, PreTokenizer, Sequence, Split

from fem_megatron.mixers.attention.shape import AttentionConfig

TEXTS = [
    "It's 2024: 12345678 bytes, don't stop",
    "def f(x):\n\treturn  x**2  # 你好 мир\r\n\r\n",
    "  lead  trail  ",
    "Straße ｆｕｌｌ e\u0301 नमस्ते ก้ไก่ 👩‍👩‍👧",
    "HelloWorld fooBar3 <|endoftext|>",
]
PATTERN = Regex(r"\p{N}{1,3}|\s?\p{L}+[.,]?|\s+|[^\s\p{L}\p{N}]+")
KINDS: dict[str, PreTokenizer] = {
    "regex": Sequence(
        [Split(PATTERN, "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    ),
    "prefixed": ByteLevel(add_prefix_space=True),
    "pieces": Sequence([Digits(individual_digits=True), Metaspace(prepend_scheme="never")]),
}
SIZES: dict[str, Any] = {"vocab_size": 640}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"name": "transformer"},
    "mistral": SIZES | {"name": "transformer", "attention": AttentionConfig(sliding_window=5)},
    "qwen2": SIZES | {"name": "transformer", "attention": AttentionConfig(qkv_bias=True)},
    "qwen3": SIZES | {"name": "transformer", "qk_norm": True},
    "fem_lm": SIZES | {"name": "fem_softmax"},
}


@functools.cache
def trained(kind: str) -> str:
    """Return the tokenizer.json of a BPE with 600 entries."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.pre_tokenizer = KINDS[kind]
    tokenizer.decoder = decoders.Metaspace() if kind == "pieces" else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<s>", "</s>", "<unk>", "<pad>"],
        initial_alphabet=[] if kind == "pieces" else ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 8, trainer)
    text: str = tokenizer.to_str()
    return text


def write_reader(folder: Path, kind: str, name: str | None, **settings: Any) -> Path:
    """Write a tokenizer's folder whose tokenizer_config.json names this class."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(trained(kind))
    values = (
        {"eos_token": "<|endoftext|>"}
        | ({} if name is None else {"tokenizer_class": name})
        | settings
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return folder


def ids(tokenizer: Any) -> list[list[int]]:
    """Return the ids of the texts."""
    return [list(tokenizer(text)["input_ids"]) for text in TEXTS]
