"""data_prep: the verb ``run``: parquet text into train/valid/test ``.bin/.idx``, losing nothing that it does not count."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_prep.documents import Document, Drop, Split, read_documents
from data_prep.encoder import TOKENIZER_FILES, Encoder, TokenizerFolder, load_folder
from data_prep.errors import UserError
from data_prep.files import UNFINISHED, Staging, json_bytes, sha256_json, sync_file, sync_folder, write_synced
from data_prep.indexed import IndexedWriter, dtype_name
from data_prep.manifest import FORMAT, MANIFEST, SPLITS, Manifest, SplitEntry, TokenizerEntry, read_manifest
from data_prep.progress import Progress, count
from data_prep.sources import Columns, ParquetFile, describe_inputs, open_files

TOKENIZER = "tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's command line."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="parquet file, folder or glob")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Hugging Face tokenizer folder with an eos_token, used as EOD")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--valid-percent", type=float, default=2.0, help="share of the documents in valid; 0: none (default: 2)")
    parser.add_argument("--test-percent", type=float, default=2.0, help="share of the documents in test; 0: none (default: 2)")
    parser.add_argument("--text-column", default="text", help="column of the text (default: text)")
    parser.add_argument("--id-column", default="id", help="column of the document id (default: id)")
    parser.add_argument("--overwrite", action="store_true", help="replace the data in --out")


class SplitWriters:
    """One IndexedWriter a split, fed with batches of documents; counts text bytes and drops."""

    def __init__(self, folder: Path, split: Split, encoder: Encoder, tokenizer: TokenizerFolder) -> None:
        self.split, self.encoder, self.eod = split, encoder, tokenizer.eod_id
        self.dropped: Counter[Drop] = Counter()
        self.text_bytes: Counter[str] = Counter()
        self.writers = {name: IndexedWriter(folder / name, dtype_name(tokenizer.vocab_size)) for name in split.names}

    @property
    def tokens(self) -> int:
        """Tokens written so far, EOD included."""
        return sum(writer.tokens for writer in self.writers.values())

    def add(self, batch: list[Document]) -> None:
        """Encode a batch and append each document to its split."""
        parts: dict[str, list[list[int]]] = {name: [] for name in self.writers}
        for document, ids in zip(batch, self.encoder.encode([document.text for document in batch]), strict=True):
            if not ids or self.eod in ids:
                self.dropped[Drop.CONTAINS_EOD if ids else Drop.NO_TOKENS] += 1
                continue
            name = self.split.of(document.id)
            parts[name].append(ids)
            self.text_bytes[name] += document.size
        for name, documents in parts.items():
            if documents:
                self.writers[name].add(documents, self.eod)

    def finish(self) -> dict[str, SplitEntry]:
        """Finish the files. Raises UserError for a split without documents."""
        for name, writer in self.writers.items():
            if not writer.documents:
                share = "" if name == "train" else f"raise --{name}-percent, set it to 0, or "
                raise UserError(f"the split {name!r} would be empty; {share}give more documents")
        return {name: SplitEntry(text_bytes=self.text_bytes[name], **asdict(writer.finish())) for name, writer in self.writers.items()}

    def close(self) -> None:
        """Close the files, finished or not."""
        for writer in self.writers.values():
            writer.close()


def _already_there(out: Path, fingerprint: str, tokenizer: Path, overwrite: bool) -> bool:
    """Whether OUT is what this run would write. Raises UserError where it is something else, or damaged, and may not be replaced."""
    if overwrite:
        return False
    if not (out / MANIFEST).is_file():
        names = [f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx")]
        names += [] if _same(tokenizer, out / TOKENIZER) else [f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES]
        taken = [name for name in names if (out / name).exists()]
        if taken and not (out / UNFINISHED).exists():
            raise UserError(f"{out / taken[0]} exists and no {MANIFEST} says what it is; choose another --out or add --overwrite")
        return False
    manifest = read_manifest(out)
    if manifest.source.get("fingerprint") != fingerprint:
        raise UserError(f"{out} holds data made from other inputs, tokenizer or settings; choose another --out or add --overwrite")
    for name, entry in manifest.splits.items():
        for file, size in ((out / f"{name}.bin", entry.bin_bytes), (out / f"{name}.idx", entry.idx_bytes)):
            if not file.is_file() or file.stat().st_size != size:
                raise UserError(f"{file} is not the {size} bytes that {MANIFEST} says; make the data again with --overwrite")
    return True


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.resolve() == other.resolve()


def _stage_tokenizer(tokenizer: TokenizerFolder, out: Path, staging: Path) -> tuple[list[str], list[str]]:
    """Copy the tokenizer into the staging folder: (names to publish, names to remove first); none where it lies in OUT already."""
    if _same(tokenizer.path, out / TOKENIZER):
        return [], []
    folder = staging / TOKENIZER
    folder.mkdir()
    for name in tokenizer.files:
        shutil.copyfile(tokenizer.path / name, folder / name)
        sync_file(folder / name)
    sync_folder(folder)
    return [f"{TOKENIZER}/{name}" for name in tokenizer.files], [f"{TOKENIZER}/{name}" for name in TOKENIZER_FILES]


def _encode_all(
    files: list[ParquetFile], columns: Columns, writers: SplitWriters, unreadable: Counter[Drop]
) -> tuple[dict[str, SplitEntry], float]:
    """Read, encode and write everything: the finished splits, and the seconds it took."""
    progress = Progress(sum(file.rows for file in files), sys.stderr)
    read = text_bytes = 0
    try:
        for batch in read_documents(files, columns, unreadable):
            writers.add(batch)
            read += len(batch)
            text_bytes += sum(document.size for document in batch)
            progress.update(read + unreadable.total(), text_bytes, writers.tokens)
        return writers.finish(), progress.close()
    finally:
        progress.close()


def _report(out: Path, splits: dict[str, SplitEntry], source: dict[str, Any], seconds: float) -> None:
    for name, entry in splits.items():
        size = f"{count(entry.tokens)} tokens, {entry.text_bytes / 1e6:.2f} MB of text"
        print(f"{out / name}: {entry.documents:,} documents, {size} ({entry.text_bytes / entry.tokens:.2f} bytes a token)")
    written = sum(entry.documents for entry in splits.values())
    drops = ", ".join(f"{number} {reason}" for reason, number in source["dropped"].items()) or "none"
    rate = sum(entry.text_bytes for entry in splits.values()) / 1e6 / max(seconds, 1e-9)
    lost = source["rows"] - written
    print(f"{source['rows']:,} rows = {written:,} written + {lost:,} dropped ({drops}); {rate:.1f} MB/s, {source['encoder']}")


def main(arguments: argparse.Namespace) -> int:
    """Write the data folder, manifest.json last; a folder made from the same things is left alone. Raises UserError."""
    out, columns = arguments.out, Columns(arguments.text_column, arguments.id_column)
    split = Split(arguments.valid_percent, arguments.test_percent)
    tokenizer = load_folder(arguments.tokenizer)
    encoder = Encoder(tokenizer)
    files = open_files(arguments.inputs, columns)
    inputs = describe_inputs(files)
    settings = {"text_column": columns.text, "id_column": columns.id, **asdict(split)}
    hashes = [entry["sha256"] for entry in inputs]
    fingerprint = sha256_json({"format": FORMAT, "inputs": hashes, "tokenizer": tokenizer.sha256, "eod_id": tokenizer.eod_id, **settings})
    if _already_there(out, fingerprint, tokenizer.path, arguments.overwrite):
        print(f"{out}: unchanged; made from the same inputs, tokenizer and settings (check it with: python -m data_prep verify {out})")
        return 0
    with Staging(out) as staging, ExitStack() as stack:
        dropped: Counter[Drop] = Counter()
        writers = SplitWriters(staging.path, split, encoder, tokenizer)
        stack.callback(writers.close)
        splits, seconds = _encode_all(files, columns, writers, dropped)
        dropped += writers.dropped
        rows = sum(file.rows for file in files)
        reasons = {str(reason): dropped[reason] for reason in Drop if dropped[reason]}
        if rows != sum(entry.documents for entry in splits.values()) + dropped.total():
            raise UserError(f"the inputs changed while they were read ({rows} rows at the start); run again")
        source = {"inputs": inputs, "rows": rows, "dropped": reasons, **settings, "encoder": encoder.name, "fingerprint": fingerprint}
        entry = TokenizerEntry(TOKENIZER, tokenizer.vocab_size, tokenizer.eod_id, tokenizer.sha256)
        write_synced(staging.path / MANIFEST, json_bytes(Manifest(entry, dtype_name(tokenizer.vocab_size), splits, source).as_json()))
        names, stale = _stage_tokenizer(tokenizer, out, staging.path)
        stale += [f"{name}.{kind}" for name in SPLITS for kind in ("bin", "idx")]
        staging.publish([f"{name}.{kind}" for name in splits for kind in ("bin", "idx")] + names, seal=MANIFEST, stale=stale)
    _report(out, splits, source, seconds)
    return 0
