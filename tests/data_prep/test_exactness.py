"""What ``run`` writes is, byte for byte, what datatrove's MegatronDocumentTokenizer writes of documents without special tokens' names."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from data_prep.encode.selfcheck import battery
from data_prep.encode.tokenizer import TokenizerFolder
from tests.data_prep.conftest import ROOT, cli, make_documents, read_split
from tests.data_prep.tokenizers_made import gpt, llama, texts, write

ALL_IN_TRAIN = ("--valid-percent", "0", "--test-percent", "0")
# As its users run it: a reader, the tokenizer's step, one task.
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
source, tokenizer, eod, out = sys.argv[1:]
step = MegatronDocumentTokenizer(output_folder=out, tokenizer_name_or_path=tokenizer, eos_token=eod)
LocalPipelineExecutor(pipeline=[ParquetReader(source), step], tasks=1, logging_dir=out + "/logs").run()
"""


def widened(tokenizer: Tokenizer, entries: int) -> Tokenizer:
    """A tokenizer with entries that no text reaches, up to a number."""
    spec = json.loads(tokenizer.to_str())
    spec["model"]["vocab"] |= {f"[unreached {number}]": number for number in range(tokenizer.get_vocab_size(), entries)}
    return Tokenizer.from_str(json.dumps(spec))


def documents(folder: TokenizerFolder) -> list[str | None]:
    """Code, prose and fuzz without a special token's name in it, and some rows that are no documents."""
    special = [token["content"] for token in json.loads((folder.path / "tokenizer.json").read_bytes())["added_tokens"]]
    strings = [*texts(), *battery(folder, 600, 300), *(text for _, text in make_documents(300, 60))]
    strings = [string for string in strings if not any(content in string for content in special)]
    assert len(strings) > 1000
    return [*strings[:400], None, "", *strings[400:], None]


def write_source(path: Path, rows: Sequence[str | None]) -> Path:
    """Two files of rows with ids, in the order of their names, in a folder."""
    path.mkdir()
    half = len(rows) // 2
    for name, part in (("a", rows[:half]), ("b", rows[half:])):
        ids = [f"{name}{number}" for number in range(len(part))]
        if path.name == "jsonl":
            lines = [json.dumps({"id": document, "text": text}) for document, text in zip(ids, part, strict=True)]
            (path / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            pq.write_table(pa.table({"id": ids, "text": pa.array(part, pa.string())}), path / f"{name}.parquet", row_group_size=200)
    return path


def datatrove(source: Path, folder: TokenizerFolder, out: Path) -> Path:
    """Run datatrove; the prefix of its files."""
    command = [sys.executable, "-c", DATATROVE, str(source), str(folder.path / "tokenizer.json"), folder.eod_token, str(out)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return out / "00000_tokens"


def ours(source: Path, folder: TokenizerFolder, out: Path, *options: str) -> Path:
    """Run ``data_prep run``; the prefix of its files."""
    result = cli("run", source, "--tokenizer", folder.path, "--out", out, *ALL_IN_TRAIN, "--max-bad", "1%", *options)
    assert result.returncode == 0, result.stderr
    return out / "train"


@pytest.mark.parametrize(
    ("style", "kind", "dtype"),
    [("gpt", "parquet", "uint16"), ("llama", "jsonl", "uint16"), ("llama", "parquet", "int32")],
)
def test_files_are_those_of_datatrove(tmp_path: Path, style: str, kind: str, dtype: str) -> None:
    made = gpt() if style == "gpt" else llama()
    folder = write(tmp_path / "tokenizer", widened(made, 66_000) if dtype == "int32" else made)
    rows = documents(folder)
    theirs = datatrove(write_source(tmp_path / "parquet", rows), folder, tmp_path / "datatrove")
    source = tmp_path / "parquet" if kind == "parquet" else write_source(tmp_path / kind, rows)
    runs = [("--encoder", "gigatoken", "--workers", "2", "--unit-mb", "0.1"), ("--encoder", "hf", "--workers", "1")]
    for number, options in enumerate(runs):
        out = tmp_path / f"ours-{number}"
        prefix = ours(source, folder, out, *options)
        manifest = json.loads((out / "manifest.json").read_text())
        assert manifest["dtype"] == dtype
        for ending in ("bin", "idx"):
            assert prefix.with_name(f"train.{ending}").read_bytes() == theirs.with_name(f"{theirs.name}.{ending}").read_bytes()


def test_where_megatrons_choice_of_width_is_not_datatroves(tmp_path: Path) -> None:
    """From 65500 to 65536 entries datatrove still writes uint16. We do as Megatron's own tools do: int32; the ids are the same."""
    folder = write(tmp_path / "tokenizer", widened(gpt(), 65_510))
    source = write_source(tmp_path / "parquet", documents(folder)[:300])
    theirs = datatrove(source, folder, tmp_path / "datatrove")
    prefix = ours(source, folder, tmp_path / "ours", "--encoder", "hf")
    wide = np.fromfile(prefix.with_name("train.bin"), dtype="<i4")
    assert np.array_equal(wide, np.fromfile(theirs.with_name(f"{theirs.name}.bin"), dtype="<u2"))


@pytest.mark.parametrize("style", ["gpt", "llama"])
@pytest.mark.parametrize("encoder", ["gigatoken", "hf"])
def test_eod_in_a_text_is_text_where_datatrove_would_end_the_document(tmp_path: Path, style: str, encoder: str) -> None:
    folder = write(tmp_path / "tokenizer", gpt() if style == "gpt" else llama())
    eod = folder.eod_token
    rows = ["plain", f"one{eod}two", eod, f"{eod}{eod}", f"{eod} at the start", f"at the end {eod}", f"<s>{eod}<unk>"]
    prefix = ours(write_source(tmp_path / "parquet", rows), folder, tmp_path / "ours", "--encoder", encoder)
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    written = read_split(prefix.parent, "train")
    assert [ids.count(folder.eod_id) for ids in written] == [1] * len(rows)
    if style == "llama":  # the GPT style made here has no decoder
        assert [tokenizer.decode(ids[:-1], skip_special_tokens=False) for ids in written] == rows
    theirs = tokenizer.encode(rows[1], add_special_tokens=False).ids
    assert theirs.count(folder.eod_id) == 1, "a tokenizer as it is makes EOD of the text"
