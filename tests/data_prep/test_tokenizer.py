"""The tokenizer: exact both ways, deterministic, loaded by stock transformers; and its use in encoding."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from data_prep.__main__ import main
from data_prep.encoder import Encoder, load_folder
from data_prep.errors import UserError
from tests.data_prep.conftest import ROOT, cli, command, snapshot, write_parquet

EOD = "<|endoftext|>"
FRAGMENTS = [
    EOD,
    "<|",
    "|>",
    "endoftext",
    "\x00",
    "\r\n",
    "\n\n",
    "\t",
    "    ",
    "  ",
    " ",
    "'s",
    "'LL",
    "0123456789",
    "\ufeff",
    "é",
    "e\u0301",
    "ﬁ",
]
FRAGMENTS += [
    "👩‍👩‍👧‍👦",
    "🇯🇵",
    "العربية",
    "日本語",
    "\u2028",
    "\u00a0",
    "\u3000",
    "\uffff",
    "\U0010ffff",
    "def f(x):",
    "return",
    "</s>",
    "\x7f\x1b",
]


def fuzz(number: int) -> list[str]:
    """Strings of fragments and of random code points; every code point but the surrogates, which are not text."""
    random_ = random.Random(0)
    strings = []
    for _ in range(number):
        parts = []
        for _ in range(random_.randint(1, 12)):
            high = random_.choice([0x80, 0x800, 0x10000, 0x110000])
            point = random_.randrange(high)
            parts.append(random_.choice(FRAGMENTS) if random_.random() < 0.6 or 0xD800 <= point < 0xE000 else chr(point))
        strings.append("".join(parts))
    return strings


def test_round_trip_is_exact_and_no_text_becomes_eod(tokenizer: Path) -> None:
    folder = load_folder(tokenizer)
    encoder = Encoder(folder)
    strings = [*FRAGMENTS, *fuzz(3000)]
    for string, ids in zip(strings, encoder.encode(strings), strict=True):
        assert encoder.tokenizer.decode(ids, skip_special_tokens=False) == string
        assert ids
        assert folder.eod_id not in ids
        assert max(ids) < folder.vocab_size


def test_transformers_loads_it_and_agrees(tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    folder = load_folder(tokenizer)
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == (EOD, folder.eod_id, folder.vocab_size)
    assert loaded.bos_token is None
    strings = [string for string in fuzz(300) if EOD not in string]
    assert len(strings) > 100
    encoded = Encoder(folder).encode(strings)
    assert [loaded(string).input_ids for string in strings] == encoded
    assert [loaded.decode(ids) for ids in encoded] == strings
    assert loaded(f"a{EOD}").input_ids[-1] == folder.eod_id


def test_training_is_deterministic(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    result = cli("train-tokenizer", corpus, "--vocab-size", 320, "--out", tmp_path / "again")
    assert result.returncode == 0, result.stderr
    again, before = snapshot(tmp_path / "again"), snapshot(tokenizer)
    assert again == before
    assert set(again) == {"tokenizer.json", "tokenizer_config.json", "training.json"}


def test_same_training_is_left_alone_and_another_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, out)
    before = os.stat(out / "tokenizer.json").st_mtime_ns
    same = ["train-tokenizer", str(corpus), "--vocab-size", "320", "--out", str(out)]
    assert main(same) == 0
    assert "unchanged" in capsys.readouterr().out
    assert os.stat(out / "tokenizer.json").st_mtime_ns == before
    other = [*same[:3], "300", *same[4:]]
    assert main(other) == 2
    assert "holds another tokenizer" in capsys.readouterr().err
    assert main([*other, "--overwrite"]) == 0
    assert load_folder(out).vocab_size == 300


def test_damaged_tokenizer_is_not_taken_for_done(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    out = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, out)
    (out / "tokenizer.json").write_text("{}")
    assert main(["train-tokenizer", str(corpus), "--vocab-size", "320", "--out", str(out), "--overwrite"]) == 0
    assert snapshot(out) == snapshot(tokenizer)


def test_sample_takes_about_the_text_asked_for(tmp_path: Path, corpus: Path, documents: list[tuple[str, str]]) -> None:
    total = sum(len(text.encode()) for _, text in documents)
    assert main(["train-tokenizer", str(corpus), "--vocab-size", "300", "--out", str(tmp_path), "--sample-mb", str(total / 4e6)]) == 0
    taken = json.loads((tmp_path / "training.json").read_text())["text_bytes"]
    # a quarter of 400 documents of uneven length: standard deviation about 11% of the mean, so a factor of 1.5 is above 4 of them
    assert total / 4 / 1.5 < taken < total / 4 * 1.5


def test_too_little_text_yields_fewer_entries_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "tiny.parquet", [("a", "abab")])
    assert main(["train-tokenizer", str(file), "--vocab-size", "1000", "--out", str(tmp_path / "t")]) == 0
    assert "fewer than --vocab-size 1000" in capsys.readouterr().err
    assert load_folder(tmp_path / "t").vocab_size < 300


def test_truncation_and_bos_of_a_saved_tokenizer_do_not_reach_the_data(tmp_path: Path, tokenizer: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    shutil.copytree(tokenizer, tmp_path / "t")
    changed = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    changed.enable_truncation(4)
    changed.enable_padding(length=8)
    changed.post_processor = TemplateProcessing(single=f"{EOD} $A", special_tokens=[(EOD, 0)])
    changed.save(str(tmp_path / "t" / "tokenizer.json"))
    text = "import tensor as the free energy of the mixer"
    assert len(changed.encode(text).ids) != len(Encoder(load_folder(tokenizer)).encode([text])[0])
    assert Encoder(load_folder(tmp_path / "t")).encode([text]) == Encoder(load_folder(tokenizer)).encode([text])


def test_added_tokens_that_are_text_stay(tmp_path: Path, tokenizer: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "t")
    changed = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    changed.add_tokens([AddedToken("␠␠␠␠", normalized=False)])
    changed.save(str(tmp_path / "t" / "tokenizer.json"))
    folder = load_folder(tmp_path / "t")
    text = f"a␠␠␠␠b{EOD}"
    ids = Encoder(folder).encode([text])[0]
    assert folder.vocab_size == 321
    assert 320 in ids and folder.eod_id not in ids
    assert Encoder(folder).tokenizer.decode(ids, skip_special_tokens=False) == text


def test_added_token_whose_id_would_move_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    shutil.copytree(tokenizer, tmp_path / "t")
    changed = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    changed.add_special_tokens(["<|pad|>"])
    changed.add_tokens(["␠␠␠␠"])
    changed.save(str(tmp_path / "t" / "tokenizer.json"))
    with pytest.raises(UserError, match="␠␠␠␠.*another id"):
        Encoder(load_folder(tmp_path / "t"))


def test_room_needs_neither_torch_nor_the_other_rooms(tmp_path: Path) -> None:
    foreign = ("torch", "megatron", "transformers", "fem_megatron", "pretrain", "kernels", "launch", "tools")
    code = f"import sys, data_prep.__main__; print([m for m in sys.modules if m.split('.')[0] in {foreign}])"
    result = subprocess.run([command()[0], "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
