"""Baseline pipeline: Megatron's algorithm with one tokenizer call per document.

Usage: ``python -m tools.bench.data_prep.per_document PARQUET_FOLDER TOKENIZER.json EOD_ID
OUT_PREFIX``.

The algorithm is that of Megatron-LM's ``tools/preprocess_data.py``. For each row it calls
``tokenizer.encode`` with the text, appends EOD, and writes the ids to the .bin; the index is
written at the end. It runs in one process. This is the fastest form of that algorithm: it calls the
tokenizers library directly, without transformers, and reads two columns of parquet instead of JSON
lines.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

MAGIC, UINT16, INT32 = b"MMIDIDX\x00\x00", 8, 4
UINT16_BELOW = 65500  # Megatron's rule


def main(folder: Path, tokenizer_file: Path, eod: int, prefix: Path) -> int:
    """Encode every row of the folder's parquet files, ordered by file name, and return 0."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    code = UINT16 if tokenizer.get_vocab_size() < UINT16_BELOW else INT32
    dtype = np.dtype(np.uint16 if code == UINT16 else np.int32)
    lengths: list[int] = []
    with prefix.with_suffix(".bin").open("wb") as stream:
        for file in sorted(folder.glob("*.parquet")):
            for batch in pq.ParquetFile(file).iter_batches(columns=["text", "id"]):
                for row in batch.to_pylist():
                    ids = tokenizer.encode(row["text"], add_special_tokens=False).ids
                    ids.append(eod)
                    stream.write(np.array(ids, dtype=dtype).tobytes())
                    lengths.append(len(ids))
    write_index(prefix.with_suffix(".idx"), np.array(lengths, dtype=np.int32), code, dtype.itemsize)
    return 0


def write_index(path: Path, lengths: np.ndarray, code: int, width: int) -> None:
    """Write Megatron's .idx for documents of one sequence each.

    The file contains lengths in token ids, offsets in bytes, and document numbers.

    code: Megatron's number of the dtype.
    width: bytes of one token id.
    """
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    with path.open("wb") as stream:
        stream.write(MAGIC + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1))
        stream.write(lengths.tobytes())
        stream.write((starts * width).tobytes())
        stream.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])))
