"""Read and check facts about the data on disk before training starts.

The facts are numbers of tokens, the vocabulary, the end-of-document id and the identity of the
contents. They are read from the headers of Megatron's .idx files and from data_prep's
manifest.json, without torch and Megatron. ``check_data`` reads a few bytes of each file, in every
process and for every plan. ``check_contents`` reads entire .idx files and samples of .bin files, in
one process of a run.

Long, because each of its checks has a separate error message.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError
from fem_common.files import sha256, start_of
from fem_common.stores import is_url
from fem_common.text import nearest
from pretrain.config import SPLITS, RunConfig, Source
from pretrain.data.store_cache import bring, identity, local_prefix, store_cache

_MAGIC = b"MMIDIDX\x00\x00"
# Magic, version, dtype code, sequences, entries of the document index.
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    8: ("uint16", 2),
}
_LARGEST = {"uint8": 2**8, "int8": 2**7, "int16": 2**15, "uint16": 2**16}
_MANIFEST_FORMAT = 2
SAMPLE_BLOCKS = 64
MAKE_DATA = "make the data with: python -m data_prep run (the demo's: make demo)"


@dataclass(frozen=True)
class SourceFacts:
    """Facts about one .bin/.idx pair.

    The optional fields are recorded in the manifest in the pair's folder; they are None without a
    manifest. mask: entry of the loss mask ``PREFIX.mask``, {} without a manifest; None if every
    token counts in the loss. local: local path prefix by which the files are opened.
    """

    split: str
    key: str  # data.<split>.<n>.prefix
    prefix: str
    tokens: int
    documents: int
    dtype: str
    text_bytes: int | None = None
    idx_sha256: str | None = None
    bin_sha256: str | None = None
    bin_sample: str | None = None
    mask: dict[str, Any] | None = None
    local: str = ""  # path prefix of the local files


@dataclass(frozen=True)
class SourceContents:
    """Identity of the contents of a .bin/.idx pair.

    prefix: an absolute path, or a URL. idx_sha256: SHA-256 of the .idx. bin: SHA-256 of the .bin
    from the manifest; without a manifest, the size and the hash of a sample. mask: the same of the
    loss mask; empty if every token counts.
    """

    split: str
    prefix: str
    idx_sha256: str
    bin: str
    mask: str = ""


@dataclass(frozen=True)
class Contents:
    """Identity of the contents of training and validation data, independent of their location."""

    sources: tuple[SourceContents, ...]

    @property
    def key(self) -> str:
        """Hexadecimal identity of all the data, for the index cache and for studies.

        It depends on the contents and on the order of the sources.
        """
        text = "".join(
            f"{':'.join(filter(None, (source.split, source.idx_sha256, source.bin, source.mask)))};"
            for source in self.sources
        )
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def keys(self) -> dict[str, str]:
        """Identities of the data that a checkpoint's manifest records.

        ``data`` is the identity of all sources. ``training_data`` is that of the training sources
        only, which a resume compares.
        """
        training = Contents(tuple(source for source in self.sources if source.split == "train"))
        return {"data": self.key, "training_data": training.key}


@dataclass(frozen=True)
class DataFacts:
    """Facts about all of a run's data.

    ``vocab_size`` and ``eod_id`` belong to the tokenizer. They are None if no file on disk contains
    them.
    """

    vocab_size: int | None
    eod_id: int | None
    tokenizer: Path | None
    sources: tuple[SourceFacts, ...]

    @property
    def tokens(self) -> dict[str, int]:
        """Split -> number of tokens of all its sources."""
        return {
            split: sum(source.tokens for source in self.sources if source.split == split)
            for split in SPLITS
        }

    @property
    def masks_line(self) -> str | None:
        """Line about the tokens that loss masks count, or None if every token counts."""
        parts = []
        for source in self.sources:
            if source.mask is not None:
                counted = source.mask.get("counted")
                known = "?" if counted is None else f"{counted:,}"
                parts.append(f"{source.key} {known} of {source.tokens:,}")
        return f"tokens that count in the loss: {'; '.join(parts)}" if parts else None

    def bytes_per_token(self, split: str = "valid") -> float | None:
        """Return the mean number of UTF-8 bytes of text per token of a split.

        Return None if no manifest records the bytes, or if the split has several sources.
        """
        sources = [source for source in self.sources if source.split == split]
        if len(sources) != 1 or sources[0].text_bytes is None or not sources[0].tokens:
            return None
        return sources[0].text_bytes / sources[0].tokens


@dataclass(frozen=True)
class Manifest:
    """The entries of a manifest.json that this module reads.

    tokenizer: path, vocab_size, eod_id and sha256 of the tokenizer. splits: the recorded values of
    each split.
    """

    path: Path
    tokenizer: dict[str, Any]
    dtype: str
    splits: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Tokenizer:
    """A tokenizer and the configuration key that names it."""

    key: str
    vocab_size: int
    eod_id: int | None
    sha256: str
    folder: Path


def check_data(config: RunConfig) -> DataFacts:
    """Read the headers of every source and compare them with the manifests and the configuration.

    Files of sources in object stores are copied first, see `bring`.

    Raises:
        ConfigError: a file is missing, damaged or differs from its manifest; tokenizers differ, the
            vocabulary does not fit, or a source is shorter than one sequence.
        StorageError: a store does not answer.
    """
    if not config.data.train:
        raise ConfigError(
            "data.train is empty: name at least one source, as in data.train.0.prefix=FOLDER/train"
        )
    bring(config)
    sources, tokenizers = [], []
    for split, key, source in config.data.named_sources():
        local = local_prefix(source.prefix, store_cache(config))
        with _with_source_place(key, source.prefix):
            manifest = read_manifest(Path(local).parent / "manifest.json")
            facts = _source_facts(split, key, source, local, manifest)
        if facts.tokens < config.data.seq_length + 1:
            raise ConfigError(
                f"data.seq_length = {config.data.seq_length} is longer than {key} = "
                f"{source.prefix}, which has {facts.tokens} tokens (a sequence takes "
                f"seq_length + 1); the largest that fits: {max(facts.tokens - 1, 0)}"
            )
        sources.append(facts)
        if manifest is not None:
            tokenizers.append(_manifest_tokenizer(f"{key} = {source.prefix}", manifest))
    if config.data.tokenizer is not None:
        tokenizers.append(_given_tokenizer(Path(config.data.tokenizer)))
    tokenizer = _one_tokenizer(tokenizers)
    _check_vocabulary(config, tokenizer, sources)
    _check_ends(config, tokenizer)
    if tokenizer is None:
        return DataFacts(None, None, None, tuple(sources))
    folder = tokenizer.folder if tokenizer.folder.is_dir() else None
    return DataFacts(tokenizer.vocab_size, tokenizer.eod_id, folder, tuple(sources))


def check_contents(facts: DataFacts) -> Contents:
    """Compare all .idx files and samples of all .bin and .mask files with the manifests.

    Return the identity of the contents. A sample consists of 64 blocks of 64 KiB.

    Raises:
        ConfigError: a file is not the one that its manifest records.
    """
    found = []
    for source in facts.sources:
        binary, index = Path(source.local + ".bin"), Path(source.local + ".idx")
        sample = sample_digest(binary)
        idx_sha256 = sha256(index)
        files = [(index, idx_sha256, source.idx_sha256), (binary, sample, source.bin_sample)]
        mask = ""
        if source.mask is not None:
            path = Path(source.local + ".mask")
            files.append((path, sample_digest(path), source.mask.get("sample")))
            mask = source.mask.get("sha256") or files[-1][1]
        for path, held, recorded in files:
            if recorded is None or held == recorded:
                continue
            if is_url(source.prefix):
                raise ConfigError(
                    f"{source.key} = {source.prefix}: its {path.suffix} is not the file that the "
                    "manifest.json next to it records (the size is right, the contents differ): "
                    "damaged or replaced; upload all again"
                )
            raise ConfigError(
                f"{path} is not the file that {path.with_name('manifest.json')} records (the size "
                "is right, the contents differ): damaged or replaced; check the other files with: "
                f"python -m data_prep verify {path.parent}, then restore it or {MAKE_DATA}"
            )
        if source.split != "test":
            found.append(
                SourceContents(
                    source.split,
                    identity(source.prefix),
                    idx_sha256,
                    source.bin_sha256 or sample,
                    mask,
                )
            )
    return Contents(tuple(found))


def index_bytes(facts: DataFacts) -> int:
    """Return the total bytes of all .idx files, which ``check_contents`` reads."""
    return sum(os.path.getsize(source.local + ".idx") for source in facts.sources)


def fill_from_data(config: RunConfig, facts: DataFacts) -> RunConfig:
    """Return the configuration with ``model.vocab_size`` and ``data.tokenizer`` filled in.

    Values that are given in the configuration remain.
    """
    vocab_size = facts.vocab_size if config.model.vocab_size is None else config.model.vocab_size
    tokenizer = (
        str(facts.tokenizer)
        if config.data.tokenizer is None and facts.tokenizer
        else config.data.tokenizer
    )
    return replace(
        config,
        model=replace(config.model, vocab_size=vocab_size),
        data=replace(config.data, tokenizer=tokenizer),
    )


def any_on_disk(config: RunConfig) -> bool:
    """Return True if any file of any source exists locally."""
    cache = store_cache(config)
    prefixes = [local_prefix(source.prefix, cache) for _, _, source in config.data.named_sources()]
    return any(Path(prefix + ending).exists() for prefix in prefixes for ending in (".bin", ".idx"))


@contextmanager
def _with_source_place(key: str, prefix: str) -> Iterator[None]:
    """Add the source's key and URL to a ConfigError of the block that names only local files."""
    try:
        yield
    except ConfigError as error:
        if not is_url(prefix) or str(error).startswith(key):
            raise
        raise ConfigError(f"{key} = {prefix}: {error}") from None


def _source_facts(
    split: str, key: str, source: Source, local: str, manifest: Manifest | None
) -> SourceFacts:
    files = {ending: Path(f"{local}.{ending}") for ending in ("bin", "idx")}
    if manifest is None:
        _check_merged(key, source)
    for file in files.values():
        if not file.is_file():
            raise ConfigError(
                f"{key} = {source.prefix}: {file} not found; {_missing_hint(source.prefix, split)}"
            )
    recorded = _recorded(key, source, manifest) if manifest else {}
    mask_file = Path(f"{local}.mask")
    mask = recorded.get("mask")
    if manifest is None and mask_file.is_file():
        mask = {}
    for ending, file in files.items():
        size, recorded_size = file.stat().st_size, recorded.get(f"{ending}_bytes")
        if manifest and size != recorded_size:
            raise ConfigError(
                f"{file} has {size} bytes, but {manifest.path} records {recorded_size}: damaged or "
                f"replaced; {MAKE_DATA}"
            )
    dtype, tokens, documents = _read_index(files["idx"], files["bin"])
    if manifest and dtype != manifest.dtype:
        raise ConfigError(
            f"{files['idx']} holds {dtype} tokens, but {manifest.path} records {manifest.dtype}; "
            f"{MAKE_DATA}"
        )
    if manifest and tokens != recorded["tokens"]:
        raise ConfigError(
            f"{files['idx']} describes {tokens} tokens, but {manifest.path} records "
            f"{recorded['tokens']}; {MAKE_DATA}"
        )
    _check_mask(mask_file, tokens, mask, manifest)
    recorded_facts = {
        field: recorded.get(field)
        for field in ("text_bytes", "idx_sha256", "bin_sha256", "bin_sample")
    }
    return SourceFacts(
        split,
        key,
        source.prefix,
        tokens,
        documents,
        dtype,
        **recorded_facts,
        mask=mask,
        local=local,
    )


def _check_mask(
    file: Path, tokens: int, mask: dict[str, Any] | None, manifest: Manifest | None
) -> None:
    """Raise ConfigError if a loss mask is missing, not recorded, or not of one byte per token."""
    if not file.is_file():
        if mask is not None:
            raise ConfigError(
                f"{file} not found, the loss mask that the manifest.json next to it records; "
                f"{MAKE_DATA}"
            )
    elif mask is None and manifest:
        raise ConfigError(
            f"{file} exists, but {manifest.path} records no loss mask: it belongs to other data; "
            f"delete it, or {MAKE_DATA}"
        )
    elif (size := file.stat().st_size) != tokens:
        raise ConfigError(
            f"{file} has {size} bytes, but a loss mask has one for each of the {tokens} tokens: "
            f"damaged or replaced; {MAKE_DATA}"
        )


def _check_merged(key: str, source: Source) -> None:
    """Raise ConfigError if data_prep has not finished writing the source's folder."""
    folder = Path(source.prefix).parent
    begun = [name for name in ("plan.json", "shards/*.json") if any(folder.glob(name))]
    if begun:
        raise ConfigError(
            f"{key} = {source.prefix}: {folder} is not finished: it has {begun[0]} and no "
            f"manifest.json; finish and merge it with: python -m data_prep run --out {folder}"
        )


def _recorded(key: str, source: Source, manifest: Manifest) -> dict[str, Any]:
    """Return the manifest's entry for the .bin/.idx pair of a source.

    Raises ConfigError if the manifest has no entry.
    """
    name = Path(source.prefix).name
    if name not in manifest.splits:
        known = ", ".join(manifest.splits) or "none"
        raise ConfigError(
            f"{key} = {source.prefix}: {manifest.path} records no split '{name}' (its splits: "
            f"{known}); name one of these, or keep the pair in a separate folder"
        )
    return manifest.splits[name]


def sample_ranges(size: int) -> list[tuple[int, int]]:
    """Return [start, end) byte ranges of blocks that are spread evenly over a file.

    size: bytes of the file. A file of up to 4 MiB is covered completely.
    """
    block = 1 << 16
    starts = (
        number * max(block, (size - block) // (SAMPLE_BLOCKS - 1))
        for number in range(SAMPLE_BLOCKS)
    )
    return [(start, min(start + block, size)) for start in starts if start < size]


def sample_digest(file: Path) -> str:
    """Return the size and the hash of a file's sample as text.

    Unlike a time stamp, the result is the same for a copy of the file.
    """
    digest, size = hashlib.sha256(), file.stat().st_size
    with file.open("rb") as stream:
        for start, end in sample_ranges(size):
            stream.seek(start)
            digest.update(stream.read(end - start))
    return f"{size}:{digest.hexdigest()}"


def _missing_hint(prefix: str, split: str) -> str:
    path = Path(prefix)
    if path.suffix in (".bin", ".idx"):
        return f"a prefix is given without its ending: {path.with_suffix('')}"
    folder, name, cutoff = (path, split, 0.0) if path.is_dir() else (path.parent, path.name, 0.5)
    pairs = sorted(
        other.stem for other in folder.glob("*.bin") if other.with_suffix(".idx").exists()
    )
    near = nearest(name, pairs, cutoff)
    if near and folder / near != path:
        return f"did you mean {folder / near}?"
    return MAKE_DATA if folder.is_dir() else f"{start_of(prefix)}{MAKE_DATA}"


def _read_index(index: Path, tokens_file: Path) -> tuple[str, int, int]:
    """Return (dtype, number of tokens, number of documents) of an .idx file.

    The numbers follow from its header and its last entries; its arrays are not read.
    """
    with index.open("rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(_MAGIC):
            raise ConfigError(
                f"{index} is not an index of Megatron's format (MMIDIDX); {MAKE_DATA}"
            )
        _, version, code, sequences, entries = HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise ConfigError(
                f"{index} has version {version} and dtype code {code}; readable: version 1, "
                f"integer dtypes; {MAKE_DATA}"
            )
        dtype, width = _DTYPES[code]
        size, plain = index.stat().st_size, HEADER.size + 12 * sequences + 8 * entries
        if size not in (plain, plain + sequences):
            raise ConfigError(
                f"{index} has {size} bytes, but its header requires {plain}: it is damaged; "
                f"{MAKE_DATA}"
            )
        end = 0
        if sequences:
            file.seek(HEADER.size + 4 * (sequences - 1))
            (length,) = struct.unpack("<i", file.read(4))
            file.seek(HEADER.size + 4 * sequences + 8 * (sequences - 1))
            (start,) = struct.unpack("<q", file.read(8))
            end = start + length * width
    held = tokens_file.stat().st_size
    if held != end:
        raise ConfigError(
            f"{tokens_file} has {held} bytes, but {index} describes {end}: truncated, or not a "
            f"pair; {MAKE_DATA}"
        )
    return dtype, end // width, max(entries - 1, 0)


def read_manifest(path: Path) -> Manifest | None:
    """Return data_prep's record of the data, or None if the file does not exist.

    Raises ConfigError if it is damaged.
    """
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_bytes())
        if raw["format"] != _MANIFEST_FORMAT:
            raise ConfigError(
                f"{path} has format {raw['format']!r}, readable: {_MANIFEST_FORMAT}; {MAKE_DATA}"
            )
        wanted = (
            "tokens",
            "text_bytes",
            "bin_sha256",
            "idx_sha256",
            "bin_bytes",
            "idx_bytes",
            "bin_sample",
        )
        splits = {
            name: {field: entry[field] for field in wanted}
            | {field: entry.get(field) for field in ("ids", "mask")}
            for name, entry in raw["splits"].items()
        }
        for entry in splits.values():
            if entry["mask"] is not None:
                fields = ("bytes", "sha256", "sample", "counted")
                entry["mask"] = {field: entry["mask"][field] for field in fields}
                entry["text_bytes"] = None  # the bytes of the counted tokens are unknown
        tokenizer = {
            field: raw["tokenizer"][field] for field in ("path", "vocab_size", "eod_id", "sha256")
        }
        return Manifest(path, tokenizer, raw["dtype"], splits)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {error}); {MAKE_DATA}"
        ) from None


def _manifest_tokenizer(key: str, manifest: Manifest) -> _Tokenizer:
    entry = manifest.tokenizer
    return _Tokenizer(
        key,
        entry["vocab_size"],
        entry["eod_id"],
        entry["sha256"],
        manifest.path.parent / entry["path"],
    )


def _given_tokenizer(folder: Path) -> _Tokenizer:
    """Return the tokenizer in ``folder``, the value of ``data.tokenizer``.

    The folder must contain the tokenizer.json of a Hugging Face tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"data.tokenizer = {folder}: {file} not found; {start_of(folder)}give the folder that "
            "holds tokenizer.json"
        )
    try:
        raw = json.loads(file.read_bytes())
        # BPE, WordPiece, WordLevel: token -> id; Unigram: a list of [token, score].
        vocabulary = raw["model"]["vocab"]
        ids = (
            dict(vocabulary)
            if isinstance(vocabulary, dict)
            else {token: number for number, (token, _) in enumerate(vocabulary)}
        )
        ids.update({token["content"]: token["id"] for token in raw.get("added_tokens", [])})
        settings_file = folder / "tokenizer_config.json"
        settings = json.loads(settings_file.read_bytes()) if settings_file.is_file() else {}
        eos = settings.get("eos_token")
        eod_id = ids.get(eos["content"] if isinstance(eos, dict) else eos)
        return _Tokenizer(
            f"data.tokenizer = {folder}", max(ids.values()) + 1, eod_id, sha256(file), folder
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"data.tokenizer = {folder}: not a readable Hugging Face tokenizer "
            f"({type(error).__name__}: {error})"
        ) from None


def _one_tokenizer(tokenizers: list[_Tokenizer]) -> _Tokenizer | None:
    """Return the tokenizer that all sources share, or None if the list is empty.

    Of several folders, it is the first with a chat template, which an export copies.

    Raises ConfigError if they differ.
    """
    if not tokenizers:
        return None
    first = tokenizers[0]
    for other in tokenizers[1:]:
        if other.sha256 != first.sha256:
            raise ConfigError(
                f"{other.key} has another tokenizer (sha256 {other.sha256[:12]}) than {first.key} "
                f"({first.sha256[:12]}); all sources of a run need the same one"
            )
        if None not in (other.eod_id, first.eod_id) and other.eod_id != first.eod_id:
            ends = (
                f"{other.key} ends its documents in id {other.eod_id}, {first.key} in "
                f"{first.eod_id}"
            )
            raise ConfigError(f"{ends}; all sources of a run need the same EOD")
    chat = (one for one in tokenizers if (one.folder / "chat_template.jinja").is_file())
    return next(chat, first)


def _check_ends(config: RunConfig, tokenizer: _Tokenizer | None) -> None:
    data = config.data
    if (tokenizer is None or tokenizer.eod_id is None) and (
        data.documents == "separate" or data.reset_positions or not data.eod_loss
    ):
        raise ConfigError(
            "data.documents, data.reset_positions and data.eod_loss need the id that ends a "
            f"document, which no file next to {data.train[0].prefix} contains; set data.tokenizer "
            "to a folder whose tokenizer has an eos_token"
        )


def _check_vocabulary(
    config: RunConfig, tokenizer: _Tokenizer | None, sources: list[SourceFacts]
) -> None:
    given = config.model.vocab_size
    if tokenizer is None:
        if given is None:
            raise ConfigError(
                f"model.vocab_size is null and no manifest.json next to {sources[0].key} = "
                f"{sources[0].prefix} records it; set model.vocab_size, or data.tokenizer"
            )
        return
    if given is not None and given < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {given} is less than the {tokenizer.vocab_size} entries of the "
            f"tokenizer of {tokenizer.key}; set model.vocab_size={tokenizer.vocab_size}, or null"
        )
    for source in sources:
        if tokenizer.vocab_size > _LARGEST.get(source.dtype, 2**31):
            raise ConfigError(
                f"{source.key} = {source.prefix} holds {source.dtype} tokens, too narrow for the "
                f"{tokenizer.vocab_size} entries of the tokenizer of {tokenizer.key}; {MAKE_DATA}"
            )
