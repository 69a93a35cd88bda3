"""Verb ``inspect``: report the content of inputs and the cost of encoding them.

    python -m data_prep inspect INPUT... [--tokenizer DIR] [filters]

The verb writes no files. Files and rows are counted from footers and sizes. Other values are
measured on a sample from up to 8 places spread over the inputs, and scaled to all of the text. The
last lines report the size of the sample. Speeds are those of one core of this machine, without
downloads.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_prep.aliases import Json
from data_prep.encode.documents import (
    Documents,
    Selection,
    add_column_arguments,
    add_messages_arguments,
    settings_of,
)
from data_prep.encode.encoders import chat, choose, make
from data_prep.encode.tokenizer import TokenizerFolder, find_tokenizer, load_folder
from data_prep.encode.unit import unwritable
from data_prep.options import add_encoder_argument, add_input_arguments, worker_count
from data_prep.prepared.indexed import dtype_name
from data_prep.report.progress import Reading
from data_prep.sources import (
    Rows,
    SourceFile,
    Span,
    arrow,
    jsonl,
    open_files,
    read_span,
    spans,
)
from data_prep.sources.rows import Drop, by_reason, listed
from data_prep.sources.streams import open_input
from fem_common.errors import UserError
from fem_common.text import count, counted, duration, size

PLACES = 8
EXAMPLES, EXAMPLE_CHARACTERS = 3, 160
TIMED_BYTES = 8 << 20
CHECKED_DOCUMENTS, CHECKED_BYTES = 64, 1_000_000
IDX_BYTES = 20  # per document in the .idx: length, pointer, document number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add = parser.add_argument
    add_input_arguments(parser)
    add(
        "--tokenizer",
        metavar="DIR|NAME",
        help="estimate tokens, disk and hours with this one: a folder, or ORG/NAME on the Hub",
    )
    add_encoder_argument(parser)
    add_column_arguments(parser)
    add_messages_arguments(parser)
    add(
        "--sample-mb",
        type=float,
        default=8.0,
        metavar="MB",
        help="read about this much text (default: 8)",
    )
    add(
        "--workers",
        type=int,
        metavar="W",
        help="processes assumed for the hours (default: one per core)",
    )
    add("--json", action="store_true", help="print one JSON object instead")


@dataclass
class Sample:
    """Sample of the rows of the inputs, with its documents and counts.

    ``places`` is the number of parts of the inputs from which the rows were read; the first field
    is True if all rows were read. ``read_bytes`` is the size of the texts of these rows.
    ``dropped`` has the number of dropped rows for each reason. ``batches`` contain the documents.
    """

    whole: bool
    files: int = 0
    places: int = 0
    rows: int = 0
    read_bytes: int = 0
    dropped: Counter[Drop] = field(default_factory=Counter)
    batches: list[Documents] = field(default_factory=list)


def evenly(number: int, most: int) -> list[int]:
    """Return at most ``most`` numbers of range(number), spread evenly.

    They are the middles of equal parts of the range.
    """
    taken = min(number, most)
    return [(2 * i + 1) * number // (2 * taken) for i in range(taken)]


def draw(
    files: list[SourceFile], selection: Selection, sample_bytes: float
) -> tuple[Sample, float | None]:
    """Read a sample of the inputs, and return it with the reading speed of one core in MB/s.

    All rows are read if the inputs have at most ``sample_bytes`` of text. Otherwise about the same
    amount is read from each of several places. The speed is None if no row could be read. Raises
    UserError.
    """
    total = sum(file.text_bytes for file in files)
    sample = Sample(whole=total <= sample_bytes)
    chosen = files if sample.whole else [files[number] for number in evenly(len(files), PLACES)]
    with Reading("sampling", int(min(total, sample_bytes))) as reading:
        for number, file in enumerate(chosen):
            share = (sample_bytes - sample.read_bytes) / (len(chosen) - number)
            sample.files += 1
            _draw_from(file, selection, math.inf if sample.whole else share, sample, reading)
    return sample, _speed(chosen[-1], selection)


def _draw_from(
    file: SourceFile, selection: Selection, share: float, sample: Sample, reading: Reading
) -> None:
    """Add about ``share`` bytes of a file's text to the sample.

    The text is from up to 8 spans of the file, or from more spans if they are small.
    """
    columns, started = selection.settings.columns, sample.read_bytes
    cuts = spans(file, columns, max(1, round(min(share, file.text_bytes) / PLACES)))
    order = (
        range(len(cuts))
        if sample.whole
        else dict.fromkeys([*evenly(len(cuts), PLACES), *range(len(cuts))])
    )
    for number, place in enumerate(order):
        left = share - (sample.read_bytes - started)
        if left <= 0:
            return
        sample.places += 1
        _draw_span(
            file,
            cuts[place],
            selection,
            left / max(1, min(PLACES, len(cuts)) - number),
            sample,
            reading,
        )


def _draw_span(
    file: SourceFile,
    span: Span,
    selection: Selection,
    most: float,
    sample: Sample,
    reading: Reading,
) -> None:
    taken = 0
    for part in read_span(file, span, selection.settings.columns):
        if not isinstance(part, Rows):
            sample.dropped[part.reason] += part.rows
            sample.rows += part.rows
            continue
        texts = part.batch.column(selection.settings.text_column)
        sizes = pc.fill_null(pc.binary_length(texts), 0).to_numpy(zero_copy_only=False).cumsum()
        # The rows that reach ``most``, at least one.
        number = min(int(np.searchsorted(sizes, most - taken)) + 1, len(sizes))
        documents, dropped, _ = selection.of(
            Rows(part.places[:number], part.batch.slice(0, number)), file.path
        )
        if len(documents.splits):
            sample.batches.append(documents)
        sample.dropped += dropped
        sample.rows += number
        sample.read_bytes += int(sizes[number - 1])
        taken += int(sizes[number - 1])
        reading.advance(int(sizes[number - 1]))
        if taken >= most:
            break


def _speed(file: SourceFile, selection: Selection) -> float | None:
    """Return the speed of reading and selecting rows in MB of text per CPU second.

    It is measured at the beginning of the file, on complete row groups. Return None if no row could
    be read.
    """
    clock, done = time.process_time(), 0
    for span in spans(file, selection.settings.columns, TIMED_BYTES)[:1]:
        for part in read_span(file, span, selection.settings.columns):
            if isinstance(part, Rows):
                selection.of(part, file.path)
                done += part.batch.column(selection.settings.text_column).nbytes
            if done >= TIMED_BYTES:
                break
    return done / 1e6 / max(time.process_time() - clock, 1e-9) if done else None


def facts_of_files(files: list[SourceFile]) -> Json:
    """Return the section ``files`` of the report, from footers and file sizes.

    Its entry ``first`` describes the columns of the first file.
    """
    kinds = Counter[str]()
    for file in files:
        kinds[file.kind] += len(file.parts) or 1
    rows = None
    if all(file.rows is not None for file in files):
        rows = sum(file.rows or 0 for file in files)
    return {
        "kinds": dict(kinds),
        "bytes": sum(file.bytes for file in files),
        "rows": rows,
        "text_bytes": sum(file.text_bytes for file in files),
        "list": [
            {"path": file.path, "kind": file.kind, "bytes": file.bytes, "rows": file.rows}
            for file in files
        ],
        "first": first_file(files[0]),
    }


def first_file(file: SourceFile) -> Json:
    """Return a dictionary with the columns and types of a file, and its number of row groups.

    The columns of a JSONL file are the keys of its first line. A .txt file has no columns. The
    number of row groups (Arrow: record batches) is None for the other kinds.
    """
    if file.parts:
        return {"columns": {}, "row_groups": None}
    with open_input(file.path) as stream:
        if file.kind == "parquet":
            with pq.ParquetFile(stream) as parquet:
                schema, groups = parquet.schema_arrow, parquet.metadata.num_row_groups
            return {
                "columns": {column.name: str(column.type) for column in schema},
                "row_groups": groups,
            }
        if file.kind == "arrow":
            schema, batches = arrow.schema(file.path, stream)
            return {
                "columns": {column.name: str(column.type) for column in schema},
                "row_groups": batches,
            }
        first = jsonl.first_object(stream, file.kind)
    return {
        "columns": {name: _json_type(value) for name, value in first.items()},
        "row_groups": None,
    }


def _json_type(value: object) -> str:
    names = {
        str: "string",
        bool: "bool",
        jsonl.Integer: "number",
        float: "number",
        list: "list",
        dict: "object",
    }
    return names.get(type(value), "null")


def facts_of_sample(sample: Sample, speed: float | None) -> Json:
    """Return the section ``sample`` of the report.

    It contains rows, drops, document sizes, and the beginnings of up to 3 documents spread over the
    sample.
    """
    parts = [pc.binary_length(batch.texts).to_numpy() for batch in sample.batches]
    lengths = np.concatenate([np.empty(0, np.int64), *parts])
    sizes = None
    if len(lengths):
        sizes = {
            "mean": float(lengths.mean()),
            "median": float(np.median(lengths)),
            "largest": int(lengths.max()),
        }
    shown = [sample.batches[index] for index in evenly(len(sample.batches), EXAMPLES)]
    return {
        "whole": sample.whole,
        "files": sample.files,
        "places": sample.places,
        "rows": sample.rows,
        "read_bytes": sample.read_bytes,
        "documents": len(lengths),
        "text_bytes": int(lengths.sum()),
        "dropped": by_reason(sample.dropped),
        "document_bytes": sizes,
        "read_mb_per_second": speed,
        "examples": [
            {"id": _one_line(batch.ids[0]), "text": _one_line(batch.texts[0])} for batch in shown
        ],
    }


def _one_line(value: pa.Scalar) -> str:
    """Return the beginning of a text on one line.

    White space and control characters are replaced by single spaces.
    """
    text = value.as_buffer()[: 16 * EXAMPLE_CHARACTERS].to_pybytes().decode(errors="ignore")
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())[
        :EXAMPLE_CHARACTERS
    ]


def encoding(
    folder: TokenizerFolder, wanted: str, batches: list[Documents], *, messages: bool
) -> Json:
    """Return the section ``encoding`` of the report.

    It contains the tokenizer, the encoder that ``wanted`` selects, and the results of encoding the
    sample, which consists of conversations if ``messages``. The first half of the sample is a
    warm-up and is not timed. Raises UserError.
    """
    texts: list[str] = []
    for batch in batches:
        texts += batch.texts[: CHECKED_DOCUMENTS - len(texts)].to_pylist()
    while len(texts) > 1 and sum(map(len, texts)) > CHECKED_BYTES:
        texts.pop()
    choice = chat(folder, wanted, None) if messages else choose(folder, wanted, texts)
    dropped = Counter[Drop]()
    encoder, total = make(folder, choice.kind), sum(batch.text_bytes for batch in batches)
    tokens = done = timed_bytes = 0
    seconds = 0.0
    for number, batch in enumerate(batches, 1):
        clock = time.process_time()
        encoded = encoder.encode(batch.texts)
        tokens += len(encoded.ids)
        if done >= total / 2 or number == len(batches):
            seconds += time.process_time() - clock
            timed_bytes += batch.text_bytes
        dropped.update(reason for reason, _ in unwritable(encoded, folder.eod_id).values())
        done += batch.text_bytes
    return {
        "path": str(folder.path),
        "vocab_size": folder.vocab_size,
        "eod": folder.eod_token,
        "dtype": dtype_name(folder.vocab_size),
        "encoder": choice.name,
        "why": choice.why,
        "tokens": tokens,
        "dropped": by_reason(dropped),
        "bytes_per_token": total / max(tokens, 1),
        "mb_per_second": timed_bytes / 1e6 / max(seconds, 1e-9),
    }


def estimate(files: Json, sample: Json, encoder: Json | None, workers: int) -> Json:
    """Return the section of the report with the estimates for all inputs, scaled from the sample.

    These are rows and documents. If ``encoder`` is given, they are also tokens (including EOD),
    bytes on disk, and hours with the given number of ``workers``.
    """
    by_text = 1.0 if sample["whole"] else files["text_bytes"] / max(sample["read_bytes"], 1)
    by_rows = (
        by_text
        if files["rows"] is None or sample["whole"]
        else files["rows"] / max(sample["rows"], 1)
    )
    documents, text_bytes = sample["documents"] * by_rows, sample["text_bytes"] * by_text
    found: Json = {
        "share_of_text": min(1 / by_text, 1.0),
        "rows": round(sample["rows"] * by_rows),
        "documents": round(documents),
        "text_bytes": round(text_bytes),
    }
    if encoder:
        tokens = encoder["tokens"] * by_text + documents
        seconds = text_bytes / 1e6 / encoder["mb_per_second"] + sample[
            "read_bytes"
        ] * by_text / 1e6 / (sample["read_mb_per_second"] or math.inf)
        found |= {
            "tokens": round(tokens),
            "bin_bytes": round(tokens * np.dtype(encoder["dtype"]).itemsize),
            "idx_bytes": round(documents * IDX_BYTES),
            "core_hours": seconds / 3600,
            "workers": workers,
            "hours": seconds / 3600 / workers,
        }
    return found


def main(arguments: argparse.Namespace) -> int:
    """Print the content of the inputs and the cost of encoding them. Raises UserError."""
    workers = worker_count(arguments.workers)
    if not (math.isfinite(arguments.sample_mb) and arguments.sample_mb > 0):
        raise UserError(f"--sample-mb is {arguments.sample_mb:g}; it must be a number above 0")
    settings = settings_of(arguments)
    folder = None
    if arguments.tokenizer:
        folder = load_folder(find_tokenizer(arguments.tokenizer), arguments.chat_template)
    files = open_files(
        arguments.inputs, settings.columns, arguments.subset, paragraphs=arguments.paragraphs
    )
    sample, speed = draw(files, Selection(settings), arguments.sample_mb * 1e6)
    report: Json = {
        "files": facts_of_files(files),
        "columns": asdict(settings.columns),
        "sample": facts_of_sample(sample, speed),
    }
    report["encoding"] = (
        encoding(folder, arguments.encoder, sample.batches, messages=settings.messages)
        if folder and sample.batches
        else None
    )
    report["estimate"] = estimate(report["files"], report["sample"], report["encoding"], workers)
    if arguments.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        print(*lines(report), sep="\n")
    return 0


FILES_SHOWN = 8


def lines(report: Json) -> Iterator[str]:
    """Yield the lines of the report in readable form."""
    encoder = report["encoding"]
    yield from _files(report["files"])
    yield from _sample(report["sample"])
    if encoder:
        yield (
            f"tokenizer: {encoder['path']}: {encoder['vocab_size']:,} entries, "
            f"{encoder['dtype']} ids, EOD {encoder['eod']!r}"
        )
        rates = (
            f"{encoder['bytes_per_token']:.2f} bytes per token, {encoder['mb_per_second']:.1f} "
            "MB/s per core"
        )
        yield f"encoder: {encoder['encoder']} ({encoder['why']}): {rates}"
        if encoder["dropped"]:
            yield f"  left out of the documents while encoding: {listed(encoder['dropped'])}"
    yield from _estimate(report["files"], report["sample"], report["estimate"])


def _files(files: Json) -> Iterator[str]:
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in files["kinds"].items())
    rows = counted(files["rows"], "row") if files["rows"] is not None else "rows not counted"
    yield (
        f"files: {kinds}; {size(files['bytes'])}; {rows}; about {size(files['text_bytes'])} of text"
    )
    for file in files["list"][:FILES_SHOWN]:
        rows = "" if file["rows"] is None else f" · {counted(file['rows'], 'row')}"
        yield f"  {file['path']} · {file['kind']} · {size(file['bytes'])}{rows}"
    if len(files["list"]) > FILES_SHOWN:
        yield f"  and {len(files['list']) - FILES_SHOWN:,} more"
    first = files["first"]
    columns = ", ".join(f"{name} {kind}" for name, kind in first["columns"].items()) or "none"
    groups = (
        f"; {counted(first['row_groups'], 'row group')}" if first["row_groups"] is not None else ""
    )
    yield f"columns of the first file: {columns}{groups}"


def _sample(sample: Json) -> Iterator[str]:
    places = f"{counted(sample['places'], 'place')} of {counted(sample['files'], 'file')}"
    rate = (
        f"; read at {sample['read_mb_per_second']:,.0f} MB/s per core"
        if sample["read_mb_per_second"]
        else ""
    )
    yield (
        f"sample: {counted(sample['rows'], 'row')}, {size(sample['read_bytes'])} of text, from "
        f"{places}{rate}"
    )
    share = 100 * sample["documents"] / max(sample["rows"], 1)
    dropped = (
        ", ".join(
            f"{100 * number / max(sample['rows'], 1):.3g}% {reason}"
            for reason, number in sample["dropped"].items()
        )
        or "nothing"
    )
    yield f"  documents: {sample['documents']:,} ({share:.4g}% of the rows); left out: {dropped}"
    sizes = sample["document_bytes"]
    if sizes:
        yield (
            f"  bytes per document: {sizes['mean']:,.0f} on average, {sizes['median']:,.0f} at "
            f"the median, {sizes['largest']:,} at most"
        )
    for example in sample["examples"]:
        yield (
            f"  {example['text']}"
            if example["id"] == example["text"]
            else f"  {example['id']}: {example['text']}"
        )


def _estimate(files: Json, sample: Json, full: Json) -> Iterator[str]:
    share = full["share_of_text"]
    basis = (
        "read to the end" if sample["whole"] else f"estimated from {100 * share:.3g}% of the text"
    )
    rows = "" if files["rows"] is not None else f"{count(full['rows'])} rows, "
    tokens = f", {count(full['tokens'])} tokens with EOD" if "tokens" in full else ""
    about = "" if sample["whole"] else "about "
    yield (
        f"all ({basis}): {about}{rows}{count(full['documents'])} documents, "
        f"{size(full['text_bytes'])} of text{tokens}"
    )
    if "tokens" in full:
        disk = size(full["bin_bytes"] + full["idx_bytes"])
        yield (
            f"  disk: {size(full['bin_bytes'])} .bin and {size(full['idx_bytes'])} .idx; twice "
            f"that until the merge ({disk} more)"
        )
        wall = duration(3600 * full["hours"])
        workers = counted(full["workers"], "worker")
        yield (
            f"  time: {_hours(full['core_hours'])} on this machine's cores: {wall} with "
            f"{workers}, downloads and writing not counted"
        )
    elif sample["documents"]:
        yield "  tokens, disk and time: name a --tokenizer"
    else:
        yield "  no row of the sample is a document: see the rows left out"


def _hours(hours: float) -> str:
    return f"{hours:.3g} core-hours" if hours >= 0.1 else f"{3600 * hours:.3g} core-seconds"
