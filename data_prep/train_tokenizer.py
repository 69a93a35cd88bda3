"""data_prep: the verb ``train-tokenizer``: a byte-level BPE over parquet text, as a folder that transformers.AutoTokenizer loads."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from data_prep.documents import Drop, hash64, read_documents
from data_prep.errors import UserError
from data_prep.files import Staging, json_bytes, sha256_file, sha256_json, write_synced
from data_prep.progress import Progress
from data_prep.sources import Columns, ParquetFile, describe_inputs, open_files

EOD = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # 256 bytes and EOD
SEAL = "training.json"
# GPT-4's pieces: contractions, words with one leading non-letter, up to three digits, punctuation, line ends, runs of spaces.
PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's command line."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="parquet file, folder or glob")
    parser.add_argument("--vocab-size", type=int, required=True, help="entries, EOD included")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument(
        "--sample-mb", type=float, default=64.0, help="train on about this much text, chosen by a hash of the document id (default: 64)"
    )
    parser.add_argument("--text-column", default="text", help="column of the text (default: text)")
    parser.add_argument("--id-column", default="id", help="column of the document id (default: id)")
    parser.add_argument("--overwrite", action="store_true", help="replace the tokenizer in --out")


class Sample:
    """The texts to train on: all documents, or those whose id hashes below the wanted share; counts what it gave."""

    def __init__(self, files: list[ParquetFile], columns: Columns, sample_mb: float) -> None:
        self.files, self.columns = files, columns
        total = sum(file.text_bytes for file in files)
        self.threshold = 2**64 if total <= sample_mb * 1e6 else int(2**64 * sample_mb * 1e6 / total)
        self.documents = self.text_bytes = 0

    def __iter__(self) -> Iterator[list[str]]:
        dropped: Counter[Drop] = Counter()
        progress = Progress(sum(file.rows for file in self.files), sys.stderr)
        read = 0
        for batch in read_documents(self.files, self.columns, dropped):
            chosen = [document for document in batch if hash64(document.id, b"tokenizer") < self.threshold]
            self.documents += len(chosen)
            self.text_bytes += sum(document.size for document in chosen)
            read += len(batch)
            progress.update(read + dropped.total(), self.text_bytes, None)
            yield [document.text for document in chosen]
        progress.close()
        if self.documents:
            print(f"{self.documents:,} documents, {self.text_bytes / 1e6:.1f} MB of text read; merging", file=sys.stderr, flush=True)


def train(texts: Iterator[list[str]], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` entries; EOD is entry 0, the 256 bytes follow, so every UTF-8 text comes back exactly."""
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """What AutoTokenizer reads beside tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOD,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }


def _already_there(out: Path, fingerprint: str, overwrite: bool) -> bool:
    seal, file = out / SEAL, out / "tokenizer.json"
    try:
        made = json.loads(seal.read_bytes())
        if (
            made["fingerprint"] == fingerprint
            and file.is_file()
            and made["sha256"] == sha256_file(file)
            and (out / "tokenizer_config.json").is_file()
        ):
            return True
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        pass
    interrupted = not seal.exists() and (out / ".unfinished").exists()
    if file.exists() and not overwrite and not interrupted:
        raise UserError(f"{out} holds another tokenizer; choose another --out or add --overwrite")
    return False


def main(arguments: argparse.Namespace) -> int:
    """Train and write the tokenizer; one made from the same text and settings is left alone. Raises UserError."""
    vocab_size, out, sample_mb = arguments.vocab_size, arguments.out, arguments.sample_mb
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size is {vocab_size}; the smallest is {SMALLEST_VOCABULARY} (256 bytes and EOD)")
    if not sample_mb > 0:
        raise UserError(f"--sample-mb is {sample_mb}; it must be above 0")
    columns = Columns(arguments.text_column, arguments.id_column)
    files = open_files(arguments.inputs, columns)
    inputs = describe_inputs(files)
    wanted = {
        "inputs": [i["sha256"] for i in inputs],
        "vocab_size": vocab_size,
        "sample_mb": sample_mb,
        "columns": [columns.text, columns.id],
        "pieces": PIECES,
    }
    fingerprint = sha256_json(wanted)
    if _already_there(out, fingerprint, arguments.overwrite):
        print(f"{out}: unchanged; made from the same text and settings")
        return 0
    with Staging(out) as staging:
        sample = Sample(files, columns, sample_mb)
        tokenizer = train(iter(sample), vocab_size)
        if not sample.documents:
            raise UserError(
                f"no document to train on in {', '.join(arguments.inputs)} with --sample-mb {sample_mb}; raise it or give more text"
            )
        write_synced(staging.path / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        write_synced(staging.path / "tokenizer_config.json", json_bytes(tokenizer_config()))
        seal = {
            "fingerprint": fingerprint,
            "sha256": sha256_file(staging.path / "tokenizer.json"),
            "vocab_size": tokenizer.get_vocab_size(),
            "documents": sample.documents,
            "text_bytes": sample.text_bytes,
            "encoder": f"tokenizers {tokenizers.__version__}",
            "inputs": inputs,
        }
        write_synced(staging.path / SEAL, json_bytes(seal))
        staging.publish(["tokenizer.json", "tokenizer_config.json"], seal=SEAL)
    size = tokenizer.get_vocab_size()
    print(f"{out}: {size} entries, EOD {EOD!r} = {tokenizer.token_to_id(EOD)}; trained on {sample.text_bytes / 1e6:.1f} MB of text")
    if size < vocab_size:
        print(f"data_prep: this text yields {size} entries, fewer than --vocab-size {vocab_size}; give more text for more", file=sys.stderr)
    return 0
