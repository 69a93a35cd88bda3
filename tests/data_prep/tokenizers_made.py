"""Folders of small tokenizers of many kinds, trained on the same prose and code."""

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
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = GPT_PIECES.replace("{1,3}", "")
Spec = dict[str, Any]


def texts() -> list[str]:
    """Return the training texts: about 300 kB of the standard library, and some other scripts."""
    files = [
        Path(os.__file__).with_name(name) for name in ("argparse.py", "typing.py", "inspect.py")
    ]
    others = ["naïve café 東京 日本語 🙂 العربية Ελλάδα it's we'll 1234 234 2025 "] * 20
    return [file.read_text(encoding="utf-8") for file in files] + others


def trained(
    model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any = None, most: int | None = None
) -> Tokenizer:
    """Return a tokenizer trained on the first ``most`` characters of each text."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([text[:most] for text in texts()], trainer)
    return tokenizer


def of_bytes(pieces: Any, normalizer: Any = None) -> Tokenizer:
    """Return a byte-level BPE of 1500 entries with a pre-tokenizer or with the matches of a regular
    expression.
    """
    if isinstance(pieces, str):
        split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
        pieces = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False
    )
    return trained(models.BPE(), trainer, pieces, normalizer)


def gpt(normalizer: Any = None) -> Tokenizer:
    """Return a tokenizer with the pre-tokenization of ``train-tokenizer``, which is LLaMA-3's."""
    return of_bytes(GPT_PIECES, normalizer)


def changed(tokenizer: Tokenizer, change: Callable[[Spec], object]) -> Tokenizer:
    """Return a tokenizer with a changed specification."""
    spec = json.loads(tokenizer.to_str())
    change(spec)
    return Tokenizer.from_str(json.dumps(spec))


def llama(change: Callable[[Spec], object] = lambda spec: None) -> Tokenizer:
    """Return a tokenizer with a changed form of LLaMA-2's layout."""
    return changed(STYLES["llama"].train([text.encode() for text in texts()], 1500, False), change)


def metaspace(**how: object) -> Callable[[Spec], object]:
    """Return a change that replaces the normalizer by Metaspace as pre-tokenizer."""
    return lambda spec: spec.update(
        normalizer=None, pre_tokenizer={"type": "Metaspace", "replacement": "▁", **how}
    )


def ignore_merges(spec: Spec) -> None:
    """Change a tokenizer to encode a word with its own entry as that entry, as in LLaMA-3."""
    spec["model"]["ignore_merges"] = True


def added(tokenizer: Tokenizer, *contents: str, after: str = "", **how: bool) -> Tokenizer:
    """Add text tokens to a tokenizer, after the special token ``after`` if given, as in Qwen."""
    tokenizer.add_special_tokens([after] * bool(after))
    tokenizer.add_tokens([AddedToken(content, **how) for content in contents])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a Unigram tokenizer like T5's."""
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>", EOD], unk_token="<unk>", show_progress=False
    )
    return trained(
        models.Unigram(), trainer, pre_tokenizers.Metaspace(), normalizers.NFKC(), 30_000
    )


def word_piece() -> Tokenizer:
    """Return a WordPiece tokenizer like BERT's."""
    trainer = trainers.WordPieceTrainer(
        vocab_size=600, special_tokens=["[UNK]", EOD], show_progress=False
    )
    model = models.WordPiece(unk_token="[UNK]")
    return trained(
        model, trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(), 30_000
    )


DIGITS = [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
# Tokenizers for which gigatoken is used, as in the table in README.md.
EXACT: dict[str, Callable[[], Tokenizer]] = {
    "gpt": gpt,
    "gpt2": lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, space first": lambda: of_bytes(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "o200k": lambda: of_bytes(O200K),
    "qwen": lambda: of_bytes(QWEN, normalizers.NFC()),
    "ignoring merges": lambda: changed(gpt(), ignore_merges),
    "added": lambda: added(gpt(), "    ", "<tool>", normalized=False),
    "added after special": lambda: added(
        gpt(), "<tool>", "    ", after="<|pad|>", normalized=False
    ),
    "llama": llama,
    "llama, ignoring merges": lambda: llama(ignore_merges),
    "llama, added": lambda: added(llama(), "<tool>", "▁▁▁▁", normalized=False),
    "metaspace, split": lambda: llama(metaspace(prepend_scheme="always", split=True)),
    "metaspace, first": lambda: llama(metaspace(prepend_scheme="first", split=False)),
}
# Tokenizers for which it is not used, with the reason in the output.
INEXACT: dict[str, tuple[Callable[[], Tokenizer], str]] = {
    "nfkc": (lambda: gpt(normalizers.NFKC()), "normalizer has a step NFKC"),
    "lower case": (lambda: gpt(normalizers.Lowercase()), "normalizer has a step Lowercase"),
    "own pieces": (lambda: of_bytes(r"\p{L}+|\p{N}|[^\p{L}\p{N}]"), "does not load this tokenizer"),
    "digits": (lambda: of_bytes(pre_tokenizers.Sequence(DIGITS)), "does not load"),
    "unigram": (unigram, "normalizer has a step NFKC"),
    "word piece": (word_piece, "normalizer has a step BertNormalizer"),
    "single word": (lambda: added(gpt(), "sw", single_word=True), " differ on "),
}


def write(folder: Path, tokenizer: Tokenizer) -> TokenizerFolder:
    """Save a tokenizer as a folder and load it."""
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    eod = EOD if tokenizer.token_to_id(EOD) is not None else "</s>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eod}))
    return load_folder(folder)
