"""What is read from .idx headers and manifests before a run, and every way in which data and configuration can disagree."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fem_common.errors import ConfigError
from pretrain.config import RunConfig, load_run
from pretrain.data.facts import Contents, check_contents, check_data
from pretrain.validate import prepare
from tests.pretrain.data_folder import write_folder, write_manifest, write_pair

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "run"
DEMO = CONFIGS / "demo.yaml"


def run_on(folder: Path, *overrides: str) -> RunConfig:
    """The demo, reading ``folder``."""
    return load_run(DEMO, [f"data.{split}.0.prefix={folder / split}" for split in ("train", "valid", "test")] + list(overrides))


def contents(folder: Path, *overrides: str) -> Contents:
    facts = prepare(run_on(folder, *overrides), 1).facts
    assert facts is not None
    return check_contents(facts)


def complaint(folder: Path, *overrides: str) -> str:
    """What a user is told who starts a run on the data; fails where nothing is wrong."""
    with pytest.raises(ConfigError) as caught:
        contents(folder, *overrides)
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
    elsewhere = write_folder(tmp_path / "elsewhere")
    manifest = json.loads((elsewhere / "manifest.json").read_text())
    manifest["tokenizer"]["eod_id"] = 3
    write_manifest(elsewhere, manifest)
    said = complaint(folder, f"data.train.1.prefix={elsewhere}/train")
    assert f"{elsewhere}/train ends its documents in id 3, data.train.0.prefix = {folder}/train in 499" in said
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
    for text in ("{", "[]", '{"format": 2}', manifest.replace('"bin_sample"', '"bin_simple"'), manifest.replace('"eod_id"', '"eot_id"')):
        (folder / "manifest.json").write_text(text)
        assert complaint(folder).startswith(f"{folder}/manifest.json is damaged")
    (folder / "manifest.json").write_text(manifest.replace('"format": 2', '"format": 1'))
    assert complaint(folder).startswith(f"{folder}/manifest.json has format 1, readable: 2")


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "valid.bin", "test.idx"])
def test_a_file_of_the_right_size_that_is_not_the_recorded_one_is_named(folder: Path, name: str) -> None:
    assert len(contents(folder).sources) == 2
    path = folder / name
    raw = bytearray(path.read_bytes())
    raw[-3 if name.endswith("idx") else 800] ^= 1  # not where the header's check looks
    path.write_bytes(raw)
    check_data(run_on(folder))  # headers and sizes are right
    said = complaint(folder)
    assert said.startswith(f"{path} is not the file that {folder}/manifest.json records (the size is right, the contents differ)")
    assert f"python -m data_prep verify {folder}," in said


def test_a_foreign_index_or_bin_of_the_same_size_is_named(folder: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    write_pair(foreign / "train", [[8] * 300, [7] * 600])
    for name in ("train.idx", "train.bin"):
        kept = (folder / name).read_bytes()
        shutil.copy(foreign / name, folder / name)
        assert (folder / name).stat().st_size == len(kept)
        assert complaint(folder).startswith(f"{folder / name} is not the file that")
        (folder / name).write_bytes(kept)
    contents(folder)


def test_a_pair_that_the_manifest_beside_it_does_not_know_is_refused(folder: Path) -> None:
    write_pair(folder / "mine", [[7] * 900])
    said = complaint(folder, f"data.train.0.prefix={folder / 'mine'}")
    assert said.startswith(
        f"data.train.0.prefix = {folder}/mine: {folder}/manifest.json records no split 'mine' (its splits: train, valid, test)"
    )


@pytest.mark.parametrize("left", ["plan.json", "shards/00003.json"])
def test_data_that_is_not_merged_is_refused_with_the_command(folder: Path, left: str) -> None:
    (folder / "manifest.json").unlink()
    contents(folder, "model.vocab_size=500")
    (folder / left).parent.mkdir(exist_ok=True)
    (folder / left).write_text("{}")
    said = complaint(folder, "model.vocab_size=500")
    assert said.startswith(f"data.train.0.prefix = {folder}/train: {folder} is not finished: {Path(left).parts[0]}")
    assert said.endswith(f"python -m data_prep run --out {folder}")
    (folder / "train.bin").unlink()  # the files come late in a merge: what is missing is not a misspelt prefix
    assert complaint(folder, "model.vocab_size=500") == said


def test_a_count_of_tokens_that_is_not_the_recorded_one_is_refused(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["valid"]["tokens"] += 1
    write_manifest(folder, manifest)
    assert complaint(folder).startswith(f"{folder}/valid.idx describes 900 tokens, but {folder}/manifest.json records 901")


def test_a_plan_reads_no_index_through(folder: Path) -> None:
    """Every process, and every --plan, looks at headers and sizes alone; what reads gigabytes is ``check_contents``."""
    raw = bytearray((folder / "train.idx").read_bytes())
    raw[-3] ^= 1
    (folder / "train.idx").write_bytes(raw)
    assert prepare(run_on(folder), None, plan_only=True).facts is not None


@pytest.mark.parametrize("with_manifest", [True, False])
def test_the_content_key_follows_the_contents_and_nothing_else(folder: Path, tmp_path: Path, with_manifest: bool) -> None:
    def key(where: Path) -> str:
        return check_contents(check_data(run_on(where, "model.vocab_size=500"))).key

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
