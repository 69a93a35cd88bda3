"""Tests of reading .idx headers and manifests before a run, and of every contradiction between data
and configuration.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fem_common.errors import ConfigError
from pretrain.config import RunConfig, load_run
from pretrain.data.facts import Contents, check_contents, check_data
from pretrain.validate import prepare
from tests.pretrain.conftest import DEMO, data_of, edit, flip
from tests.pretrain.data_folder import write_folder, write_mask, write_pair
from tests.wording import Wording

EOD = 499  # id of the end-of-document token in the tokenizer of `write_folder`


def run_on(folder: Path, *overrides: str) -> RunConfig:
    """Return the demo's configuration with ``folder`` as its data."""
    return load_run(
        DEMO,
        data_of(folder, "train", "valid", "test") + list(overrides),
    )


def contents(folder: Path, *overrides: str) -> Contents:
    facts = prepare(run_on(folder, *overrides), 1).facts
    assert facts is not None
    return check_contents(facts)


def complaint(folder: Path, *overrides: str) -> str:
    """Return the error that a user sees who starts a run on the data; fail if the data is valid."""
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
    assert prepared.config.model.vocab_size == 500
    assert prepared.config.data.tokenizer == str(folder / "tokenizer")
    assert prepared.facts.tokens == {"train": 900, "valid": 900, "test": 900}
    assert prepared.facts.eod_id == 499 and prepared.facts.bytes_per_token() == 4.0
    chat = write_folder(folder.with_name("chat"))
    (chat / "tokenizer/chat_template.jinja").touch()
    blend = run_on(folder, f"data.train=[{{prefix: {folder}/train}}, {{prefix: {chat}/train}}]")
    write_mask(chat, "train", bytes(890) + bytes([1]) * 10)
    facts = check_data(blend)
    assert facts.tokenizer == chat / "tokenizer" and facts.masks_line is not None
    assert facts.masks_line.endswith("data.train.1.prefix 10 of 900")
    assert [source.documents for source in prepared.facts.sources] == [2, 2, 2]
    # The saved configuration with all values filled in describes the same run.
    assert prepare(prepared.config, 1).config == prepared.config


def test_the_header_is_read_as_megatron_writes_it(tmp_path: Path) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "mine.bin"), dtype=numpy.int32)
    for length in (200, 57, 90):
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize(str(tmp_path / "mine.idx"))
    config = load_run(
        DEMO,
        [
            "model.vocab_size=400",
            f"data.train=[{{prefix: {tmp_path}/mine}}]",
            "data.valid=[]",
            "data.test=[]",
        ],
    )
    (source,) = check_data(config).sources
    assert (source.tokens, source.documents, source.dtype) == (347, 3, "int32")


def test_a_vocabulary_may_be_given_without_a_manifest_or_come_from_the_named_tokenizer(
    folder: Path,
) -> None:
    (folder / "manifest.json").unlink()
    facts = check_data(run_on(folder, "model.vocab_size=500"))
    assert facts.vocab_size is None and facts.bytes_per_token() is None
    named = prepare(run_on(folder, f"data.tokenizer={folder / 'tokenizer'}"), 1)
    assert named.config.model.vocab_size == 500
    assert named.facts is not None
    assert named.facts.eod_id == 499


def test_a_plan_needs_no_data_where_the_vocabulary_is_given(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    assert prepare(run_on(missing, "model.vocab_size=500"), None, plan_only=True).facts is None
    with pytest.raises(ConfigError, match="train.bin not found"):
        prepare(run_on(missing), None, plan_only=True)
    with pytest.raises(ConfigError, match="train.bin not found"):
        prepare(run_on(missing, "model.vocab_size=500"), 1)


def written(path: Path, text: str) -> None:
    path.write_text(text)


def without_manifest(
    folder: Path, change: Callable[[bytes], bytes] = lambda index: index, size: int = 1800
) -> list[str]:
    (folder / "manifest.json").unlink()
    os.truncate(folder / "train.bin", size)
    (folder / "train.idx").write_bytes(change((folder / "train.idx").read_bytes()))
    return ["model.vocab_size=500"]


def edited_plan(
    folder: Path,
    key: str = "train.1.prefix",
    name: str = "train",
    eod: int | None = None,
    **changes: Any,
) -> list[str]:
    """Write another data folder and return the override that adds it."""
    other = write_folder(folder.with_name("other"), **changes)
    if eod is not None:
        edit(other / "manifest.json", lambda manifest: manifest["tokenizer"].update(eod_id=eod))
    return [f"data.{key}={other / name}"]


def refilled(folder: Path, **changes: Any) -> None:
    write_folder(folder, **changes)


def with_another_pair(folder: Path) -> list[str]:
    write_pair(folder / "mine", [[7] * 900])
    return [f"data.train.0.prefix={folder / 'mine'}"]


def replaced(folder: Path, name: str) -> None:
    """Replace a file by one of equal size with other documents."""
    write_pair(folder.with_name("foreign"), [[8] * 300, [7] * 600])
    shutil.copy(folder.with_name("foreign").with_suffix(Path(name).suffix), folder / name)


def masked(folder: Path, change: Callable[[Path], object]) -> list[str]:
    write_mask(folder, "valid", bytes(300) + b"\1" * 600)
    assert contents(folder).key != contents(write_folder(folder.with_name("plain"))).key
    change(folder / "valid.mask")
    return ["model.vocab_size=500"]


def left_behind(folder: Path, name: str) -> list[str]:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("{}")
    return without_manifest(folder)


MANIFEST = "manifest.json"
# Name of the mistake -> function that makes it and returns the overrides of the run, if any.
MISTAKES: dict[str, Callable[[Path], Sequence[str] | None]] = {
    "no data": lambda folder: shutil.rmtree(folder),
    "a prefix misspelled": lambda folder: [f"data.train.0.prefix={folder}/trian"],
    "a folder": lambda folder: [f"data.train.0.prefix={folder}"],
    "a folder of validation data": lambda folder: [f"data.valid.0.prefix={folder}"],
    "a prefix with its ending": lambda folder: [f"data.train.0.prefix={folder}/train.bin"],
    "no index": lambda folder: (folder / "valid.idx").unlink(),
    "no training data": lambda folder: ["data.train=[]"],
    "too long a sequence": lambda folder: ["data.seq_length=900"],
    "too small a vocabulary": lambda folder: ["model.vocab_size=400"],
    "another tokenizer's data": lambda folder: edited_plan(folder, tokenizer="two"),
    "another tokenizer": lambda folder: edited_plan(
        folder, "tokenizer", "tokenizer", tokenizer="two"
    ),
    "no tokenizer": lambda folder: [f"data.tokenizer={folder}"],
    "another end of documents": lambda folder: edited_plan(folder, eod=3),
    "nobody tells the vocabulary": lambda folder: (folder / MANIFEST).unlink(),
    "too narrow a dtype": lambda folder: refilled(folder, vocab_size=70_000),
    "not the recorded dtype": lambda folder: edit(
        folder / MANIFEST, lambda manifest: manifest.update(dtype="int32")
    ),
    "not the recorded size": lambda folder: os.truncate(folder / "train.bin", 1000),
    "not the described size": lambda folder: without_manifest(folder, size=1000),
    "an index cut short": lambda folder: without_manifest(folder, lambda index: index[:-1]),
    "a header cut short": lambda folder: without_manifest(folder, lambda index: index[:20]),
    "no index of Megatron's": lambda folder: without_manifest(
        folder, lambda index: b"x" + index[1:]
    ),
    "an unknown dtype": lambda folder: without_manifest(
        folder, lambda index: index[:17] + b"\x07" + index[18:]
    ),
    "a manifest that is no JSON": lambda folder: written(folder / MANIFEST, "{"),
    "a manifest that is a list": lambda folder: written(folder / MANIFEST, "[]"),
    "a manifest of nothing": lambda folder: written(folder / MANIFEST, '{"format": 2}'),
    "a manifest without a key": lambda folder: edit(
        folder / MANIFEST, lambda manifest: manifest["tokenizer"].pop("eod_id")
    ),
    "a split without a key": lambda folder: edit(
        folder / MANIFEST, lambda manifest: manifest["splits"]["train"].pop("bin_sample")
    ),
    "another format": lambda folder: edit(
        folder / MANIFEST, lambda manifest: manifest.update(format=1)
    ),
    **{  # outside the bytes that the check of the header reads
        f"a bit of {name}": lambda folder, name=name: flip(
            folder / name, -3 if name.endswith("idx") else 800
        )  # type: ignore[misc]
        for name in ("train.bin", "train.idx", "valid.bin", "test.idx")
    },
    "a foreign index": lambda folder: replaced(folder, "train.idx"),
    "a foreign bin": lambda folder: replaced(folder, "train.bin"),
    **{
        f"a loss mask {name}": lambda folder, change=change: masked(folder, change)  # type: ignore[misc]
        for name, change in {
            "gone": lambda file: file.unlink(),
            "cut short": lambda file: os.truncate(file, 899),
            "replaced": lambda file: flip(file, 500),
            "that the manifest does not know": lambda file: write_folder(file.parent),
            "of another length without a manifest": lambda file: (
                file.write_bytes(bytes(901)),
                without_manifest(file.parent),
            ),
        }.items()
    },
    "a pair that the manifest does not know": with_another_pair,
    "a plan left behind": lambda folder: left_behind(folder, "plan.json"),
    "a shard left behind": lambda folder: left_behind(folder, "shards/00003.json"),
    "not the recorded tokens": lambda folder: edit(
        folder / MANIFEST, lambda manifest: manifest["splits"]["valid"].update(tokens=901)
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_file_both_sides_and_what_to_do(
    folder: Path, wording: Wording, mistake: str
) -> None:
    assert len(contents(folder).sources) == 2
    wording(complaint(folder, *(MISTAKES[mistake](folder) or ())))


@pytest.mark.parametrize("staged", ["", "one stage", "two stages"])
@pytest.mark.parametrize("way", ["same", "dots", "link", "copy", "copy without manifest"])
def test_a_source_is_in_a_blend_once_by_whatever_path(folder: Path, way: str, staged: str) -> None:
    """Through two stages one path may repeat, which continues in its documents; a copy may not,
    which would start again.
    """
    other = {"same": folder, "dots": folder / "tokenizer" / ".."}.get(
        way, folder.with_name("other")
    )
    if way == "link":
        other.symlink_to(folder)
    elif "copy" in way:
        shutil.copytree(folder, other)
        (other / "manifest.json").unlink() if "without" in way else None
    pair = [f"{{prefix: {place / 'train'}}}" for place in (folder, other)]
    blend = "data.train=[{}, {}]"
    if staged:
        data = [", ".join(pair)] if staged == "one stage" else pair
        stages = ", ".join(
            f"{{name: s{number}, steps: 1, data: [{sources}]}}"
            for number, sources in enumerate(data)
        )
        settings = [
            "train.steps=null",
            f"stages=[{stages}]",
            "optimizer.warmup_fraction=null",
            "optimizer.warmup_steps=0",
        ]
    else:
        settings = [blend.format(*pair)]
    if (way, staged) == ("same", "two stages"):
        assert prepare(run_on(folder, *settings), None, plan_only=True).facts is not None
        return
    with pytest.raises(ConfigError) as caught:
        prepare(run_on(folder, *settings), None, plan_only=True)
    assert (
        f" = {other / 'train'} contains the same tokens as data.train.0.prefix ="
        f" {folder / 'train'}, which" in str(caught.value)
    )
    assert str(caught.value).startswith("stages.0 (s0): ") is (staged == "one stage")


def test_sources_of_one_size_with_other_tokens_are_a_blend(folder: Path) -> None:
    write_pair(folder.with_name("other"), [[7] * 600, [9] * 300])
    blend = f"data.train=[{{prefix: {folder / 'train'}}}, {{prefix: {folder.with_name('other')}}}]"
    assert prepare(run_on(folder, blend), None, plan_only=True).facts is not None


def documents(ends: dict[int, int], count: int = 1000) -> list[list[int]]:
    """Return documents with 1 to 300 tokens, ending in EOD or in the value of ``ends``: several
    blocks of a sample.
    """
    return [[*range(number % 300), ends.get(number, EOD)] for number in range(count)]


@pytest.mark.parametrize(
    ("setting", "manifest"),
    [
        ("data.documents=separate", True),
        ("data.documents=separate", False),
        ("data.reset_positions=true", False),
        ("data.eod_loss=false", False),
    ],
)
def test_documents_that_do_not_end_in_eod_are_refused_where_ends_matter(
    tmp_path: Path, wording: Wording, setting: str, manifest: bool
) -> None:
    """Without EOD, with another EOD, or only in the last document; for any source, in a plan too,
    and for every packing.
    """
    folder = write_folder(tmp_path / "data", documents=documents({}))
    other = write_folder(tmp_path / "other", documents=documents({}, 999))
    settings = [
        f"data.tokenizer={folder / 'tokenizer'}",
        f"data.train.1.prefix={other / 'train'}",
        "data.train.0.weight=1",
    ]
    for place in () if manifest else (folder, other):
        (place / MANIFEST).unlink()
    assert prepare(run_on(folder, *settings, setting), 1).facts is not None
    for place, count, ends in (
        (other / "train", 999, dict.fromkeys(range(999), 17)),
        (folder / "valid", 1000, {number: 17 for number in range(1000) if number % 5}),
        (folder / "train", 1000, {999: 17}),
    ):
        write_pair(place, documents(ends, count))
        for packing in ("stream", "best_fit"):
            with pytest.raises(ConfigError) as caught:
                prepare(
                    run_on(folder, *settings, setting, f"data.packing={packing}"),
                    None,
                    plan_only=True,
                )
            assert f"= {place}: document " in str(caught.value)
            assert "ends in token 17, but" in str(caught.value)
        write_pair(place, documents({}, count))
    wording(str(caught.value))
    write_pair(folder / "train", documents({299: 17}))
    assert prepare(run_on(folder, *settings, "data.packing=best_fit"), 1).facts is not None, (
        "nothing depends on the token"
    )


def test_a_plan_reads_no_index_through(folder: Path) -> None:
    """Every process and every --plan reads only headers and sizes; ``check_contents`` reads
    gigabytes.
    """
    flip(folder / "train.idx", -3)
    # The longest that fits.
    assert prepare(run_on(folder, "data.seq_length=899"), None, plan_only=True).facts is not None


@pytest.mark.parametrize("with_manifest", [True, False])
def test_the_content_key_follows_the_contents_and_nothing_else(
    folder: Path, tmp_path: Path, with_manifest: bool
) -> None:
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
    assert key(copy) == key(folder)  # the key does not depend on the test split
    write_pair(copy / "train", [[7] * 300, [8] * 600])  # the same number of bytes, other documents
    assert key(copy) != key(folder)
    write_pair(copy / "train", [[7] * 600, [9] * 300])  # the same document lengths, other tokens
    assert key(copy) != key(folder)
