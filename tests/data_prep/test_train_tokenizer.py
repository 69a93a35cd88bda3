"""Tokenizers of both styles: exact both ways, the same for the same text, loaded by stock transformers; and their sample."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from data_prep.__main__ import main
from data_prep.encode.documents import Documents
from data_prep.encode.splits import hash64
from data_prep.encode.tokenizer import load_folder
from data_prep.verbs.train_tokenizer import BYTES, PRINTABLE, SPACE, STYLES, Sample, alphabet
from tests.data_prep.conftest import ROOT, cli, command, make_documents, snapshot, write_parquet

FRAGMENTS = "\x00|\r\n|\n\n|\t|    |  | |'s|'LL|0123456789|\ufeff|é|e\u0301|ﬁ|👩‍👩‍👧‍👦|🇯🇵|العربية|日本語|\u2028|\u00a0|\u3000|\uffff".split(
    "|"
)
FRAGMENTS += ["\U0010ffff", "def f(x):", "return", "\x7f\x1b", "<0x41>", "<unk", "##", "Ġ", "<|", "|>"]
CODE = "def step(x):\n        if x > 10:\n\n            return x - 3.25  # naïve 東京\n"
VOCABULARY = {"gpt": 320, "llama": 460}


def fuzz(number: int) -> list[str]:
    """Strings of fragments and of random code points but surrogates, which are no text, and U+2581, which stands for a space in LLaMA-2."""
    random_ = random.Random(0)
    strings = []
    for _ in range(number):
        parts = []
        for _ in range(random_.randint(1, 12)):
            point = random_.randrange(random_.choice([0x80, 0x800, 0x10000, 0x110000]))
            known = random_.random() < 0.6 or 0xD800 <= point < 0xE000 or point == 0x2581
            parts.append(random_.choice(FRAGMENTS) if known else chr(point))
        strings.append("".join(parts))
    return strings


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str]]:
    """Documents of prose and code."""
    return [(name, text + CODE * (number % 3)) for number, (name, text) in enumerate(make_documents(300, 40, seed=8))]


@pytest.fixture(scope="module", params=list(STYLES))
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, mixed: list[tuple[str, str]]) -> tuple[str, Path]:
    """A style and the tokenizer of that style."""
    folder = tmp_path_factory.mktemp(request.param)
    file = write_parquet(folder / "mixed.parquet", mixed)
    assert main(["train-tokenizer", str(file), *options(request.param, folder / "t")]) == 0
    return request.param, folder / "t"


def options(style: str, out: Path) -> list[str]:
    return ["--style", style, "--vocab-size", str(VOCABULARY[style]), "--out", str(out)]


def plain(folder: Path) -> Tokenizer:
    """The tokenizer as data_prep encodes with it: a special token's text is text."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    return Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))


def test_every_text_comes_back(trained: tuple[str, Path]) -> None:
    style, folder = trained
    tokenizer, eod = plain(folder), load_folder(folder).eod_id
    strings = [*FRAGMENTS, *fuzz(3000), "   a", " ", "\n", "a ", "</s>", "<|endoftext|>", "<s>", "", " \x00"]
    for string in strings:
        ids = tokenizer.encode(string, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == string
        assert eod not in ids
        assert bool(ids) == bool(string)
        assert style != "llama" or 0 not in ids  # <unk>


def test_transformers_loads_it_and_agrees(trained: tuple[str, Path]) -> None:
    from transformers import AutoTokenizer

    style, folder = trained
    loaded, tokenizer, facts = AutoTokenizer.from_pretrained(folder), plain(folder), load_folder(folder)
    assert loaded.is_fast
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == (STYLES[style].eod, facts.eod_id, facts.vocab_size)
    assert (loaded.bos_token, loaded.unk_token) == (("<s>", "<unk>") if style == "llama" else (None, None))
    strings = [*FRAGMENTS, *fuzz(300), "   three before", "after   ", CODE]
    ids = [encoding.ids for encoding in tokenizer.encode_batch(strings, add_special_tokens=False)]
    assert [loaded(string).input_ids for string in strings] == ids
    assert [loaded.decode(one) for one in ids] == strings
    assert loaded(f"a{loaded.eos_token}").input_ids[-1] == facts.eod_id


def test_llama_layout(tmp_path: Path, mixed: list[tuple[str, str]]) -> None:
    file = write_parquet(tmp_path / "mixed.parquet", mixed)
    assert main(["train-tokenizer", str(file), *options("llama", tmp_path / "t")]) == 0
    spec = json.loads((tmp_path / "t" / "tokenizer.json").read_text())
    assert [token["content"] for token in spec["added_tokens"]] == ["<unk>", "<s>", "</s>"]
    # LLaMA-2's own tokenizer.json
    assert spec["normalizer"] == {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
    }
    assert spec["pre_tokenizer"] is None and spec["post_processor"] is None
    assert spec["decoder"] == {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    model = spec["model"]
    assert (model["type"], model["unk_token"], model["fuse_unk"], model["byte_fallback"]) == ("BPE", "<unk>", True, True)
    entries = sorted(model["vocab"], key=model["vocab"].get)
    assert len(entries) == VOCABULARY["llama"] and sorted(model["vocab"].values()) == list(range(len(entries)))
    assert entries[:259] == ["<unk>", "<s>", "</s>", *BYTES]
    rest = entries[259:]
    assert set(PRINTABLE) <= set(rest)
    assert all(len(entry) <= 16 for entry in rest)
    assert all(re.fullmatch(f"{SPACE}+|{SPACE}?[^{SPACE}]+", entry) for entry in rest)  # a space begins an entry, or there is nothing else
    assert [entry for entry in rest if len(entry) > 1 and re.search(r"[\d\s]", entry)] == []
    assert SPACE * 4 in rest and f"{SPACE}the" in rest
    tokenizer = Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    assert tokenizer.encode("2025").tokens == [SPACE, "2", "0", "2", "5"]
    assert tokenizer.encode("\n\t").tokens == [SPACE, "<0x0A>", "<0x09>"]
    assert tokenizer.decode(tokenizer.encode("a▁b").ids) == "a b"  # the one sign that does not come back


def test_training_is_deterministic(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    result = cli("train-tokenizer", corpus, "--vocab-size", 320, "--out", tmp_path / "again")
    assert result.returncode == 0, result.stderr
    again, before = snapshot(tmp_path / "again"), snapshot(tokenizer)
    assert again == before
    assert set(again) == {"tokenizer.json", "tokenizer_config.json", "training.json"}


@pytest.mark.parametrize("style", list(STYLES))
def test_files_their_order_and_threads_make_no_difference(tmp_path: Path, mixed: list[tuple[str, str]], style: str) -> None:
    sample = ["--sample-mb", str(sum(len(text.encode()) for _, text in mixed) / 3e6)]
    shuffled = mixed.copy()
    random.Random(1).shuffle(shuffled)
    (tmp_path / "parts").mkdir()
    write_parquet(tmp_path / "whole.parquet", mixed)
    for number in range(3):
        write_parquet(tmp_path / "parts" / f"{number}.parquet", shuffled[number::3], row_group_size=17)
    lines = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in reversed(mixed))
    (tmp_path / "lines.jsonl").write_text(lines)
    made = []
    for number, (source, threads) in enumerate((("whole.parquet", "1"), ("parts", "4"), ("lines.jsonl", "2"))):
        words = command("train-tokenizer", tmp_path / source, *options(style, tmp_path / str(number)), *sample)
        environment = {"PYTHONPATH": str(ROOT), "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": str(number)}
        subprocess.run(words, env=environment, check=True, capture_output=True, timeout=60)
        made.append((tmp_path / str(number) / "tokenizer.json").read_bytes())
    assert made[0] == made[1] == made[2]
    assert main(["train-tokenizer", str(tmp_path / "whole.parquet"), *options(style, tmp_path / "all")]) == 0
    assert (tmp_path / "all" / "tokenizer.json").read_bytes() != made[0]  # the sample decides


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
    other = [*same[:3], "400", *same[4:]]
    for change in (other, [*other, "--style", "llama"], [*same, "--min-bytes", "20"], [*same, "--sample-mb", "0.001"]):
        assert main(change) == 2
        assert "holds another tokenizer" in capsys.readouterr().err
    assert main([*other, "--overwrite"]) == 0
    assert load_folder(out).vocab_size == 400


def test_damaged_tokenizer_is_not_taken_for_done(tmp_path: Path, corpus: Path, tokenizer: Path) -> None:
    out = tmp_path / "tokenizer"
    shutil.copytree(tokenizer, out)
    (out / "tokenizer.json").write_text("{}")
    assert main(["train-tokenizer", str(corpus), "--vocab-size", "320", "--out", str(out), "--overwrite"]) == 0
    assert snapshot(out) == snapshot(tokenizer)


def test_too_little_text_yields_fewer_entries_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_parquet(tmp_path / "tiny.parquet", [("a", "abab")])
    for style in STYLES:
        assert main(["train-tokenizer", str(file), "--vocab-size", "1000", "--style", style, "--out", str(tmp_path / style)]) == 0
        assert "fewer than --vocab-size 1000" in capsys.readouterr().err
        assert load_folder(tmp_path / style).vocab_size < 400


def test_smallest_vocabularies(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for style, smallest in (("gpt", 257), ("llama", 354)):
        words = ["train-tokenizer", str(corpus), "--style", style, "--out", str(tmp_path / style), "--vocab-size"]
        assert main([*words, str(smallest - 1)]) == 2
        assert f"the smallest is {smallest}" in capsys.readouterr().err
        assert main([*words, str(smallest)]) == 0
        tokenizer = plain(tmp_path / style)
        assert tokenizer.get_vocab_size() == smallest
        assert tokenizer.decode(tokenizer.encode("a  é東\n").ids) == "a  é東\n"


def test_filters_and_drops_are_those_of_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": str(i), "text": text, "score": score} for i, (text, score) in enumerate((("good " * 30, 3), ("bad " * 30, 1), ("", 3)))]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{no json\n")
    words = ["train-tokenizer", str(tmp_path / "a.jsonl"), "--vocab-size", "270", "--out", str(tmp_path / "t"), "--min-score", "2"]
    assert main(words) == 0
    made = json.loads((tmp_path / "t" / "training.json").read_text())
    assert (made["documents"], made["text_bytes"]) == (1, 150)
    assert made["dropped"] == {"empty_text": 1, "malformed": 1, "below_min_score": 1}
    assert "left out: 1 empty_text, 1 malformed, 1 below_min_score" in capsys.readouterr().err
    vocabulary = plain(tmp_path / "t").get_vocab()
    assert "good" in vocabulary and "bad" not in vocabulary


# --- the sample ----------------------------------------------------------------------------------------------------------------------


def batch(documents: list[tuple[str, str]]) -> Documents:
    texts, ids = (
        pa.array([text for _, text in documents], pa.large_string()),
        pa.array([i.encode() for i, _ in documents], pa.large_binary()),
    )
    return Documents(texts, ids, np.zeros(len(documents), np.uint8), np.arange(len(documents)))


def by_hash(documents: list[tuple[str, str]]) -> list[bytes]:
    """The texts in the order in which they are taken."""
    ordered = sorted(documents, key=lambda d: (2**64 - hash64(d[0].encode(), b"tokenizer"), d[1].encode()), reverse=True)
    return [text.encode() for _, text in ordered]


def assert_sample(documents: list[tuple[str, str]], wanted: float) -> None:
    """Of ``documents`` the sample is the fewest first ones by hash that hold ``wanted`` bytes, in whatever order they come."""
    texts = by_hash(documents)
    sums = np.cumsum([len(text) for text in texts])
    expected, largest = texts[: int(np.searchsorted(sums, wanted)) + 1], max(map(len, texts))
    for seed in range(4):
        order = documents.copy()
        random.Random(seed).shuffle(order)
        sample = Sample(wanted)
        for start in range(0, len(order), 37):
            sample.add(batch(order[start : start + 37]))
            assert sample.text_bytes == sum(map(len, sample.texts)) < wanted + largest
        assert sample.texts == expected


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.3, 0.999, 1.0, 5.0])
def test_sample_is_the_smallest_hashes_in_whatever_order(share: float) -> None:
    documents = make_documents(500, 30, seed=4)
    assert_sample(documents, share * sum(len(text.encode()) for _, text in documents))


@pytest.mark.parametrize("taken", [1, 60, 199])
def test_sample_that_ends_among_documents_of_one_id_or_to_the_byte(taken: int) -> None:
    documents = [(f"one of three {number % 3}", text) for number, (_, text) in enumerate(make_documents(200, 30, seed=5))]
    size = sum(map(len, by_hash(documents)[:taken]))
    for wanted in (size - 1, size, size + 1):
        assert_sample(documents, wanted)


def test_sample_takes_the_text_asked_for(tmp_path: Path, corpus: Path, documents: list[tuple[str, str]]) -> None:
    total = sum(len(text.encode()) for _, text in documents)
    assert main(["train-tokenizer", str(corpus), "--vocab-size", "300", "--out", str(tmp_path), "--sample-mb", str(total / 4e6)]) == 0
    taken = json.loads((tmp_path / "training.json").read_text())["text_bytes"]
    assert total / 4 <= taken < total / 4 + max(len(text.encode()) for _, text in documents)


def test_alphabet_is_the_most_frequent_characters_with_ties_by_code_point() -> None:
    texts = ["éé ñ ñ αβγ 🙂🙂🙂\n\t", "plain " * 10]
    counts = Counter("".join(texts))
    by_count = sorted((c for c in counts if not c.isascii()), key=lambda c: (-counts[c], ord(c)))
    for most in (0, 1, 3, 5, 6, 99):
        letters, rare = alphabet([text.encode() for text in texts], most)
        assert letters == PRINTABLE + "".join(by_count[:most])
        assert set(rare) == set(counts) - set(letters) - {" "}
    common = ["x" * 100_000 + "é" * 50 + "ñ"]  # 0.00051 of the characters are not ASCII, 0.00001 of them ñ, below what is covered
    assert alphabet([common[0].encode()], 99) == (PRINTABLE + "é", "ñ")
