"""Verb ``merge``: merge the units' shards into one pair per split, then write manifest.json.

The shards are merged in order. Every shard is compared with the hash in its entry during the copy.
After a kill, the same command repeats the merge from the start. Until the merge is complete, all
files with final names are complete and the shards are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import numpy as np

from data_prep.aliases import AnyArray
from data_prep.encode.splits import SPLITS
from data_prep.options import check_least
from data_prep.prepared.document_ids import IdsEntry, IdsWriter
from data_prep.prepared.entries import (
    accept_bad_rows,
    add_max_bad_argument,
    manifest_of,
    read_entries,
    shortened,
    units_bytes,
)
from data_prep.prepared.hashed import HashedWriter
from data_prep.prepared.indexed import (
    FormatError,
    dtype_name,
    index_bytes_of,
    read_index,
    sample_digest,
    with_ending,
    write_index,
)
from data_prep.prepared.layout import (
    KINDS,
    MANIFEST,
    SHARDS,
    UNITS,
    Plan,
    Unit,
    do_again,
    entry_path,
    read_plan,
    shard_prefix,
)
from data_prep.prepared.loss_mask import MaskEntry, MaskWriter, counting
from data_prep.prepared.manifest import (
    Manifest,
    MergedEntry,
    SplitEntry,
    UnitEntry,
    read_manifest,
    size_fault,
)
from data_prep.prepared.staging import Staging, existing_folder
from data_prep.report.progress import Reading
from data_prep.sources.rows import listed
from fem_common.errors import StorageError, UserError
from fem_common.fem import command_line, next_steps
from fem_common.files import json_bytes, remove, sha256, write_synced
from fem_common.text import count, counted, ranges, size

COPY_BYTES = 1 << 22
# Names of data_prep's files in OUT/shards.
OURS = re.compile(
    rf"\d{{5,}}(\.json|-({'|'.join(SPLITS)})\.({'|'.join(KINDS)}))"
    rf"|\.\d{{5,}}(\.json)?~[^~]+~\d+~\d+"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder whose units are all done")
    parser.add_argument(
        "--tasks", type=int, metavar="M", help="report which of M tasks have missing units"
    )
    add_max_bad_argument(parser)


def main(arguments: argparse.Namespace) -> int:
    """Merge a folder and return 0, or 1 if it has too many bad rows. Raises UserError."""
    folder = existing_folder(arguments.folder)
    check_least("tasks", arguments.tasks)
    return merge_folder(folder, max_bad=arguments.max_bad, tasks=arguments.tasks)


def merge_folder(out: Path, *, max_bad: str, tasks: int | None = None) -> int:
    """Merge the shards of a folder and return 0, or 1 if it has more bad rows than ``max_bad``.

    The folder is locked. If it is already merged, only remaining shards are removed. Raises
    UserError if units are missing, a shard is damaged, or a split is empty, and StorageError if the
    disk is too small. If the number of ``tasks`` is given, the error for missing units names their
    tasks.
    """
    plan = read_plan(out)
    with Staging(out) as staging:
        if is_merged(out, plan):
            remove_shards(out)
            print(
                f"{out}: unchanged; all units are merged (check it with: python -m data_prep "
                f"verify {out})"
            )
            return 0
        entries = read_entries(out, plan, tasks)
        if not accept_bad_rows(out, plan, entries, max_bad):
            return 1
        names = _splits(plan, entries)
        _check_space(out, entries)
        with Reading(f"merging {counted(len(entries), 'unit')}", _bytes(entries, "bin")) as reading:
            splits = {
                name: _merge_split(name, staging.path / name, out, plan, entries, reading)
                for name in names
            }
        manifest = manifest_of(plan, entries, splits)
        write_synced(staging.path / UNITS, units_bytes(entries))
        write_synced(staging.path / MANIFEST, json_bytes(manifest.as_json()))
        files = {f"{name}.{kind}" for name in SPLITS for kind in KINDS}
        merged = [f"{name}.{kind}" for name, entry in splits.items() for kind in entry.sizes]
        staging.publish([*merged, UNITS], seal=MANIFEST, stale=sorted(files.difference(merged)))
        remove_shards(out)
    _report(out, manifest)
    _report_missing_ids(out, entries)
    return 0


def is_merged(out: Path, plan: Plan) -> bool:
    """Return True if OUT contains the merged data of this plan.

    Raises UserError if a file of this data is missing or has another size.
    """
    if not (out / MANIFEST).is_file():
        return False
    manifest = read_manifest(out)
    if manifest.source.fingerprint != plan.fingerprint:
        return False
    if fault := size_fault(out, manifest):
        raise UserError(
            f"{fault}; remove {out / MANIFEST} and make it again with: python -m data_prep "
            f"run --out {out}"
        )
    return True


def _merge_split(
    split: str, target: Path, out: Path, plan: Plan, entries: Sequence[UnitEntry], reading: Reading
) -> MergedEntry:
    """Write the merged pair ``target``.bin/.idx of a split and return its record.

    The pair is flushed to disk. The error for a damaged shard is a UserError that names the shard.
    """
    dtype = dtype_name(plan.tokenizer.vocab_size)
    shards = [
        (unit, entry.splits[split])
        for unit, entry in zip(plan.units, entries, strict=True)
        if split in entry.splits
    ]
    binary, index = with_ending(target, "bin"), with_ending(target, "idx")
    with closing(HashedWriter(binary)) as writer:
        for unit, part in shards:
            prefix = shard_prefix(out, unit, split)
            try:
                _check_index(with_ending(prefix, "idx"), part, dtype)
                for block in _blocks(with_ending(prefix, "bin"), part.bin_bytes, part.bin_sha256):
                    writer.write(block)
                    reading.advance(len(block))
            except (FormatError, FileNotFoundError) as error:
                raise _again(out, unit, error) from None
        bin_sha256 = writer.complete()

    def lengths() -> Iterator[AnyArray]:
        for unit, _ in shards:
            yield read_index(with_ending(shard_prefix(out, unit, split), "idx")).lengths

    documents = sum(part.documents for _, part in shards)
    tokens = sum(part.tokens for _, part in shards)
    text_bytes = sum(part.text_bytes for _, part in shards)
    idx_bytes, idx_sha256 = write_index(index, documents, dtype, lengths)
    hashes, sizes = (bin_sha256, idx_sha256), (writer.bytes, idx_bytes)
    ids = mask = None
    if parts := _parts((unit, part.ids) for unit, part in shards):
        with closing(IdsWriter(with_ending(target, "ids"))) as lines:
            _copy_other(lines, "ids", split, out, parts)
            ids = lines.finish()
    if parts := _parts((unit, part.mask) for unit, part in shards):
        with closing(MaskWriter(with_ending(target, "mask"))) as bytes_of_mask:
            _copy_other(bytes_of_mask, "mask", split, out, parts)
            mask = bytes_of_mask.finish()
    return MergedEntry(
        documents, tokens, text_bytes, *hashes, *sizes, sample_digest(binary), ids=ids, mask=mask
    )


Parts = list[tuple[Unit, IdsEntry | MaskEntry]]


def _parts(shards: Iterable[tuple[Unit, IdsEntry | MaskEntry | None]]) -> Parts:
    """Return the records of the files of units, or an empty list if a unit has no such file."""
    records = list(shards)
    parts = [(unit, entry) for unit, entry in records if entry]
    return parts if len(parts) == len(records) else []


def _copy_other(writer: HashedWriter, kind: str, split: str, out: Path, parts: Parts) -> None:
    """Concatenate the .ids or .mask files of units.

    The error for a damaged file is a UserError that names the file.
    """
    for unit, entry in parts:
        path = with_ending(shard_prefix(out, unit, split), kind)
        try:
            for block in _blocks(path, entry.bytes, entry.sha256):
                writer.write(block)
        except (FormatError, FileNotFoundError) as error:
            raise _again(out, unit, error) from None


def _again(out: Path, unit: Unit, error: FormatError | FileNotFoundError) -> UserError:
    what = f"{error.filename} is missing" if isinstance(error, FileNotFoundError) else str(error)
    return UserError(f"{what}; {do_again(out, entry_path(out, unit))}")


def _check_index(path: Path, part: SplitEntry, dtype: str) -> None:
    if path.stat().st_size != part.idx_bytes or sha256(path) != part.idx_sha256:
        raise FormatError(f"{path} is damaged: not the {part.idx_bytes} bytes of its entry")
    try:
        index = read_index(path)
    except FormatError as error:
        raise FormatError(f"{path} {error}") from None
    documents, tokens = len(index.lengths), int(index.lengths.sum(dtype=np.int64))
    described = tokens * np.dtype(index.dtype).itemsize
    if (index.dtype, documents, tokens, described) != (
        dtype,
        part.documents,
        part.tokens,
        part.bin_bytes,
    ):
        raise FormatError(
            f"{path} contains {documents} documents and {tokens} {index.dtype} tokens, not what "
            "its entry says"
        )


def _blocks(path: Path, total: int, expected: str) -> Iterator[memoryview]:
    """Yield the content of a shard's file in blocks.

    After the last block, raise FormatError if the size differs from ``total`` or the SHA-256 from
    ``expected``.
    """
    digest = hashlib.sha256()
    copied = 0
    buffer = memoryview(bytearray(COPY_BYTES))
    with path.open("rb", buffering=0) as stream:
        while number := stream.readinto(buffer):
            digest.update(buffer[:number])
            copied += number
            yield buffer[:number]
    if copied != total or digest.hexdigest() != expected:
        raise FormatError(f"{path} is damaged: not the {total} bytes of its entry")


def _splits(plan: Plan, entries: Sequence[UnitEntry]) -> tuple[str, ...]:
    names = plan.settings.split.names
    for name in names:
        if not any(name in entry.splits for entry in entries):
            share = (
                "" if name == "train" else f"plan again with a higher --{name}-percent, with 0, or "
            )
            raise UserError(f"the split {name!r} would be empty; {share}give more documents")
    return names


def _bytes(entries: Sequence[UnitEntry], *kinds: str) -> int:
    return sum(
        part.sizes.get(kind, 0)
        for entry in entries
        for part in entry.splits.values()
        for kind in kinds
    )


def _check_space(out: Path, entries: Sequence[UnitEntry]) -> None:
    wanted = _bytes(entries, "bin", "ids", "mask") + index_bytes_of(
        sum(entry.documents for entry in entries)
    )
    free = shutil.disk_usage(out).free
    if wanted > free:
        sizes = f"merging needs {size(wanted)} in addition to the shards, and {size(free)} are free"
        raise StorageError(
            f"{out}: {sizes}; free disk space and merge again with: python -m data_prep merge {out}"
        )


def remove_shards(out: Path) -> None:
    """Remove all files of units in OUT/shards, entries first.

    The folder is also removed if it is then empty.
    """
    with suppress(FileNotFoundError):
        ours = [path for path in (out / SHARDS).iterdir() if OURS.fullmatch(path.name)]
        for path in sorted(ours, key=lambda path: (path.suffix != ".json", path.name)):
            remove(path)
    with suppress(OSError):
        (out / SHARDS).rmdir()


def _report(out: Path, manifest: Manifest) -> None:
    """Print the sizes of the merged splits, and how many rows were written and dropped."""
    for name, entry in manifest.splits.items():
        tokens = f"{count(entry.tokens)} tokens, {size(entry.text_bytes)} of text"
        print(
            f"{out / name}: {entry.documents:,} documents, {tokens} "
            f"({entry.text_bytes / entry.tokens:.2f} bytes per token)"
        )
        if entry.mask:
            print(f"  {counting(entry.mask.counted, entry.tokens)}")
    written = sum(entry.documents for entry in manifest.splits.values())
    drops, rows = listed(manifest.source.dropped) or "none", manifest.source.rows
    print(
        f"{rows:,} rows = {written:,} written + {rows - written:,} dropped ({drops}); "
        f"{manifest.source.encoder}"
    )
    data = []
    for name in SPLITS:
        made = name in manifest.splits
        data.append(f"data.{name}.0.prefix={out / name}" if made else f"data.{name}=[]")
    train = command_line(
        "pretrain", "configs/run/demo.yaml", *data, f"run_dir=runs/on_{out.resolve().name}"
    )
    print(next_steps(command_line("data", "verify", out), train))


def _report_missing_ids(out: Path, entries: Sequence[UnitEntry]) -> None:
    """Print which splits have no file of ids, and the units that cause this.

    These units were encoded before ids were recorded, while other units have ids. A split's ids are
    never written in part.
    """
    without = [
        entry.unit for entry in entries if any(part.ids is None for part in entry.splits.values())
    ]
    if without and any(part.ids for entry in entries for part in entry.splits.values()):
        splits = sorted(
            {name for entry in entries for name, part in entry.splits.items() if part.ids is None},
            key=SPLITS.index,
        )
        whose = f"units {shortened(ranges(without))} were encoded before ids were recorded"
        print(
            f"{out}: no document ids for {', '.join(splits)}: {whose}; to get them, run "
            "again with --overwrite"
        )
