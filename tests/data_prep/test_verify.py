"""Tests of verify: no faults in complete data, and each fault reported with its file and fix in
pairs, shards, index caches.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_prep.prepared.indexed import read_index
from tests.data_prep import conftest as base
from tests.wording import Wording

# Changes (see conftest.spoil) of a merged folder,
MERGED = """
train.bin: cut 1; cut 200; write; add xy; flip -1; swap valid.bin
valid.bin: flip 50; gone
valid.idx: gone
valid.ids: flip 2; cut 3; gone
test.idx: flip 40; flip 0; cut 8; write; lengths 0+1 1+-1; swap valid.idx
tokenizer: gone
tokenizer/tokenizer.json: write {}; set version "1.0"
tokenizer/tokenizer_config.json: set eos_token "a"
manifest.json: set dtype "int32"; set tokenizer.eod_id 5; set splits.train.documents 7
manifest.json: set splits.test.tokens 7
manifest.json: set splits.test.bin_sample "9:x"; set source.rows 1; set source.dropped.masked 3
manifest.json: set source.files.0.rows 1; pop splits.test
manifest.json: set source.settings.min_bytes 1; set source.fingerprint "0"
manifest.json: set splits.test.text_bytes 7
units.jsonl: flip 9; gone
plan.json: gone; set units.0.2 0; set settings.min_bytes 9; set settings.more 9
"""
# of the shards of a folder that is not merged,
SHARDS = """
00002-train.bin: cut 2; flip 9
00002-train.idx: flip 40; gone
00002-train.ids: flip 0
00002.json: swap 00003.json; gone; write {; set plan "0"; set rows 61
00009.json: copy 00002.json
00009-train.bin: copy 00002-train.bin
note.txt: write x
00002-dev.bin: write x
../plan.json: set tokenizer.eod_id 3
../tokenizer: gone
"""
# of a folder whose hashes are updated, so that only checks of the content find them,
INSIDE = """
test.bin: ids -1=9; ids 0=0; ids -1=9 0=0; ids 0=320
test.idx: lengths 0+1 1+-1; flip 74; flip -8
"""
# of an index cache,
CACHES = """
complete.json: set sources.0.idx_sha256 "0"; set sources.1.bin "0"; write {; set format 2
complete.json: pop sources.0.bin
train-indices.npy: flip 100; cut 1; gone
"""
# and of units.jsonl, with its hash in the manifest.
UNITS: tuple[Callable[[list[Any]], object], ...] = (
    lambda u: u.pop(),
    lambda u: u.reverse(),
    lambda u: u[2].update(plan="0"),
    lambda u: u[2]["splits"]["train"].update(tokens=9),
    lambda u: u[2].update(rows=61, dropped={"masked": 1 + sum(u[2]["dropped"].values())}, bad=[]),
    lambda u: u[2].update(encoder="other 1.0"),
)


def verify(folder: Path, *options: object) -> tuple[int, str]:
    """Return the exit code and output of ``verify``."""
    result = base.cli("verify", folder, *options)
    return result.returncode, result.stdout


def check_faults(
    folder: Path, table: str, change: Callable[[str], object], wording: Wording, *options: object
) -> None:
    """Check that each change is found and that its fault is reported (tests/wording.yaml) with its
    fix.
    """
    full, name = base.snapshot(folder), version("tokenizers")
    fingerprint = json.loads(full["plan.json"])["fingerprint"]
    for line in table.strip().splitlines():
        file, changes = line.split(": ", 1)
        for how in changes.split("; "):
            change(f"{file} {how}")
            code, output = verify(folder, "--sample 0", *options)
            faults = [
                line.removeprefix("fault: ")
                for line in output.splitlines()
                if line.startswith("fault: ")
            ]
            assert (
                code == 1 and faults and f"{folder}: {len(faults)} fault" in output.splitlines()[-1]
            ), (how, output)
            assert all(
                "; " in fault and re.search("--overwrite|run --out|remove it", fault)
                for fault in faults
            ), output
            printed = [fault.split("; ")[0] for fault in faults]
            wording(
                f"{file} {how}: {' | '.join(printed)}",
                DATA=folder,
                VERSION=name,
                FINGERPRINT=fingerprint[:12],
            )
            base.restore(folder, full)


def test_whole_data_passes_and_is_not_touched(made: Path, merged: Path, encoded: Path) -> None:
    assert verify(made)[0] == 0
    for folder, printed in (
        (merged, r"complete; train [\d.]+k tokens, valid .*, test "),
        (encoded, "complete; not merged yet; continue with: .* merge"),
    ):
        before = base.snapshot(folder)
        code, output = verify(folder)
        assert (
            code == 0
            and re.search(printed, output)
            and "fault" not in output
            and "not checked" not in output
        ), output
        assert (
            "hashes, indices, EOD, 100 documents encoded again agree" in output
            and base.snapshot(folder) == before
        )


def test_a_fault_is_found_and_named(data: Path, wording: Wording) -> None:
    def resealed(how: str) -> None:
        base.spoil(data, how)
        base.reseal(data, "test")

    def units(how: str) -> None:
        base.edit_units(data, UNITS[int(how.split()[1])])

    check_faults(data, MERGED, lambda how: base.spoil(data, how), wording)
    assert len(read_index(data / "test.idx").lengths) == 8
    check_faults(data, INSIDE, resealed, wording)
    check_faults(data, "units.jsonl: " + "; ".join(map(str, range(len(UNITS)))), units, wording)


def test_a_fault_in_shards_is_found_and_named(shards: Path, wording: Wording) -> None:
    check_faults(shards, SHARDS, lambda how: base.spoil(shards / "shards", how), wording)


@pytest.mark.parametrize("block", [2, 6, 64, 4096])
def test_documents_that_straddle_blocks_are_followed(
    data: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr("data_prep.verify.pairs.BLOCK_BYTES", block)
    monkeypatch.setattr("data_prep.verify.pairs.DOCUMENTS_AT_ONCE", 3)
    assert verify(data, "--sample 0")[0] == 0
    ends = np.cumsum(read_index(data / "test.idx").lengths)
    base.spoil(
        data, "test.bin ids " + " ".join(f"{ends[document] - 1}=9" for document in (0, 4, 7))
    )
    base.reseal(data, "test")
    code, output = verify(data, "--sample 0")
    assert code == 1 and "3 documents do not end in EOD, number 0 first" in output, output


def test_shards_that_a_kill_left_are_reported_and_are_no_fault(data: Path, encoded: Path) -> None:
    base.copied(encoded / "shards", data / "shards")
    assert f"not checked: {data / 'shards'}: all of it is merged" in base.done(
        "verify", data, "--sample 3"
    )


# --- the sample -----------------------------------------------------------------------------------


def test_the_sample_alone_sees_a_document_that_is_not_its_text(
    data: Path, encoded: Path, tmp_path: Path
) -> None:
    base.spoil(data, "train.bin ids 0=77")
    base.reseal(data, "train")
    assert verify(data, "--sample 0")[0] == 0
    code, output = verify(data, "--sample 1000")
    assert code == 1 and output.count("fault: ") == 1, output
    printed = (
        r"train.bin: document 0 \(unit 0, place 0 of .*rows.parquet\) is not what Hugging Face "
        r"tokenizers makes of its text, from id 0"
    )
    assert re.search(printed, output)
    shards = base.copied(encoded, tmp_path / "shards")
    base.spoil(shards / "shards", "00001-train.bin ids 0=77")
    base.reseal(shards / "shards", "00001-train", "00001.json", "train")
    code, output = verify(shards, "--sample 1000")
    assert code == 1 and "00001-train.bin: document 0 (unit 1, place 60 " in output, output


def test_a_sample_of_everything_is_everything_in_place(tmp_path: Path) -> None:
    """The tokenizer encodes some texts as EOD or as no tokens. These are dropped, and the texts
    after them are still found.
    """
    tokenizer = Tokenizer(
        models.WordLevel({"<eod>": 0, **{f"w{i}": i + 1 for i in range(50)}}, unk_token="<eod>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Strip()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<eod>"}})
    )
    texts = []
    for i in range(150):
        if i % 7 == 3:
            texts.append("   ")
        elif i % 11 == 4:
            texts.append(f"w{i % 50} unknown")
        else:
            texts.append(f"w{i % 50} w1 " * (1 + i % 3))
    file = base.write_parquet(
        tmp_path / "a.parquet", [(f"d{i}", text) for i, text in enumerate(texts)], row_group_size=40
    )
    out = base.prepared(tmp_path / "out", [file], tmp_path / "tokenizer", base.SMALL_UNITS)
    dropped = base.manifest_of(out)["source"]["dropped"]
    assert dropped == {
        "no_tokens": sum(not text.strip() for text in texts),
        "contains_eod": sum("unknown" in text for text in texts),
    }
    assert f"{150 - sum(dropped.values())} documents encoded again" in base.done(
        "verify", out, "--sample 1000"
    )


def test_inputs_gone_or_changed_are_reported_and_are_no_fault(
    tmp_path: Path, rows: Path, tokenizer: Path
) -> None:
    mine, mask = tmp_path / "mine.parquet", tmp_path / "mask.py"
    mine.write_bytes(rows.read_bytes())
    mask.write_text(
        "import numpy as np\n\ndef keep(batch, places, path):\n    return np.array(places) % "
        "2 == 0\n"
    )
    out = base.prepared(tmp_path / "out", [mine], tokenizer, f"--mask {mask}:keep")
    assert "100 documents encoded again" in base.done("verify", out)
    moved = mine.rename(tmp_path / "moved.parquet")
    base.spoil(out, f"plan.json set files.0.path {json.dumps(str(moved))}")
    assert "100 documents encoded again" in base.done("verify", out)

    def went_bad() -> None:
        raw = bytearray(moved.read_bytes())
        raw[2000:2064] = bytes(64)
        moved.write_bytes(raw)

    for change, printed in (
        (went_bad, "moved.parquet can no longer be read as it was"),
        (
            lambda: base.write_parquet(
                moved, base.rows_with_faults(250, seed=12), row_group_size=60
            ),
            "moved.parquet has changed since",
        ),
        (moved.unlink, "no such file: .*moved.parquet"),
        (mask.unlink, "mask.py"),
    ):
        change()
        output = base.done("verify", out)
        assert re.search(
            f"^not checked: a sample of unit 0 against the inputs: .*{printed}",
            output,
            re.MULTILINE,
        ), output
        assert "encoded again" not in output and "complete" in output


# --- index caches ---------------------------------------------------------------------------------


def make_cache(folder: Path, data: Path, key: str = "k" * 32) -> Path:
    """Write an index cache in the form of pretrain."""
    cache = folder / key
    cache.mkdir(parents=True)
    (cache / "train-indices.npy").write_bytes(bytes(range(200)))
    splits = base.manifest_of(data)["splits"]
    sources = [
        {
            "split": name,
            "prefix": os.path.abspath(data / name),
            "idx_sha256": splits[name]["idx_sha256"],
            "bin": splits[name][kind],
        }
        for name, kind in (("train", "bin_sha256"), ("valid", "bin_sample"))
    ]
    files = {
        "train-indices.npy": {"bytes": 200, "sha256": hashlib.sha256(bytes(range(200))).hexdigest()}
    }
    (cache / "complete.json").write_text(
        json.dumps({"format": 1, "sources": sources, "files": files})
    )
    return cache


def test_a_stale_or_damaged_index_cache_is_found(
    data: Path, merged: Path, wording: Wording
) -> None:
    """Caches of other data and unfinished caches are not faults."""
    cache, options = make_cache(data / "caches", data), f"--index-cache {data}/caches"
    base.spoil(
        make_cache(data / "caches", merged, "o" * 32), 'complete.json set sources.0.idx_sha256 "0"'
    )
    (data / "caches" / ".building-x").mkdir()
    (data / "caches" / ".lock").touch()
    assert "1 index caches (1 of other data, 1 unfinished) agree" in base.done(
        "verify", data, "--sample 0", options
    )
    check_faults(data, CACHES, lambda how: base.spoil(cache, how), wording, options)
    base.edit_json(
        cache / "complete.json",
        lambda value: value["sources"][1].update(prefix=str(data / "valid2")),
    )
    code, output = verify(data, "--sample 0", options)
    assert code == 1 and "which the data no longer has" in output
