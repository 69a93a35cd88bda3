"""The promises of ``run``: nothing lost uncounted, no document in two splits, the same bytes however the work is divided."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from data_prep.__main__ import main
from data_prep.encode.splits import Split
from data_prep.encode.tokenizer import load_folder
from tests.data_prep.conftest import HF, SHARES, SMALL_UNITS, make_documents, merged_hashes, read_split, snapshot, start, write_parquet

NO_SPLITS = ("--valid-percent", "0", "--test-percent", "0")


def run(inputs: list[Path], tokenizer: Path, out: Path, *options: str) -> int:
    return main(["run", *map(str, inputs), "--tokenizer", str(tokenizer), "--out", str(out), *HF, *options])


def texts(folder: Path, tokenizer: Path) -> dict[str, list[str]]:
    """The documents of each split, decoded; EOD taken off after a check that it is there."""
    info, decoder = load_folder(tokenizer), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    result = {}
    for name in ("train", "valid", "test"):
        split = read_split(folder, name)
        assert all(ids[-1] == info.eod_id and ids.count(info.eod_id) == 1 for ids in split)
        result[name] = [decoder.decode(ids[:-1], skip_special_tokens=False) for ids in split]
    return result


def test_every_document_lands_whole_in_the_split_of_its_id(made: Path, tokenizer: Path, documents: list[tuple[str, str]]) -> None:
    split = Split(10, 5)
    expected: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for document_id, text in documents:
        expected[split.of(document_id.encode())].append(text)
    assert all(expected.values())
    assert texts(made, tokenizer) == expected


def test_manifest_says_what_is_there(made: Path, tokenizer: Path, documents: list[tuple[str, str]]) -> None:
    manifest = json.loads((made / "manifest.json").read_text())
    found = texts(made, tokenizer)
    assert manifest["format"] == 2 and manifest["dtype"] == "uint16"
    raw = (tokenizer / "tokenizer.json").read_bytes()
    assert manifest["tokenizer"] == {"path": "tokenizer", "vocab_size": 320, "eod_id": 0, "sha256": hashlib.sha256(raw).hexdigest()}
    assert set(manifest["splits"]) == {"train", "valid", "test"}
    for name, entry in manifest["splits"].items():
        binary, index = (made / f"{name}.bin").read_bytes(), (made / f"{name}.idx").read_bytes()
        assert entry == {
            "documents": len(found[name]),
            "tokens": len(binary) // 2,
            "text_bytes": sum(len(text.encode()) for text in found[name]),
            "bin_sha256": hashlib.sha256(binary).hexdigest(),
            "idx_sha256": hashlib.sha256(index).hexdigest(),
            "bin_bytes": len(binary),
            "idx_bytes": len(index),
            "bin_sample": entry["bin_sample"],
        }
    assert manifest["source"]["rows"] == len(documents)
    names = {path.name for path in made.iterdir()}
    assert names == {".lock", "manifest.json", "plan.json", "tokenizer", "units.jsonl", *merged_hashes(made)}
    assert (made / "tokenizer" / "tokenizer.json").read_bytes() == raw


def test_order_of_inputs_and_row_groups_do_not_change_a_documents_split(
    tmp_path: Path, tokenizer: Path, documents: list[tuple[str, str]], made: Path
) -> None:
    mixed = list(documents)
    random.Random(1).shuffle(mixed)
    files = [write_parquet(tmp_path / f"{i}.parquet", mixed[i::3], row_group_size=17) for i in range(3)]
    assert run(files, tokenizer, tmp_path / "out", *SHARES) == 0
    assert {name: sorted(t) for name, t in texts(tmp_path / "out", tokenizer).items()} == {
        name: sorted(t) for name, t in texts(made, tokenizer).items()
    }
    assert run([tmp_path / "*.parquet"], tokenizer, tmp_path / "glob", *SHARES) == 0
    assert (tmp_path / "glob" / "train.bin").read_bytes() == (tmp_path / "out" / "train.bin").read_bytes()
    folder = tmp_path / "folder" / "deeper"
    folder.mkdir(parents=True)
    for file in files:
        shutil.copy(file, folder)
    assert run([tmp_path / "folder"], tokenizer, tmp_path / "from_folder", *SHARES) == 0
    assert (tmp_path / "from_folder" / "train.bin").read_bytes() == (tmp_path / "out" / "train.bin").read_bytes()


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_bad_rows_are_dropped_and_counted(tmp_path: Path, tokenizer: Path, text_type: pa.DataType) -> None:
    good = [("a", b"alpha"), ("b", "βeta 🙂\x00".encode()), ("c", b" "), ("d", b"<|endoftext|>"), ("7", b"seven")]
    bad = [("e", None), ("f", b""), ("g", b"\xff\xfe bad"), ("h", b"ok \xed\xa0\x80"), (None, b"no id"), ("i", None)]
    rows = [row for pair in zip(bad, good, strict=False) for row in pair] + bad[len(good) :]
    raw = pa.array([text for _, text in rows], pa.binary())
    column = (
        raw.cast(pa.large_binary()).view(pa.large_string())
        if text_type == pa.large_string()
        else raw
        if text_type == pa.binary()
        else raw.view(pa.string())
    )
    if pa.types.is_dictionary(text_type):
        column = column.dictionary_encode()
    table = pa.table({"name": pa.array([i for i, _ in rows]), "body": column})
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=4)
    out = tmp_path / "out"
    columns = ["--text-column", "body", "--id-column", "name"]
    assert run([tmp_path / "rows.parquet"], tokenizer, out, *columns, *NO_SPLITS, "--max-bad", "6") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"]["dropped"] == {"null_text": 2, "empty_text": 1, "invalid_utf8": 2, "null_id": 1}
    assert manifest["source"]["rows"] == manifest["splits"]["train"]["documents"] + 6
    assert set(manifest["splits"]) == {"train"}
    decoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert [decoder.decode(ids[:-1], skip_special_tokens=False).encode() for ids in read_split(out, "train")] == [text for _, text in good]


def test_integer_ids_are_ids(tmp_path: Path, tokenizer: Path) -> None:
    pq.write_table(pa.table({"id": [3, 4, 5], "text": ["x", "y", "z"]}), tmp_path / "a.parquet")
    assert run([tmp_path / "a.parquet"], tokenizer, tmp_path / "out", *NO_SPLITS) == 0
    assert len(read_split(tmp_path / "out", "train")) == 3


def test_text_that_a_tokenizer_turns_into_eod_or_nothing_is_dropped_and_counted(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<eod>": 0, "word": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eod>"}}))
    file = write_parquet(tmp_path / "a.parquet", [("a", "word word"), ("b", "word <eod> word"), ("c", "   "), ("d", "other")])
    assert run([file], tmp_path, tmp_path / "out", *NO_SPLITS, "--max-bad", "50%") == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["source"]["dropped"] == {"no_tokens": 1, "contains_eod": 1}
    assert read_split(tmp_path / "out", "train") == [[1, 1, 0], [2, 0]]


def test_same_run_is_left_alone_another_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    shutil.copytree(made, out)
    before = snapshot(out)
    assert run([corpus], tokenizer, out, *SHARES) == 0
    assert "unchanged" in capsys.readouterr().out
    moved = shutil.copy(corpus, tmp_path / "renamed.parquet")
    assert run([Path(moved)], tokenizer, out, *SHARES) == 0
    assert run([corpus], tokenizer, out, "--valid-percent", "10", "--test-percent", "0") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert snapshot(out) == before
    assert run([corpus], tokenizer, out, "--valid-percent", "10", "--test-percent", "0", "--overwrite") == 0
    assert not (out / "test.bin").exists() and set(json.loads((out / "manifest.json").read_text())["splits"]) == {"train", "valid"}
    assert main(["verify", str(out)]) == 0
    (out / "train.idx").unlink()
    assert run([corpus], tokenizer, out, "--valid-percent", "10", "--test-percent", "0") == 2
    assert "train.idx" in capsys.readouterr().err
    assert run([corpus], tokenizer, out, "--valid-percent", "10", "--test-percent", "0", "--overwrite") == 0
    assert main(["verify", str(out)]) == 0


def test_files_of_unknown_origin_are_not_replaced(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "valid.bin").write_bytes(b"mine")
    assert run([corpus], tokenizer, tmp_path, *SHARES) == 2
    assert "valid.bin exists" in capsys.readouterr().err
    assert snapshot(tmp_path) == {"valid.bin": b"mine"}


def test_tokenizer_may_lie_in_the_output_folder(tmp_path: Path, corpus: Path, tokenizer: Path, made: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    for options in ([], ["--overwrite"]):
        assert run([corpus], tmp_path / "tokenizer", tmp_path, *SHARES, *options) == 0
        assert (tmp_path / "train.bin").read_bytes() == (made / "train.bin").read_bytes()
        assert (tmp_path / "tokenizer" / "training.json").exists()


def test_empty_split_is_named(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "few.parquet", make_documents(3, 5))
    assert run([file], tokenizer, tmp_path / "out", "--valid-percent", "0.001", "--test-percent", "0") == 2
    assert "valid would be empty" in capsys.readouterr().err
    assert not merged_hashes(tmp_path / "out")
    assert run([file], tokenizer, tmp_path / "out", *NO_SPLITS, "--overwrite") == 0


# --- the same bytes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [3])
def test_workers_do_not_change_a_byte(tmp_path: Path, many: Path, tokenizer: Path, many_made: Path, workers: int) -> None:
    assert run([many], tokenizer, tmp_path / "out", *SHARES, *SMALL_UNITS, "--workers", str(workers)) == 0
    assert snapshot(tmp_path / "out") == snapshot(many_made)


@pytest.mark.parametrize("unit_mb", ["0.05", "1000"])
def test_the_size_of_units_does_not_change_the_merged_bytes(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path, unit_mb: str
) -> None:
    assert run([many], tokenizer, tmp_path / "out", *SHARES, "--unit-mb", unit_mb) == 0
    assert merged_hashes(tmp_path / "out") == merged_hashes(many_made)
    count = json.loads((tmp_path / "out" / "manifest.json").read_text())["units"]["count"]
    assert count < 40 and (count == 1) == (unit_mb == "1000")


def plan(many: Path, tokenizer: Path, out: Path) -> None:
    assert main(["plan", str(many), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES, *SMALL_UNITS]) == 0


@pytest.mark.parametrize("order", [[2, 0, 1]])
def test_tasks_in_any_order_do_not_change_a_byte(tmp_path: Path, many: Path, tokenizer: Path, many_made: Path, order: list[int]) -> None:
    out = tmp_path / "out"
    plan(many, tokenizer, out)
    for done, task in enumerate(order, 1):
        assert main(["run", "--out", str(out), "--task-id", str(task), "--tasks", str(len(order)), "--workers", "1", *HF]) == 0
        entries = {int(path.stem) for path in (out / "shards").glob("*.json")}
        assert entries == {number for number in range(40) if number % len(order) in order[:done]}
        assert not (out / "manifest.json").exists()
    assert main(["merge", str(out)]) == 0
    assert snapshot(out) == snapshot(many_made)


def test_tasks_at_once_each_planning_too_do_not_change_a_byte(tmp_path: Path, many: Path, tokenizer: Path, many_made: Path) -> None:
    out, array = tmp_path / "out", {"SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_STEP": "2", "SLURM_ARRAY_TASK_COUNT": "3"}
    options = ("--tokenizer", tokenizer, "--out", out, *SHARES, *SMALL_UNITS, "--workers", 1, *HF)
    tasks = [start("run", many, *options, **array, SLURM_ARRAY_TASK_ID=number) for number in ("9", "5", "7")]
    for task in tasks:
        assert task.communicate(timeout=60)[1] == "" and task.returncode == 0
    assert main(["merge", str(out)]) == 0
    assert snapshot(out) == snapshot(many_made)


def test_a_task_with_nothing_to_do_says_so(tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", str(corpus), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--tasks", "2", *HF]
    assert main([*command, "--task-id", "1"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    for said in ("1 of 1 unit to do", "nothing to do"):
        assert main([*command, "--task-id", "0"]) == 0
        assert said in capsys.readouterr().out


def test_a_restart_does_what_is_left(
    tmp_path: Path, many: Path, tokenizer: Path, many_made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    plan(many, tokenizer, out)
    assert main(["run", "--out", str(out), "--task-id", "0", "--tasks", "1", *HF]) == 0
    shards = out / "shards"
    (shards / "00003.json").unlink()  # never finished
    (shards / "00007.json").write_bytes(b"{")  # damaged
    (shards / "00011-train.bin").unlink()  # its file is gone
    (shards / "00013-train.idx").write_bytes(b"short")
    other = json.loads((shards / "00017.json").read_text()) | {"plan": "another"}
    (shards / "00017.json").write_text(json.dumps(other))
    before = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.json")}
    assert main(["merge", str(out)]) == 2
    capsys.readouterr()
    assert main(["run", "--out", str(out), "--task-id", "0", "--tasks", "1", *HF]) == 0
    assert "5 of 40 units to do" in capsys.readouterr().out
    after = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.json")}
    again = {name for name in after if after[name] != before.get(name)}
    assert again == {f"{number:05d}.json" for number in (3, 7, 11, 13, 17)}
    assert main(["run", "--out", str(out), *HF]) == 0
    assert snapshot(out) == snapshot(many_made)


def test_moved_inputs_are_the_same_inputs(tmp_path: Path, many: Path, tokenizer: Path, many_made: Path) -> None:
    out, first = tmp_path / "out", Path(shutil.copy(many, tmp_path / "first.parquet"))
    plan(first, tokenizer, out)
    assert main(["run", "--out", str(out), "--task-id", "0", "--tasks", "2", *HF]) == 0
    second = first.rename(tmp_path / "second.parquet")
    assert main(["run", "--out", str(out)]) == 2
    assert run([second], tokenizer, out, *SHARES, *SMALL_UNITS) == 0
    assert merged_hashes(out) == merged_hashes(many_made)


def test_a_plan_is_done_from_any_folder_and_only_the_files_to_be_read_are_needed(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    for name, seed in (("a", 1), ("b", 2)):
        write_parquet(tmp_path / "here" / f"{name}.parquet", make_documents(50, 20, seed=seed))
    monkeypatch.chdir(tmp_path / "here")
    out = tmp_path / "out"
    assert main(["plan", "a.parquet", "b.parquet", "--tokenizer", str(tokenizer), "--out", str(out), *NO_SPLITS]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--out", str(out), "--task-id", "0", "--tasks", "2"]) == 0
    (tmp_path / "here" / "a.parquet").unlink()
    assert main(["run", "--out", str(out), "--task-id", "1", "--tasks", "2"]) == 0
    assert main(["merge", str(out)]) == 0
    assert len(read_split(out, "train")) == 100
