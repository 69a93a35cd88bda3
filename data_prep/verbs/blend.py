"""Verb ``blend``: write several data folders with weights as one data section for pretrain.

    python -m data_prep blend blend.yaml data/fineweb_edu=0.7 data/slimpajama=0.3
    python -m pretrain CONFIG data=blend.yaml

Without weights, each folder is weighted by its training tokens, so that all are read equally often.
The verb reads only manifests.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from data_prep.aliases import Json
from data_prep.encode.splits import SPLITS
from data_prep.options import check_least
from data_prep.prepared.layout import MANIFEST
from data_prep.prepared.manifest import Manifest, read_manifest, size_fault
from data_prep.prepared.staging import existing_folder
from fem_common.errors import UserError
from fem_common.files import make_folder, write_atomically
from fem_common.text import count

SEQ_LENGTH = 4096


@dataclass(frozen=True)
class Source:
    """Data folder of the blend, with its absolute path, its weight and its manifest."""

    folder: Path
    weight: float
    manifest: Manifest

    @property
    def tokens(self) -> int:
        """Number of tokens in the folder's train split."""
        return self.manifest.splits["train"].tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("out", metavar="OUT.yaml", type=Path, help="file to write")
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="DIR[=WEIGHT]",
        help="merged data folder; weights are relative; give one to all folders or to none",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        default=SEQ_LENGTH,
        metavar="N",
        help=f"tokens per sequence (default: {SEQ_LENGTH})",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.yaml")


def main(arguments: argparse.Namespace) -> int:
    """Write the data section and print a description of it. Raises UserError."""
    out: Path = arguments.out
    if out.suffix not in (".yaml", ".yml"):
        raise UserError(f"{out} does not end in .yaml; pretrain reads YAML")
    sources = read_sources(arguments.folders)
    section = data_section(sources, arguments.seq_length)
    head = (
        f"# Written by python -m data_prep blend, for: python -m pretrain CONFIG data={out.name}\n"
    )
    content = (head + yaml.safe_dump(section, sort_keys=False, allow_unicode=True)).encode()
    if out.is_dir():
        raise UserError(f"{out} is a folder; name the file to write")
    if out.exists() and not arguments.overwrite and out.read_bytes() != content:
        raise UserError(f"{out} exists with other content; choose another name or add --overwrite")
    make_folder(out.parent)
    write_atomically(out, content)
    print(
        f"{out}: {len(sources)} source{'s' * (len(sources) > 1)}, {arguments.seq_length} "
        "tokens per sequence"
    )
    print("\n".join(describe(sources, section)))
    return 0


def read_sources(given: Sequence[str]) -> list[Source]:
    """Parse the arguments ``DIR[=WEIGHT]`` and return the folders with their weights.

    Raises UserError for a missing manifest, different tokenizers, a duplicate folder, or an invalid
    weight.
    """
    folders: dict[Path, tuple[float | None, Manifest]] = {}
    for text in given:
        folder, weight = _parse(text)
        existing_folder(folder)
        path = Path(os.path.abspath(folder))
        if any(path.samefile(other) for other in folders):
            raise UserError(f"{folder} is given twice; each folder counts once, with one weight")
        manifest = read_manifest(folder)
        _check_files(path, manifest)
        folders[path] = weight, manifest
    first = next(iter(folders))
    for path, (_, manifest) in folders.items():
        one, other = folders[first][1].tokenizer, manifest.tokenizer
        if one.sha256 != other.sha256:
            theirs = f"(sha256 {other.sha256[:12]}) than {first} ({one.sha256[:12]})"
            raise UserError(f"{path} has another tokenizer {theirs}; a blend needs one tokenizer")
        if one.eod_id != other.eod_id:
            raise UserError(
                f"{path} ends its documents in id {other.eod_id}, {first} in {one.eod_id}; a "
                "blend needs one EOD"
            )
    weights = [weight for weight, _ in folders.values()]
    without = [path for path, (weight, _) in folders.items() if weight is None]
    if without and len(without) < len(weights):
        raise UserError(
            f"{without[0]} has no weight but others do; give a weight to all folders or to none"
        )
    tokens = sum(manifest.splits["train"].tokens for _, manifest in folders.values())
    total = math.fsum(weight for weight in weights if weight is not None)
    return [
        Source(
            path,
            manifest.splits["train"].tokens / tokens if weight is None else weight / total,
            manifest,
        )
        for path, (weight, manifest) in folders.items()
    ]


def _parse(text: str) -> tuple[Path, float | None]:
    name, equals, number = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return Path(text), None
    try:
        weight = float(number)
    except ValueError:
        raise UserError(f"{text}: the weight {number!r} is not a number; write DIR=0.3") from None
    if not (math.isfinite(weight) and weight > 0):
        raise UserError(f"{text}: the weight must be above 0; to exclude a folder, omit it")
    return Path(name), weight


def _check_files(folder: Path, manifest: Manifest) -> None:
    if "train" not in manifest.splits:
        raise UserError(
            f"{folder / MANIFEST} has no train split; make the data again with: python -m "
            "data_prep run"
        )
    if fault := size_fault(folder, manifest):
        raise UserError(f"{fault}; see: python -m data_prep verify {folder}")


def data_section(sources: Sequence[Source], seq_length: int) -> Json:
    """Return the section ``data`` of a run's configuration.

    A split lists, with their weights, the folders whose split is at least one sequence of
    ``seq_length`` tokens long. Raises UserError if a train split is shorter than a sequence.
    """
    check_least("seq-length", seq_length)
    section: Json = {}
    for split in SPLITS:
        having = []
        for source in sources:
            tokens = source.manifest.splits[split].tokens if split in source.manifest.splits else 0
            if tokens > seq_length:
                having.append(source)
            elif split == "train":
                short = (
                    f"{source.folder / split} has {tokens} tokens, a sequence of {seq_length} "
                    f"takes {seq_length + 1}"
                )
                raise UserError(f"{short}; lower --seq-length, or leave the folder out")
        total = math.fsum(source.weight for source in having)
        section[split] = [
            {"prefix": str(source.folder / split), "weight": float(f"{source.weight / total:.12g}")}
            for source in having
        ]
    return section | {"seq_length": seq_length}


def describe(sources: Sequence[Source], section: Json) -> Iterator[str]:
    """Yield the lines of a summary: tokens and weight of each folder.

    Each line also contains how often a run reads the folder if it reads as many tokens as all
    folders contain together.
    """
    total = sum(source.tokens for source in sources)
    for source in sources:
        often = f"read {source.weight * total / source.tokens:.3g} times in {count(total)}"
        yield (
            f"  {source.folder}: {count(source.tokens)} tokens, weight {source.weight:.4g}, {often}"
        )
    for split in SPLITS[1:]:
        prefixes = {entry["prefix"] for entry in section[split]}
        without = [
            str(source.folder) for source in sources if str(source.folder / split) not in prefixes
        ]
        if without:
            yield (
                f"  {split} is without {', '.join(without)}: the split is missing or shorter "
                "than a sequence"
            )
    first = min(sources, key=lambda source: source.tokens / source.weight)
    last = max(sources, key=lambda source: source.tokens / source.weight)
    yield (
        f"  {count(first.tokens / first.weight)} tokens can be drawn before any repeats "
        f"({first.folder} is the first)"
    )
    yield (
        f"  {count(last.tokens / last.weight)} until all {count(total)} are read once "
        f"({last.folder} is the last)"
    )
