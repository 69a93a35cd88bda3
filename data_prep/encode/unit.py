"""Encoding of one unit of a plan: rows to documents to token ids to shards.

A unit's shards get their final names only when all of them are complete. This module does not
depend on other units, processes or tasks.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.aliases import BoolArray, Int64Array
from data_prep.encode.documents import Documents, Selection
from data_prep.encode.encoders import Encoded, Encoder
from data_prep.encode.splits import SPLITS
from data_prep.prepared.document_ids import IdsWriter
from data_prep.prepared.indexed import IndexedWriter, dtype_name
from data_prep.prepared.layout import SHARDS, Plan, Unit, entry_path, read_plan, shard_prefix
from data_prep.prepared.loss_mask import MaskWriter
from data_prep.prepared.manifest import PLACES_KEPT, SplitEntry, UnitEntry
from data_prep.sources import Rows, read_span
from data_prep.sources.rows import BadRow, Drop, Tally, by_reason
from fem_common.errors import UserError
from fem_common.files import json_bytes, sync_folder, temporary, write_atomically

Report = Callable[[int, Tally], None]
EOD_IN_CHAT = "EOD before the end; give a --chat-template whose turns end in another token"


class Engine:
    """Encoder of the units of a plan, one after another, inside a worker process.

    ``encoder`` converts text to ids. The constructor loads the mask of the settings and raises
    UserError if that fails.
    """

    def __init__(self, out: Path, plan: Plan, encoder: Encoder) -> None:
        self.out = out
        self.plan = plan
        self.encoder = encoder
        self.settings = plan.settings
        self.selection = Selection(self.settings)

    def encode_unit(self, unit: Unit, report: Report) -> UnitEntry:
        """Write the shards of a unit, then its entry, and return the entry.

        ``report(bytes of text read, counts so far)`` is called after every batch. Raises UserError
        if the input is missing or has changed since the plan was made, and OSError if writing the
        output fails.
        """
        file, folder = self.plan.files[unit.file], temporary(self.out / SHARDS / unit.name)

        folder.parent.mkdir(exist_ok=True)
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            folder.mkdir()
            work = _Work(self, file.path, folder, stack)
            read = 0
            for part in read_span(file, unit.span, self.settings.columns):
                if isinstance(part, Rows):
                    read += part.batch.column(self.settings.text_column).nbytes
                    work.add(part)
                else:
                    work.drop(
                        Counter({part.reason: part.rows}),
                        [BadRow(part.place, part.reason, part.message)],
                        part.rows,
                    )
                report(read, work.tally)
            if unit.rows not in (None, work.tally.rows):
                raise UserError(
                    f"{file.path} has changed since it was planned; make the data again with "
                    "--overwrite"
                )
            return work.publish(unit)


class _Work:
    """Unfinished output of a unit.

    It consists of writers in a temporary folder, and counts of documents and dropped rows.
    """

    def __init__(self, engine: Engine, path: str, folder: Path, stack: ExitStack) -> None:
        self.engine = engine
        self.path = path
        self.folder = folder
        self.stack = stack
        self.eod = engine.plan.tokenizer.eod_id
        self.dtype = dtype_name(engine.plan.tokenizer.vocab_size)
        self.tally = Tally()
        self.bad: list[BadRow] = []
        self.writers: dict[str, IndexedWriter] = {}
        self.ids: dict[str, IdsWriter] = {}
        self.masks: dict[str, MaskWriter] = {}
        # If the text column is the id column, the ids would repeat the texts.
        self.have_ids = engine.settings.id_column != engine.settings.text_column
        self.text_bytes: Counter[str] = Counter()

    def drop(self, dropped: Counter[Drop], bad: list[BadRow], rows: int = 0) -> None:
        """Count dropped rows, and record bad rows up to PLACES_KEPT.

        dropped: number of rows by reason.
        bad: bad rows among them.
        rows: number of rows to add to the unit's total.
        """
        self.tally.rows += rows
        self.tally.dropped += dropped
        self.bad += sorted(bad, key=lambda row: row.place)[: PLACES_KEPT - len(self.bad)]

    def add(self, rows: Rows) -> None:
        """Encode the documents of a batch of rows and append each to the shard of its split."""
        documents, dropped, bad = self.engine.selection.of(rows, self.path)
        if not len(documents.splits):
            self.drop(dropped, bad, rows.batch.num_rows)
            return
        encoded = self.engine.encoder.encode(documents.texts)
        faults = unwritable(encoded, self.eod)
        dropped.update(reason for reason, _ in faults.values())
        bad = bad + [
            BadRow(int(documents.places[number]), *fault) for number, fault in faults.items()
        ]
        self.drop(dropped, bad, rows.batch.num_rows)
        kept = np.ones(len(documents.splits), dtype=bool)
        kept[list(faults)] = False
        self._write(documents, encoded, kept)

    def _write(self, documents: Documents, encoded: Encoded, kept: BoolArray) -> None:
        ids, lengths = with_eod(encoded, self.eod, np.dtype(self.dtype).newbyteorder("<"))
        sizes = encoded.sizes
        if sizes is None:
            sizes = pc.binary_length(documents.texts).to_numpy()
        for number, name in enumerate(SPLITS):
            chosen = kept & (documents.splits == number)
            if not chosen.any():
                continue
            which = np.repeat(chosen, lengths)
            part = ids if chosen.all() else ids[which]
            text_bytes = int(sizes[chosen].sum())
            if name not in self.writers:
                self.writers[name] = self.stack.enter_context(
                    closing(IndexedWriter(self.folder / name, self.dtype))
                )
                if self.have_ids:
                    self.ids[name] = self.stack.enter_context(
                        closing(IdsWriter(self.folder / f"{name}.ids"))
                    )
                if encoded.mask is not None:
                    self.masks[name] = self.stack.enter_context(
                        closing(MaskWriter(self.folder / f"{name}.mask"))
                    )
            self.writers[name].add(part, lengths[chosen])
            if self.have_ids:
                self.ids[name].add(documents.ids.filter(pa.array(chosen)).to_pylist())
            if encoded.mask is not None:
                self.masks[name].write(encoded.mask[which].tobytes())
            self.text_bytes[name] += text_bytes
            self.tally.documents += int(chosen.sum())
            self.tally.tokens += len(part)
            self.tally.text_bytes += text_bytes

    def publish(self, unit: Unit) -> UnitEntry:
        """Complete the files, move them to their final names, write the entry last, and return it.

        Raises RuntimeError if the counts of rows, documents and dropped rows disagree.
        """
        out = self.engine.out
        plan = self.engine.plan
        tally = self.tally
        if tally.rows != tally.documents + tally.dropped.total():
            raise RuntimeError(
                f"unit {unit.number}: {tally.rows} rows are not {tally.documents} documents "
                f"and {tally.dropped}"
            )
        splits = {}
        for name in (name for name in SPLITS if name in self.writers):
            ids = self.ids[name].finish() if self.have_ids else None
            mask = self.masks[name].finish() if name in self.masks else None
            splits[name] = SplitEntry(
                text_bytes=self.text_bytes[name],
                **asdict(self.writers[name].finish()),
                ids=ids,
                mask=mask,
            )
        dropped, encoder = by_reason(tally.dropped), self.engine.encoder.name
        bad = tuple(sorted(self.bad, key=lambda row: row.place))
        entry = UnitEntry(unit.number, plan.fingerprint, tally.rows, dropped, bad, splits, encoder)
        if read_plan(out).fingerprint != plan.fingerprint:
            raise UserError(f"{out} was planned again during this run; run the command again")
        for name, split in splits.items():
            for kind in split.sizes:
                final = shard_prefix(out, unit, name)
                os.replace(self.folder / f"{name}.{kind}", final.with_name(f"{final.name}.{kind}"))
        sync_folder(out / SHARDS)
        write_atomically(entry_path(out, unit), json_bytes(entry.as_json()))
        return entry


def unwritable(encoded: Encoded, eod: int) -> dict[int, tuple[Drop, str]]:
    """Return the reason and a message for each document, by index, that cannot be written.

    The reasons are: the document has no tokens, EOD is among its tokens, or one of
    ``encoded.faults``.
    """
    empty = np.flatnonzero(np.diff(encoded.offsets) == 0)
    found = np.flatnonzero(encoded.ids == eod)
    ending = np.unique(np.searchsorted(encoded.offsets, found, side="right") - 1)
    fix = "" if encoded.mask is None else EOD_IN_CHAT
    return (
        dict.fromkeys(empty.tolist(), (Drop.NO_TOKENS, ""))
        | dict.fromkeys(ending.tolist(), (Drop.CONTAINS_EOD, fix))
        | dict(encoded.faults)
    )


def with_eod(
    encoded: Encoded, eod: int, dtype: np.dtype[np.generic]
) -> tuple[npt.NDArray[np.generic], Int64Array]:
    """Return (ids, lengths) of n documents with EOD appended to each document.

    ids: all ids [total + n] as ``dtype``.
    lengths: number of ids of each document including EOD [n].
    """
    lengths = np.diff(encoded.offsets) + 1
    ids = np.empty(len(encoded.ids) + len(lengths), dtype=dtype)
    last = np.zeros(len(ids), dtype=bool)
    last[np.cumsum(lengths) - 1] = True
    ids[last] = eod
    ids[~last] = encoded.ids
    return ids, lengths
