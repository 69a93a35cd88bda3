"""Order of a run's training samples, as documents and offsets, read from its index cache.

The arrays are memory-mapped from existing files. The module needs no torch and reads no .bin file.

Megatron's arrays of a source (one .bin/.idx pair) are ``document_index`` [documents x epochs],
``sample_index`` [samples + 1, 2] (position in document_index, offset in that document) and
``shuffle_index`` [samples] (row of sample_index for each sample). The arrays of a blend of sources
are ``dataset_index`` and ``dataset_sample_index`` [samples]. `PackedGPTDataset` describes the
arrays of a source with best-fit packing.
"""

from __future__ import annotations

import json
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from data_prep.prepared.indexed import read_index
from fem_common.errors import ConfigError
from fem_common.files import sha256
from fem_common.stores import is_url
from pretrain.config import RunConfig
from pretrain.data.facts import Contents, SourceContents, read_manifest, sample_digest
from pretrain.data.index_cache import COMPLETE, IndexCache, index_cache
from pretrain.data.store_cache import local_prefix, store_cache
from pretrain.training_stages import Part

_SPLIT = "train"


class Piece(NamedTuple):
    """Part of a document in a sample: its tokens [start, stop).

    source: number of the .bin/.idx pair that contains the document.
    stop: None if the document's length is no longer available.
    """

    sample: int
    source: int
    document: int
    start: int
    stop: int | None


@dataclass(frozen=True)
class SiblingFacts:
    """Facts from the files next to a source's .bin file.

    lengths: tokens of each document, int32 [n]; None if unavailable.
    ids: path of the file with the document ids; None if unavailable.
    mask: path of the loss mask; None if unavailable.
    fault: reason why all are unavailable.
    """

    lengths: npt.NDArray[np.int32] | None = None
    ids: Path | None = None
    mask: Path | None = None
    fault: str | None = None


class Source:
    """Order of the samples of one source, a .bin/.idx pair.

    prefix: path (without ending) from which the run read the pair.
    base: common prefix of the source's files in the index cache.
    """

    def __init__(self, base: Path, source: SourceContents, cache: Path) -> None:
        self.prefix, self.masked = source.prefix, bool(source.mask)
        self.sibling_facts = _sibling_facts(source, local_prefix(source.prefix, cache))
        self.documents = _mapped(base, "document")
        self.samples = _mapped(base, "sample")
        self.shuffle = _mapped(base, "shuffle")

    def pieces(self, position: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield (document, start, stop) for the sample at ``position`` in this source's order.

        ``stop`` is None if the document's length is unavailable. The label of the sample's last
        token is not included.
        """
        row = int(self.shuffle[position])
        first, start = self.samples[row].tolist()
        last, end = self.samples[row + 1].tolist()
        for place in range(first, last + 1):
            document = int(self.documents[place])
            stop = end if place == last else None
            if stop is None and self.sibling_facts.lengths is not None:
                stop = int(self.sibling_facts.lengths[document])
            if stop is None or stop > start:
                yield document, start, stop
            start = 0

    def counted(self, document: int, start: int, stop: int | None) -> int | None:
        """Return the number of a document's tokens [start, stop) that count in the loss.

        None if it is unknown.
        """
        mask, lengths = self.sibling_facts.mask, self.sibling_facts.lengths
        if stop is None or not self.masked:
            return stop if stop is None else stop - start
        if mask is None or lengths is None:
            return None
        first = int(lengths[:document].sum(dtype=np.int64)) + start
        return int(np.count_nonzero(np.memmap(mask, np.uint8, "r", first, (stop - start,))))

    def positions(self, documents: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the positions of samples that may contain tokens of ``documents``, ascending."""
        places = np.flatnonzero(np.isin(self.documents, documents)).tolist()
        rows = sorted({row for place in places for row in self._rows(place)})
        return np.flatnonzero(np.isin(self.shuffle, rows))

    def _rows(self, place: int) -> range:
        """Return the rows of sample_index whose samples may contain the document at ``place``.

        place: position in document_index. The first row may belong to a sample that ends exactly
        where the document begins.
        """
        first = bisect_left(self.samples, place, key=itemgetter(0))
        after = bisect_right(self.samples, place, key=itemgetter(0))
        return range(max(first - 1, 0), min(after, len(self.samples) - 1))


class PackedSource(Source):
    """Order of the samples of a source, packed best-fit into sequences of ``length`` tokens."""

    def __init__(self, base: Path, source: SourceContents, cache: Path, length: int) -> None:
        super().__init__(base, source, cache)
        self.length = length
        self.before = self.documents[:, 1]
        self.documents = self.documents[:, 0]

    def pieces(self, position: int) -> Iterator[tuple[int, int, int | None]]:
        row, remaining = int(self.shuffle[position]), self.length
        here = slice(*self.samples[row : row + 2].tolist())
        for document, before in zip(
            self.documents[here].tolist(), self.before[here].tolist(), strict=True
        ):
            start, stop = before * self.length, None
            if self.sibling_facts.lengths is not None:
                stop = min(int(self.sibling_facts.lengths[document]), start + remaining)
                remaining -= stop - start
            if stop is None or stop > start:
                yield document, start, stop

    def _rows(self, place: int) -> range:
        row = bisect_right(self.samples, place) - 1
        return range(row, row + 1)


@dataclass(frozen=True)
class Order:
    """Order of all training samples of a run or stage.

    blend: (source number of each sample, position of the sample in that source); None with one
    source.
    """

    sources: list[Source]
    blend: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None

    def __len__(self) -> int:
        return len(self.blend[0]) if self.blend else len(self.sources[0].shuffle)

    def pieces(self, sample: int) -> list[Piece]:
        """Return the parts of documents in a sample. The order repeats after its last sample."""
        number, position = 0, sample % len(self)
        if self.blend:
            number, position = (int(array[position]) for array in self.blend)
        return [Piece(sample, number, *piece) for piece in self.sources[number].pieces(position)]

    def find(self, wanted: dict[int, list[int]]) -> list[Piece]:
        """Return the parts of the wanted documents, ordered by sample.

        wanted: source number -> document numbers.
        """
        samples = set[int]()
        for number, documents in wanted.items():
            found = self.sources[number].positions(documents)
            if self.blend:
                found = np.flatnonzero((self.blend[0] == number) & np.isin(self.blend[1], found))
            samples.update(found.tolist())
        return [
            piece
            for sample in sorted(samples)
            for piece in self.pieces(sample)
            if piece.document in wanted.get(piece.source, ())
        ]


def open_order(
    run_dir: Path, parts: Sequence[Part], samples: int, contents_key: str | None
) -> Order:
    """Open the order of samples that the last stage of ``parts`` reads.

    parts: stages up to and including that stage.
    samples: number of samples of the order.
    contents_key: identifier of the data, as recorded in the run's checkpoints; None accepts any.

    Raises:
        ConfigError: the index cache is missing or damaged, or several caches match.
    """
    config = parts[-1].config
    needs = [part.needs() for part in parts] if parts[-1].name else []
    prefixes = [source.prefix for source in config.data.train]
    if needs:
        prefixes = list(dict.fromkeys(prefix for need in needs for prefix in need))
    root = Path(config.data.index_cache or run_dir / "index_cache")
    megatron = _megatron(run_dir)
    fitting = []
    for complete in sorted(root.glob(f"*/{COMPLETE}")):
        contents = _contents(complete)
        if contents and contents_key in (None, contents.key) and _is_of(prefixes, contents):
            cache = index_cache(config, contents, samples, run_dir / "index_cache", megatron, needs)
            if cache.folder.name == complete.parent.name:
                fitting.append(cache)
    if not fitting:
        elsewhere = "the default of data.index_cache"
        if config.data.index_cache:
            elsewhere = "data.index_cache, relative to the working directory"
        raise ConfigError(
            f"{run_dir}: {root} ({elsewhere}) has no index cache of this run: "
            "the run has not begun to train, or the cache was deleted"
        )
    if len(fitting) > 1:
        folders = ", ".join(cache.folder.name for cache in fitting)
        raise ConfigError(
            f"{root}: {folders} belong to this run with different contents of its data; "
            "without a checkpoint the right one is unknown"
        )
    fault = fitting[0].fault()
    if fault:
        raise ConfigError(f"index cache {fitting[0].folder}: {fault}")
    # The run directory may have been moved since the configuration was written.
    return _read(fitting[0], replace(config, run_dir=str(run_dir)), prefixes)


def _present(source: SourceContents, prefixes: Sequence[str]) -> SourceContents:
    """Return the source at the relative path of the run's configuration, if its .idx exists there.

    Otherwise return it at the absolute path that the index cache records, with a note on stderr.
    """
    for prefix in prefixes:
        if is_url(prefix) or os.path.isabs(prefix) or not source.prefix.endswith(_name(prefix)):
            continue
        if Path(f"{prefix}.idx").is_file():
            return replace(source, prefix=os.path.abspath(prefix))
        print(
            f"tools.tokens: note: {prefix} is not in the current folder, {os.getcwd()}; reading "
            f"{source.prefix}, as the run did",
            file=sys.stderr,
        )
    return source


def _read(cache: IndexCache, config: RunConfig, prefixes: Sequence[str]) -> Order:
    by_prefix = {
        source.prefix: source for source in cache.contents.sources if source.split == _SPLIT
    }
    bases = _described(cache.folder, "GPTDataset")
    blend = _described(cache.folder, "BlendedDataset")
    stores = store_cache(config)

    def source(base: Path, prefix: str) -> Source:
        contents = _present(by_prefix[prefix], prefixes)
        if config.data.packing == "best_fit":
            return PackedSource(base, contents, stores, config.data.seq_length)
        return Source(base, contents, stores)

    if not blend:
        ((only_prefix, base),) = bases.items()
        return Order([source(base, json.loads(only_prefix)["dataset_path"])], None)
    ((only_prefix, base),) = blend.items()
    datasets = json.loads(only_prefix)["datasets"]
    sources = [
        source(bases[json.dumps(dataset, indent=4)], dataset["dataset_path"])
        for dataset in datasets
    ]
    return Order(sources, (_mapped(base, "dataset"), _mapped(base, "dataset_sample")))


def _described(folder: Path, kind: str) -> dict[str, Path]:
    """Return description -> common prefix of the files, for the training datasets in ``folder``.

    kind: name of the dataset class.
    """
    ending = "-description.txt"
    return {
        path.read_text(): path.with_name(path.name.removesuffix(ending))
        for path in folder.glob(f"*{kind}-{_SPLIT}{ending}")
    }


def _mapped(base: Path, name: str) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.load(f"{base}-{name}_index.npy", mmap_mode="r")
    return array


def _contents(complete: Path) -> Contents | None:
    try:
        sources = json.loads(complete.read_bytes())["sources"]
        return Contents(tuple(SourceContents(**source) for source in sources))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_of(prefixes: Sequence[str], contents: Contents) -> bool:
    """Return True if the recorded training sources have the names in ``prefixes``.

    A relative name is compared with the end of the recorded path, so that it matches for every
    working directory of the run. The order of the sources is not compared, since it is part of the
    cache folder's name.
    """
    recorded = [source.prefix for source in contents.sources if source.split == _SPLIT]
    named = [_name(prefix) for prefix in prefixes]
    if len(recorded) != len(named):
        return False
    return all(any(prefix.endswith(name) for prefix in recorded) for name in named)


def _name(prefix: str) -> str:
    """Return the end of the absolute path of a prefix, for every working directory."""
    return prefix if is_url(prefix) else f"/{os.path.normpath(prefix).lstrip('./')}"


def _megatron(run_dir: Path) -> str:
    try:
        environment = json.loads((run_dir / "environment.json").read_bytes())
        return str(environment["packages"]["megatron-core"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{run_dir / 'environment.json'} does not contain the version of megatron-core that "
            "drew the order of samples"
        ) from None


def _sibling_facts(source: SourceContents, prefix: str) -> SiblingFacts:
    """Return the facts from the files next to a source's .bin file.

    The .idx file must have the recorded checksum. If the manifest has the file's size, the
    manifest's checksum is used; otherwise the entire file is hashed.
    """
    index, ids = Path(f"{prefix}.idx"), Path(f"{prefix}.ids")
    if not index.is_file():
        return SiblingFacts(fault=f"{index} no longer exists")
    manifest = read_manifest(index.with_name("manifest.json"))
    entry = manifest.splits.get(ids.stem, {}) if manifest else {}
    same_size = entry.get("idx_bytes") == index.stat().st_size
    if (entry["idx_sha256"] if same_size else sha256(index)) != source.idx_sha256:
        return SiblingFacts(fault=f"{index} is not the file that the run read")
    recorded = (
        same_size and entry["ids"] and ids.is_file() and ids.stat().st_size == entry["ids"]["bytes"]
    )
    mask = Path(f"{prefix}.mask")
    same_mask = mask.is_file() and not is_url(source.prefix)
    if same_mask:
        held = (entry.get("mask") or {}).get("sha256") or sample_digest(mask)
        same_mask = held == source.mask
    return SiblingFacts(
        read_index(index).lengths, ids if recorded else None, mask if same_mask else None
    )
