"""Measurement of the CPU seconds that a data_prep worker spends in each step.

The steps by which a worker encodes its unit of work are repeated in one process, and the CPU time
of each is recorded.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.encode import encoders
from data_prep.encode.documents import Selection, Settings
from data_prep.encode.unit import unwritable, with_eod
from data_prep.prepared.indexed import IndexedWriter, dtype_name
from data_prep.sources import Rows, open_files, read_span, spans
from tools.bench.data_prep.corpus import Corpus
from tools.bench.data_prep.peers import Kit

UNIT_BYTES = 256_000_000


@dataclass(frozen=True)
class Breakdown:
    """CPU seconds of a worker by step, for ``text_bytes`` bytes of text."""

    corpus: str
    tokenizer: str
    text_bytes: int
    seconds: dict[str, float]


def measure(corpus: Corpus, kit: Kit, scratch: Path) -> Breakdown:
    """Encode the corpus as a worker does and return the CPU seconds of each step.

    The supervision of workers and the merge of their outputs are not included.
    """
    settings = Settings(valid_percent=0.0, test_percent=0.0)
    selection, encoder = Selection(settings), encoders.make(kit.folder, "gigatoken")
    dtype = np.dtype(dtype_name(kit.folder.vocab_size))
    scratch.mkdir(parents=True, exist_ok=True)
    writer = IndexedWriter(scratch / "breakdown", dtype.name)
    seconds: defaultdict[str, float] = defaultdict(float)
    last = time.process_time()

    def spent(step: str) -> None:
        nonlocal last
        now = time.process_time()
        seconds[step] += now - last
        last = now

    for file in open_files([corpus.folder], settings.columns):
        for span in spans(file, settings.columns, UNIT_BYTES):
            for rows in read_span(file, span, settings.columns):
                spent("read")
                if not isinstance(rows, Rows):
                    continue
                documents, _, _ = selection.of(rows, file.path)
                spent("check and select")
                encoded = encoder.encode(documents.texts)
                spent("tokenize")
                unwritable(encoded, kit.folder.eod_id)
                ids, lengths = with_eod(encoded, kit.folder.eod_id, dtype)
                spent("EOD and dtype")
                writer.add(ids, lengths)
                spent("hash and write")
    writer.finish()
    spent("index and fsync")
    return Breakdown(corpus.name, kit.style, corpus.text_bytes, dict(seconds))
