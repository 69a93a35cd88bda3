"""Measurement of the cost of GPTDataset's index for a corpus of FineWeb-Edu's size.

The measured command is ``python -m pretrain CONFIG --index``.

Megatron's index depends only on the documents' lengths. The benchmark therefore writes an .idx with
FineWeb-Edu's number of documents and tokens, and a sparse .bin of the right size.
"""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tools.bench.data_prep.processes import Usage, run

DOCUMENTS, TOKENS = 97_000_000, 101_700_000_000  # FineWeb-Edu's 100 billion tokens
SAMPLE, VOCAB_SIZE = 4096, 32_000
CHUNK = 4_000_000  # documents that are generated at once
SIGMA = 1.0  # parameter of the lognormal distribution of lengths
HEADER = struct.Struct("<9sQBQQ")
UINT16 = 8
CONFIG = "configs/run/demo_transformer.yaml"
SMALLEST = 20_000  # documents of the pair whose index measures start-up


@dataclass(frozen=True)
class Indexing:
    """Cost of indexing ``documents`` documents with ``tokens`` tokens, in one round.

    startup: cost of the same command for very few documents.
    cache_bytes: size of the written index.
    """

    documents: int
    tokens: int
    whole: Usage
    startup: Usage
    cache_bytes: int


def lengths(documents: int) -> Iterator[npt.NDArray[np.int32]]:
    """Yield chunks of document lengths in tokens: lognormal with FineWeb-Edu's mean.

    The numbers are always the same.
    """
    rng = np.random.default_rng(97)
    middle = np.log(TOKENS / DOCUMENTS) - SIGMA**2 / 2
    for start in range(0, documents, CHUNK):
        drawn = rng.lognormal(middle, SIGMA, min(CHUNK, documents - start))
        yield np.clip(drawn, 2, 2**20).astype(np.int32)


def write_pair(prefix: Path, documents: int) -> int:
    """Write an .idx of ``documents`` documents and a sparse .bin of their size.

    Return the number of tokens.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens, done = 0, 0
    with prefix.with_suffix(".idx").open("wb") as stream:
        stream.write(HEADER.pack(b"MMIDIDX\x00\x00", 1, UINT16, documents, documents + 1))
        for chunk in lengths(documents):
            starts = tokens + np.cumsum(chunk, dtype=np.int64) - chunk
            for place, array in (
                (4 * done, chunk),
                (4 * documents + 8 * done, 2 * starts),
                (12 * documents + 8 * done, np.arange(done, done + len(chunk), dtype=np.int64)),
            ):
                stream.seek(HEADER.size + place)
                stream.write(array.tobytes())
            tokens += int(chunk.sum(dtype=np.int64))
            done += len(chunk)
        stream.write(struct.pack("<q", documents))
    with prefix.with_suffix(".bin").open("wb") as stream:
        stream.truncate(2 * tokens)
    return tokens


def measure(documents: int, rounds: int, folder: Path) -> list[Indexing]:
    """Index ``documents`` documents, and a few for start-up; return the costs of each round.

    Every command of the ``rounds`` rounds starts with an empty cache.

    Raises BenchError.
    """
    shutil.rmtree(folder, ignore_errors=True)
    try:
        tokens = write_pair(folder / "whole" / "train", documents)
        small = write_pair(folder / "small" / "train", min(SMALLEST, documents))
        found = []
        for _ in range(rounds):
            startup, _ = _index(folder, "small", small)
            whole, held = _index(folder, "whole", tokens)
            found.append(Indexing(documents, tokens, whole, startup, held))
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _index(folder: Path, name: str, tokens: int) -> tuple[Usage, int]:
    cache = folder / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    overrides = {
        "run_dir": folder / "run",
        "data.train.0.prefix": folder / name / "train",
        "data.valid": "[]",
        "data.test": "[]",
        "data.seq_length": SAMPLE,
        "data.index_cache": cache,
        "model.vocab_size": VOCAB_SIZE,
        "train.steps": "null",
        "train.tokens": tokens // 100 * 99,  # within one epoch
        "train.eval_interval": 0,
    }
    words = [
        sys.executable,
        "-m",
        "pretrain",
        CONFIG,
        *(f"{key}={value}" for key, value in overrides.items()),
        "--index",
    ]
    usage = run(words, folder / "log")
    return usage, sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
