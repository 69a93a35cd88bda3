"""data_prep: the verb ``verify``: a data folder against its manifest, and each .idx against its .bin."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.encoder import load_folder
from data_prep.errors import UserError, existing_folder
from data_prep.files import sha256_file
from data_prep.indexed import FormatError, Index, read_index
from data_prep.manifest import Manifest, SplitEntry, read_manifest
from data_prep.progress import count

TOKENS_PER_READ = 1 << 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's command line."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder that run wrote")


def faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Every fault found in a data folder, one line each."""
    yield from _tokenizer_faults(folder, manifest)
    for name, entry in manifest.splits.items():
        sound = True
        for fault in _file_faults(folder, name, entry):
            sound = sound and not fault.endswith("is missing")
            yield fault
        if sound:
            yield from _pair_faults(folder / name, entry, manifest)


def _tokenizer_faults(folder: Path, manifest: Manifest) -> Iterator[str]:
    try:
        tokenizer = load_folder(folder / manifest.tokenizer.path)
    except UserError as error:
        yield str(error)
        return
    if tokenizer.sha256 != manifest.tokenizer.sha256:
        yield f"{tokenizer.path / 'tokenizer.json'}: content differs from the manifest's hash"
    for what, found, said in (
        ("EOD is", tokenizer.eod_id, manifest.tokenizer.eod_id),
        ("entries are", tokenizer.vocab_size, manifest.tokenizer.vocab_size),
    ):
        if found != said:
            yield f"{tokenizer.path}: its {what} {found}, the manifest says {said}"


def _file_faults(folder: Path, name: str, entry: SplitEntry) -> Iterator[str]:
    for kind, size, digest in (("bin", entry.bin_bytes, entry.bin_sha256), ("idx", entry.idx_bytes, entry.idx_sha256)):
        path = folder / f"{name}.{kind}"
        if not path.is_file():
            yield f"{path} is missing"
        elif path.stat().st_size != size:
            change = "truncated" if path.stat().st_size < size else "too long"
            yield f"{path}: {path.stat().st_size} bytes, the manifest says {size} ({change})"
        elif sha256_file(path) != digest:
            yield f"{path}: content differs from the manifest's hash"


def _pair_faults(prefix: Path, entry: SplitEntry, manifest: Manifest) -> Iterator[str]:
    binary, index_path = prefix.with_suffix(".bin"), prefix.with_suffix(".idx")
    try:
        index = read_index(index_path)
    except FormatError as error:
        yield f"{index_path} {error}"
        return
    if index.dtype != manifest.dtype:
        yield f"{index_path}: ids are {index.dtype}, the manifest says {manifest.dtype}"
        return
    lengths = index.lengths.astype(np.int64)
    ends = np.cumsum(lengths)
    width = np.dtype(index.dtype).itemsize
    tokens = int(lengths.sum())
    if tokens * width != binary.stat().st_size:
        yield f"{index_path} does not belong to {binary.name}: it describes {tokens * width} bytes, the file has {binary.stat().st_size}"
        return
    if (lengths < 1).any() or not np.array_equal(index.pointers, (ends - lengths) * width):
        yield f"{index_path}: lengths and pointers disagree"
    if not np.array_equal(index.document_indices, np.arange(len(lengths) + 1)):
        yield f"{index_path}: document indices are not one document a sequence"
    if (len(lengths), tokens) != (entry.documents, entry.tokens):
        yield f"{index_path}: {len(lengths)} documents and {tokens} tokens, the manifest says {entry.documents} and {entry.tokens}"
    yield from _token_faults(binary, index, ends, manifest)


def _token_faults(path: Path, index: Index, ends: npt.NDArray[np.int64], manifest: Manifest) -> Iterator[str]:
    """EOD ends every document and stands nowhere else; every id is in the vocabulary."""
    ids = np.memmap(path, dtype=np.dtype(index.dtype).newbyteorder("<"), mode="r")
    eod, vocab_size = manifest.tokenizer.eod_id, manifest.tokenizer.vocab_size
    found = foreign = 0
    for start in range(0, len(ids), TOKENS_PER_READ):
        part = ids[start : start + TOKENS_PER_READ]
        found += int(np.count_nonzero(part == eod))
        foreign += int(np.count_nonzero((part < 0) | (part >= vocab_size)))
    if foreign:
        yield f"{path}: {foreign} ids lie outside the vocabulary of {vocab_size}"
    if found != len(ends):
        yield f"{path}: EOD stands {found} times for {len(ends)} documents"
    unended = int(np.count_nonzero(ids[ends - 1] != eod)) if (index.lengths >= 0).all() else len(ends)
    if unended:
        yield f"{path}: {unended} documents do not end in EOD"


def main(arguments: argparse.Namespace) -> int:
    """Check a data folder: 0 and a summary when it is whole, 1 and a line a fault when it is not. Raises UserError where there is none."""
    folder = existing_folder(arguments.folder, "a folder that python -m data_prep run wrote")
    manifest = read_manifest(folder)
    found = list(faults(folder, manifest))
    for fault in found:
        print(f"fault: {fault}")
    if found:
        print(
            f"{folder}: {len(found)} fault{'s' if len(found) > 1 else ''}; make the data again with: python -m data_prep run … --overwrite"
        )
        return 1
    sizes = ", ".join(f"{name} {count(entry.tokens)} tokens" for name, entry in manifest.splits.items())
    print(f"{folder}: whole; {sizes}; hashes, indices and EOD agree")
    return 0
