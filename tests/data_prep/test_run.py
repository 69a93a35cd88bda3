"""The promises of ``run``: nothing lost uncounted, no document in two splits, the same bytes always, whole or absent."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_prep.__main__ import main
from data_prep.documents import Split, hash64
from data_prep.encoder import Encoder, load_folder
from tests.data_prep.conftest import ROOT, command, make_documents, read_split, snapshot, write_parquet

SHARES = ["--valid-percent", "10", "--test-percent", "5"]


def run(inputs: list[Path], tokenizer: Path, out: Path, *options: str) -> int:
    return main(["run", *map(str, inputs), "--tokenizer", str(tokenizer), "--out", str(out), *options])


def texts(folder: Path, tokenizer: Path) -> dict[str, list[str]]:
    """The documents of each split, decoded; EOD taken off after a check that it is there."""
    info = load_folder(tokenizer)
    decoder = Encoder(info).tokenizer
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
    assert manifest["format"] == 1 and manifest["dtype"] == "uint16"
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
        }
    assert manifest["source"]["rows"] == len(documents)
    assert not (made / ".unfinished").exists()
    assert (made / "tokenizer" / "tokenizer.json").read_bytes() == raw


def test_split_follows_the_hash_of_the_id_and_the_shares() -> None:
    ids = [f"id-{i}".encode() for i in range(20000)]
    counts = Counter(Split(4, 1).of(document_id) for document_id in ids)
    # binomial, 20000 draws: standard deviations 28 and 14; 5 of each
    assert abs(counts["valid"] - 800) < 140 and abs(counts["test"] - 200) < 70
    share = int.from_bytes(hashlib.blake2b(b"id-7", digest_size=8).digest(), "big") / 2**64
    assert hash64(b"id-7") / 2**64 == share
    below, above = 100 * share - 1e-6, 100 * share + 1e-6
    assert Split(0, below).of(b"id-7") == "train" and Split(0, above).of(b"id-7") == "test"
    assert Split(above, 0).of(b"id-7") == "valid"
    assert Split(0, 0).names == ("train",)


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
    assert run([tmp_path / "rows.parquet"], tokenizer, out, *columns, "--valid-percent", "0", "--test-percent", "0") == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["source"]["dropped"] == {"null_text": 2, "empty_text": 1, "invalid_utf8": 2, "null_id": 1}
    assert manifest["source"]["rows"] == manifest["splits"]["train"]["documents"] + 6
    assert set(manifest["splits"]) == {"train"}
    decoder = Encoder(load_folder(tokenizer)).tokenizer
    assert [decoder.decode(ids[:-1], skip_special_tokens=False).encode() for ids in read_split(out, "train")] == [text for _, text in good]


def test_integer_ids_are_ids(tmp_path: Path, tokenizer: Path) -> None:
    pq.write_table(pa.table({"id": [3, 4, 5], "text": ["x", "y", "z"]}), tmp_path / "a.parquet")
    assert run([tmp_path / "a.parquet"], tokenizer, tmp_path / "out", "--valid-percent", "0", "--test-percent", "0") == 0
    assert len(read_split(tmp_path / "out", "train")) == 3


def test_text_that_a_tokenizer_turns_into_eod_or_nothing_is_dropped_and_counted(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<eod>": 0, "word": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Strip()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<eod>"}}))
    file = write_parquet(tmp_path / "a.parquet", [("a", "word word"), ("b", "word <eod> word"), ("c", "   "), ("d", "other")])
    assert run([file], tmp_path, tmp_path / "out", "--valid-percent", "0", "--test-percent", "0") == 0
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


def test_empty_split_is_named_and_leaves_nothing(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "few.parquet", make_documents(3, 5))
    assert run([file], tokenizer, tmp_path / "out", "--valid-percent", "0.001", "--test-percent", "0") == 2
    assert "'valid' would be empty" in capsys.readouterr().err
    assert snapshot(tmp_path / "out") == {}


def test_second_run_at_the_same_time_is_refused(tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from data_prep.files import Staging

    with Staging(tmp_path / "out") as staging:
        assert run([corpus], tokenizer, tmp_path / "out", *SHARES) == 2
        assert "another data_prep process" in capsys.readouterr().err
        assert staging.path.is_dir()


def test_sigkill_leaves_no_final_name_and_a_rerun_gives_the_same(tmp_path: Path, tokenizer: Path) -> None:
    file = write_parquet(tmp_path / "big.parquet", make_documents(12000, 100), row_group_size=500)
    assert run([file], tokenizer, tmp_path / "whole", *SHARES) == 0
    whole = snapshot(tmp_path / "whole")
    out = tmp_path / "killed"
    arguments = command("run", file, "--tokenizer", tokenizer, "--out", out, *SHARES)
    killed = 0
    for wait in (0.0, 0.1, 0.3):
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        binary = out / ".unfinished" / "train.bin"
        deadline = time.monotonic() + 30
        while process.poll() is None and not (binary.exists() and binary.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
        assert [path.name for path in out.iterdir()] == [".unfinished"]
    assert killed == 3
    assert run([file], tokenizer, out, *SHARES) == 0
    assert snapshot(out) == whole


@pytest.mark.parametrize("moves", [1, 4, 8])
def test_sigkill_while_names_are_moved_is_mended_by_a_rerun(tmp_path: Path, corpus: Path, tokenizer: Path, made: Path, moves: int) -> None:
    out = tmp_path / "out"
    code = f"""
import os, signal, sys
from data_prep.__main__ import main
move, left = os.replace, [{moves}]
def replace(source, target):
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    move(source, target)
os.replace = replace
sys.exit(main(sys.argv[1:]))
"""
    arguments = ["run", str(corpus), "--tokenizer", str(tokenizer), "--out", str(out), *SHARES]
    result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True)
    assert result.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    finals = {name: content for name, content in snapshot(out).items() if not name.startswith(".unfinished")}
    assert len(finals) == moves
    assert finals.items() <= snapshot(made).items()
    assert main(arguments) == 0
    assert snapshot(out) == snapshot(made)


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    code = """
import resource, sys
from data_prep.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
sys.exit(main(sys.argv[1:]))
"""
    arguments = ["run", str(corpus), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), *SHARES]
    result = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith("data_prep: error: ") and "train.bin" in result.stderr and result.stderr.count("\n") == 1
    assert snapshot(tmp_path / "out") == {}
