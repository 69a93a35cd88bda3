"""Tests of both encoders: equality with ``Tokenizer.encode`` for any batches, the choice of
encoder, ``run`` against datatrove.
"""

from __future__ import annotations

import json
import os
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from data_prep.encode import encoders, selfcheck
from data_prep.encode.encoders import (
    Encoded,
    Gigatoken,
    HuggingFace,
    choose,
    make,
    unsettled_documents,
    unsettled_points,
)
from data_prep.encode.selfcheck import PARTS, battery, check, compare
from data_prep.encode.tokenizer import TokenizerFolder, load_folder
from fem_common.errors import UserError
from tests.data_prep import conftest as base
from tests.data_prep.tokenizers_made import (
    EOD,
    EXACT,
    INEXACT,
    Spec,
    changed,
    gpt,
    llama,
    texts,
    write,
)

KINDS = ("gigatoken", "hf")
LONG = (
    "1a|!\n|a| |\n \t|don't |x'|!!\r\n| é漢1|the quick 12345  \n\n  brown |\u3000\u00a0|\x1c \x1d"
).split("|")
Made = Callable[[str], TokenizerFolder]


def arrow(strings: list[str]) -> pa.LargeStringArray:
    return pa.array(strings, pa.large_string())


def lists(encoded: Encoded) -> list[list[int]]:
    """Return the ids of each document."""
    assert (str(encoded.ids.dtype), str(encoded.offsets.dtype)) == ("uint32", "int64")
    assert (encoded.offsets[0], encoded.offsets[-1]) == (0, len(encoded.ids))
    return [
        encoded.ids[start:stop].tolist()
        for start, stop in zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)
    ]


def as_written(folder: TokenizerFolder, strings: list[str]) -> list[list[int]]:
    """Encode with the unchanged tokenizer, one document per call: the reference for texts without
    special tokens.
    """
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    return [tokenizer.encode(string, add_special_tokens=False).ids for string in strings]


def alone(folder: TokenizerFolder, strings: list[str]) -> list[list[int]]:
    """Encode with the tokenizer without special tokens: the reference for texts that contain their
    names.
    """
    tokenizer = Tokenizer.from_str(json.dumps(encoders.encoding_spec(folder)))
    return [tokenizer.encode(string, add_special_tokens=False).ids for string in strings]


@pytest.fixture(scope="session")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Function that returns the folder of a kind of tokenizer and creates it at the first use."""
    root = tmp_path_factory.mktemp("tokenizers")

    def folder(name: str) -> TokenizerFolder:
        if (root / name).exists():
            return load_folder(root / name)
        return write(root / name, (EXACT[name] if name in EXACT else INEXACT[name][0])())

    return folder


def special_contents(folder: TokenizerFolder) -> list[str]:
    tokens = json.loads((folder.path / "tokenizer.json").read_bytes())["added_tokens"]
    return [token["content"] for token in tokens if token["special"]]


def text_of_the_library(most: int) -> list[str]:
    """Return the sources of modules of the standard library."""
    files = sorted(Path(os.__file__).parent.rglob("*.py"))
    return [
        file.read_bytes().decode("utf-8", "replace")
        for file in files[: 2 * most]
        if "site-packages" not in file.parts
    ][:most]


# --- the ids --------------------------------------------------------------------------------------


def some(*names: str) -> list[Any]:
    """Return parameters in which every second name is marked as slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow if n % 2 else []) for n, name in enumerate(names)
    ]


@pytest.mark.parametrize("name", some(*EXACT, *INEXACT))
def test_hugging_face_gives_each_documents_own_ids(made_of: Made, name: str) -> None:
    folder = made_of(name)
    strings, special = [*battery(folder, 150, 1000), ""], special_contents(folder)
    encoded = lists(HuggingFace(folder).encode(arrow(strings)))
    plain = [
        number
        for number, string in enumerate(strings)
        if not any(content in string for content in special)
    ]
    assert len(plain) > 300
    assert [encoded[number] for number in plain] == as_written(
        folder, [strings[number] for number in plain]
    )
    assert name == "added after special" or encoded == alone(folder, strings)


@pytest.mark.parametrize("name", some(*EXACT))
def test_gigatoken_is_exact(made_of: Made, name: str) -> None:
    folder = made_of(name)
    strings, gigatoken = list(battery(folder, 500, 400, seed=7)), Gigatoken(folder)
    strings.append("".join(text_of_the_library(40))[: 200_000 if name in ("gpt", "llama") else 0])
    assert compare(HuggingFace(folder), gigatoken, strings) is None
    left = unsettled_documents(*encoders.text_buffers(arrow(strings)), gigatoken.unsettled)
    assert len(left) < len(strings) / (2 if name == "qwen" else 10), (
        "Hugging Face was compared with itself"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_gigatoken_is_exact_on_every_code_point_and_much_fuzz(made_of: Made, name: str) -> None:
    folder = made_of(name)
    for seed in range(3):
        assert (
            compare(
                HuggingFace(folder),
                Gigatoken(folder),
                list(battery(folder, 20_000, 1 if seed == 0 else 50, seed)),
            )
            is None
        )


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "added after special"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_text_are_text(made_of: Made, name: str, kind: str) -> None:
    folder = made_of(name)
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    encoder = make(folder, kind)
    tokenizer.decoder = tokenizer.decoder or decoders.ByteLevel()
    for content in set(special_contents(folder)) - {"<unk>"}:
        for text in (content, f"a{content}b", f"a {content} b", content * 3, f"{content}\n"):
            ids = lists(encoder.encode(arrow([text])))[0]
            assert ids and tokenizer.token_to_id(content) not in ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


LOOKED_UP = ("<unk>", "</s>", "<s>", "a", "/", "s", "<", ">")  # the first three are special


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            models.Unigram([(entry, -1.0) for entry in LOOKED_UP], 0),
            [[3, 6, 4, 5, 7, 6, 5, 7], [6, 4, 5, 7], [6, 0, 7]],
        ),
        (
            models.WordPiece(
                {
                    f"{'##' * part}{entry}": 8 * part + i
                    for part in (0, 1)
                    for i, entry in enumerate(LOOKED_UP)
                },
                unk_token="<unk>",
            ),
            [[3, 6, 12, 13, 15, 6, 13, 15], [6, 12, 13, 15], [0]],
        ),
        (
            models.WordLevel({entry: i for i, entry in enumerate(LOOKED_UP)}, unk_token="<unk>"),
            [[3, 0, 0], [0], [0]],
        ),
        (
            models.BPE(
                {entry: i for i, entry in enumerate(LOOKED_UP)},
                [],
                unk_token="<unk>",
                ignore_merges=True,
            ),
            [[3, 6, 4, 5, 7, 6, 5, 7], [6, 4, 5, 7], [6, 0, 0, 0, 7]],
        ),
    ],
    ids=["Unigram", "WordPiece", "WordLevel", "BPE that ignores merges"],
)
def test_special_tokens_in_text_are_text_of_a_vocabulary_that_is_looked_up(
    tmp_path: Path, model: Any, expected: list[list[int]]
) -> None:
    """No document is dropped for a literal EOD. The only special id in the data is that of an
    unknown word.
    """
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(LOOKED_UP[:3]))
    encoder = HuggingFace(write(tmp_path / "tokenizer", tokenizer))
    assert lists(encoder.encode(arrow(["a </s> <s>", "</s>", "<unk>"]))) == expected


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_slices_and_order_make_no_difference(made_of: Made, name: str, kind: str) -> None:
    folder, random_ = made_of(name), random.Random(1)
    strings = ["", *battery(folder, 200, 2000), "", "x" * 5000, ""]
    encoder, full_texts = make(folder, kind), arrow(strings)
    full = lists(encoder.encode(full_texts))
    assert full[0] == full[-1] == [] and lists(encoder.encode(arrow([]))) == []
    for _ in range(20):
        start = random_.randrange(len(strings))
        stop = random_.randrange(start, len(strings) + 1)
        assert lists(encoder.encode(full_texts.slice(start, stop - start))) == full[start:stop]
    order = random_.sample(range(len(strings)), len(strings))
    assert lists(encoder.encode(full_texts.take(pa.array(order)))) == [
        full[number] for number in order
    ]
    assert [lists(encoder.encode(full_texts.slice(number, 1)))[0] for number in range(60)] == full[
        :60
    ]


def without_type(spec: Spec) -> None:
    del spec["model"][
        "type"
    ]  # as in GPT-2's first files; Hugging Face infers it from the other keys


@pytest.mark.parametrize("kind", KINDS)
def test_what_of_a_tokenizers_settings_reaches_the_ids(
    tmp_path: Path, made_of: Made, kind: str
) -> None:
    """Truncation, padding, BOS and an omitted model type do not change the ids. The ids of added
    text tokens are used.
    """
    text, plain = "import tensor as the free energy of the mixer", made_of("gpt")
    odd = gpt()
    odd.enable_truncation(4)
    odd.enable_padding(length=8)
    odd.post_processor = TemplateProcessing(single=f"{EOD} $A", special_tokens=[(EOD, 0)])
    folder = write(tmp_path / "odd", odd)
    spec = json.loads((folder.path / "tokenizer.json").read_bytes())
    without_type(spec)
    (folder.path / "tokenizer.json").write_text(json.dumps(spec))
    assert (
        lists(make(load_folder(folder.path), kind).encode(arrow([text])))
        == as_written(plain, [text])
        != [odd.encode(text).ids]
    )
    for name in ("added", "added after special"):
        folder = made_of(name)
        number = Tokenizer.from_file(str(folder.path / "tokenizer.json")).token_to_id("<tool>")
        ids = lists(make(folder, kind).encode(arrow([f"a<tool>b{EOD}<|pad|>"])))[0]
        assert (
            number in ids
            and folder.eod_id not in ids
            and number >= 1500
            and not {0, 1500 * (name != "added")} & set(ids)
        )


@pytest.mark.parametrize("name", ["gpt", "gpt2", "qwen"])
@pytest.mark.parametrize("window", [40, 61, 1000])
def test_windows_of_a_long_document_are_exact(
    made_of: Made, name: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, random_ = made_of(name), random.Random(window)
    encoder = HuggingFace(folder)
    assert encoder.has_windows == (name != "qwen")
    monkeypatch.setattr(encoders, "WINDOW", window)
    monkeypatch.setattr(encoders, "BATCH_BYTES", 1)
    strings = [part * (4500 // len(part)) for part in LONG] + [
        "".join(random_.choices(PARTS, k=600)) for _ in range(20)
    ]
    for _ in range(30):
        parts = [random_.choice(LONG) * random_.choice((1, 1, 2, 9, 40)) for _ in range(80)]
        strings.append("".join(parts))
    assert lists(encoder.encode(arrow(strings))) == alone(folder, strings)


FORGETS = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa
from data_prep.encode import encoders
from data_prep.encode.tokenizer import load_folder
encoders.CACHE_EVERY, encoders.CACHE_BYTES = 2_000_000, 8_000_000
encoder = encoders.Gigatoken(load_folder(Path(sys.argv[1])))
random, loaded = np.random.default_rng(0), 1
for _ in range(20):
    letters = random.integers(97, 123, 1_000_000, dtype=np.uint8)
    letters[::9] = 32
    text = pa.array([letters.tobytes().decode()], pa.large_string())
    before, ids = encoder.tokenizer, encoder.encode(text).ids
    if encoder.tokenizer is not before:
        loaded += 1
        assert np.array_equal(encoder.encode(text).ids, ids)
print(loaded)
"""


def test_gigatoken_forgets_words_when_they_take_too_much(made_of: Made) -> None:
    """A separate process is used because the test measures the growth of the process."""
    assert 2 < int(base.python(FORGETS, made_of("gpt").path).stdout) < 12


# --- settled code points --------------------------------------------------------------------------


@pytest.mark.parametrize("composed", [False, True])
def test_unsettled_documents_are_found(composed: bool) -> None:
    points, random_ = unsettled_points(composed), random.Random(3)
    assert (
        not points[:0x80].any()
        and points[0xFDD0]
        and points[0x10FFFF]
        and not points[0x10FFFD]
        and points[0x301] == composed
    )
    strings = []
    for _ in range(3000):
        drawn = [
            random_.randrange(random_.choice((0x80, 0x800, 0x10000, 0x110000)))
            for _ in range(random_.randrange(4))
        ]
        strings.append("".join(chr(point) for point in drawn if not 0xD800 <= point < 0xE000))
    expected = [
        number
        for number, string in enumerate(strings)
        if any(points[ord(letter)] for letter in string)
    ]
    assert 100 < len(expected) < 2900
    assert unsettled_documents(*encoders.text_buffers(arrow(strings)), points).tolist() == expected
    settled = [point for point in np.flatnonzero(~points).tolist() if not 0xD800 <= point < 0xE000]
    text = "".join(map(chr, random_.sample(settled, 50_000)))
    assert len(settled) > 250_000 and (not composed or unicodedata.normalize("NFC", text) == text)


def test_unsettled_documents_are_left_to_hugging_face(made_of: Made) -> None:
    folder = made_of("gpt")
    strings = ["\U00011de0", "one two", "", "three \ufdd0 four", "five", "1\U00011de0234", ""]
    encoder = Gigatoken(folder)
    assert lists(encoder.encode(arrow(strings))) == alone(folder, strings)
    assert lists(encoder.encode(arrow(strings).slice(1, 4))) == alone(folder, strings[1:5])
    differs = lists(encoder._encode(*encoders.text_buffers(arrow(["1\U00011de0234"]))))
    assert differs != alone(folder, ["1\U00011de0234"]), (
        "a digit of Unicode 17 is none of Hugging Face's: if now it is, try a newer one"
    )


# --- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.slow)])
def test_gigatoken_is_chosen_where_it_is_exact(
    made_of: Made, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = choose(made_of(name), "auto", ["a sample", "</s>" * 300_000])
    assert (choice.kind, choice.name) == (
        "gigatoken",
        "gigatoken 0.10.0",
    ) and choice.why.startswith("equal to tokenizers ")
    assert make(made_of(name), choice.kind).name == choice.name
    monkeypatch.setattr(selfcheck, "check", None)  # not called
    assert choose(made_of("gpt"), "hf", []).why == "requested"


@pytest.mark.parametrize("name", INEXACT)
def test_hugging_face_is_chosen_where_it_is_not_and_reports_why(made_of: Made, name: str) -> None:
    fault = selfcheck.answer(made_of(name), []).fault
    assert fault is not None and INEXACT[name][1] in fault and "\n" not in fault


def test_a_difference_in_a_sample_is_named(made_of: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sample = made_of("single word"), f"{'a long line of text, and ' * 9}_sw"
    output = (
        r"gigatoken cannot be used with .*single word: gigatoken .* differ on '.* from token \d+ "
        r"on; give --encoder hf"
    )
    with pytest.raises(UserError, match=output):
        choose(folder, "gigatoken", [])
    assert "not gigatoken: " in choose(folder, "auto", []).why
    monkeypatch.setattr(selfcheck, "battery", lambda folder: [])
    fault = selfcheck.answer(folder, ["fine", sample]).fault
    assert (
        fault is not None
        and f"differ on {sample[:60]!r}… ({len(sample)} characters) from token " in fault
    )


BROKEN = {
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": (
        "it crashed in its self-check (SIGSEGV)"
    ),
    "import os; os._exit(3)": "it crashed in its self-check (exit code 3)",
    "import nothing_of_this_name": "it is not installed",
    "class Tokenizer:\n    @staticmethod\n    def from_json(text): raise BaseException('panic')": (
        "it does not load this tokenizer (panic)"
    ),
    "import time; time.sleep(60)": "its self-check did not end within 1 seconds",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_crash_of_gigatoken_means_hugging_face(
    made_of: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / "gigatoken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in code:
        monkeypatch.setattr(selfcheck, "SECONDS", 1.0)
    assert check(made_of("gpt"), []).fault == BROKEN[code]


class PanicException(BaseException):
    """Exception with the name of Rust's panics."""


def test_a_breakdown_while_encoding_is_one_line_and_one_wrong_id_is_found(
    made_of: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made_of("gpt")
    encoder = Gigatoken(folder)
    right = HuggingFace(folder)
    strings = list(battery(folder, 300, 500))

    class Panicking:
        def encode_batch(self, texts: object, parallel: bool) -> None:
            raise PanicException("index out of bounds\nmore")

    class Wrong:
        name = "wrong"

        def encode(self, texts: pa.LargeStringArray) -> Encoded:
            encoded = right.encode(texts)
            ids = encoded.ids.copy()
            ids[len(ids) // 2] += 1
            return Encoded(ids, encoded.offsets)

    fault = compare(right, Wrong(), strings)
    assert (
        fault is not None
        and fault.startswith("wrong and tokenizers ")
        and compare(right, right, strings) is None
    )
    monkeypatch.setattr(encoder, "tokenizer", Panicking())
    with pytest.raises(
        UserError, match=r"^gigatoken broke down \(index out of bounds more\); give --encoder hf$"
    ):
        encoder.encode(arrow(["a"]))


# --- run against datatrove's MegatronDocumentTokenizer, run in its usual way ----------------------

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.tokens import MegatronDocumentTokenizer
source, tokenizer, eod, out = sys.argv[1:]
step = MegatronDocumentTokenizer(output_folder=out, tokenizer_name_or_path=tokenizer, eos_token=eod)
steps = [ParquetReader(source), step]
LocalPipelineExecutor(pipeline=steps, tasks=1, logging_dir=out + "/logs").run()
"""


def widen(entries: int) -> Callable[[Spec], object]:
    """Return a change that adds entries that no text uses, up to a number of entries."""

    def change(spec: Spec) -> None:
        vocabulary = spec["model"]["vocab"]
        vocabulary.update({f"[{n}]": n for n in range(len(vocabulary), entries)})

    return change


@pytest.mark.parametrize(
    ("style", "kind", "entries"),
    [("gpt", "parquet", 1500), pytest.param("llama", "jsonl", 66_000, marks=pytest.mark.slow)],
)
def test_files_are_those_of_datatrove(tmp_path: Path, style: str, kind: str, entries: int) -> None:
    folder = write(
        tmp_path / "tokenizer", changed(gpt() if style == "gpt" else llama(), widen(entries))
    )
    strings = [
        *texts(),
        *battery(folder, 600, 300),
        *(text for _, text in base.make_documents(300, 60)),
    ]
    special = special_contents(folder)
    strings = [string for string in strings if not any(content in string for content in special)]
    rows: list[str | None] = [
        *strings[:300],
        None,
        "",
        *strings[300 : None if entries == 1500 else 400],
        None,
    ]
    for number, part in enumerate((rows[:200], rows[200:])):
        names = [f"{number}-{place}" for place in range(len(part))]
        (tmp_path / "parquet").mkdir(exist_ok=True)
        (tmp_path / "jsonl").mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"id": names, "text": part}),
            tmp_path / "parquet" / f"{number}.parquet",
            row_group_size=200,
        )
        lines = "".join(
            json.dumps({"id": name, "text": text}) + "\n"
            for name, text in zip(names, part, strict=True)
        )
        (tmp_path / "jsonl" / f"{number}.jsonl").write_text(lines, encoding="utf-8")
    theirs = tmp_path / "datatrove"
    result = base.python(
        DATATROVE, tmp_path / "parquet", folder.path / "tokenizer.json", folder.eod_token, theirs
    )
    assert result.returncode == 0, result.stderr[-2000:]
    for number, options in enumerate(("hf --workers 1", "gigatoken --unit-mb 0.1")):
        out = tmp_path / f"ours-{number}"
        options = f"--tokenizer {folder.path} --out {out} --max-bad 1% --encoder {options}"
        base.done("run", tmp_path / kind, options, base.ALL_TRAIN)
        for ending in ("bin", "idx"):
            assert (out / f"train.{ending}").read_bytes() == (
                theirs / f"00000_tokens.{ending}"
            ).read_bytes()
        assert base.manifest_of(out)["dtype"] == ("int32" if entries > 65_536 else "uint16")
