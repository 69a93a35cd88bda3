"""Check of a sample of documents: encode the input text again and compare it with the data.

The documents are encoded by Hugging Face tokenizers. This is the only part of ``verify`` that
opens inputs. Missing or changed inputs are not faults of the data; they are reported as not
checked.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_prep.aliases import Advance, AnyArray, Int64Array, Uint8Array
from data_prep.encode.documents import Selection
from data_prep.encode.encoders import Encoder, first_unequal, make
from data_prep.encode.splits import SPLITS
from data_prep.encode.tokenizer import load_folder
from data_prep.prepared.indexed import Index, read_index, with_ending
from data_prep.prepared.layout import TOKENIZER, Plan, Unit, shard_prefix
from data_prep.prepared.manifest import UnitEntry
from data_prep.report.progress import Reading
from data_prep.sources import Rows, SourceFile, read_span, unchanged
from data_prep.sources.rows import Drop
from fem_common.errors import CommandError, UserError
from fem_common.errors import reason as reason_of

FROM_A_UNIT = 10
WHILE_READING = (Drop.UNREADABLE, Drop.MALFORMED, Drop.CUT_OFF)
WHILE_ENCODING = (
    Drop.NO_TOKENS,
    Drop.CONTAINS_EOD,
    Drop.NOT_MESSAGES,
    Drop.TEMPLATE_FAILED,
    Drop.NOTHING_COUNTS,
)


@dataclass(frozen=True)
class Checked:
    """Data folder that is checked: its plan and the entries of its units, in order.

    ``entries`` may be those of some units. ``merged`` is True if the folder contains merged pairs.
    """

    folder: Path
    plan: Plan
    entries: Sequence[UnitEntry]
    merged: bool


@dataclass
class Result:
    """Result of the check.

    compared: number of documents compared.
    faults: error texts.
    unchecked: for each reason, the numbers of the units that could not be checked.
    """

    compared: int = 0
    faults: list[str] = field(default_factory=list)
    unchecked: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Drawn:
    """Document of the sample.

    number: index of the document among the unit's documents of its split.
    place: place of its row in the input, as in BadRow.
    """

    split: str
    number: int
    place: int
    text: str


def check_sample(data: Checked, number: int) -> Result:
    """Encode ``number`` documents of the inputs again and compare them with the data.

    The documents are chosen at random with the plan's fingerprint as seed. ``data`` has the entries
    of all units. Inputs that cannot be read are reported in the result.
    """
    plan = data.plan
    entries = data.entries
    result = Result()
    chosen = draw_numbers(plan, entries, number)
    try:
        selection = Selection(plan.settings)
        kind, template = "chat" if plan.settings.messages else "hf", plan.settings.template_sha256
        encoder = make(load_folder(data.folder / TOKENIZER), kind, template)
    except UserError as error:
        result.unchecked[str(error)] = [unit.number for unit, _ in chosen]
        return result
    written = Written(data, encoder, result)
    with Reading("encoding a sample again", sum(unit.text_bytes for unit, _ in chosen)) as reading:
        for unit, wanted in chosen:
            try:
                file = plan.files[unit.file]
                if not unchanged(file, plan.settings.columns):
                    raise UserError(f"{file.path} has changed since the data was made")
                documents = _draw(
                    file, unit, entries[unit.number], selection, wanted, result, reading.advance
                )
            except (CommandError, OSError) as error:
                reason = reason_of(error) if isinstance(error, OSError) else str(error)
                result.unchecked.setdefault(reason, []).append(unit.number)
            else:
                for document in documents:
                    written.compare(document, unit)
    return result


def draw_numbers(
    plan: Plan, entries: Sequence[UnitEntry], number: int
) -> list[tuple[Unit, Int64Array]]:
    """Choose at most ``number`` documents at random.

    Returns:
        Pairs of a unit and the sorted numbers of its chosen documents. The documents of a unit are
        numbered consecutively through its splits.
    """
    seed = int.from_bytes(hashlib.sha256(plan.fingerprint.encode()).digest()[:8], "big")
    generator = np.random.default_rng(seed)
    order = [plan.units[i] for i in generator.permutation(len(plan.units)) if entries[i].documents]
    most = max(FROM_A_UNIT, -(-number // max(len(order), 1)))
    chosen = []
    for unit in order:
        documents = entries[unit.number].documents
        if number > 0:
            wanted = generator.choice(documents, size=min(most, number, documents), replace=False)
            chosen.append((unit, np.sort(wanted)))
            number -= len(wanted)
    return chosen


def _draw(
    file: SourceFile,
    unit: Unit,
    entry: UnitEntry,
    selection: Selection,
    wanted: Int64Array,
    result: Result,
    advance: Advance,
) -> list[Drawn]:
    """Read the complete span of a unit and return the chosen documents.

    ``wanted`` contains the numbers of the chosen documents, which are numbered consecutively
    through the unit's splits. Faults are added to ``result``.
    """
    unwritten = [row.place for row in entry.bad if row.reason in WHILE_ENCODING]
    if len(unwritten) != sum(entry.dropped.get(str(reason), 0) for reason in WHILE_ENCODING):
        raise UserError(
            "more rows were dropped in encoding than its entry lists: their places are not known"
        )
    numbers, first = {}, 0
    for name in (name for name in SPLITS if name in entry.splits):
        documents = entry.splits[name].documents
        numbers[name] = wanted[(wanted >= first) & (wanted < first + documents)] - first
        first += documents
    found: list[Drawn] = []
    seen = Counter[str]()
    text_bytes = Counter[str]()
    unreadable = 0
    for rows in read_span(file, unit.span, selection.settings.columns):
        if not isinstance(rows, Rows):
            unreadable += rows.rows
            continue
        selected, _, _ = selection.of(rows, file.path)
        sizes = pc.binary_length(selected.texts).to_numpy()
        kept = ~np.isin(selected.places, unwritten)
        for code, name in enumerate(SPLITS):
            which = np.flatnonzero(kept & (selected.splits == code))
            chosen = numbers.get(name, np.zeros(0, np.int64)) - seen[name]
            for number in chosen[(chosen >= 0) & (chosen < len(which))]:
                row = int(which[number])
                found.append(
                    Drawn(
                        name,
                        seen[name] + int(number),
                        int(selected.places[row]),
                        selected.texts[row].as_py(),
                    )
                )
            seen[name] += len(which)
            text_bytes[name] += int(sizes[which].sum())
        advance(int(sizes.sum()))
    if unreadable != sum(entry.dropped.get(str(reason), 0) for reason in WHILE_READING):
        raise UserError(f"{file.path} can no longer be read as it was when the data was made")
    for name in SPLITS:
        part = entry.splits.get(name)
        recorded = (part.documents, part.text_bytes) if part else (0, 0)
        if selection.settings.messages:  # the recorded bytes are those of the rendered text
            text_bytes[name] = recorded[1]
        if (seen[name], text_bytes[name]) != recorded:
            given = f"{seen[name]} documents, {text_bytes[name]} bytes for {name}"
            result.faults.append(
                f"unit {unit.number}: {file.path} gives {given}; its entry says {recorded[0]} "
                f"and {recorded[1]}"
            )
    return found


class Written:
    """Encoded documents of units, in the shards or in the merged pairs, to compare with texts.

    In a merged pair, the documents of a unit follow the documents of earlier units.
    """

    def __init__(self, data: Checked, encoder: Encoder, result: Result) -> None:
        self.data = data
        self.encoder = encoder
        self.result = result
        self.before: dict[str, AnyArray] = {}
        for name in SPLITS:
            parts = [entry.splits.get(name) for entry in data.entries]
            self.before[name] = np.cumsum([0, *(part.documents if part else 0 for part in parts)])
        self._open: tuple[Path, Index, AnyArray] | None = None

    def place(self, unit: Unit, split: str, number: int) -> tuple[Path, int]:
        """Return (prefix of the pair that contains a document, number of the document in the pair).

        The document is number ``number`` of the unit's documents in the split.
        """
        if self.data.merged:
            return self.data.folder / split, int(self.before[split][unit.number]) + number
        return shard_prefix(self.data.folder, unit, split), number

    def ids(self, prefix: Path, number: int) -> AnyArray:
        """Return the ids of document ``number`` of the pair with this prefix, including EOD."""
        if self._open is None or self._open[0] != prefix:
            index = read_index(with_ending(prefix, "idx"))
            kind = np.dtype(index.dtype).newbyteorder("<")
            self._open = prefix, index, np.memmap(with_ending(prefix, "bin"), dtype=kind, mode="r")
        _, index, tokens = self._open
        start = int(index.pointers[number]) // tokens.itemsize
        return tokens[start : start + int(index.lengths[number])]

    def mask(self, prefix: Path, number: int) -> Uint8Array:
        """Return the mask of document ``number`` of the pair that ``ids`` has opened."""
        assert self._open is not None
        _, index, tokens = self._open
        start = int(index.pointers[number]) // tokens.itemsize
        length = int(index.lengths[number])
        return np.fromfile(with_ending(prefix, "mask"), np.uint8, length, offset=start)

    def compare(self, document: Drawn, unit: Unit) -> None:
        """Encode the text of a document of a unit and add the outcome to the result."""
        plan, text = self.data.plan, pa.array([document.text], pa.large_string())
        encoded = self.encoder.encode(text)
        expected = np.append(encoded.ids, plan.tokenizer.eod_id)
        prefix, number = self.place(unit, document.split, document.number)
        found = self.ids(prefix, number)
        self.result.compared += 1
        ending = "bin"
        if encoded.mask is not None and np.array_equal(found, expected):
            ending, found, expected = "mask", self.mask(prefix, number), encoded.mask
        if not np.array_equal(found, expected):
            at, path = first_unequal(found, expected), plan.files[unit.file].path
            what = f"document {number} (unit {unit.number}, place {document.place} of {path})"
            self.result.faults.append(
                f"{with_ending(prefix, ending)}: {what} is not what Hugging Face tokenizers makes "
                f"of its text, from id {at} on"
            )
