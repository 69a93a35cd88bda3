"""Verb ``plan``: write the inputs, the settings and the units of work that run and merge follow.

    python -m data_prep plan INPUT... --tokenizer DIR --out OUT

The same inputs, tokenizer and settings give the same plan.json; an existing plan.json is then not
changed. The verb does not encode text.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.aliases import Uint64Array
from data_prep.encode.documents import (
    Documents,
    Selection,
    Settings,
    add_settings_arguments,
    settings_of,
)
from data_prep.encode.splits import SPLITS, Split, fitting, hash_ids
from data_prep.encode.tokenizer import TOKENIZER_FILES, TokenizerFolder, find_tokenizer, load_folder
from data_prep.options import add_input_arguments, values_of
from data_prep.prepared.indexed import dtype_name
from data_prep.prepared.layout import (
    BAD_ROWS,
    KINDS,
    MANIFEST,
    PLAN,
    SHARDS,
    TOKENIZER,
    UNITS,
    Identity,
    Plan,
    Unit,
    fingerprint_of,
    read_plan,
    write_plan,
)
from data_prep.prepared.staging import UNFINISHED, lock
from data_prep.sources import Rows, open_found, read_span, spans
from data_prep.sources.finding import Found, find_files
from data_prep.sources.hub import is_hub
from data_prep.sources.rows import ID
from data_prep.verbs.merge import remove_shards
from fem_common.errors import UserError
from fem_common.files import write_atomically
from fem_common.text import count, counted, first_few, size

UNIT_MB = 256.0
BYTES_PER_TOKEN = 4  # approximate; used for estimates of disk space
# Files that data_prep writes in OUT.
PAIRS = tuple(f"{split}.{kind}" for split in SPLITS for kind in KINDS)
OWN = (PLAN, MANIFEST, *PAIRS, UNITS, BAD_ROWS)

AGAIN = "choose another --out or add --overwrite"


@dataclass(frozen=True)
class Request:
    """Plan that a command line defines.

    ``inputs`` may be empty, and ``tokenizer`` None, for a ``run`` that continues an existing plan.
    The other fields are options of the command line.
    """

    inputs: list[str]
    subset: str | None
    paragraphs: bool
    tokenizer: str | None
    chat_template: Path | None
    out: Path
    unit_mb: float
    overwrite: bool
    settings: Settings


def request_of(arguments: argparse.Namespace) -> Request:
    """Return the plan that the arguments of ``add_plan_arguments`` define. Raises UserError."""
    return Request(**values_of(Request, arguments), settings=settings_of(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    add_plan_arguments(parser, required=True)


def add_plan_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options that define a plan.

    ``required`` is False for ``run``, which can continue with an existing plan.
    """
    add_input_arguments(parser, "+" if required else "*")
    tokenizer = (
        "Hugging Face tokenizer with an eos_token, used as EOD: a folder, or ORG/NAME on the Hub"
    )
    parser.add_argument("--tokenizer", required=required, metavar="DIR|NAME", help=tokenizer)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    add_settings_arguments(parser)
    parser.add_argument(
        "--unit-mb",
        type=float,
        default=UNIT_MB,
        metavar="MB",
        help="approximate text in a unit of work (default: 256)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the data in --out")


def main(arguments: argparse.Namespace) -> int:
    """Write OUT/plan.json and the copy of the tokenizer, and print a summary of the work.

    Return 0. Raises UserError.
    """
    request = request_of(arguments)
    out, overwrite = request.out, request.overwrite
    plan, tokenizer = make_plan(request)
    with lock(out, shared=not overwrite):
        unchanged = settle(out, plan, tokenizer, overwrite=overwrite)
    for line in (*describe(out, plan, unchanged=unchanged), *notes(plan)):
        print(line)
    return 0


def make_plan(request: Request) -> tuple[Plan, TokenizerFolder]:
    """Return the requested plan and its tokenizer. No files are written.

    Raises UserError for invalid options or inputs.
    """
    if not (math.isfinite(request.unit_mb) and request.unit_mb >= 0.001):
        raise UserError(f"--unit-mb is {request.unit_mb:g}; it must be at least 0.001")
    if not request.tokenizer:
        raise UserError(
            "inputs without --tokenizer; name a Hugging Face tokenizer's folder, or ORG/NAME "
            "on the Hub"
        )
    settings = request.settings
    tokenizer = load_folder(find_tokenizer(request.tokenizer), request.chat_template)
    if settings.messages:
        from data_prep.encode.chat import Chat

        settings = replace(settings, template_sha256=Chat(tokenizer).template_sha256)
    files = open_found(_inputs(request), settings.columns, paragraphs=request.paragraphs)
    files = [
        file if "://" in file.path else replace(file, path=os.path.abspath(file.path))
        for file in files
    ]
    unit_bytes = round(request.unit_mb * 1e6)
    cuts = (
        (number, span)
        for number, file in enumerate(files)
        for span in spans(file, settings.columns, unit_bytes)
    )
    units = tuple(Unit(number, file, **vars(span)) for number, (file, span) in enumerate(cuts))
    if all(unit.rows == 0 for unit in units):
        if len(files) == 1:
            raise UserError(f"no rows in {files[0].path}")
        raise UserError(f"no rows in any of the {len(files)} input files")
    plan = Plan("", settings, identity(tokenizer), tuple(files), units, unit_bytes)
    check_splits(plan)
    return replace(plan, fingerprint=fingerprint_of(plan)), tokenizer


def unmasked(plan: Plan, unit: Unit) -> Iterator[Documents]:
    """Yield the documents of a unit without applying the mask.

    The mask is the user's code: it may be slow or fail, and runs only in the workers.
    """
    settings = replace(plan.settings, mask=None, mask_sha256=None, mask_columns=())
    file, selection = plan.files[unit.file], Selection(settings)
    for rows in read_span(file, unit.span, settings.columns):
        if isinstance(rows, Rows):
            yield selection.of(rows, file.path)[0]


def check_splits(plan: Plan) -> None:
    """Raise UserError if a split of the plan would be empty.

    Documents are read, without encoding them, until each split has one. For a large input, usually
    only the beginning is read; the complete input is read only if a split is empty or nearly empty.
    """
    split = plan.settings.split
    wanted = {SPLITS.index(name) for name in split.names}
    hashes: list[Uint64Array] = []
    for documents in (documents for unit in plan.units for documents in unmasked(plan, unit)):
        hashes.append(hash_ids(documents.ids))
        wanted -= set(documents.splits.tolist())
        if not wanted:
            return
    if any(map(len, hashes)):  # if all rows are bad, run reports them
        raise UserError(_empty(split, wanted, np.concatenate(hashes), plan))


def _empty(split: Split, empty: set[int], hashes: Uint64Array, plan: Plan) -> str:
    """Return the error text for empty splits, with percentages that would fill them."""
    names = " and ".join(SPLITS[number] for number in sorted(empty))
    wishes = (split, Split(split.valid_percent, 0.0), Split(0.0, 0.0))
    fits = next(filter(None, (fitting(wish, hashes) for wish in wishes)))
    advice = f"give --valid-percent {fits.valid_percent:g} --test-percent {fits.test_percent:g}"
    if any(file.kind == "txt" for file in plan.files):
        advice += ", or --paragraphs to make each paragraph a document"
    return f"{names} would be empty: {counted(len(hashes), 'document')} in total; {advice}"


def notes(plan: Plan) -> Iterator[str]:
    """Yield one line about each unexpected property of the inputs."""
    unnamed = [file for file in plan.files if file.id_prefix is not None]
    if unnamed and plan.settings.id_column != plan.settings.text_column:
        has = "has" if len(unnamed) == 1 else "have"
        which = f"{first_few([file.path for file in unnamed], 1)} {has}"
        yield (
            f"{which} no column {ID!r}: a document's id, which decides its split, is its file "
            "and its place in the file (see --id-column)"
        )
    large = [
        name
        for file in plan.files
        if file.kind == "txt"
        for name, size in file.parts
        if size > plan.settings.max_bytes
    ]
    if large:
        yield (
            f"{counted(len(large), '.txt file')} above --max-bytes left out (first: {large[0]}); "
            "--paragraphs makes each paragraph a document"
        )


def _inputs(request: Request) -> list[Found]:
    """Return the input files of a request.

    If OUT is inside an input folder or glob, the files that data_prep wrote to OUT are left out.
    Raises UserError for any other input file at a path that data_prep writes in OUT.
    """
    out = request.out
    own = [(out / name).resolve() for name in (*OWN, SHARDS, TOKENIZER, UNFINISHED)]
    found: list[Found] = []
    for name, group in itertools.groupby(
        find_files(request.inputs, request.subset), lambda file: file.given
    ):
        files = list(group)
        if not is_hub(name):
            listed = [file.path for file in files] != [str(Path(name))] and (out / PLAN).is_file()
            files = [file for file in files if not (listed and _is_inside(file.path, own))]
            if not files:
                raise UserError(
                    f"{name} contains only files that data_prep wrote to {out}; name the inputs"
                )
            for file in files:
                if _is_inside(file.path, own):
                    raise UserError(
                        f"the input {file.path} is at a path that data_prep writes in --out "
                        f"{out}; move it, or choose another --out"
                    )
        found += files
    return found


def _is_inside(file: str, places: Iterable[Path]) -> bool:
    """Return True if ``file``, or the target of this link, is at or below one of ``places``."""
    path = Path(file)
    return any(
        location.is_relative_to(place)
        for location in {path.parent.resolve() / path.name, path.resolve()}
        for place in places
    )


def identity(tokenizer: TokenizerFolder) -> Identity:
    """Return the properties of a tokenizer that determine the encoded data."""
    return Identity(tokenizer.vocab_size, tokenizer.eod_id, tokenizer.sha256)


def settle(out: Path, plan: Plan, tokenizer: TokenizerFolder, *, overwrite: bool) -> bool:
    """Write ``plan`` and a copy of the tokenizer to OUT. Return True if OUT already has this plan.

    If OUT already has the plan, its finished units are kept. Only the paths of its input files are
    updated, unless the data is complete.

    overwrite: replace data of any other plan, and also complete data of the same plan; without it,
    UserError is raised if OUT contains data of another plan or without a plan.
    """
    # Checked before the plan is read, because another task may be writing both.
    taken = [] if overwrite else _taken(out, tokenizer)
    old: Plan | None = None
    with suppress(UserError) if overwrite else nullcontext():
        old = read_plan(out) if (out / PLAN).exists() else None
    if (
        old
        and old.fingerprint == plan.fingerprint
        and not (overwrite and (out / MANIFEST).exists())
    ):
        if old != plan and not (out / MANIFEST).exists():
            write_plan(out, plan)
        return True
    if overwrite:
        # The manifest is removed first, because it marks the data as complete.
        for name in (MANIFEST, *PAIRS, UNITS, BAD_ROWS):
            (out / name).unlink(missing_ok=True)
        remove_shards(out)
    elif old:
        raise UserError(f"{out} contains a plan with {', '.join(differences(old, plan))}; {AGAIN}")
    elif taken:
        raise UserError(f"{taken[0]} exists without a {PLAN} that describes it; {AGAIN}")
    _copy_tokenizer(tokenizer, out)
    write_plan(out, plan)
    return False


def _taken(out: Path, tokenizer: TokenizerFolder) -> list[Path]:
    """Return the paths in OUT that a new plan would replace.

    Files in the copy of the tokenizer that equal the files of ``tokenizer`` are not included.
    """
    copy = out / TOKENIZER
    foreign = [
        copy / name
        for name in TOKENIZER_FILES
        if (copy / name).exists() and not same_file(tokenizer.file(name), copy / name)
    ]
    written = [out / name for name in (MANIFEST, *PAIRS, UNITS, SHARDS)]
    return [path for path in (*written, *foreign) if path.exists()]


def same_file(one: Path, other: Path) -> bool:
    """Return True if two files exist with the same content."""
    return (
        one.is_file()
        and other.is_file()
        and (one.samefile(other) or one.read_bytes() == other.read_bytes())
    )


def _copy_tokenizer(tokenizer: TokenizerFolder, out: Path) -> None:
    """Copy the tokenizer to OUT/tokenizer, each file atomically.

    Other files in that folder are kept.
    """
    copy = out / TOKENIZER
    if not tokenizer.template and copy.exists() and copy.samefile(tokenizer.path):
        return
    copy.mkdir(exist_ok=True)
    for name in TOKENIZER_FILES:
        if name in tokenizer.files:
            write_atomically(copy / name, tokenizer.file(name).read_bytes())
        else:
            (copy / name).unlink(missing_ok=True)


def differences(old: Plan, new: Plan) -> Iterator[str]:
    """Yield the differences between two plans as readable texts."""
    old_contents = [(file.kind, *file.content) for file in old.files]
    new_contents = [(file.kind, *file.content) for file in new.files]
    if len(old.files) != len(new.files):
        yield f"other inputs ({len(old.files)} in the plan, {len(new.files)} now)"
    elif sorted(old_contents) == sorted(new_contents) and old_contents != new_contents:
        yield "the same inputs in another order"
    elif {file.kind for file in old.files} ^ {file.kind for file in new.files} == {
        "txt",
        "paragraphs",
    }:
        yield "another --paragraphs"
    elif old_contents != new_contents:
        pairs = zip(old_contents, new_contents, strict=True)
        number = next(i for i, (one, other) in enumerate(pairs) if one != other)
        yield f"other inputs ({old.files[number].path} in the plan, {new.files[number].path} now)"
    if old.tokenizer != new.tokenizer:
        yield "another tokenizer"
    there, now = (plan.settings.deciding() for plan in (old, new))
    differing = [name for name in there | now if there.get(name) != now.get(name)]
    for name in differing:
        if not name.startswith("mask"):
            values = f"{_shown(there.get(name))} in the plan, {_shown(now.get(name))} now"
            yield f"another --{option_of(name)} ({values})"
    if any(name.startswith("mask") for name in differing):
        yield "another --mask"
    if old.unit_bytes != new.unit_bytes:
        yield (
            f"another --unit-mb ({old.unit_bytes / 1e6:g} in the plan, {new.unit_bytes / 1e6:g} "
            "now)"
        )
    if old_contents == new_contents and old.unit_bytes == new.unit_bytes and old.units != new.units:
        yield "other cuts of the same inputs, by another version of data_prep"


def option_of(name: str) -> str:
    """Return the option, without the dashes, that sets a field of the settings or of a request."""
    if name.startswith("mask"):
        return "mask"
    return {"languages": "language", "template_sha256": "chat-template"}.get(name, name).replace(
        "_", "-"
    )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def disk_bytes(plan: Plan, text_bytes: int) -> int:
    """Return the approximate bytes of ids and mask of ``text_bytes`` bytes of text."""
    width = np.dtype(dtype_name(plan.tokenizer.vocab_size)).itemsize + plan.settings.messages
    return text_bytes // BYTES_PER_TOKEN * width


def describe(out: Path, plan: Plan, *, unchanged: bool) -> Iterator[str]:
    """Yield the lines of the plan's summary: files, rows, text, units, shards and disk space."""
    text = sum(file.text_bytes for file in plan.files)
    rows = [file.rows for file in plan.files]
    known = f"{sum(filter(None, rows)):,} rows" + (
        " and rows that are counted when read" if None in rows else ""
    )
    names, longest = plan.settings.split.names, max(unit.text_bytes for unit in plan.units)
    tokens, disk = text / BYTES_PER_TOKEN, disk_bytes(plan, text)
    yield f"{out / PLAN}: {'unchanged' if unchanged else 'written'} ({plan.fingerprint[:12]})"
    files = sum(len(file.parts) or 1 for file in plan.files)
    yield (
        f"  {files:,} files, {size(sum(file.bytes for file in plan.files))}: {known}, about "
        f"{size(text)} of text"
    )
    yield (
        f"  {counted(len(plan.units), 'unit')} of about {size(plan.unit_bytes)} of text, the "
        f"largest {size(longest)}"
    )
    yield (
        f"  {len(plan.units) * len(names):,} shards ({', '.join(names)}), merged into "
        f"{len(names)} pairs of .bin and .idx"
    )
    yield (
        f"  about {count(tokens)} tokens at {BYTES_PER_TOKEN} bytes of text each: {size(disk)} "
        "of disk, twice that while they are merged"
    )
    yield f"run it with: python -m data_prep run --out {out}"
