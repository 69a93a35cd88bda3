"""What is read from .idx headers and manifests before a run, and every way in which data and configuration can disagree."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from pretrain.config import RunConfig
from pretrain.data_facts import check_data
from pretrain.loader import ConfigError, load_run
from pretrain.validate import prepare

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "run"
DEMO = CONFIGS / "demo.yaml"
CODES = {"uint16": (8, "H"), "int32": (4, "i")}


def write_pair(prefix: Path, documents: list[list[int]], dtype: str = "uint16") -> None:
    """Megatron's .bin/.idx as its builder writes them."""
    code, letter = CODES[dtype]
    width = struct.calcsize(letter)
    lengths = [len(document) for document in documents]
    starts = [sum(lengths[:n]) * width for n in range(len(lengths))]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(lengths) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(lengths)}q", *starts)
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(b"".join(struct.pack(f"<{len(document)}{letter}", *document) for document in documents))


def write_folder(folder: Path, tokens: int = 900, vocab_size: int = 500, tokenizer: str = "one", dtype: str = "uint16") -> Path:
    """A data folder as data_prep writes it: three splits, a tokenizer, the manifest."""
    (folder / "tokenizer").mkdir(parents=True)
    raw = {
        "model": {"vocab": {f"{tokenizer}{n}": n for n in range(vocab_size - 1)}},
        "added_tokens": [{"content": "</s>", "id": vocab_size - 1}],
    }
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    splits = {}
    for split in ("train", "valid", "test"):
        prefix = folder / split
        write_pair(prefix, [[7] * (tokens - 300), [8] * 300], dtype)
        binary, index = (prefix.with_suffix(ending).read_bytes() for ending in (".bin", ".idx"))
        splits[split] = {
            "documents": 2,
            "tokens": tokens,
            "text_bytes": 4 * tokens,
            "bin_sha256": hashlib.sha256(binary).hexdigest(),
            "idx_sha256": hashlib.sha256(index).hexdigest(),
            "bin_bytes": len(binary),
            "idx_bytes": len(index),
        }
    sha256 = hashlib.sha256((folder / "tokenizer" / "tokenizer.json").read_bytes()).hexdigest()
    entry = {"path": "tokenizer", "vocab_size": vocab_size, "eod_id": vocab_size - 1, "sha256": sha256}
    write_manifest(folder, {"format": 1, "tokenizer": entry, "dtype": dtype, "splits": splits, "source": {}})
    return folder


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    (folder / "manifest.json").write_text(json.dumps(manifest))


def run_on(folder: Path, *overrides: str) -> RunConfig:
    """The demo, reading ``folder``."""
    return load_run(DEMO, [f"data.{split}.0.prefix={folder / split}" for split in ("train", "valid", "test")] + list(overrides))


def complaint(folder: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(run_on(folder, *overrides), 1)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "data")


def test_the_data_fills_in_vocabulary_and_tokenizer(folder: Path) -> None:
    prepared = prepare(run_on(folder), 1)
    assert prepared.facts is not None
    assert prepared.config.model.vocab_size == 500 and prepared.config.data.tokenizer == str(folder / "tokenizer")
    assert prepared.facts.tokens == {"train": 900, "valid": 900, "test": 900}
    assert prepared.facts.eod_id == 499 and prepared.facts.bytes_per_token() == 4.0
    assert [source.documents for source in prepared.facts.sources] == [2, 2, 2]
    # The saved, filled-in configuration means the same run.
    assert prepare(prepared.config, 1).config == prepared.config


def test_the_header_is_read_as_megatron_writes_it(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "mine.bin"), dtype=numpy.int32)
    for length in (200, 57, 90):
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize(str(tmp_path / "mine.idx"))
    config = load_run(DEMO, ["model.vocab_size=400", f"data.train=[{{prefix: {tmp_path}/mine}}]", "data.valid=[]", "data.test=[]"])
    (source,) = check_data(config).sources
    assert (source.tokens, source.documents, source.dtype) == (347, 3, "int32")


def test_a_vocabulary_may_be_given_without_a_manifest_or_come_from_the_named_tokenizer(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    facts = check_data(run_on(folder, "model.vocab_size=500"))
    assert facts.vocab_size is None and facts.bytes_per_token() is None
    named = prepare(run_on(folder, f"data.tokenizer={folder / 'tokenizer'}"), 1)
    assert named.config.model.vocab_size == 500 and named.facts is not None and named.facts.eod_id == 499


def test_a_plan_needs_no_data_where_the_vocabulary_is_given(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert prepare(run_on(missing, "model.vocab_size=500"), None, plan_only=True).facts is None
    with pytest.raises(ConfigError, match="train.bin not found"):
        prepare(run_on(missing), None, plan_only=True)
    with pytest.raises(ConfigError, match="train.bin not found"):
        prepare(run_on(missing, "model.vocab_size=500"), 1)


def test_missing_files_are_named_with_the_nearest_that_exists(folder: Path, tmp_path: Path) -> None:
    assert complaint(tmp_path / "nowhere").endswith(
        "nowhere/train.bin not found; make the data with: python -m data_prep run (the demo's: make demo)"
    )
    said = complaint(folder, f"data.train.0.prefix={folder}/trian")
    assert said == f"data.train.0.prefix = {folder}/trian: {folder}/trian.bin not found; did you mean {folder}/train?"
    assert complaint(folder, f"data.train.0.prefix={folder}/train.bin").endswith(f"a prefix is given without its ending: {folder}/train")
    (folder / "valid.idx").unlink()
    assert f"data.valid.0.prefix = {folder}/valid: {folder}/valid.idx not found" in complaint(folder)
    assert complaint(folder, "data.train=[]").startswith("data.train is empty")


def test_a_sequence_longer_than_the_data_names_the_source_and_the_largest_that_fits(folder: Path) -> None:
    said = complaint(folder, "data.seq_length=900")
    assert said.startswith(f"data.seq_length = 900 is longer than data.train.0.prefix = {folder}/train, which has 900 tokens")
    assert said.endswith("the largest that fits: 899")
    assert prepare(run_on(folder, "data.seq_length=899"), 1).facts is not None


def test_vocabulary_and_tokenizer_mismatches_name_both_sides(folder: Path, tmp_path: Path) -> None:
    assert complaint(folder, "model.vocab_size=400").startswith(
        f"model.vocab_size = 400 is less than the 500 entries of the tokenizer of data.train.0.prefix = {folder}/train; "
        "set model.vocab_size=500"
    )
    other = write_folder(tmp_path / "other", tokenizer="two")
    said = complaint(folder, f"data.train.1.prefix={other}/train")
    assert said.startswith(f"data.train.1.prefix = {other}/train has another tokenizer (sha256 ")
    assert f"than data.train.0.prefix = {folder}/train (" in said
    assert f"data.tokenizer = {other}/tokenizer has another tokenizer" in complaint(folder, f"data.tokenizer={other}/tokenizer")
    assert complaint(folder, f"data.tokenizer={folder}").endswith("tokenizer.json not found; give the folder that holds tokenizer.json")
    (folder / "manifest.json").unlink()
    assert complaint(folder).startswith(
        f"model.vocab_size is null and no manifest.json beside data.train.0.prefix = {folder}/train tells it"
    )


def test_a_dtype_too_narrow_or_not_the_recorded_one_is_refused(folder: Path, tmp_path: Path) -> None:
    wide = write_folder(tmp_path / "wide", vocab_size=70_000)
    assert "holds uint16 tokens, too narrow for the 70000 entries" in complaint(wide)
    manifest = json.loads((folder / "manifest.json").read_text())
    write_manifest(folder, {**manifest, "dtype": "int32"})
    assert f"{folder}/train.idx holds uint16 tokens, but {folder}/manifest.json records int32" in complaint(folder)


def test_damaged_files_are_named(folder: Path) -> None:
    with (folder / "train.bin").open("r+b") as file:
        file.truncate(1000)
    assert f"{folder}/train.bin has 1000 bytes, but {folder}/manifest.json records 1800" in complaint(folder)
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").unlink()
    assert f"{folder}/train.bin has 1000 bytes, but {folder}/train.idx describes 1800" in complaint(folder, "model.vocab_size=500")
    index = (folder / "train.idx").read_bytes()
    for damaged, said in (
        (index[:-1], "where its header asks for"),
        (index[:20], "is not an index of Megatron's format"),
        (b"x" + index[1:], "is not an index of Megatron's format"),
        (index[:17] + b"\x07" + index[18:], "dtype code 7"),
    ):
        (folder / "train.idx").write_bytes(damaged)
        assert said in complaint(folder, "model.vocab_size=500")
    for text in ("{", "[]", '{"format": 1}', manifest.replace('"eod_id"', '"eot_id"')):
        (folder / "manifest.json").write_text(text)
        assert complaint(folder).startswith(f"{folder}/manifest.json is damaged")
    (folder / "manifest.json").write_text(manifest.replace('"format": 1', '"format": 2'))
    assert complaint(folder).startswith(f"{folder}/manifest.json has format 2, readable: 1")


@pytest.mark.parametrize("with_manifest", [True, False])
def test_the_content_key_follows_the_contents_and_nothing_else(folder: Path, tmp_path: Path, with_manifest: bool) -> None:
    def key(where: Path) -> str:
        return check_data(run_on(where, "model.vocab_size=500")).content_key

    if not with_manifest:
        (folder / "manifest.json").unlink()
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    os.utime(copy / "train.bin", (1, 1))
    assert key(copy) == key(folder)
    write_pair(copy / "test", [[1] * 900])
    (copy / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(folder)
    write_folder(folder)
    (folder / "manifest.json").unlink()
    assert key(copy) == key(folder)  # the test split is not part of it
    write_pair(copy / "train", [[7] * 300, [8] * 600])  # as many bytes, other documents
    assert key(copy) != key(folder)
    write_pair(copy / "train", [[7] * 600, [9] * 300])  # the same documents' lengths, other tokens
    assert key(copy) != key(folder)
