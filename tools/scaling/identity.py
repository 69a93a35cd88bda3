"""What makes two runs the same run, or their losses comparable: the data they read, the tokenizer, the configuration. No torch.

Held-out losses compare between runs that read the same tokens in sequences of the same length, and a loss a token means nothing across
tokenizers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fem_common.errors import ConfigError, files_told
from pretrain.config import RunConfig, Source
from pretrain.data_facts import Contents, SourceContents, check_contents, check_data, read_manifest
from pretrain.loader import to_dict

DIGITS = 16  # of a hash in the table
# What says where a run is, how it is laid out and what it tells, and changes nothing of what is learnt. A key stands for all below it.
_NO_MATTER = (
    "name run_dir data.tokenizer data.index_cache data.test parallel log evaluate model.attention_backend train.micro_batch_size "
    "train.recompute train.eval_interval train.max_bad_steps checkpoint.interval checkpoint.keep_last checkpoint.async_save "
    "checkpoint.resume"
).split()
_FROM_DATA = ("model.vocab_size",)  # filled in from the data where the study leaves it null


@dataclass(frozen=True)
class DataIdentity:
    """What training and validation data hold (`Contents.key`), their shares, the sequences they are cut into, and the tokenizer's sha256.

    ``tokenizer`` is empty where nothing tells it.
    """

    contents: str
    weights: tuple[tuple[float, ...], ...]
    seq_length: int
    tokenizer: str

    @property
    def key(self) -> str:
        """Hexadecimal, of all but the tokenizer, which has a column of its own."""
        return _hash([self.contents, self.weights, self.seq_length])

    def difference(self, other: DataIdentity) -> str:
        """In words, what differs; both hold for each."""
        if self.tokenizer != other.tokenizer:
            return f"tokenizers of sha256 {_short(self.tokenizer)} and {_short(other.tokenizer)}"
        if self.seq_length != other.seq_length:
            return f"data.seq_length = {self.seq_length} and {other.seq_length}"
        if self.contents != other.contents:
            return f"data of contents {_short(self.contents)} and {_short(other.contents)}"
        return f"shares {self.weights} and {other.weights} of the data's sources"


def data_identity(config: RunConfig, run: Path | None) -> DataIdentity:
    """The identity of what a run read: what its newest checkpoint records, and the manifests beside the data.

    ``run`` is its directory, None where there is none (Weights & Biases). A pair without a manifest is identified by its .idx and a
    sample of its .bin.

    Raises:
        ConfigError: neither is there, or the data on disk is no longer what the run was trained on.
        StorageError: a file system failed.
    """
    with files_told():
        recorded = _recorded(run) if run is not None else None
        held = _held(config)
    if recorded is None and held is None:
        prefix = config.data.train[0].prefix if config.data.train else "data.train"
        raise ConfigError(
            f"nothing tells which data it read: {prefix} is not here and it has no checkpoint; run collect where the data is, from the "
            "folder that the run was started in"
        )
    if recorded is not None and held is not None and recorded != held:
        raise ConfigError(
            f"it was trained on other data (contents {_short(recorded)}) than {config.data.train[0].prefix} holds now ({_short(held)}); "
            "restore the data, or run it again"
        )
    contents = recorded or held or ""
    return DataIdentity(contents, tuple(_shares(part) for part in _splits(config)), config.data.seq_length, _tokenizer(config))


def config_hash(config: RunConfig, data: DataIdentity) -> str:
    """Of what decides what the run learns: model, data by what it holds, batch, length, seed, optimizer; not of names, places or layout."""
    return _hash([sorted(_flat(config).items()), data.key, data.tokenizer])


def difference_from_plan(planned: RunConfig, found: RunConfig) -> tuple[str, Any, Any] | None:
    """(key, planned value, the run's) of the first key that decides what a run learns and is not as planned; None where all are."""
    wanted, held = _flat(planned), _flat(found)
    for key in dict.fromkeys([*wanted, *held]):
        one, other = wanted.get(key), held.get(key)
        if one != other and not (one is None and key in _FROM_DATA):
            return key, one, other
    return None


def heldout_tokens(config: RunConfig) -> int:
    """Tokens that a validation reads, from the beginning of the validation data."""
    return config.train.eval_batches * config.train.global_batch_size * config.data.seq_length


def _flat(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in _leaves(to_dict(config), "") if not _passed_over(key)}


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{prefix}.{number}")
    else:
        yield prefix, value


def _passed_over(key: str) -> bool:
    return any(key == word or key.startswith(word + ".") for word in _NO_MATTER) or key.endswith(".prefix")


def _splits(config: RunConfig) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    return config.data.train, config.data.valid


def _shares(sources: tuple[Source, ...]) -> tuple[float, ...]:
    total = sum(source.weight for source in sources)
    return tuple(round(source.weight / total, 9) for source in sources)


def _recorded(run: Path) -> str | None:
    """`Contents.key` as the newest checkpoint's manifest says it."""
    latest = run / "checkpoints" / "latest"
    if not latest.is_file():
        return None
    manifest = latest.parent / latest.read_text(encoding="utf-8").strip() / "manifest.json"
    if not manifest.is_file():
        return None
    try:
        told = json.loads(manifest.read_bytes()).get("data")
    except (ValueError, AttributeError):
        raise ConfigError(f"{manifest} is damaged: not a JSON mapping; run it again, or remove the checkpoint") from None
    return str(told) if told else None


def _held(config: RunConfig) -> str | None:
    """`Contents.key` of what lies under the configuration's prefixes; None where a source is not there."""
    sources: list[SourceContents] = []
    for split, listed in zip(("train", "valid"), _splits(config), strict=True):
        for source in listed:
            path = Path(source.prefix)
            manifest = read_manifest(path.parent / "manifest.json")
            if manifest is None:
                return _read(config)
            if path.name not in manifest.splits:
                return None
            entry = manifest.splits[path.name]
            sources.append(SourceContents(split, source.prefix, entry["idx_sha256"], entry["bin_sha256"]))
    return Contents(tuple(sources)).key if sources else None


def _read(config: RunConfig) -> str | None:
    files = [Path(source.prefix + ending) for listed in _splits(config) for source in listed for ending in (".bin", ".idx")]
    return check_contents(check_data(config)).key if all(file.is_file() for file in files) else None


def _tokenizer(config: RunConfig) -> str:
    """sha256 of the tokenizer: the manifest's, else of the file that the configuration names; empty where neither is there."""
    for source in config.data.train:
        manifest = read_manifest(Path(source.prefix).parent / "manifest.json")
        if manifest is not None:
            return str(manifest.tokenizer["sha256"])
    file = Path(config.data.tokenizer) / "tokenizer.json" if config.data.tokenizer else None
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else ""


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:DIGITS]


def _short(key: str) -> str:
    return key[:12] or "none"
