"""verify: silent on whole data, and each fault named with its file and the fix: in merged folders, in shards, in index caches."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_prep.store.indexed import read_index
from tests.data_prep import conftest as room

# What is done to a merged folder (see conftest.spoil) | what verify says.
MERGED = r"""
train.bin cut 1 | train.bin: \d+ bytes, .*truncated
train.bin cut 200 | train.idx does not belong to train.bin
train.bin write | train.bin: 0 bytes, .*truncated
train.bin add xy | train.bin: .*too long
valid.bin flip 50 | valid.bin: content differs
train.bin flip -1 | train.bin: content differs
test.idx flip 40 | test.idx: content differs
test.idx flip 0 | test.idx is not a Megatron index
test.idx cut 8 | test.idx is \d+ bytes, its header says
test.idx write | test.idx is not a Megatron index
train.idx swap valid.idx | valid.idx does not belong to valid.bin
train.bin swap valid.bin | train.idx does not belong to train.bin
test.idx lengths 0+1 1+-1 | test.idx: content differs
valid.idx gone | valid.idx is missing
valid.bin gone | valid.bin is missing
tokenizer/tokenizer.json add   | tokenizer.json: content differs
tokenizer gone | no such folder: .*tokenizer
tokenizer/tokenizer_config.json set eos_token "a" | its EOD is .*, the manifest says 0
manifest.json set dtype "int32" | manifest.json: dtype is 'int32'
manifest.json set tokenizer.eod_id 5 | EOD is 0, the manifest says 5
manifest.json set splits.train.documents 7 | splits.train.documents is 7
manifest.json set splits.test.tokens 7 | splits.test.tokens is 7
manifest.json set splits.test.text_bytes 7 | text_bytes is 7
manifest.json set splits.test.bin_sample "9:x" | test.bin: its sample differs
manifest.json set source.rows 1 | source.rows is 1
manifest.json set source.dropped.masked 3 | source.dropped.masked is 3
manifest.json set source.files.0.rows 1 | source.files.0.rows is 1
manifest.json set source.settings.min_bytes 1 | settings.min_bytes is 1
manifest.json set source.fingerprint "0" | is of another plan than
manifest.json pop splits.test | lacks the split 'test'
manifest.json pop splits.test | test.bin is not in the manifest
units.jsonl flip 9 | units.jsonl: content differs
units.jsonl gone | units.jsonl is missing
plan.json gone | plan.json is missing
plan.json set units.0.2 0 | plan.json was altered
plan.json set settings.min_bytes 9 | plan.json was altered
plan.json set settings.more 9 | plan.json is damaged
"""
UNITS: dict[str, Callable[[list[Any]], object]] = {  # units.jsonl changed, and the manifest's hash of it
    "units.jsonl has 4 units, .*plan.json has 5": lambda u: u.pop(),
    "not the entries of units 0 to 4": lambda u: u.reverse(),
    "unit 2 is of another plan": lambda u: u[2].update(plan="0"),
    "splits.train.tokens is .*, units and plan say": lambda u: u[2]["splits"]["train"].update(tokens=9),
    "unit 2 accounts for 61 rows, the plan for 60": lambda u: u[2].update(
        rows=61, dropped={"masked": 1 + sum(u[2]["dropped"].values())}, bad=[]
    ),
    "source.encoder is": lambda u: u[2].update(encoder="other 1.0"),
}
# In a folder whose hashes are made to agree: only what is inside the files can tell.
INSIDE = """
test.bin ids -1=9 | EOD stands
test.bin ids 0=0 | EOD stands
test.bin ids -1=9 0=0 | 1 documents do not end in EOD, number 7 first
test.bin ids 0=320 | 1 ids lie outside the vocabulary of 320
test.idx lengths 0+1 1+-1 | 1 documents do not end in EOD, number 0
test.idx flip 74 | lengths and pointers disagree
test.idx flip -8 | document indices are not one document a sequence
"""
SHARDS = r"""
00002-train.bin cut 2 | 00002-train.bin: \d+ bytes, its entry says \d+ \(truncated\)
00002-train.bin flip 9 | 00002-train.bin: content differs from its entry's hash
00002-train.idx flip 40 | 00002-train.idx: content differs
00002.json swap 00003.json | 00002.json is the entry of unit 3
00002-train.idx gone | 00002-train.idx is missing
00002.json gone | 00002-train.bin has no entry
00002.json gone | 1 of 5 units are not done: 2; do them
00002.json write { | 00002.json is damaged
00002.json set plan "0" | 00002.json belongs to another plan
00009.json copy 00002.json | 00009.json is the entry of a unit that the plan does not
00009-train.bin copy 00002-train.bin | 00009-train.bin belongs to no unit
note.txt write x | note.txt belongs to no unit
00002-dev.bin write x | 00002-dev.bin belongs to no unit
00002.json set rows 61 | 00002.json is damaged .61 rows are not
../plan.json set tokenizer.eod_id 3 | plan.json was altered
../tokenizer gone | no such folder: .*tokenizer
"""


def verify(folder: Path, *options: object) -> tuple[int, str]:
    """Exit code and output of ``verify``."""
    result = room.cli("verify", folder, *options)
    return result.returncode, result.stdout


def table(text: str) -> list[str]:
    return text.strip().splitlines()


def check_faults(folder: Path, said: str, *options: object) -> None:
    """The fault is found, and each has its remedy."""
    code, output = verify(folder, "--sample", 5, *options)
    assert code == 1 and re.search(f"^fault: .*{said}", output, re.MULTILINE), output
    faults = [line for line in output.splitlines() if line.startswith("fault: ")]
    assert all(any(fix in line for fix in ("--overwrite", f"run --out {folder}", "remove it")) for line in faults), output
    assert f"{folder}: {len(faults)} fault" in output.splitlines()[-1]


def test_whole_data_passes_and_is_not_touched(made: Path, merged: Path, encoded: Path) -> None:
    assert verify(made)[0] == 0
    for folder, said in (
        (merged, r"whole; train [\d.]+k tokens, valid .*, test "),
        (encoded, "whole; not merged yet; go on with: .* merge"),
    ):
        before = room.snapshot(folder)
        code, output = verify(folder)
        assert code == 0 and re.search(said, output) and "fault" not in output and "not checked" not in output, output
        assert "hashes, indices, EOD, 100 documents encoded again agree" in output and room.snapshot(folder) == before


@pytest.mark.parametrize("case", table(MERGED))
def test_a_fault_is_found_and_named(data: Path, case: str) -> None:
    how, said = case.split(" | ")
    room.spoil(data, how)
    check_faults(data, said)


@pytest.mark.parametrize("said", UNITS)
def test_a_fault_of_the_units_is_found(data: Path, said: str) -> None:
    room.edit_units(data, UNITS[said])
    check_faults(data, said)


@pytest.mark.parametrize("case", table(SHARDS))
def test_a_fault_in_shards_is_found_and_named(shards: Path, case: str) -> None:
    how, said = case.split(" | ")
    room.spoil(shards / "shards", how)
    check_faults(shards, said)


@pytest.mark.parametrize("case", table(INSIDE))
def test_a_fault_that_no_hash_shows_is_found(data: Path, case: str) -> None:
    how, said = case.split(" | ")
    assert len(read_index(data / "test.idx").lengths) == 8
    room.spoil(data, how)
    room.reseal(data, "test")
    code, output = verify(data, "--sample", 0)
    assert code == 1 and said in output and "content differs" not in output, output


@pytest.mark.parametrize("block", [2, 6, 64, 4096])
def test_documents_that_straddle_blocks_are_followed(data: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr("data_prep.verify.pairs.BLOCK_BYTES", block)
    monkeypatch.setattr("data_prep.verify.pairs.DOCUMENTS_AT_ONCE", 3)
    assert verify(data, "--sample", 0)[0] == 0
    ends = np.cumsum(read_index(data / "test.idx").lengths)
    room.spoil(data, "test.bin ids " + " ".join(f"{ends[document] - 1}=9" for document in (0, 4, 7)))
    room.reseal(data, "test")
    code, output = verify(data, "--sample", 0)
    assert code == 1 and "3 documents do not end in EOD, number 0 first" in output, output


def test_shards_that_a_kill_left_are_said_and_are_no_fault(data: Path, encoded: Path) -> None:
    room.copied(encoded / "shards", data / "shards")
    assert f"not checked: {data / 'shards'}: all of it is merged" in room.done("verify", data, "--sample", 3)


# --- the sample -------------------------------------------------------------------------------------------------------------------------


def test_the_sample_alone_sees_a_document_that_is_not_its_text(data: Path, encoded: Path, tmp_path: Path) -> None:
    room.spoil(data, "train.bin ids 0=77")
    room.reseal(data, "train")
    assert verify(data, "--sample", 0)[0] == 0
    code, output = verify(data, "--sample", 1000)
    assert code == 1 and output.count("fault: ") == 1, output
    said = r"train.bin: document 0 \(unit 0, place 0 of .*rows.parquet\) is not what Hugging Face tokenizers makes of its text, from id 0"
    assert re.search(said, output)
    shards = room.copied(encoded, tmp_path / "shards")
    room.spoil(shards / "shards", "00001-train.bin ids 0=77")
    room.reseal(shards / "shards", "00001-train", "00001.json", "train")
    code, output = verify(shards, "--sample", 1000)
    assert code == 1 and "00001-train.bin: document 0 (unit 1, place 60 " in output, output


def test_a_sample_of_everything_is_everything_in_place(tmp_path: Path) -> None:
    """With a tokenizer that makes EOD or nothing of some texts: these are dropped, and what follows them is still found."""
    tokenizer = Tokenizer(models.WordLevel({"<eod>": 0, "?": 1, **{f"w{i}": i + 2 for i in range(50)}}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.WhitespaceSplit(), normalizers.Strip()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eod>"}}))
    texts = ["   " if i % 7 == 3 else f"w{i % 50} <eod>" if i % 11 == 4 else f"w{i % 50} w1 " * (1 + i % 3) for i in range(150)]
    file = room.write_parquet(tmp_path / "a.parquet", [(f"d{i}", text) for i, text in enumerate(texts)], row_group_size=40)
    out = room.merge(room.encode_units(room.plan_folder(tmp_path / "out", [file], tmp_path / "tokenizer", *room.SMALL_UNITS)))
    dropped = room.manifest_of(out)["source"]["dropped"]
    assert dropped == {"no_tokens": sum(not text.strip() for text in texts), "contains_eod": sum("<eod>" in text for text in texts)}
    assert f"{150 - sum(dropped.values())} documents encoded again" in room.done("verify", out, "--sample", 1000)


def test_inputs_gone_or_changed_are_said_and_are_no_fault(tmp_path: Path, rows: Path, tokenizer: Path) -> None:
    mine, mask = tmp_path / "mine.parquet", tmp_path / "mask.py"
    mine.write_bytes(rows.read_bytes())
    mask.write_text("import numpy as np\n\ndef keep(batch, places, path):\n    return np.array(places) % 2 == 0\n")
    out = room.merge(room.encode_units(room.plan_folder(tmp_path / "out", [mine], tokenizer, "--mask", f"{mask}:keep")))
    assert "100 documents encoded again" in room.done("verify", out)
    moved = mine.rename(tmp_path / "moved.parquet")
    room.spoil(out, f"plan.json set files.0.path {json.dumps(str(moved))}")
    assert "100 documents encoded again" in room.done("verify", out)

    def went_bad() -> None:
        raw = bytearray(moved.read_bytes())
        raw[2000:2064] = bytes(64)
        moved.write_bytes(raw)

    for change, said in (
        (went_bad, "moved.parquet can no longer be read as it was"),
        (lambda: room.write_parquet(moved, room.rows_with_faults(250, seed=12), row_group_size=60), "moved.parquet has changed since"),
        (moved.unlink, "no such file: .*moved.parquet"),
        (mask.unlink, "mask.py"),
    ):
        change()
        output = room.done("verify", out)
        assert re.search(f"^not checked: a sample of unit 0 against the inputs: .*{said}", output, re.MULTILINE), output
        assert "encoded again" not in output and "whole" in output


# --- index caches -----------------------------------------------------------------------------------------------------------------------

CACHES = """
complete.json set sources.0.idx_sha256 "0" | complete.json is stale: built from other contents
complete.json set sources.1.bin "0" | complete.json is stale: built from other contents
train-indices.npy flip 100 | train-indices.npy: content differs
train-indices.npy cut 1 | train-indices.npy: 199 bytes, complete.json says 200
train-indices.npy gone | train-indices.npy is missing
complete.json write { | complete.json is damaged
complete.json set format 2 | complete.json is damaged
complete.json pop sources.0.bin | complete.json is damaged
"""


def make_cache(folder: Path, data: Path, key: str = "k" * 32, ending: str = "") -> Path:
    """An index cache as pretrain leaves it."""
    cache = folder / key
    cache.mkdir(parents=True)
    (cache / "train-indices.npy").write_bytes(bytes(range(200)))
    splits = room.manifest_of(data)["splits"]
    sources = [
        {
            "split": name,
            "prefix": os.path.abspath(data / name) + ending,
            "idx_sha256": splits[name]["idx_sha256"],
            "bin": splits[name][kind],
        }
        for name, kind in (("train", "bin_sha256"), ("valid", "bin_sample"))
    ]
    files = {"train-indices.npy": {"bytes": 200, "sha256": hashlib.sha256(bytes(range(200))).hexdigest()}}
    (cache / "complete.json").write_text(json.dumps({"format": 1, "sources": sources, "files": files}))
    return cache


@pytest.mark.parametrize("case", ["other | which the data no longer has", *table(CACHES)])
def test_a_stale_or_damaged_index_cache_is_found(tmp_path: Path, merged: Path, case: str) -> None:
    how, said = case.split(" | ")
    cache = make_cache(tmp_path / "caches", merged, ending="2" * (how == "other"))
    options = ("--sample", 0, "--index-cache", tmp_path / "caches")
    if how != "other":
        assert "1 index caches (0 of other data, 0 unfinished)" in room.done("verify", merged, *options)
        room.spoil(cache, how)
    code, output = verify(merged, *options)
    assert code == 1 and re.search(f"^fault: .*{said}.*build it again with: python -m data_prep index", output, re.MULTILINE), output


def test_caches_of_other_data_and_unfinished_ones_are_no_fault(tmp_path: Path, merged: Path, data: Path) -> None:
    make_cache(tmp_path / "caches", merged)
    room.spoil(make_cache(tmp_path / "caches", data, "o" * 32), 'complete.json set sources.0.idx_sha256 "0"')
    (tmp_path / "caches" / ".building-x").mkdir()
    (tmp_path / "caches" / ".lock").touch()
    said = room.done("verify", merged, "--sample", 0, "--index-cache", tmp_path / "caches")
    assert "1 index caches (1 of other data, 1 unfinished)" in said


def test_the_cache_that_pretrain_leaves_is_read(tmp_path: Path, merged: Path) -> None:
    """pretrain's own record of the same data, through its own code."""
    from pretrain.data.facts import Contents, SourceContents
    from pretrain.data.index_cache import IndexCache

    splits = room.manifest_of(merged)["splits"]
    of = {name: (os.path.abspath(merged / name), splits[name]["idx_sha256"], splits[name]["bin_sha256"]) for name in ("train", "valid")}
    cache = IndexCache(tmp_path / "caches", Contents(tuple(SourceContents(name, *told) for name, told in of.items())), ("seed", 1))
    with cache.building() as building:
        (building / "a.npy").write_bytes(b"indices")
        cache.publish(building)
    options = ("--sample", 0, "--index-cache", tmp_path / "caches")
    assert "1 index caches" in room.done("verify", merged, *options)
    room.spoil(cache.folder, "a.npy flip 0")
    assert verify(merged, *options)[0] == 1
