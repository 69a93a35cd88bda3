"""Tests of ``run``: all rows are counted, no document is in two splits, the division of work does
not change the bytes, bad input.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data_prep.encode.splits import Split
from data_prep.encode.tokenizer import load_folder
from pretrain.config import load_run
from tests.data_prep import conftest as base


def run(inputs: object, tokenizer: Path, out: Path, *options: object) -> str:
    files = inputs if isinstance(inputs, list) else [inputs]
    return base.done("run", *files, f"--tokenizer {tokenizer} --out {out}", base.HF, *options)


def texts(folder: Path, tokenizer: Path) -> dict[str, list[str]]:
    """Return the decoded documents of each split, without EOD.

    Every document must end in EOD, and every row must be written or dropped.
    """
    info, manifest = load_folder(tokenizer), base.manifest_of(folder)
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    result = {}
    for name in manifest["splits"]:
        split = base.read_split(folder, name)
        assert all(ids[-1] == info.eod_id and ids.count(info.eod_id) == 1 for ids in split)
        result[name] = [decoder.decode(ids[:-1], skip_special_tokens=False) for ids in split]
    assert manifest["source"]["rows"] == sum(map(len, result.values())) + sum(
        manifest["source"]["dropped"].values()
    )
    return result


def dropped(folder: Path) -> Any:
    return base.manifest_of(folder)["source"]["dropped"]


def test_every_document_lands_whole_in_the_split_of_its_id(
    made: Path, tokenizer: Path, documents: list[tuple[str, str]]
) -> None:
    expected: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    ids: dict[str, str] = {"train": "", "valid": "", "test": ""}
    for document_id, text in documents:
        expected[Split(10, 5).of(document_id.encode())].append(text)
        ids[Split(10, 5).of(document_id.encode())] += f"{document_id}\n"
    assert all(expected.values()) and texts(made, tokenizer) == expected
    manifest, raw = base.manifest_of(made), (tokenizer / "tokenizer.json").read_bytes()
    assert (
        manifest["format"] == 2
        and manifest["dtype"] == "uint16"
        and (made / "tokenizer" / "tokenizer.json").read_bytes() == raw
    )
    assert manifest["tokenizer"] == {
        "path": "tokenizer",
        "vocab_size": 320,
        "eod_id": 0,
        "sha256": hashlib.sha256(raw).hexdigest(),
    }
    for name, entry in manifest["splits"].items():
        binary, index = (made / f"{name}.bin").read_bytes(), (made / f"{name}.idx").read_bytes()
        assert entry == {
            "documents": len(expected[name]),
            "tokens": len(binary) // 2,
            "text_bytes": sum(len(text.encode()) for text in expected[name]),
            "bin_sha256": hashlib.sha256(binary).hexdigest(),
            "idx_sha256": hashlib.sha256(index).hexdigest(),
            "bin_bytes": len(binary),
            "idx_bytes": len(index),
            "bin_sample": entry["bin_sample"],
            "ids": {
                "bytes": len(ids[name]),
                "sha256": hashlib.sha256(ids[name].encode()).hexdigest(),
            },
        }
        assert (made / f"{name}.ids").read_text() == ids[name]
    files = {f"{name}.{kind}" for name in ids for kind in ("bin", "idx", "ids")}
    names = {".lock", "manifest.json", "plan.json", "tokenizer", "units.jsonl", *files}
    assert {path.name for path in made.iterdir()} == names


def test_order_of_inputs_and_row_groups_do_not_change_a_documents_split(
    tmp_path: Path, tokenizer: Path, documents: list[tuple[str, str]], made: Path
) -> None:
    mixed, folder = documents.copy(), tmp_path / "folder" / "deeper"
    random.Random(1).shuffle(mixed)
    folder.mkdir(parents=True)
    files = [
        base.write_parquet(folder / f"{i}.parquet", mixed[i::3], row_group_size=17)
        for i in range(3)
    ]
    run(files, tokenizer, tmp_path / "out", base.SHARES)
    found, expected = (texts(out, tokenizer) for out in (tmp_path / "out", made))
    assert {name: sorted(part) for name, part in found.items()} == {
        name: sorted(part) for name, part in expected.items()
    }
    run(tmp_path / "folder", tokenizer, tmp_path / "whole", base.SHARES)
    assert base.merged_hashes(tmp_path / "whole") == base.merged_hashes(tmp_path / "out")


def test_same_run_is_left_alone_another_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, made: Path
) -> None:
    out = base.copied(made, tmp_path / "data")
    before, other = base.snapshot(out), "--valid-percent 10 --test-percent 0"
    assert "unchanged" in run(corpus, tokenizer, out, base.SHARES)
    run(shutil.copy(corpus, tmp_path / "renamed.parquet"), tokenizer, out, base.SHARES)
    command = ("run", corpus, f"--tokenizer {tokenizer} --out {out}", other, base.HF)
    assert "--overwrite" in base.refused(*command) and base.snapshot(out) == before
    output = base.done(*command, "--overwrite")
    hint = shlex.split(output.splitlines()[-1])  # a command that trains on these splits
    suggested = load_run(base.ROOT / "configs" / "run" / "demo.yaml", [w for w in hint if "=" in w])
    assert suggested.data.train[0].prefix == str(out / "train")
    assert (suggested.data.valid[0].prefix, suggested.data.test) == (str(out / "valid"), ())
    assert not (out / "test.bin").exists() and set(base.manifest_of(out)["splits"]) == {
        "train",
        "valid",
    }
    (out / "train.idx").unlink()
    assert "train.idx" in base.refused(*command)
    base.done(*command, "--overwrite")
    assert "complete" in base.done("verify", out)


def test_the_tokenizer_may_lie_in_the_output_folder(
    tmp_path: Path, corpus: Path, tokenizer: Path, made: Path
) -> None:
    base.copied(tokenizer, tmp_path / "tokenizer")
    for options in ([], ["--overwrite"]):
        run(corpus, tmp_path / "tokenizer", tmp_path, base.SHARES, *options)
        assert (
            base.merged_hashes(tmp_path) == base.merged_hashes(made)
            and (tmp_path / "tokenizer" / "training.json").exists()
        )


# --- the same bytes -------------------------------------------------------------------------------


def test_workers_and_the_size_of_units_do_not_change_a_byte(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path
) -> None:
    run(many, tokenizer, tmp_path / "out", base.SHARES, base.SMALL_UNITS, "--workers 3")
    assert base.snapshot(tmp_path / "out") == base.snapshot(many_made)
    for unit_mb in ("0.05", "1000"):
        out = base.prepared(tmp_path / unit_mb, [many], tokenizer, f"--unit-mb {unit_mb}")
        assert base.merged_hashes(out) == base.merged_hashes(many_made)
        assert (base.manifest_of(out)["units"]["count"] == 1) == (unit_mb == "1000")


def test_tasks_one_after_the_other_do_not_change_a_byte(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path
) -> None:
    out = base.plan_folder(tmp_path / "out", [many], tokenizer, base.SMALL_UNITS)
    tasks = [2, 0, 1]
    for done, task in enumerate(tasks, 1):
        command = ("run", f"--out {out} --task-id {task} --tasks 3 --workers 1", base.HF)
        base.done(*command)
        expected = {number for number in range(40) if number % 3 in tasks[:done]}
        assert base.entries(out) == expected and not (out / "manifest.json").exists()
        assert "nothing to do" in base.done(*command)
    base.done("merge", out)
    assert base.snapshot(out) == base.snapshot(many_made)


@pytest.mark.slow
def test_tasks_at_once_each_planning_too_do_not_change_a_byte(
    tmp_path: Path, rows: Path, tokenizer: Path, merged: Path
) -> None:
    out = tmp_path / "out"
    array = {"MIN": "5", "STEP": "2", "COUNT": "3"}
    environment = {f"SLURM_ARRAY_TASK_{name}": value for name, value in array.items()}
    files = f"--tokenizer {tokenizer} --out {out} --workers 1"
    command = ("run", rows, files, base.SHARES, base.SMALL_UNITS, base.HF)
    tasks = [
        base.start(*command, **environment, SLURM_ARRAY_TASK_ID=number)
        for number in ("9", "5", "7")
    ]
    for task in tasks:
        assert task.communicate(timeout=300)[1] == "" and task.returncode == 0
    assert base.snapshot(base.merge(out)) == base.snapshot(merged)


DAMAGE = """
00000.json gone
00001.json write {
00002-train.bin gone
00003-train.idx write short
00004.json set plan "another"
"""


def test_a_restart_does_what_is_left(shards: Path, merged: Path) -> None:
    before = base.snapshot(shards)
    command = ("run", f"--out {shards} --task-id 0 --tasks 1", base.HF)
    for how in DAMAGE.strip().splitlines():
        base.spoil(shards / "shards", how)
        assert "1 of 5 units to do" in base.done(*command) and base.snapshot(shards) == before, how
    base.edit_json(
        shards / "shards" / "00002.json",
        lambda e: e.update(rows=e["rows"] + 1, dropped=e["dropped"] | {"masked": 1}),
    )
    assert "1 of 5 units to do" in base.done(*command) and base.snapshot(
        base.merge(shards)
    ) == base.snapshot(merged)


def test_a_plan_is_done_from_any_folder_and_only_the_files_to_be_read_are_needed(
    tmp_path: Path, tokenizer: Path
) -> None:
    (tmp_path / "here").mkdir()
    for name, seed in (("a", 1), ("b", 2), ("moved", 2)):
        base.write_parquet(
            tmp_path / "here" / f"{name}.parquet", base.make_documents(50, 20, seed=seed)
        )
    inputs, here = ("a.parquet", "b.parquet"), str(tmp_path / "here")
    options = f"--tokenizer {tokenizer} --out {tmp_path}/out {base.ALL_TRAIN}"
    base.done("plan", *inputs, options, HERE=here)
    base.done("run", f"--out {tmp_path}/out --task-id 0 --tasks 2", base.HF)
    # The same inputs, one of them in another place.
    base.done("plan", "a.parquet", "moved.parquet", options, HERE=here)
    for name in inputs:
        (tmp_path / "here" / name).unlink()
    base.done("run", f"--out {tmp_path}/out --task-id 1 --tasks 2", base.HF)
    base.done("merge", tmp_path / "out")
    assert len(base.read_split(tmp_path / "out", "train")) == 100


# --- bad input ------------------------------------------------------------------------------------


def test_bad_rows_are_dropped_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    good = [
        ("a", b"alpha"),
        ("b", "βeta 🙂\x00".encode()),
        ("c", b" "),
        ("d", b"<|endoftext|>"),
        ("7", b"seven"),
    ]
    bad = [
        ("e", None),
        ("f", b""),
        ("g", b"\xff\xfe bad"),
        ("h", b"ok \xed\xa0\x80"),
        (None, b"no id"),
        ("i", None),
    ]
    rows = [row for pair in zip(bad, good, strict=False) for row in pair] + bad[len(good) :]
    body = pa.array([text for _, text in rows], pa.binary()).view(pa.string()).dictionary_encode()
    file, out = tmp_path / "a.parquet", tmp_path / "out"
    pq.write_table(pa.table({"name": [i for i, _ in rows], "body": body}), file, row_group_size=4)
    columns = "--text-column body --id-column name"
    run(file, tokenizer, out, columns, base.ALL_TRAIN, "--max-bad 6")
    assert dropped(out) == {"null_text": 2, "empty_text": 1, "invalid_utf8": 2, "null_id": 1}
    assert [text.encode() for text in texts(out, tokenizer)["train"]] == [text for _, text in good]


@pytest.mark.parametrize("how", ["zeros", "bit"])
def test_a_damaged_row_group_fails_the_job_at_its_end_and_its_work_is_kept(
    tmp_path: Path, tokenizer: Path, how: str
) -> None:
    """The damage is zeros, or one letter in a page without compression and encoding, which only the
    checksum detects.
    """
    file, out = tmp_path / "corrupt.parquet", tmp_path / "out"
    documents = base.make_documents(300, 40, seed=5)
    table = pa.table({"id": [d[0] for d in documents], "text": [d[1] for d in documents]})
    pq.write_table(
        table,
        file,
        compression="none",
        use_dictionary=False,
        row_group_size=100,
        write_page_checksum=True,
    )
    raw = bytearray(file.read_bytes())
    at = raw.index(b" import ", len(raw) // 2)
    raw[at : at + 40] = bytes(40) if how == "zeros" else b" Import " + raw[at + 8 : at + 40]
    file.write_bytes(raw)
    files = f"--tokenizer {tokenizer} --out {out}"
    command = ("run", file, files, base.SHARES, base.SMALL_UNITS, base.HF)
    for limit in ([], ["--max-bad 99"], ["--max-bad 33%"], ["--max-bad 0"]):
        result = base.cli(*command, *limit)
        assert (
            result.returncode == 1
            and not (out / "manifest.json").exists()
            and not base.merged_hashes(out)
        ), result
        assert result.stderr.startswith(
            "data_prep: error: 100 of 300 rows are bad (100 unreadable), more than --max-bad"
        )
        assert (
            "corrupt.parquet, row 100: unreadable (" in result.stderr
            and "row group 1 of 3 cannot be read" in result.stderr
        )
    (place,) = [json.loads(line) for line in (out / "bad_rows.jsonl").read_text().splitlines()]
    assert (place["place"], place["reason"]) == (100, "unreadable")
    assert "units to do" not in base.done(*command, "--max-bad 100")
    assert dropped(out) == {"unreadable": 100} and texts(out, tokenizer)


def test_max_bad_counts_faults_alone_and_lists_their_places(
    tmp_path: Path, tokenizer: Path
) -> None:
    rows = [(f"d{i}", None if 100 <= i < 150 else "text " * (1 + i % 3)) for i in range(1000)]
    file, out = base.write_parquet(tmp_path / "rows.parquet", rows), tmp_path / "out"
    files = f"--tokenizer {tokenizer} --out {out} --min-bytes 9"
    command = ("run", file, files, base.ALL_TRAIN, base.HF)
    for limit in ("49", "4.9%"):
        result = base.cli(*command, f"--max-bad {limit}")
        lines = result.stderr.splitlines()
        assert (
            lines[0].startswith("data_prep: error: 50 of 1,000 rows are bad (50 null_text)")
            and "bad_rows.jsonl" in lines[0]
        )
        assert (
            result.returncode == 1
            and lines[1] == f"  {file}, row 100: null_text"
            and len(lines) == 22
        ), result
    assert len((out / "bad_rows.jsonl").read_text().splitlines()) == 50
    base.done(*command, "--max-bad 5%")
    assert (
        dropped(out)["null_text"] == 50
        and dropped(out)["below_min_bytes"] > 300
        and texts(out, tokenizer)
    )


@pytest.mark.parametrize("kind", [pytest.param("gz", marks=pytest.mark.slow), "zst"])
def test_a_stream_that_is_cut_off_fails_whatever_the_share(
    tmp_path: Path, tokenizer: Path, kind: str
) -> None:
    noise = random.Random(5)
    raw = "\n".join(
        json.dumps({"id": f"d{i}", "text": f"{i} {noise.randbytes(300).hex()}"})
        for i in range(2000)
    ).encode()
    file, out = tmp_path / f"cut.jsonl.{kind}", tmp_path / "out"
    full = gzip.compress(raw, 1) if kind == "gz" else pa.Codec("zstd").compress(raw, asbytes=True)
    file.write_bytes(full[: int(0.7 * len(full))])
    command = ("run", file, f"--tokenizer {tokenizer} --out {out}", base.ALL_TRAIN, base.HF)
    for limit in ([], ["--max-bad 1000"], ["--max-bad 99%"]):
        result = base.cli(*command, *limit)
        assert result.returncode == 1 and not (out / "manifest.json").exists(), result
        assert (
            "1 cut_off" in result.stderr
            and str(file) in result.stderr
            and "--max-bad 100%" in result.stderr
        )
    base.done(*command, "--max-bad 100%")
    assert dropped(out) == {"cut_off": 1} and 500 < len(texts(out, tokenizer)["train"]) < 2000
    checked = base.done("verify", out)
    assert "documents encoded again" in checked and "not checked" not in checked, checked


@pytest.mark.parametrize(
    ("encoder", "limit"),
    [
        ("hf", []),
        pytest.param("gigatoken", [], marks=pytest.mark.slow),
        pytest.param("gigatoken", ["--max-bytes 60000000"], marks=pytest.mark.slow),
    ],
)
def test_a_document_of_50_mb_among_small_ones(
    tmp_path: Path, tokenizer: Path, encoder: str, limit: list[str]
) -> None:
    """The document is dropped at the default limit and written with a higher limit. All other
    documents are written.
    """
    long, out = "word and number 12345 " * (50_000_000 // 22), tmp_path / "out"
    file = base.write_parquet(
        tmp_path / "long.parquet", [("a", "first"), ("long", long), ("b", "last")]
    )
    run(file, tokenizer, out, base.ALL_TRAIN, *limit, f"--encoder {encoder}")
    assert dropped(out) == ({} if limit else {"above_max_bytes": 1})
    assert texts(out, tokenizer)["train"] == ["first", *[long] * bool(limit), "last"]


def test_malformed_lines_and_lone_surrogates_in_json(tmp_path: Path, tokenizer: Path) -> None:
    lines = [
        *(
            b'{"id": "a", "text": "fine"}',
            b'{"id": "b", "text": "lone \\ud800 surrogate"}',
            b'{"id": "c", "text": "never closed',
        ),
        *(
            b'{"id": "d"}',
            b'{"id": "e", "text": null}',
            b'{"id": "f", "text": ""}',
            b'{"text": "no id"}',
            b"[1, 2]",
        ),
        *(
            b'{"id": "g", "text": "not \xff UTF-8"}',
            b'{"id": "h", "text": 5}',
            b'{"id": "i", "text": "<|endoftext|> is text"}',
        ),
        b'{"id": "j", "text": "last, without a line end"}',
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    run(tmp_path / "rows.jsonl", tokenizer, tmp_path / "out", base.ALL_TRAIN, "--max-bad 9")
    assert dropped(tmp_path / "out") == {
        "null_text": 1,
        "empty_text": 1,
        "invalid_utf8": 2,
        "null_id": 1,
        "malformed": 4,
    }
    assert texts(tmp_path / "out", tokenizer)["train"] == [
        "fine",
        "<|endoftext|> is text",
        "last, without a line end",
    ]
