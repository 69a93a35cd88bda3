"""Tests of train-tokenizer: both styles decode every text exactly, independent of files and
threads; stock transformers load them; samples.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from data_prep.encode.documents import Documents
from data_prep.encode.splits import hash64
from data_prep.encode.tokenizer import load_folder
from data_prep.verbs.train_tokenizer import BYTES, PRINTABLE, SPACE, STYLES, Sample, alphabet
from tests.data_prep import conftest as base

FRAGMENTS = [
    *"\x00|\r\n|\n\n|\t|    |  | |'s|'LL|0123456789|\ufeff|é|e\u0301|ﬁ".split("|"),
    *"👩‍👩‍👧‍👦|🇯🇵|العربية|日本語|\u2028|\u00a0|\u3000|\uffff".split("|"),
    *("\U0010ffff", "def f(x):", "return", "\x7f\x1b", "<0x41>", "<unk", "##", "Ġ", "<|", "|>"),
]
CODE = "def step(x):\n        if x > 10:\n\n            return x - 3.25  # naïve 東京\n"
VOCABULARY = {"gpt": 320, "llama": 460}


def fuzz(number: int) -> list[str]:
    """Return strings of fragments and random code points.

    Surrogates are excluded because they are not text, and U+2581 because it represents a space in
    LLaMA-2.
    """
    random_, strings = random.Random(0), []
    for _ in range(number):
        parts = []
        for _ in range(random_.randint(1, 12)):
            point = random_.randrange(random_.choice([0x80, 0x800, 0x10000, 0x110000]))
            known = random_.random() < 0.6 or 0xD800 <= point < 0xE000 or point == 0x2581
            parts.append(random_.choice(FRAGMENTS) if known else chr(point))
        strings.append("".join(parts))
    return strings


def train(source: Path, out: Path, style: str = "gpt", *options: object, entries: int = 0) -> Path:
    size = entries or VOCABULARY[style]
    words = f"--style {style} --vocab-size {size} --out {out}"
    base.done("train-tokenizer", source, words, *options)
    return out


def plain(folder: Path) -> Tokenizer:
    """Return the tokenizer that data_prep encodes with. Its special tokens are ordinary text."""
    return Tokenizer.from_str(
        json.dumps(json.loads((folder / "tokenizer.json").read_text()) | {"added_tokens": []})
    )


@pytest.fixture(scope="module")
def mixed() -> list[tuple[str, str]]:
    """Documents of prose and code."""
    return [
        (name, text + CODE * (number % 3))
        for number, (name, text) in enumerate(base.make_documents(300, 40, seed=8))
    ]


@pytest.fixture(scope="module", params=list(STYLES))
def trained(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    mixed: list[tuple[str, str]],
) -> tuple[str, Path]:
    """Style and the tokenizer of that style."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, train(
        base.write_parquet(folder / "mixed.parquet", mixed), folder / "t", request.param
    )


def test_every_text_comes_back_and_transformers_agrees(trained: tuple[str, Path]) -> None:
    from transformers import AutoTokenizer

    (style, folder), most = trained, 300
    tokenizer = plain(folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    facts = load_folder(folder)
    others = "   a¦ ¦\n¦a ¦¦ \x00¦</s>¦<|endoftext|>¦<s>".split("¦")
    strings = [*FRAGMENTS, *fuzz(3000), *others, CODE]
    for string in strings:
        ids = tokenizer.encode(string, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == string and bool(ids) == bool(
            string
        )
        assert facts.eod_id not in ids and (style != "llama" or 0 not in ids)  # <unk>
    assert loaded.is_fast and (loaded.bos_token, loaded.unk_token) == (
        ("<s>", "<unk>") if style == "llama" else (None, None)
    )
    assert (loaded.eos_token, loaded.eos_token_id, len(loaded)) == (
        STYLES[style].eod,
        facts.eod_id,
        facts.vocab_size,
    )
    expected = [
        encoding.ids
        for encoding in tokenizer.encode_batch(strings[:most], add_special_tokens=False)
    ]
    assert [loaded(string).input_ids for string in strings[:most]] == expected
    assert [loaded.decode(one) for one in expected] == strings[:most] and loaded(
        f"a{loaded.eos_token}"
    ).input_ids[-1] == facts.eod_id


def test_llamas_layout(tmp_path: Path, mixed: list[tuple[str, str]]) -> None:
    """The layout equals LLaMA-2's tokenizer.json."""
    folder = train(base.write_parquet(tmp_path / "mixed.parquet", mixed), tmp_path / "t", "llama")
    spec = json.loads((folder / "tokenizer.json").read_text())
    assert [token["content"] for token in spec["added_tokens"]] == ["<unk>", "<s>", "</s>"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    assert spec["normalizer"] == {
        "type": "Sequence",
        "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace],
    }
    back = replace | {"pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    assert spec["decoder"] == {
        "type": "Sequence",
        "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
    }
    assert spec["pre_tokenizer"] is None and spec["post_processor"] is None
    model = spec["model"]
    assert (model["type"], model["unk_token"], model["fuse_unk"], model["byte_fallback"]) == (
        "BPE",
        "<unk>",
        True,
        True,
    )
    entries = sorted(model["vocab"], key=model["vocab"].get)
    assert len(entries) == VOCABULARY["llama"] and sorted(model["vocab"].values()) == list(
        range(len(entries))
    )
    first, rest = entries[:259], entries[259:]
    assert first == ["<unk>", "<s>", "</s>", *BYTES] and {
        *PRINTABLE,
        SPACE * 4,
        f"{SPACE}the",
    } <= set(rest)
    for entry in (
        rest
    ):  # a space begins an entry or is all of it; digits and line ends have separate entries
        assert len(entry) <= 16 and re.fullmatch(f"{SPACE}+|{SPACE}?[^{SPACE}]+", entry)
        assert len(entry) == 1 or not re.search(r"[\d\s]", entry)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("2025").tokens == [SPACE, "2", "0", "2", "5"]
    assert tokenizer.encode("\n\t").tokens == [SPACE, "<0x0A>", "<0x09>"]
    assert (
        tokenizer.decode(tokenizer.encode("a▁b").ids) == "a b"
    )  # the only character that is not decoded exactly


@pytest.mark.parametrize(
    "style",
    [style if style == "gpt" else pytest.param(style, marks=pytest.mark.slow) for style in STYLES],
)
def test_files_their_order_and_threads_make_no_difference(
    tmp_path: Path, mixed: list[tuple[str, str]], style: str
) -> None:
    (tmp_path / "parts").mkdir()
    shuffled, made = mixed.copy(), set[bytes]()
    sample = f"--sample-mb {sum(len(text.encode()) for _, text in mixed) / 3e6}"
    random.Random(1).shuffle(shuffled)
    base.write_parquet(tmp_path / "whole.parquet", mixed)
    for number in range(3):
        base.write_parquet(
            tmp_path / "parts" / f"{number}.parquet", shuffled[number::3], row_group_size=17
        )
    lines = "".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in reversed(mixed))
    (tmp_path / "lines.jsonl").write_text(lines)
    for name, threads in (("whole.parquet", "1"), ("parts", "4"), ("lines.jsonl", "2")):
        options = f"--style {style} --vocab-size {VOCABULARY[style]} --out {tmp_path}/of-{name}"
        known = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        done = base.alone("train-tokenizer", tmp_path / name, options, sample, **known)
        assert done.returncode == 0, done
        made.add((tmp_path / f"of-{name}" / "tokenizer.json").read_bytes())
    assert len(made) == 1  # the sample decides
    assert (
        train(tmp_path / "whole.parquet", tmp_path / "all", style) / "tokenizer.json"
    ).read_bytes() not in made


def test_the_same_training_is_left_alone_and_another_is_refused(
    tmp_path: Path, corpus: Path, tokenizer: Path
) -> None:
    out = base.copied(tokenizer, tmp_path / "tokenizer")
    before = os.stat(out / "tokenizer.json").st_mtime_ns
    same = ("train-tokenizer", corpus, f"--out {out} --vocab-size 320")
    assert "unchanged" in base.done(*same) and os.stat(out / "tokenizer.json").st_mtime_ns == before
    for change in (
        "--vocab-size 400",
        "--style llama --vocab-size 400",
        "--min-bytes 20",
        "--sample-mb 0.001",
    ):
        assert "contains another tokenizer" in base.refused(*same, change)
    base.done(*same, "--vocab-size 400 --overwrite")
    assert load_folder(out).vocab_size == 400
    (out / "tokenizer.json").write_text(
        "{}"
    )  # the folder counts as incomplete, and a second training gives the same
    base.done(*same, "--overwrite")
    assert base.snapshot(out) == base.snapshot(tokenizer)
    assert set(base.snapshot(out)) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }


def test_small_vocabularies(tmp_path: Path, corpus: Path) -> None:
    file = base.write_parquet(tmp_path / "tiny.parquet", [("a", "abab")])
    for style, smallest in (("gpt", 257), ("llama", 354)):
        tokenizer = plain(train(corpus, tmp_path / style, style, entries=smallest))
        assert (
            tokenizer.get_vocab_size() == smallest
            and tokenizer.decode(tokenizer.encode("a  é東\n").ids) == "a  é東\n"
        )
        out = tmp_path / f"tiny-{style}"
        options = f"--vocab-size 1000 --style {style} --out {out}"
        result = base.cli("train-tokenizer", file, options)
        assert result.returncode == 0 and "fewer than --vocab-size 1000" in result.stderr
        assert load_folder(out).vocab_size < 400


def test_filters_and_drops_are_those_of_run(tmp_path: Path) -> None:
    rows = [
        {"id": str(i), "text": text, "score": score}
        for i, (text, score) in enumerate((("good " * 30, 3), ("bad " * 30, 1), ("", 3)))
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows) + "{no json\n"
    )
    options = f"--vocab-size 270 --out {tmp_path}/t --min-score 2"
    result = base.cli("train-tokenizer", tmp_path / "a.jsonl", options)
    assert (
        result.returncode == 0
        and "left out: 1 empty_text, 1 malformed, 1 below_min_score" in result.stderr
    )
    made = json.loads((tmp_path / "t" / "training.json").read_text())
    vocabulary = plain(tmp_path / "t").get_vocab()
    assert (
        (made["documents"], made["text_bytes"]) == (1, 150)
        and "good" in vocabulary
        and "bad" not in vocabulary
    )
    assert made["dropped"] == {"empty_text": 1, "malformed": 1, "below_min_score": 1}


# --- the sample -----------------------------------------------------------------------------------


def assert_sample(documents: list[tuple[str, str]], wanted: float) -> None:
    """Check that the sample is the shortest prefix of ``documents``, sorted by hash, with
    ``wanted`` bytes, for any order.
    """
    ordered = sorted(
        documents,
        key=lambda d: (2**64 - hash64(d[0].encode(), b"tokenizer"), d[1].encode()),
        reverse=True,
    )
    texts = [text.encode() for _, text in ordered]
    sums, largest = np.cumsum([len(text) for text in texts]), max(map(len, texts))
    for seed in range(4):
        order, sample = documents.copy(), Sample(wanted)
        random.Random(seed).shuffle(order)
        for start in range(0, len(order), 37):
            ids, strings = zip(*order[start : start + 37], strict=True)
            columns = (
                pa.array(strings, pa.large_string()),
                pa.array([i.encode() for i in ids], pa.large_binary()),
            )
            sample.add(Documents(*columns, np.zeros(len(ids), np.uint8), np.arange(len(ids))))
            assert sample.text_bytes == sum(map(len, sample.texts)) < wanted + largest
        assert sample.texts == texts[: int(np.searchsorted(sums, wanted)) + 1]


@pytest.mark.parametrize("share", [1e-9, 0.01, 0.3, 0.999, 1.0, 5.0])
def test_the_sample_is_the_smallest_hashes_in_whatever_order(share: float) -> None:
    """The sample is exact to the byte, also for documents with the same id."""
    documents = base.make_documents(300, 30, seed=4)
    total = sum(len(text.encode()) for _, text in documents)
    assert_sample(documents, share * total)
    for wanted in {max(1, int(share * total) + by) for by in (-1, 0, 1)}:
        assert_sample(
            [(f"one of three {number % 3}", text) for number, (_, text) in enumerate(documents)],
            wanted,
        )


def test_the_alphabet_is_the_most_frequent_characters_with_ties_by_code_point() -> None:
    texts = ["éé ñ ñ αβγ 🙂🙂🙂\n\t", "plain " * 10]
    counts = Counter("".join(texts))
    by_count = sorted((c for c in counts if not c.isascii()), key=lambda c: (-counts[c], ord(c)))
    for most in (0, 1, 3, 5, 6, 99):
        letters, rare = alphabet([text.encode() for text in texts], most)
        assert letters == PRINTABLE + "".join(by_count[:most])
        assert set(rare) == set(counts) - set(letters) - {" "}
    common = (
        "x" * 100_000 + "é" * 50 + "ñ"
    )  # 0.00051 of the characters are not ASCII; ñ, 0.00001 of them, is below the coverage
    assert alphabet([common.encode()], 99) == (PRINTABLE + "é", "ñ")
