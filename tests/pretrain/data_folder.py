"""Synthetic data folders in the format of data_prep: a few documents with a few ids, written in
milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from pretrain.data.facts import sample_digest

CODES = {"uint16": (8, "H"), "int32": (4, "i")}


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> None:
    """Write Megatron's .bin/.idx as its builder does."""
    code, letter = CODES[dtype]
    width = struct.calcsize(letter)
    lengths = [len(document) for document in documents]
    starts = [sum(lengths[:n]) * width for n in range(len(lengths))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *starts)
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(
        b"".join(struct.pack(f"<{len(document)}{letter}", *document) for document in documents)
    )


def write_folder(
    folder: Path,
    tokens: int = 900,
    vocab_size: int = 500,
    tokenizer: str = "one",
    dtype: str = "uint16",
    documents: list[list[int]] | None = None,
) -> Path:
    """Write a data folder as data_prep does: a tokenizer, a manifest, three splits, each with
    ``documents`` (default: two, with ``tokens`` ids).
    """
    documents = documents or [[7] * (tokens - 300), [8] * 300]
    tokens = sum(map(len, documents))
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    raw = {
        "model": {"vocab": {f"{tokenizer}{n}": n for n in range(vocab_size - 1)}},
        "added_tokens": [{"content": "</s>", "id": vocab_size - 1}],
    }
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    splits = {}
    write_pair(folder / "train", documents, dtype)
    binary, index = ((folder / name).read_bytes() for name in ("train.bin", "train.idx"))
    for split in ("train", "valid", "test"):
        prefix = folder / split
        prefix.with_suffix(".bin").write_bytes(binary)
        prefix.with_suffix(".idx").write_bytes(index)
        splits[split] = {
            "documents": len(documents),
            "tokens": tokens,
            "text_bytes": 4 * tokens,
            "bin_sha256": hashlib.sha256(binary).hexdigest(),
            "idx_sha256": hashlib.sha256(index).hexdigest(),
            "bin_bytes": len(binary),
            "idx_bytes": len(index),
            "bin_sample": sample_digest(prefix.with_suffix(".bin")),
        }
    sha256 = hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    entry = {
        "path": "tokenizer",
        "vocab_size": vocab_size,
        "eod_id": vocab_size - 1,
        "sha256": sha256,
    }
    write_manifest(
        folder,
        {
            "format": 2,
            "tokenizer": entry,
            "dtype": dtype,
            "splits": splits,
            "source": {},
            "units": {},
        },
    )
    return folder


def write_mask(folder: Path, split: str, mask: bytes) -> None:
    """Write the loss mask of a split and its record; a byte per token, 1 if the token counts."""
    file = folder / f"{split}.mask"
    file.unlink(missing_ok=True)  # an earlier one may be mapped
    file.write_bytes(mask)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"][split]["mask"] = {
        "bytes": len(mask),
        "sha256": hashlib.sha256(mask).hexdigest(),
        "sample": sample_digest(file),
        "counted": sum(mask),
    }
    write_manifest(folder, manifest)


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))
