"""Verb ``train-tokenizer``: train a BPE on the inputs' text, as a folder for AutoTokenizer.

    gpt     byte-level, GPT-4's pre-tokenization, <|endoftext|> (id 0) as EOD. Every UTF-8 text
            is decoded exactly.
    llama   LLaMA-2's layout: <unk> <s> </s>, 256 bytes, characters and merges; digits one by one;
            </s> as EOD. Every UTF-8 text is decoded exactly except the character U+2581, which
            becomes a space.

transformers.AutoTokenizer loads the folder. The training uses at most about --sample-mb of text:
the documents whose ids have the smallest hashes. The same documents therefore give the same
tokenizer, independent of the division into files, the order and the number of threads. All inputs
are read. The memory is a few times the sample.
"""

from __future__ import annotations

import argparse
import heapq
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from data_prep.aliases import Json
from data_prep.encode.documents import (
    Documents,
    Selection,
    Settings,
    add_column_arguments,
    settings_of,
)
from data_prep.encode.splits import hash_ids
from data_prep.options import add_input_arguments
from data_prep.prepared.staging import Staging
from data_prep.report.progress import Reading
from data_prep.sources import Rows, SourceFile, open_files, read_span, spans
from data_prep.sources.rows import Drop, by_reason
from fem_common.errors import UserError
from fem_common.files import json_bytes, sha256, sha256_json, write_synced

SEAL = "training.json"
SPAN_BYTES = 64 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_input_arguments(parser)
    parser.add_argument(
        "--style", choices=list(STYLES), default="gpt", help="the tokenizer's kind (default: gpt)"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=32000,
        metavar="N",
        help="entries, special ones included (default: 32000)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--sample-mb",
        type=float,
        default=64.0,
        metavar="MB",
        help="train on about this much text, chosen by a hash of the document id (default: 64)",
    )
    add_column_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace the tokenizer in --out")


class Sample:
    """Sample of documents for the training: those with the smallest hashes of their ids.

    The sample has about ``wanted_bytes`` of text. It does not depend on the order in which
    documents are added.
    """

    def __init__(self, wanted_bytes: float) -> None:
        self.wanted_bytes = wanted_bytes
        self.text_bytes = 0
        # Heap of (complement of the hash, text): the largest hash is first and is removed next.
        self._heap: list[tuple[int, bytes]] = []

    @property
    def texts(self) -> list[bytes]:
        """Texts of the sample in UTF-8, in the order of their hashes."""
        return [text for _, text in sorted(self._heap, reverse=True)]

    def add(self, documents: Documents) -> None:
        """Add documents, and remove the ones whose hashes are no longer among the smallest."""
        keys = ~hash_ids(documents.ids, b"tokenizer")
        full = self.text_bytes >= self.wanted_bytes
        candidates = np.flatnonzero(keys >= np.uint64(self._heap[0][0] if full else 0))
        for index in candidates.tolist():
            text = documents.texts[index].as_buffer().to_pybytes()
            heapq.heappush(self._heap, (int(keys[index]), text))
            self.text_bytes += len(text)
            while self.text_bytes - len(self._heap[0][1]) >= self.wanted_bytes:
                self.text_bytes -= len(heapq.heappop(self._heap)[1])


def gather(
    files: list[SourceFile], settings: Settings, sample_mb: float
) -> tuple[Sample, Counter[Drop]]:
    """Read all files, and return the sample and the number of dropped rows by reason.

    Raises UserError if rows cannot be read.
    """
    sample, dropped = Sample(sample_mb * 1e6), Counter[Drop]()
    selection, columns = Selection(settings), settings.columns
    with Reading("sampling", sum(file.text_bytes for file in files)) as reading:
        for file in files:
            for span in spans(file, columns, SPAN_BYTES):
                for part in read_span(file, span, columns):
                    if isinstance(part, Rows):
                        chosen, reasons, _ = selection.of(part, file.path)
                        dropped += reasons
                        sample.add(chosen)
                        reading.advance(part.batch.column(columns.text).nbytes)
                    elif part.reason is Drop.UNREADABLE:
                        raise UserError(f"{part.message}; fetch or write the file again")
                    else:
                        dropped[part.reason] += part.rows
    return sample, dropped


def _already_there(out: Path, fingerprint: str, overwrite: bool) -> bool:
    seal, file = out / SEAL, out / "tokenizer.json"
    with suppress(FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        made = json.loads(seal.read_bytes())
        if (
            made["fingerprint"] == fingerprint
            and made["sha256"] == sha256(file)
            and (out / "tokenizer_config.json").is_file()
        ):
            return True
    interrupted = not seal.exists() and (out / ".unfinished").exists()
    if file.exists() and not overwrite and not interrupted:
        raise UserError(
            f"{out} contains another tokenizer; choose another --out or add --overwrite"
        )
    return False


def main(arguments: argparse.Namespace) -> int:
    """Train a tokenizer and write it to OUT. Return 0. Raises UserError.

    A tokenizer in OUT from the same text and settings is not trained again.
    """
    vocab_size = arguments.vocab_size
    out = arguments.out
    sample_mb = arguments.sample_mb
    style, settings = STYLES[arguments.style], settings_of(arguments)
    if vocab_size < style.smallest:
        raise UserError(
            f"--vocab-size is {vocab_size}; the smallest is {style.smallest} ({style.contents})"
        )
    if not sample_mb > 0:
        raise UserError(f"--sample-mb is {sample_mb}; it must be above 0")
    files = open_files(
        arguments.inputs, settings.columns, arguments.subset, paragraphs=arguments.paragraphs
    )
    fingerprint = sha256_json(
        {
            "inputs": [part for file in files for part in file.content],
            "style": [style.name, style.rules],
            "vocab_size": vocab_size,
            "sample_mb": sample_mb,
            "settings": settings.deciding(),
        }
    )
    if _already_there(out, fingerprint, arguments.overwrite):
        print(f"{out}: unchanged; made from the same text and settings")
        return 0
    with Staging(out) as staging:
        sample, dropped = gather(files, settings, sample_mb)
        texts = sample.texts
        if not texts:
            raise UserError(
                f"no document to train on in {', '.join(arguments.inputs)}{_because(dropped)}"
            )
        read = (
            f"{len(texts):,} documents, {sample.text_bytes / 1e6:.1f} MB of text in the "
            f"sample{_because(dropped)}"
        )
        print(f"{read}; learning merges", file=sys.stderr, flush=True)
        tokenizer = style.train(texts, vocab_size, sys.stderr.isatty())
        write_synced(staging.path / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        write_synced(staging.path / "tokenizer_config.json", json_bytes(style.config))
        seal = {
            "fingerprint": fingerprint,
            "sha256": sha256(staging.path / "tokenizer.json"),
            "vocab_size": tokenizer.get_vocab_size(),
            "documents": len(texts),
            "text_bytes": sample.text_bytes,
            "dropped": by_reason(dropped),
            "encoder": f"tokenizers {tokenizers.__version__}",
            "inputs": [asdict(file) for file in files],
        }
        write_synced(staging.path / SEAL, json_bytes(seal))
        staging.publish(["tokenizer.json", "tokenizer_config.json"], seal=SEAL)
    size, eod = tokenizer.get_vocab_size(), tokenizer.token_to_id(style.eod)
    print(
        f"{out}: {size} entries, EOD {style.eod!r} = {eod}; trained on "
        f"{sample.text_bytes / 1e6:.1f} MB of text"
    )
    if size < vocab_size:
        print(
            f"data_prep: this text yields {size} entries, fewer than --vocab-size "
            f"{vocab_size}; give more text for more",
            file=sys.stderr,
        )
    return 0


def _because(dropped: Counter[Drop]) -> str:
    reasons = ", ".join(f"{number} {reason}" for reason, number in by_reason(dropped).items())
    return f" (left out: {reasons})" if reasons else ""


BATCH_BYTES = 1 << 20
GPT_EOD = "<|endoftext|>"
# GPT-4's pre-tokenization: contractions, words with one leading non-letter, up to three digits,
# punctuation, line ends, runs of spaces.
GPT_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPACE = "▁"  # replaces a space
LLAMA_SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
PRINTABLE = SPACE + "".join(map(chr, range(0x21, 0x7F)))
# Merges are learned within runs of spaces, and words and punctuation with at most one leading
# space. Digits and line ends are separate.
LLAMA_PIECES = (
    rf"{SPACE}{{2,}}|{SPACE}?\p{{L}}[\p{{L}}\p{{M}}]*|{SPACE}?[^{SPACE}\s\p{{L}}\p{{N}}]+|[\s\S]"
)
LLAMA_COVERAGE = 0.99995  # share of the characters with an entry; the rest is encoded as bytes
LLAMA_LONGEST = 16  # maximum characters of an entry


@dataclass(frozen=True)
class Style:
    """Kind of tokenizer that can be trained.

    eod: end-of-document token.
    smallest: size of the smallest possible vocabulary.
    contents: description of the entries of the smallest vocabulary.
    rules: text that identifies the algorithm.
    config: content of tokenizer_config.json.
    train: function ``train(texts, vocab_size, show)`` that returns a tokenizer of at most
    ``vocab_size`` entries, the same for the same texts in any order. It shows its progress if
    ``show``.
    """

    name: str
    eod: str
    smallest: int
    contents: str
    rules: str
    config: Json
    train: Callable[[Sequence[bytes], int, bool], Tokenizer]


def batches(texts: Sequence[bytes]) -> Iterator[list[str]]:
    """Yield the UTF-8 texts in order, decoded, in lists of about a megabyte."""
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
    """Train and return a byte-level BPE tokenizer.

    EOD is entry 0, and the 256 bytes follow, so every UTF-8 text is decoded exactly.
    """
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(GPT_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
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
    """Return (characters that get their own entry, other characters that occur in the texts).

    Printable ASCII and the space sign always get an entry. The most frequent other characters
    follow, with ties in code point order, until those without an entry are at most
    1 - LLAMA_COVERAGE of all characters or ``most`` characters are taken. Control characters, with
    line ends and tabs, are encoded as bytes and do not count as characters without an entry.
    """
    counts = np.zeros(0x110000, np.int64)
    for batch in batches(texts):
        counts += np.bincount(
            np.frombuffer("".join(batch).encode("utf-32-le"), "<u4"), minlength=len(counts)
        )
    occurring = [point for point in np.flatnonzero(counts).tolist() if chr(point) != " "]
    others = [
        point
        for point in occurring
        if chr(point) not in PRINTABLE and unicodedata.category(chr(point)) != "Cc"
    ]
    others.sort(key=lambda point: (-int(counts[point]), point))
    missing = int(counts[others].sum()) - (1 - LLAMA_COVERAGE) * int(counts.sum())
    taken = []
    for point in others[:most]:
        if missing <= 0:
            break
        taken.append(point)
        missing -= int(counts[point])
    chosen = PRINTABLE + "".join(map(chr, taken))
    with_entry = set(chosen)
    return chosen, "".join(chr(point) for point in occurring if chr(point) not in with_entry)


def train_llama(texts: Sequence[bytes], vocab_size: int, show: bool) -> Tokenizer:
    """Train and return a BPE tokenizer with LLaMA-2's layout.

    The entries are <unk> <s> </s>, the 256 bytes from entry 3, characters and merges.
    Pre-tokenization is used only in training; the returned tokenizer has none. Every UTF-8 text is
    decoded exactly, except the character U+2581, which becomes a space.
    """
    letters, rare = alphabet(texts, most=(vocab_size - LLAMA.smallest) // 4)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(LLAMA_PIECES), behavior="isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*LLAMA_SPECIAL, *BYTES],
        initial_alphabet=list(letters),
        limit_alphabet=len(letters),
        max_token_length=LLAMA_LONGEST,
        show_progress=show,
    )
    # The trainer skips characters without an entry, which would join the characters around them.
    # A line end in their place keeps these separate.
    separator = re.compile(f"[{re.escape(rare)}]+") if rare else re.compile("\n")

    def cleaned() -> Iterator[list[str]]:
        for batch in batches(texts):
            yield [separator.sub("\n", text) for text in batch]

    tokenizer.train_from_iterator(cleaned(), trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = [
        token for token in spec["added_tokens"] if token["content"] in LLAMA_SPECIAL
    ]
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


def _config(special: dict[str, str]) -> Json:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }


GPT = Style(
    "gpt", GPT_EOD, 257, "256 bytes and EOD", GPT_PIECES, _config({"eos_token": GPT_EOD}), train_gpt
)
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
