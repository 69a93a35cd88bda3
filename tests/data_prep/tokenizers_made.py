"""Small tokenizers of many kinds, as folders, trained on the same prose and code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from data_prep.encode.tokenizer import TokenizerFolder, load_folder
from data_prep.verbs.train_tokenizer import GPT_PIECES, STYLES

EOD = "<|endoftext|>"
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT_PIECES.replace("{1,3}", "")
Spec = dict[str, Any]


def texts() -> list[str]:
    """What they are trained on: a little of the standard library, about 300 kB, and some other scripts."""
    files = [Path(os.__file__).with_name(name) for name in ("argparse.py", "typing.py", "inspect.py")]
    others = ["naïve café 東京 日本語 🙂 العربية Ελλάδα it's we'll 1234 234 2025 "] * 20
    return [file.read_text(encoding="utf-8") for file in files] + others


def cut(pieces: str) -> pre_tokenizers.PreTokenizer:
    """A pre-tokenizer of a regular expression's matches, as bytes."""
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def of_bytes(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE of 1500 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def llama(change: Callable[[Spec], object] = lambda spec: None) -> Tokenizer:
    """LLaMA-2's layout, changed."""
    spec = json.loads(STYLES["llama"].train([text.encode() for text in texts()], 1500, False).to_str())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec))


def metaspace(**how: object) -> Callable[[Spec], object]:
    """A change: Metaspace as pre-tokenizer in place of the normalizer."""
    return lambda spec: spec.update(normalizer=None, pre_tokenizer={"type": "Metaspace", "replacement": "▁", **how})


def with_tokens(tokenizer: Tokenizer, *tokens: AddedToken) -> Tokenizer:
    """A tokenizer with more added tokens."""
    tokenizer.add_tokens(list(tokens))
    return tokenizer


def ignoring_merges() -> Tokenizer:
    """One that gives a word with an entry of its own that entry, as LLaMA-3 does."""
    spec = json.loads(gpt().to_str())
    spec["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(spec))


def after_special() -> Tokenizer:
    """One whose added tokens that are text come after a special one, as Qwen's do."""
    tokenizer = gpt()
    tokenizer.add_special_tokens(["<|pad|>"])
    return with_tokens(tokenizer, AddedToken("<tool>", normalized=False), AddedToken("    ", normalized=False))


def gpt(normalizer: Any = None) -> Tokenizer:
    """Of ``train-tokenizer``'s style, which is LLaMA-3's."""
    return of_bytes(cut(GPT_PIECES), normalizer)


def trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """A tokenizer of another model."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([text[:30_000] for text in texts()], trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """T5's kind."""
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=["<unk>", EOD], unk_token="<unk>", show_progress=False)
    return trained(models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC())


def word_piece() -> Tokenizer:
    """BERT's kind."""
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=["[UNK]", EOD], show_progress=False)
    return trained(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer())


def added(*contents: str, **how: bool) -> Tokenizer:
    """The GPT style with added tokens that are text."""
    return with_tokens(gpt(), *(AddedToken(content, **how) for content in contents))


# Where gigatoken is used. The table in README.md says the same.
EXACT: dict[str, Callable[[], Tokenizer]] = {
    "gpt": gpt,
    "gpt2": lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, space first": lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "o200k": lambda: of_bytes(cut(O200K)),
    "qwen": lambda: of_bytes(cut(QWEN), normalizers.NFC()),
    "ignoring merges": ignoring_merges,
    "added": lambda: added("    ", "<tool>", normalized=False),
    "added after special": after_special,
    "llama": llama,
    "llama, ignoring merges": lambda: llama(lambda spec: spec["model"].update(ignore_merges=True)),
    "llama, added": lambda: with_tokens(llama(), AddedToken("<tool>", normalized=False), AddedToken("▁▁▁▁", normalized=False)),
    "metaspace, split": lambda: llama(metaspace(prepend_scheme="always", split=True)),
    "metaspace, first": lambda: llama(metaspace(prepend_scheme="first", split=False)),
}
# Where it is not, and what is said of it.
INEXACT: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "nfkc": (lambda: gpt(normalizers.NFKC()), "normalizer has a step NFKC"),
    "lower case": (lambda: gpt(normalizers.Lowercase()), "normalizer has a step Lowercase"),
    "own pieces": (lambda: of_bytes(cut(r"\p{L}+|\p{N}|[^\p{L}\p{N}]")), "does not load this tokenizer"),
    "digits": (lambda: of_bytes(pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])), "does not load"),
    "unigram": (unigram, "normalizer has a step NFKC"),
    "word piece": (word_piece, "normalizer has a step BertNormalizer"),
    "single word": (lambda: added("sw", single_word=True), " differ on "),
}


def write(folder: Path, tokenizer: Tokenizer, eod: str | None = None) -> TokenizerFolder:
    """A tokenizer as a folder, loaded."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eod = eod or (EOD if tokenizer.token_to_id(EOD) is not None else "</s>")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eod}))
    return load_folder(folder)
