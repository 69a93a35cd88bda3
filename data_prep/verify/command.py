"""Verb ``verify``: check a data folder against its manifest, plan and entries.

A merged folder passes if all of these are correct: the size and hash of every file, the manifest
against units and plan, each .idx against its .bin, the tokenizer, ids within the vocabulary, and
EOD at the end of every document and only at these positions. In a folder that is not merged, each
shard is checked against its unit's entry. In both cases a sample of the documents is read from the
inputs, encoded again by Hugging Face tokenizers and compared. The command prints a line for each
fault and exits with 1, or with 0 if no fault is found.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.aliases import Advance
from data_prep.encode.encoders import make
from data_prep.encode.splits import SPLITS
from data_prep.encode.tokenizer import load_folder
from data_prep.options import check_least
from data_prep.prepared.document_ids import IdsEntry
from data_prep.prepared.entries import (
    manifest_of,
    missing_units,
    read_units,
    shortened,
    units_done,
)
from data_prep.prepared.indexed import dtype_name, index_bytes_of
from data_prep.prepared.layout import (
    KINDS,
    MANIFEST,
    PLAN,
    SHARDS,
    TOKENIZER,
    Plan,
    do_again,
    entry_path,
    read_plan,
    shard_prefix,
)
from data_prep.prepared.manifest import (
    Manifest,
    MergedEntry,
    TokenizerEntry,
    UnitEntry,
    read_manifest,
)
from data_prep.prepared.staging import existing_folder
from data_prep.report.progress import Reading
from data_prep.verify.cache import cache_bytes, check_caches
from data_prep.verify.pairs import Ids, pair_faults
from data_prep.verify.sample import Checked, check_sample
from fem_common.errors import UserError
from fem_common.nested import differences
from fem_common.text import count, ranges

SAMPLE = 100
PUT_BACK = "put it back, or plan and run again with --overwrite"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder that run wrote")
    parser.add_argument(
        "--sample",
        type=int,
        default=SAMPLE,
        metavar="N",
        help=f"documents to read and encode again; 0: none (default: {SAMPLE})",
    )
    parser.add_argument(
        "--index-cache",
        type=Path,
        metavar="FOLDER",
        help="check the index caches in FOLDER against this data too",
    )


@dataclass
class Report:
    """Result of a verification.

    faults: error texts.
    notes: texts about checks that were not possible.
    agree: names of the checks that succeed if no fault is found, for the summary.
    """

    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    agree: list[str] = field(default_factory=list)

    def add(self, faults: Iterator[str] | list[str], fix: str = "") -> bool:
        """Add faults to the report, each followed by ``fix``. Return True if no fault was added."""
        found = [f"{fault}; {fix}" if fix else fault for fault in faults]
        self.faults += found
        return not found


def main(arguments: argparse.Namespace) -> int:
    """Check a data folder, and print a summary or a line for each fault.

    Return 0 if no fault is found, else 1. Raises UserError if the folder contains no data.
    """
    folder = existing_folder(arguments.folder)
    check_least("sample", arguments.sample, 0)
    if (folder / MANIFEST).is_file() or not (folder / PLAN).is_file():
        manifest = read_manifest(folder)
        report = verify_merged(folder, manifest, arguments.sample, arguments.index_cache)
        done = ", ".join(
            f"{name} {count(entry.tokens)} tokens" for name, entry in manifest.splits.items()
        )
    elif arguments.index_cache:
        raise UserError(
            f"{folder} is not merged, so no index cache can belong to it; merge it with: "
            f"python -m data_prep merge {folder}"
        )
    else:
        report = verify_units(folder, arguments.sample)
        done = f"not merged yet; continue with: python -m data_prep merge {folder}"
    for note in report.notes:
        print(f"not checked: {note}")
    for fault in report.faults:
        print(f"fault: {fault}")
    if report.faults:
        print(f"{folder}: {len(report.faults)} fault{'s' if len(report.faults) > 1 else ''}")
        return 1
    print(f"{folder}: complete; {done}; {', '.join(report.agree)} agree")
    return 0


def verify_merged(folder: Path, manifest: Manifest, sample: int, caches: Path | None) -> Report:
    """Check a merged folder, which has a manifest, and return the report.

    ``sample`` is the number of documents to encode again. ``caches`` is a folder of index caches to
    check, or None. Raises UserError if ``caches`` is not a folder.
    """
    report = Report(agree=["hashes", "indices", "EOD"])
    fix = (
        f"remove {folder / MANIFEST} and make it again with: python -m data_prep run --out {folder}"
    )
    report.add(tokenizer_faults(folder / manifest.tokenizer.path, manifest.tokenizer), PUT_BACK)
    plan, entries = None, list[UnitEntry]()
    try:
        plan = _sound_plan(folder)
        report.add(template_faults(folder, plan), PUT_BACK)
    except UserError as error:
        report.add([str(error)])
    try:
        entries = read_units(folder, manifest)
    except UserError as error:
        report.add([str(error)], fix)
    if plan and entries:
        report.add(manifest_faults(folder, manifest, plan, entries), fix)
    total = sum(sum(entry.sizes.values()) for entry in manifest.splits.values())
    with Reading("verifying", total + (cache_bytes(caches) if caches else 0)) as reading:
        ids = Ids(manifest.dtype, manifest.tokenizer.eod_id, manifest.tokenizer.vocab_size)
        for name, part in manifest.splits.items():
            report.add(pair_faults(folder / name, part, "the manifest", ids, reading.advance), fix)
        known = {
            f"{name}.{kind}" for name, entry in manifest.splits.items() for kind in entry.sizes
        }
        possible = [f"{split}.{kind}" for split in SPLITS for kind in KINDS]
        strays = [folder / name for name in possible if name not in known]
        report.add(
            [
                f"{path} is not in the manifest; remove it, or {fix}"
                for path in strays
                if path.exists()
            ]
        )
        if caches:
            found = check_caches(caches, folder, manifest, reading.advance)
            report.add(found.faults)
            report.agree.append(
                f"{found.ours} index caches ({found.others} of other data, "
                f"{found.unfinished} unfinished)"
            )
    if (folder / SHARDS).exists():
        report.notes.append(
            f"{folder / SHARDS}: all of it is merged, and python -m data_prep merge {folder} "
            "removes it"
        )
    if plan:
        _sample(report, Checked(folder, plan, entries, merged=True), sample, fix)
    return report


def verify_units(folder: Path, sample: int) -> Report:
    """Check a folder whose shards are not merged, and return the report.

    ``sample`` is the number of documents to encode again.
    """
    report = Report(agree=["hashes", "indices", "EOD"])
    try:
        plan = _sound_plan(folder)
    except UserError as error:
        report.add([str(error)])
        return report
    recorded = TokenizerEntry(TOKENIZER, **asdict(plan.tokenizer))
    report.add(tokenizer_faults(folder / TOKENIZER, recorded), PUT_BACK)
    report.add(template_faults(folder, plan), PUT_BACK)
    entries, missing, faults = units_done(folder, plan)
    report.add([*faults, *[missing_units(folder, plan, missing)] * bool(missing)])
    parts = [part for entry in entries for part in entry.splits.values()]
    with Reading(
        f"verifying {folder / SHARDS}", sum(sum(part.sizes.values()) for part in parts)
    ) as reading:
        report.add(shard_faults(folder, plan, entries, reading.advance))
    fix = (
        f"remove its unit's entry in {folder / SHARDS} and do it again with: python -m data_prep "
        f"run --out {folder}"
    )
    _sample(report, Checked(folder, plan, entries, merged=False), sample, fix)
    return report


def _sound_plan(folder: Path) -> Plan:
    """Return the plan in a folder. Raises UserError if it is missing or damaged."""
    if not (folder / PLAN).is_file():
        raise UserError(f"{folder / PLAN} is missing; {PUT_BACK}")
    return read_plan(folder)


def tokenizer_faults(folder: Path, recorded: TokenizerEntry) -> Iterator[str]:
    """Yield the differences between the tokenizer in ``folder`` and its record in the manifest."""
    try:
        tokenizer = load_folder(folder)
    except UserError as error:
        yield str(error)
        return
    if tokenizer.sha256 != recorded.sha256:
        yield f"{tokenizer.path / 'tokenizer.json'}: content differs from the manifest's hash"
    for what, found, wanted in (
        ("EOD is", tokenizer.eod_id, recorded.eod_id),
        ("entries are", tokenizer.vocab_size, recorded.vocab_size),
    ):
        if found != wanted:
            yield f"{tokenizer.path}: its {what} {found}, the manifest says {wanted}"


def template_faults(folder: Path, plan: Plan) -> Iterator[str]:
    """Yield the fault of the chat template of conversations, if it is not that of the plan."""
    if plan.settings.messages:
        try:
            make(load_folder(folder / TOKENIZER), "chat", plan.settings.template_sha256)
        except UserError as error:
            yield str(error)


def manifest_faults(
    folder: Path, manifest: Manifest, plan: Plan, entries: list[UnitEntry]
) -> Iterator[str]:
    """Yield the differences between manifest.json and the content that plan and entries imply."""
    if manifest.source.fingerprint != plan.fingerprint:
        yield f"{folder / MANIFEST} is of another plan than {folder / PLAN}"
        return
    for entry in entries:
        if entry.plan != plan.fingerprint:
            yield f"{folder / manifest.units.file}: unit {entry.unit} is of another plan"
            return
    if len(entries) != len(plan.units):
        yield (
            f"{folder / manifest.units.file} has {len(entries)} units, {folder / PLAN} has "
            f"{len(plan.units)}"
        )
        return
    for unit, entry in zip(plan.units, entries, strict=True):
        if unit.rows not in (None, entry.rows):
            yield (
                f"{folder / manifest.units.file}: unit {entry.unit} accounts for {entry.rows} "
                f"rows, the plan for {unit.rows}"
            )
    splits = {
        name: _summed(manifest.splits[name], name, entries)
        for name in SPLITS
        if name in manifest.splits
    }
    said, found = asdict(manifest), asdict(manifest_of(plan, entries, splits))
    _forget_where_files_lie(said)
    _forget_where_files_lie(found)
    for key, expected, recorded in differences(found, said):
        if recorded != expected:  # 1 and 1.0 are equal
            yield f"{folder / MANIFEST}: {key} is {recorded!r}, units and plan say {expected!r}"
    for name in sorted(
        {name for entry in entries for name in entry.splits} - manifest.splits.keys()
    ):
        yield f"{folder / MANIFEST} lacks the split {name!r}, which units wrote"


def _forget_where_files_lie(manifest: dict[str, Any]) -> None:
    """Clear the paths of the inputs and of the mask's file in a manifest, in place.

    Paths are ignored in the comparison with a plan: files may move, and a later plan of the same
    contents contains the new paths.
    """
    for file in manifest["source"]["files"]:
        file["path"] = None
    mask = manifest["source"]["settings"].get("mask")
    manifest["source"]["settings"]["mask"] = mask and mask.rpartition(":")[2]


def _summed(recorded: MergedEntry, name: str, entries: list[UnitEntry]) -> MergedEntry:
    """Return a split's record in the manifest with its counts replaced by sums over the units."""
    parts = [entry.splits[name] for entry in entries if name in entry.splits]
    documents = sum(part.documents for part in parts)
    sizes = [part.ids.bytes for part in parts if part.ids]
    ids = None
    if parts and len(sizes) == len(parts):
        ids = IdsEntry(sum(sizes), recorded.ids.sha256 if recorded.ids else "")
    masks = [part.mask for part in parts if part.mask]
    mask = None
    if masks:
        known = recorded.mask or masks[0]
        counted = sum(part.counted for part in masks)
        mask = replace(known, bytes=sum(part.bytes for part in masks), counted=counted)
    return replace(
        recorded,
        documents=documents,
        tokens=sum(part.tokens for part in parts),
        text_bytes=sum(part.text_bytes for part in parts),
        bin_bytes=sum(part.bin_bytes for part in parts),
        idx_bytes=index_bytes_of(documents),
        ids=ids,
        mask=mask,
    )


def _sample(report: Report, data: Checked, number: int, fix: str) -> None:
    if not number:
        return
    if report.faults or len(data.entries) != len(data.plan.units):
        report.notes.append("a sample against the inputs: fix the faults first")
        return
    found = check_sample(data, number)
    report.add(found.faults, fix)
    for reason, units in found.unchecked.items():
        report.notes.append(
            f"a sample of unit{'s' * (len(units) > 1)} {shortened(ranges(units))} against "
            f"the inputs: {reason}"
        )
    if found.compared:
        report.agree.append(f"{found.compared} documents encoded again")


SHARD = re.compile(rf"(\d+)-({'|'.join(SPLITS)})\.(?:{'|'.join(KINDS)})")
ENTRY = re.compile(r"(\d+)\.json")


def shard_faults(
    out: Path, plan: Plan, entries: list[UnitEntry], advance: Advance
) -> Iterator[str]:
    """Yield the faults of the shards in OUT.

    A fault is a shard that does not match its entry, or a file that belongs to no entry.
    """
    vocab_size, eod_id = plan.tokenizer.vocab_size, plan.tokenizer.eod_id
    ids = Ids(dtype_name(vocab_size), eod_id, vocab_size)
    for entry in entries:
        unit = plan.units[entry.unit]
        for name, part in entry.splits.items():
            for fault in pair_faults(
                shard_prefix(out, unit, name), part, "its entry", ids, advance
            ):
                yield f"{fault}; {do_again(out, entry_path(out, unit))}"
    yield from _strays(out, plan, {entry.unit: entry for entry in entries})


def _strays(out: Path, plan: Plan, entries: dict[int, UnitEntry]) -> Iterator[str]:
    known = {unit.name: unit for unit in plan.units}
    for path in sorted((out / SHARDS).glob("[!.]*")):
        if match := ENTRY.fullmatch(path.name):
            if match[1] not in known:
                yield f"{path} is the entry of a unit that the plan does not have; remove it"
        elif not (match := SHARD.fullmatch(path.name)) or match[1] not in known:
            yield f"{path} belongs to no unit of the plan; remove it"
        elif not entry_path(out, known[match[1]]).is_file():
            yield (
                f"{path} has no entry, so its unit is not done; do it with: python -m data_prep "
                f"run --out {out}"
            )
        elif (entry := entries.get(known[match[1]].number)) and match[2] not in entry.splits:
            again = do_again(out, entry_path(out, known[match[1]]))
            yield f"{path} is not named by its unit's entry; {again}"
