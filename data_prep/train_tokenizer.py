"""data_prep: the verb ``train-tokenizer``: a BPE trained on the inputs' text, as a folder that transformers.AutoTokenizer loads.

    gpt     byte-level, GPT-4's pieces, <|endoftext|> (id 0) as EOD; every UTF-8 text comes back exactly
    llama   LLaMA-2's layout: <unk> <s> </s>, 256 bytes, characters and merges; digits one by one; </s> as EOD. Every UTF-8 text comes back
            exactly but for the sign U+2581, which comes back as a space

Trained on at most about --sample-mb of text: the documents whose ids have the smallest hashes. So the same documents give the same
tokenizer, however they are cut into files, in whatever order and on however many threads.
All inputs are read; memory is a few times the sample.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Tokenizer

from data_prep.documents import Documents, Selection, Settings, add_column_arguments, settings_of
from data_prep.drops import Drop
from data_prep.errors import UserError
from data_prep.files import Staging, json_bytes, sha256_file, sha256_json, write_synced
from data_prep.reading import Reading
from data_prep.sources import Rows, SourceFile, open_files, read_span, spans
from data_prep.splits import hash_ids
from data_prep.tokenizer_styles import STYLES, Style

SEAL = "training.json"
SPAN_BYTES = 64 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's command line."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="parquet, JSONL or .txt file, folder, glob or hf:// address")
    parser.add_argument("--subset", metavar="NAME", help="of a dataset on the Hub, such as sample-10BT")
    parser.add_argument("--style", choices=list(STYLES), default="gpt", help="the tokenizer's kind (default: gpt)")
    parser.add_argument("--vocab-size", type=int, default=32000, metavar="N", help="entries, special ones included (default: 32000)")
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
    """The documents with the smallest hashes of their ids, as few as hold ``wanted_bytes``, or all; their order makes no difference."""

    def __init__(self, wanted_bytes: float) -> None:
        self.wanted_bytes = wanted_bytes
        self.text_bytes = 0
        self._heap: list[tuple[int, bytes]] = []  # (complement of the hash, text): the first is the next to go

    @property
    def texts(self) -> list[bytes]:
        """The texts by hash."""
        return [text for _, text in sorted(self._heap, reverse=True)]

    def add(self, documents: Documents) -> None:
        """Take what belongs to the sample and let go what does no longer."""
        keys = ~hash_ids(documents.ids, b"tokenizer")
        full = self.text_bytes >= self.wanted_bytes
        candidates = np.flatnonzero(keys >= np.uint64(self._heap[0][0] if full else 0))
        for index in candidates.tolist():
            text = documents.texts[index].as_buffer().to_pybytes()
            heapq.heappush(self._heap, (int(keys[index]), text))
            self.text_bytes += len(text)
            while self.text_bytes - len(self._heap[0][1]) >= self.wanted_bytes:
                self.text_bytes -= len(heapq.heappop(self._heap)[1])


def gather(files: list[SourceFile], settings: Settings, sample_mb: float) -> tuple[Sample, Counter[Drop]]:
    """Read all files: the sample and the rows dropped. Raises UserError for a part that cannot be read."""
    sample, dropped = Sample(sample_mb * 1e6), Counter[Drop]()
    selection, columns = Selection(settings), settings.columns
    with Reading("sampling", sum(file.text_bytes for file in files), sys.stderr) as reading:
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


def _wanted(arguments: argparse.Namespace, settings: Settings, files: list[SourceFile]) -> dict[str, Any]:
    """All that decides the tokenizer."""
    style: Style = STYLES[arguments.style]
    return {
        "inputs": [part for file in files for part in file.content],
        "style": [style.name, style.rules],
        "vocab_size": arguments.vocab_size,
        "sample_mb": arguments.sample_mb,
        "settings": settings.deciding(),
    }


def _seal(sample: Sample, dropped: Counter[Drop], files: list[SourceFile], tokenizer: Tokenizer) -> dict[str, Any]:
    """What training.json says of how the tokenizer was made."""
    return {
        "vocab_size": tokenizer.get_vocab_size(),
        "documents": len(sample.texts),
        "text_bytes": sample.text_bytes,
        "dropped": {str(reason): dropped[reason] for reason in Drop if dropped[reason]},
        "encoder": f"tokenizers {tokenizers.__version__}",
        "inputs": [asdict(file) for file in files],
    }


def main(arguments: argparse.Namespace) -> int:
    """Train and write the tokenizer; one made from the same text and settings is left alone. Raises UserError."""
    vocab_size, out, sample_mb = arguments.vocab_size, arguments.out, arguments.sample_mb
    style, settings = STYLES[arguments.style], settings_of(arguments)
    if vocab_size < style.smallest:
        raise UserError(f"--vocab-size is {vocab_size}; the smallest is {style.smallest} ({style.contents})")
    if not sample_mb > 0:
        raise UserError(f"--sample-mb is {sample_mb}; it must be above 0")
    files = open_files(arguments.inputs, settings.columns, arguments.subset, paragraphs=arguments.paragraphs)
    fingerprint = sha256_json(_wanted(arguments, settings, files))
    if _already_there(out, fingerprint, arguments.overwrite):
        print(f"{out}: unchanged; made from the same text and settings")
        return 0
    with Staging(out) as staging:
        sample, dropped = gather(files, settings, sample_mb)
        texts = sample.texts
        if not texts:
            raise UserError(f"no document to train on in {', '.join(arguments.inputs)}{_because(dropped)}")
        read = f"{len(texts):,} documents, {sample.text_bytes / 1e6:.1f} MB of text in the sample{_because(dropped)}"
        print(f"{read}; learning merges", file=sys.stderr, flush=True)
        tokenizer = style.train(texts, vocab_size, sys.stderr.isatty())
        write_synced(staging.path / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        write_synced(staging.path / "tokenizer_config.json", json_bytes(style.config))
        seal = {"fingerprint": fingerprint, "sha256": sha256_file(staging.path / "tokenizer.json")}
        write_synced(staging.path / SEAL, json_bytes(seal | _seal(sample, dropped, files, tokenizer)))
        staging.publish(["tokenizer.json", "tokenizer_config.json"], seal=SEAL)
    size, eod = tokenizer.get_vocab_size(), tokenizer.token_to_id(style.eod)
    print(f"{out}: {size} entries, EOD {style.eod!r} = {eod}; trained on {sample.text_bytes / 1e6:.1f} MB of text")
    if size < vocab_size:
        print(f"data_prep: this text yields {size} entries, fewer than --vocab-size {vocab_size}; give more text for more", file=sys.stderr)
    return 0


def _because(dropped: Counter[Drop]) -> str:
    listed = ", ".join(f"{dropped[reason]} {reason}" for reason in Drop if dropped[reason])
    return f" (left out: {listed})" if listed else ""
