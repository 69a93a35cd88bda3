"""data_prep: what ``inspect`` found, as lines a person reads. Reads nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from data_prep.progress import count, counted, duration, size

FILES_SHOWN = 8


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The report of inspection.main, line by line."""
    files, sample, encoder, whole = report["files"], report["sample"], report["encoding"], report["estimate"]
    yield from _files(files)
    yield from _sample(sample)
    if encoder:
        dtype = f"{encoder['dtype']} ids, EOD {encoder['eod']!r}"
        yield f"tokenizer: {encoder['path']}: {encoder['vocab_size']:,} entries, {dtype}"
        rates = f"{encoder['bytes_per_token']:.2f} bytes a token, {encoder['mb_per_second']:.1f} MB/s a core"
        yield f"encoder: {encoder['encoder']} ({encoder['why']}): {rates}"
    yield from _estimate(files, sample, whole)


def _files(files: dict[str, Any]) -> Iterator[str]:
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in files["kinds"].items())
    rows = counted(files["rows"], "row") if files["rows"] is not None else "rows not counted"
    yield f"files: {kinds}; {size(files['bytes'])}; {rows}; about {size(files['text_bytes'])} of text"
    for file in files["list"][:FILES_SHOWN]:
        rows = "" if file["rows"] is None else f" · {counted(file['rows'], 'row')}"
        yield f"  {file['path']} · {file['kind']} · {size(file['bytes'])}{rows}"
    if len(files["list"]) > FILES_SHOWN:
        yield f"  and {len(files['list']) - FILES_SHOWN:,} more"
    first = files["first"]
    columns = ", ".join(f"{name} {kind}" for name, kind in first["columns"].items()) or "none"
    groups = f"; {counted(first['row_groups'], 'row group')}" if first["row_groups"] is not None else ""
    yield f"columns of the first file: {columns}{groups}"


def _sample(sample: dict[str, Any]) -> Iterator[str]:
    places = f"{counted(sample['places'], 'place')} of {counted(sample['files'], 'file')}"
    yield f"sample: {counted(sample['rows'], 'row')}, {size(sample['read_bytes'])} of text, from {places}{_rate(sample)}"
    share = 100 * sample["documents"] / max(sample["rows"], 1)
    dropped = (
        ", ".join(f"{100 * number / max(sample['rows'], 1):.3g}% {reason}" for reason, number in sample["dropped"].items()) or "nothing"
    )
    yield f"  documents: {sample['documents']:,} ({share:.4g}% of the rows); left out: {dropped}"
    sizes = sample["document_bytes"]
    if sizes:
        yield f"  bytes a document: {sizes['mean']:,.0f} on average, {sizes['median']:,.0f} in the middle, {sizes['largest']:,} at most"
    for example in sample["examples"]:
        yield f"  {example['text']}" if example["id"] == example["text"] else f"  {example['id']}: {example['text']}"


def _rate(sample: dict[str, Any]) -> str:
    return f"; read at {sample['read_mb_per_second']:,.0f} MB/s a core" if sample["read_mb_per_second"] else ""


def _estimate(files: dict[str, Any], sample: dict[str, Any], whole: dict[str, Any]) -> Iterator[str]:
    share = whole["share_of_text"]
    basis = "read to the end" if sample["whole"] else f"estimated from {100 * share:.3g}% of the text"
    rows = "" if files["rows"] is not None else f"{count(whole['rows'])} rows, "
    tokens = f", {count(whole['tokens'])} tokens with EOD" if "tokens" in whole else ""
    about = "" if sample["whole"] else "about "
    yield f"all ({basis}): {about}{rows}{count(whole['documents'])} documents, {size(whole['text_bytes'])} of text{tokens}"
    if "tokens" in whole:
        disk = size(whole["bin_bytes"] + whole["idx_bytes"])
        yield f"  disk: {size(whole['bin_bytes'])} .bin and {size(whole['idx_bytes'])} .idx; until it is merged twice that ({disk} more)"
        wall = duration(3600 * whole["hours"])
        workers = counted(whole["workers"], "worker")
        yield f"  time: {_hours(whole['core_hours'])} on this machine's cores: {wall} with {workers}, downloads and writing not counted"
    elif sample["documents"]:
        yield "  tokens, disk and time: name a --tokenizer"
    else:
        yield "  no row of the sample is a document: see what is left out"


def _hours(hours: float) -> str:
    return f"{hours:.3g} core-hours" if hours >= 0.1 else f"{3600 * hours:.3g} core-seconds"
