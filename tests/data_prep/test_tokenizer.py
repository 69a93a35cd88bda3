"""A tokenizer's folder: what is refused, and what of its settings reaches the ids."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from data_prep.encode.encoders import make
from data_prep.encode.tokenizer import TokenizerFolder, load_folder
from fem_common.errors import UserError
from tests.data_prep.conftest import ROOT
from tests.data_prep.tokenizers_made import EOD, gpt, write

TEXT = "import tensor as the free energy of the mixer"


def encode(folder: TokenizerFolder, text: str, kind: str = "hf") -> list[int]:
    """The ids of a text."""
    ids: list[int] = make(folder, kind).encode(pa.array([text], pa.large_string())).ids.tolist()
    return ids


def test_what_a_folder_says(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", gpt())
    assert (folder.eod_token, folder.eod_id, folder.vocab_size) == (EOD, 0, 1500)
    assert folder.files == ("tokenizer.json", "tokenizer_config.json")
    (folder.path / "tokenizer_config.json").unlink()
    (folder.path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": EOD}}))
    assert load_folder(folder.path).eod_token == EOD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: shutil.rmtree(path), "no such folder"),
        (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer.json in"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "is not a tokenizer that this version of tokenizers"),
        (lambda path: (path / "tokenizer_config.json").unlink(), "has no EOD: set eos_token"),
        (lambda path: (path / "tokenizer_config.json").write_text("[]"), "is not a JSON object"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"eos_token": null}'), "has no EOD: set eos_token"),
        (lambda path: (path / "tokenizer_config.json").write_text('{"eos_token": "<eod>"}'), "'<eod>' .* is not in tokenizer.json"),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, change: object, message: str) -> None:
    folder = write(tmp_path / "t", gpt())
    assert callable(change)
    change(folder.path)
    with pytest.raises(UserError, match=message):
        load_folder(folder.path)


def test_random_ids_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "t", gpt())
    spec = json.loads((folder.path / "tokenizer.json").read_bytes())
    spec["model"]["dropout"] = 0.1
    (folder.path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"tokenizer\.json: its model has a dropout of 0\.1, so that ids would be random; set it to null"):
        load_folder(folder.path)


@pytest.mark.parametrize("kind", ["gigatoken", "hf"])
def test_truncation_padding_and_bos_do_not_reach_the_data(tmp_path: Path, kind: str) -> None:
    changed = gpt()
    changed.enable_truncation(4)
    changed.enable_padding(length=8)
    changed.post_processor = TemplateProcessing(single=f"{EOD} $A", special_tokens=[(EOD, 0)])
    expected = encode(write(tmp_path / "plain", gpt()), TEXT)
    assert len(expected) > 4 != len(changed.encode(TEXT).ids)
    assert encode(write(tmp_path / "changed", changed), TEXT, kind) == expected


@pytest.mark.parametrize("after_special", [False, True])
@pytest.mark.parametrize("kind", ["gigatoken", "hf"])
def test_added_tokens_that_are_text_keep_their_ids(tmp_path: Path, kind: str, after_special: bool) -> None:
    changed = gpt()
    if after_special:
        changed.add_special_tokens(["<|pad|>"])
    changed.add_tokens([AddedToken("␠␠␠␠", normalized=False)])
    number = changed.token_to_id("␠␠␠␠")
    folder = write(tmp_path / "t", changed)
    assert number == 1500 + after_special == folder.vocab_size - 1
    assert encode(folder, "a␠␠␠␠b", kind) == changed.encode("a␠␠␠␠b").ids
    ids = encode(folder, f"a␠␠␠␠b{EOD}<|pad|>", kind)
    assert number in ids and not {folder.eod_id, changed.token_to_id("<|pad|>")} & set(ids)


def test_added_special_token_that_is_also_an_entry_is_text(tmp_path: Path) -> None:
    """LLaMA's ``</s>`` is in the vocabulary, too: no merge leads to it."""
    spec = json.loads(gpt().to_str())
    assert spec["model"]["vocab"][EOD] == 0
    folder = write(tmp_path / "t", Tokenizer.from_str(json.dumps(spec)))
    assert folder.eod_id not in encode(folder, EOD * 3)


def test_room_needs_neither_torch_nor_the_other_rooms() -> None:
    foreign = ("torch", "megatron", "transformers", "fem_megatron", "pretrain", "kernels", "launch", "tools", "gigatoken", "awkward")
    code = (
        "import importlib, pkgutil, sys, data_prep\n"
        "for module in pkgutil.walk_packages(data_prep.__path__, 'data_prep.'): importlib.import_module(module.name)\n"
        f"print(len(sys.modules), sorted({{m.split('.')[0] for m in sys.modules}} & {set(foreign)}))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split(maxsplit=1)[1].strip() == "[]"
