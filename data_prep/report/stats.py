"""Verb ``stats``: report documents, tokens, lengths and dropped rows of a merged data folder.

    python -m data_prep stats data/fineweb_edu --picture lengths.png

Lengths are in tokens, including EOD. The verb reads the manifest and the .idx files, but no .bin
file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from data_prep.aliases import Json
from data_prep.prepared.indexed import FormatError, read_index
from data_prep.prepared.loss_mask import counting
from data_prep.prepared.manifest import Manifest, read_manifest
from data_prep.prepared.staging import existing_folder
from data_prep.report.lengths import Lengths, count_lengths, draw_lengths, joined
from data_prep.report.progress import Reading
from fem_common.errors import UserError
from fem_common.files import make_folder, write_atomically
from fem_common.text import size

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)
MARKS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="merged data folder")
    parser.add_argument(
        "--picture", type=Path, metavar="PATH.png", help="draw the distribution of the lengths"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def main(arguments: argparse.Namespace) -> int:
    """Print the statistics, and write the picture if --picture is given. Raises UserError."""
    folder = existing_folder(arguments.folder)
    if arguments.picture is not None and arguments.picture.suffix != ".png":
        raise UserError(f"{arguments.picture} does not end in .png; the picture is a PNG")
    manifest = read_manifest(folder)
    lengths = split_lengths(folder, manifest)
    if arguments.json:
        print(json.dumps(as_json(folder, manifest, lengths), indent=2, ensure_ascii=False))
    else:
        print("\n".join(as_text(folder, manifest, lengths)))
    if arguments.picture is not None:
        full = joined(lengths.values())
        title = (
            f"{folder.resolve().name}: {full.total:,} documents, {full.tokens:,} tokens, "
            f"{_bytes_per_token(manifest):.2f} bytes per token"
        )
        make_folder(arguments.picture.parent)
        write_atomically(arguments.picture, draw_lengths(full, title))
        print(f"{arguments.picture}: written", file=sys.stderr)
    return 0


def split_lengths(folder: Path, manifest: Manifest) -> dict[str, Lengths]:
    """Return the distribution of document lengths of each split.

    Raises UserError for an .idx file that does not match the manifest.
    """
    lengths = {}
    with Reading(
        "reading lengths", 4 * sum(entry.documents for entry in manifest.splits.values())
    ) as reading:
        for name, entry in manifest.splits.items():
            path = folder / f"{name}.idx"
            try:
                lengths[name] = count_lengths(read_index(path).lengths, reading.advance)
            except FormatError as error:
                raise UserError(
                    f"{path} {error}; see: python -m data_prep verify {folder}"
                ) from None
            if (lengths[name].total, lengths[name].tokens) != (entry.documents, entry.tokens):
                raise UserError(
                    f"{path} is not the one that the manifest describes; see: python -m "
                    f"data_prep verify {folder}"
                )
    return lengths


def as_json(folder: Path, manifest: Manifest, lengths: dict[str, Lengths]) -> Json:
    """Return all statistics as a dictionary for JSON. Shares are between 0 and 1."""
    splits = {
        name: {
            "documents": entry.documents,
            "tokens": entry.tokens,
            "text_bytes": entry.text_bytes,
            "bytes_per_token": entry.text_bytes / entry.tokens,
            "lengths": _distribution(lengths[name]),
        }
        | ({"counted": entry.mask.counted} if entry.mask else {})
        for name, entry in manifest.splits.items()
    }
    full = {
        "bytes_per_token": _bytes_per_token(manifest),
        "lengths": _distribution(joined(lengths.values())),
    }
    source = {"rows": manifest.source.rows, "dropped": manifest.source.dropped}
    return {"folder": str(folder), "splits": splits, "all": full, **source}


def _distribution(lengths: Lengths) -> Json:
    shares = {mark: lengths.at_most(mark) for mark in MARKS}
    return {
        "documents": lengths.total,
        "tokens": lengths.tokens,
        "mean": lengths.tokens / lengths.total,
        "shortest": int(lengths.values[0]),
        "longest": int(lengths.values[-1]),
        "quantiles": {f"{share:g}": lengths.quantile(share) for share in QUANTILES},
        "half_of_the_tokens": lengths.token_quantile(0.5),
        "at_most": {
            str(mark): {"documents": documents, "tokens": tokens}
            for mark, (documents, tokens) in shares.items()
        },
    }


def _bytes_per_token(manifest: Manifest) -> float:
    return sum(entry.text_bytes for entry in manifest.splits.values()) / sum(
        entry.tokens for entry in manifest.splits.values()
    )


def as_text(folder: Path, manifest: Manifest, lengths: dict[str, Lengths]) -> Iterator[str]:
    """Yield all statistics as readable lines."""
    yield (
        f"{folder}: {manifest.dtype} ids of {manifest.tokenizer.vocab_size:,} entries, encoded "
        f"by {manifest.source.encoder}"
    )
    yield (
        f"{'':8}{'documents':>14}{'tokens':>18}{'text':>11}{'bytes/token':>13}{'mean':>9}"
        f"{'median':>9}{'longest':>11}"
    )
    for name, entry in manifest.splits.items():
        values = lengths[name]
        row = (
            f"{name:8}{entry.documents:>14,}{entry.tokens:>18,}{size(entry.text_bytes):>11}"
            f"{entry.text_bytes / entry.tokens:>13.3f}"
        )
        yield (
            f"{row}{values.tokens / values.total:>9,.0f}{values.quantile(0.5):>9,}"
            f"{int(values.values[-1]):>11,}"
        )
    full = joined(lengths.values())
    yield (
        f"{'':8}"
        + "".join(f"{f'{100 * share:g}%':>9}" for share in QUANTILES)
        + "  of all documents are no longer than"
    )
    yield f"{'':8}" + "".join(f"{full.quantile(share):>9,}" for share in QUANTILES) + "  tokens"
    yield f"{'at most':>10} tokens{'of documents':>15}{'of tokens':>12}"
    longest = int(full.values[-1])
    for number, mark in enumerate(MARKS):
        if number == 0 or MARKS[number - 1] < longest:
            documents, tokens = full.at_most(mark)
            yield f"{mark:>10,}       {documents:>15.2%}{tokens:>12.2%}"
    for name, entry in manifest.splits.items():
        if entry.mask:
            yield f"{name}: {counting(entry.mask.counted, entry.tokens)}"
    rows, drops = manifest.source.rows, manifest.source.dropped
    yield f"{rows:,} rows = {full.total:,} documents + {rows - full.total:,} dropped"
    for reason, number in drops.items():
        yield f"{number:>12,} {reason} ({number / rows:.3%})"
