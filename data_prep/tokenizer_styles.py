"""data_prep: the two kinds of tokenizer that ``train-tokenizer`` makes: texts in, a Hugging Face tokenizer out. Knows no file."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

BATCH_BYTES = 1 << 20
GPT_EOD = "<|endoftext|>"
# GPT-4's pieces: contractions, words with one leading non-letter, up to three digits, punctuation, line ends, runs of spaces.
GPT_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPACE = "▁"  # what a space becomes
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
PRINTABLE = SPACE + "".join(map(chr, range(0x21, 0x7F)))
# Within what merges are learnt: runs of spaces, words and punctuation with at most one leading space; digits and line ends stand alone.
LLAMA_PIECES = rf"{SPACE}{{2,}}|{SPACE}?\p{{L}}[\p{{L}}\p{{M}}]*|{SPACE}?[^{SPACE}\s\p{{L}}\p{{N}}]+|[\s\S]"
LLAMA_COVERAGE = 0.99995  # share of the characters that get an entry; the rest is written as bytes
LLAMA_LONGEST = 16  # characters of an entry


@dataclass(frozen=True)
class Style:
    """``train(texts, vocab_size, show)`` gives a tokenizer of at most ``vocab_size`` entries, the same for the same texts in any order;
    ``rules`` identifies what it does with them; ``config`` is tokenizer_config.json."""

    name: str
    eod: str
    smallest: int
    contents: str
    rules: str
    config: dict[str, Any]
    train: Callable[[Sequence[bytes], int, bool], Tokenizer]


def batches(texts: Sequence[bytes]) -> Iterator[list[str]]:
    """UTF-8 texts as strings, about a megabyte at a time."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text.decode())
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def train_gpt(texts: Sequence[bytes], vocab_size: int, show: bool) -> Tokenizer:
    """A byte-level BPE: EOD is entry 0, the 256 bytes follow, so every UTF-8 text comes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(GPT_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[GPT_EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show,
    )
    tokenizer.train_from_iterator(batches(texts), trainer)
    return tokenizer


def alphabet(texts: Sequence[bytes], most: int) -> tuple[str, str]:
    """(characters that get an entry of their own, the others that occur).

    Printable ASCII and the space's sign always; then the most frequent, ties by code point, until LLAMA_COVERAGE of all characters are
    covered or ``most`` are taken. Control characters, line ends and tabs stay bytes.
    """
    counts = np.zeros(0x110000, np.int64)
    for batch in batches(texts):
        counts += np.bincount(np.frombuffer("".join(batch).encode("utf-32-le"), "<u4"), minlength=len(counts))
    occurring = [point for point in np.flatnonzero(counts).tolist() if chr(point) != " "]
    others = [point for point in occurring if chr(point) not in PRINTABLE and unicodedata.category(chr(point)) != "Cc"]
    others.sort(key=lambda point: (-int(counts[point]), point))
    missing = int(counts[others].sum()) - (1 - LLAMA_COVERAGE) * int(counts.sum())
    taken = []
    for point in others[:most]:
        if missing <= 0:
            break
        taken.append(point)
        missing -= int(counts[point])
    chosen = PRINTABLE + "".join(map(chr, taken))
    return chosen, "".join(chr(point) for point in occurring if chr(point) not in set(chosen))


def train_llama(texts: Sequence[bytes], vocab_size: int, show: bool) -> Tokenizer:
    """A BPE of LLaMA-2's layout: <unk> <s> </s>, the 256 bytes from entry 3 on, characters and merges; no pre-tokenizer when it encodes.

    Every UTF-8 text comes back exactly, but for the sign U+2581 itself, which comes back as the space it stands for.
    """
    letters, rare = alphabet(texts, most=(vocab_size - LLAMA.smallest) // 4)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA_PIECES), behavior="isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*LLAMA_SPECIAL, *BYTES],
        initial_alphabet=list(letters),
        limit_alphabet=len(letters),
        max_token_length=LLAMA_LONGEST,
        show_progress=show,
    )
    # A character without an entry is skipped in training, which would join its neighbours: a line end keeps them apart.
    apart = re.compile(f"[{re.escape(rare)}]+") if rare else re.compile("\n")
    tokenizer.train_from_iterator(([apart.sub("\n", text) for text in batch] for batch in batches(texts)), trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] in LLAMA_SPECIAL]
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    return tokenizer


def _config(special: dict[str, str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }


GPT = Style("gpt", GPT_EOD, 257, "256 bytes and EOD", GPT_PIECES, _config({"eos_token": GPT_EOD}), train_gpt)
LLAMA = Style(
    "llama",
    "</s>",
    len(LLAMA_SPECIAL) + len(BYTES) + len(PRINTABLE),
    f"{', '.join(LLAMA_SPECIAL)}, 256 bytes and {len(PRINTABLE)} characters",
    f"{LLAMA_PIECES} {LLAMA_COVERAGE} {LLAMA_LONGEST}",
    _config({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}),
    train_llama,
)
STYLES = {style.name: style for style in (GPT, LLAMA)}
