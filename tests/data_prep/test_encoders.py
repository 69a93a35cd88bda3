"""Both encoders: equal to ``Tokenizer.encode`` document by document, whatever the batch; and how one of them is chosen.

Long, because it holds both encoders to one oracle.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders

from data_prep.encode import encoders, selfcheck
from data_prep.encode.encoders import (
    Encoded,
    Encoder,
    Gigatoken,
    HuggingFace,
    choose,
    encoding_spec,
    make,
    unsettled_documents,
    unsettled_points,
)
from data_prep.encode.selfcheck import PARTS, battery, check, compare
from data_prep.encode.tokenizer import TokenizerFolder, load_folder
from fem_common.errors import UserError
from tests.data_prep.conftest import ROOT
from tests.data_prep.tokenizers_made import EXACT, INEXACT, write

KINDS = ("gigatoken", "hf")
LONG = ("1a", "!\n", "a", " ", "\n \t", "don't ", "x'", "!!\r\n", " é漢1", "the quick 12345  \n\n  brown ", "\u3000\u00a0", "\x1c \x1d")


def arrow(texts: list[str]) -> pa.LargeStringArray:
    return pa.array(texts, pa.large_string())


def lists(encoded: Encoded) -> list[list[int]]:
    """The ids of each document."""
    assert (str(encoded.ids.dtype), str(encoded.offsets.dtype)) == ("uint32", "int64")
    assert (encoded.offsets[0], encoded.offsets[-1]) == (0, len(encoded.ids))
    return [encoded.ids[start:stop].tolist() for start, stop in zip(encoded.offsets[:-1], encoded.offsets[1:], strict=True)]


def alone(folder: TokenizerFolder, texts: list[str]) -> list[list[int]]:
    """The oracle: a tokenizer without special tokens, one document a call."""
    tokenizer = Tokenizer.from_str(json.dumps(encoding_spec(folder)))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def as_written(folder: TokenizerFolder, texts: list[str]) -> list[list[int]]:
    """Another oracle, for texts without special tokens: the tokenizer as it is."""
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.fixture(scope="session")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TokenizerFolder]:
    """The folder of a kind of tokenizer, made when it is asked for first."""
    root = tmp_path_factory.mktemp("tokenizers")

    def folder(name: str) -> TokenizerFolder:
        path = root / name
        make_it = EXACT[name] if name in EXACT else INEXACT[name][0]
        return load_folder(path) if path.exists() else write(path, make_it())

    return folder


Made = Callable[[str], TokenizerFolder]


def text_of_the_library() -> list[str]:
    """The standard library's modules."""
    files = sorted(Path(os.__file__).parent.rglob("*.py"))
    return [file.read_bytes().decode("utf-8", "replace") for file in files if "site-packages" not in file.parts][:600]


def special_contents(folder: TokenizerFolder) -> list[str]:
    tokens = json.loads((folder.path / "tokenizer.json").read_bytes())["added_tokens"]
    return [token["content"] for token in tokens if token["special"]]


# --- the ids ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*EXACT, *INEXACT])
def test_hugging_face_gives_each_documents_own_ids(made_of: Made, name: str) -> None:
    folder = made_of(name)
    strings = [*battery(folder, 150, 1000), ""]
    encoded = lists(HuggingFace(folder).encode(arrow(strings)))
    special = special_contents(folder)
    plain = [number for number, string in enumerate(strings) if not any(content in string for content in special)]
    assert len(plain) > 300
    assert [encoded[number] for number in plain] == as_written(folder, [strings[number] for number in plain])
    if name != "added after special":
        assert encoded == alone(folder, strings)


@pytest.mark.parametrize("name", EXACT)
def test_gigatoken_is_exact(made_of: Made, name: str) -> None:
    folder = made_of(name)
    strings = list(battery(folder, 4000 if name in ("gpt", "llama") else 1000, 200, seed=7))
    gigatoken = Gigatoken(folder)
    assert compare(HuggingFace(folder), gigatoken, strings) is None
    offsets, data = encoders.text_buffers(arrow(strings))
    left = unsettled_documents(offsets, data, gigatoken.unsettled)
    assert len(left) < len(strings) / (2 if name == "qwen" else 10), "Hugging Face was compared with itself"


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_gigatoken_is_exact_on_every_assigned_code_point_and_much_fuzz(made_of: Made, name: str) -> None:
    folder = made_of(name)
    hugging_face, gigatoken = HuggingFace(folder), Gigatoken(folder)
    for seed in range(3):
        assert compare(hugging_face, gigatoken, list(battery(folder, 20_000, 1 if seed == 0 else 50, seed))) is None


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "added after special"])
@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_text_are_text(made_of: Made, name: str, kind: str) -> None:
    folder = made_of(name)
    tokenizer, encoder = Tokenizer.from_file(str(folder.path / "tokenizer.json")), make(folder, kind)
    tokenizer.decoder = tokenizer.decoder or decoders.ByteLevel()
    for content in set(special_contents(folder)) - {"<unk>"}:
        for text in (f"{content}", f"a{content}b", f"a {content} b", content * 3, f"{content}\n"):
            ids = lists(encoder.encode(arrow([text])))[0]
            assert ids and tokenizer.token_to_id(content) not in ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("name", ["gpt", "llama", "qwen"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_slices_and_order_make_no_difference(made_of: Made, name: str, kind: str) -> None:
    folder = made_of(name)
    strings = ["", *battery(folder, 200, 2000), "", "x" * 5000, ""]
    encoder, texts = make(folder, kind), arrow(strings)
    whole = lists(encoder.encode(texts))
    assert whole[0] == whole[-1] == []
    random_ = random.Random(1)
    for _ in range(20):
        start = random_.randrange(len(strings))
        stop = random_.randrange(start, len(strings) + 1)
        assert lists(encoder.encode(texts.slice(start, stop - start))) == whole[start:stop]
    order = random_.sample(range(len(strings)), len(strings))
    assert lists(encoder.encode(texts.take(pa.array(order)))) == [whole[number] for number in order]
    assert [lists(encoder.encode(texts.slice(number, 1)))[0] for number in range(60)] == whole[:60]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_leaves_the_models_type_out(made_of: Made, name: str, kind: str, tmp_path: Path) -> None:
    """As GPT-2's first files do; Hugging Face tokenizers tells it by the rest."""
    folder = made_of(name)
    spec = json.loads((folder.path / "tokenizer.json").read_bytes())
    del spec["model"]["type"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    shutil.copy(folder.path / "tokenizer_config.json", tmp_path)
    texts = ["some text", " and  more\n", "x" * 100]
    assert lists(make(load_folder(tmp_path), kind).encode(arrow(texts))) == alone(folder, texts)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_and_empty_texts(made_of: Made, kind: str) -> None:
    encoder = make(made_of("gpt"), kind)
    assert lists(encoder.encode(arrow([]))) == []
    assert lists(encoder.encode(arrow(["a"]).slice(1))) == []
    assert lists(encoder.encode(arrow(["", ""]))) == [[], []]


@pytest.mark.parametrize("name", ["gpt", "gpt2", "qwen"])
@pytest.mark.parametrize("window", [40, 61, 1000])
def test_windows_of_a_long_document_are_exact(made_of: Made, name: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_of(name)
    encoder = HuggingFace(folder)
    assert encoder.has_windows == (name != "qwen")
    monkeypatch.setattr(encoders, "WINDOW", window)
    monkeypatch.setattr(encoders, "BATCH_BYTES", 1)
    random_ = random.Random(window)
    strings = [part * (4500 // len(part)) for part in LONG]
    strings += ["".join(random_.choices(PARTS, k=600)) for _ in range(20)]
    strings += ["".join(random_.choice(LONG) * random_.choice((1, 1, 2, 9, 40)) for _ in range(80)) for _ in range(30)]
    assert lists(encoder.encode(arrow(strings))) == alone(folder, strings)


@pytest.mark.parametrize("megabytes", [0.6, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_megabytes_are_one_document(made_of: Made, name: str, megabytes: float) -> None:
    folder = made_of(name)
    part = "".join(text_of_the_library())
    text = (part * (1 + int(megabytes * 1e6) // len(part)))[: int(megabytes * 1e6)]
    expected = alone(folder, [text])
    for kind in KINDS:
        assert lists(make(folder, kind).encode(arrow([text]))) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "llama"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("letters", ["a", " ", "!\n", "1a", "漢", "\U0010fffd", "\ufdd0", "kqzjx"])
def test_the_longest_document_keeps_memory_bounded(made_of: Made, name: str, kind: str, letters: str) -> None:
    code = (
        "import sys, pyarrow as pa; from pathlib import Path\n"
        "from data_prep.encode.tokenizer import load_folder; from data_prep.encode import encoders\n"
        "encoder = encoders.make(load_folder(Path(sys.argv[1])), sys.argv[2])\n"
        "text = sys.argv[3] * (encoders.MAX_DOCUMENT_BYTES // len(sys.argv[3].encode()))\n"
        "encoder.encode(pa.array([text], pa.large_string()))\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')][0])"
    )
    command = [sys.executable, "-c", code, str(made_of(name).path), kind, letters]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    assert int(result.stdout) * 1024 < 1.4e9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt2", "llama"])
def test_a_whole_corpus_is_exact(made_of: Made, name: str) -> None:
    folder = made_of(name)
    strings = [string for string in text_of_the_library() if len(string) < 300_000]
    assert sum(map(len, strings)) > 4_000_000
    texts = arrow(strings)
    expected = alone(folder, strings)
    for kind in KINDS:
        assert lists(make(folder, kind).encode(texts)) == expected


# --- one thread, bounded memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_no_threads(made_of: Made, kind: str) -> None:
    code = (
        "import os, sys, pyarrow as pa; from pathlib import Path\n"
        "from data_prep.encode.tokenizer import load_folder; from data_prep.encode.encoders import make\n"
        "texts = pa.array(['one two ' * 50, 'three \\ufdd0'] * 200, pa.large_string()); before = len(os.listdir('/proc/self/task'))\n"
        "make(load_folder(Path(sys.argv[1])), sys.argv[2]).encode(texts); print(len(os.listdir('/proc/self/task')) - before)"
    )
    command = [sys.executable, "-c", code, str(made_of("gpt").path), kind]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0"


FORGETS = """
import sys
from pathlib import Path
import numpy as np, pyarrow as pa
from data_prep.encode import encoders
from data_prep.encode.tokenizer import load_folder
encoders.CACHE_EVERY, encoders.CACHE_BYTES = 2_000_000, 8_000_000
encoder, random = encoders.Gigatoken(load_folder(Path(sys.argv[1]))), np.random.default_rng(0)
loaded = 1
for _ in range(20):
    letters = random.integers(97, 123, 1_000_000, dtype=np.uint8)
    letters[::9] = 32
    text = pa.array([letters.tobytes().decode()], pa.large_string())
    before = encoder.tokenizer
    ids = encoder.encode(text).ids
    if encoder.tokenizer is not before:
        loaded += 1
        assert np.array_equal(encoder.encode(text).ids, ids)
print(loaded)
"""


def test_gigatoken_forgets_words_when_they_take_too_much(made_of: Made) -> None:
    """In a process of its own: what counts is how much the process grows."""
    command = [sys.executable, "-c", FORGETS, str(made_of("gpt").path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 2 < int(result.stdout) < 12


# --- settled code points ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("composed", [False, True])
def test_unsettled_documents_are_found(composed: bool) -> None:
    points, random_ = unsettled_points(composed), random.Random(3)
    assert not points[:0x80].any() and points[0xFDD0] and points[0x10FFFF] and not points[0x10FFFD] and points[0x301] == composed
    strings = []
    for _ in range(3000):
        drawn = [random_.randrange(random_.choice((0x80, 0x800, 0x10000, 0x110000))) for _ in range(random_.randrange(4))]
        strings.append("".join(chr(point) for point in drawn if not 0xD800 <= point < 0xE000))
    expected = [number for number, string in enumerate(strings) if any(points[ord(letter)] for letter in string)]
    assert 100 < len(expected) < 2900
    assert unsettled_documents(*encoders.text_buffers(arrow(strings)), points).tolist() == expected


def test_settled_text_is_in_its_composed_form() -> None:
    settled = [point for point in np.flatnonzero(~unsettled_points(composed=True)).tolist() if not 0xD800 <= point < 0xE000]
    random_ = random.Random(0)
    text = "".join(map(chr, random_.sample(settled, 50_000)))
    assert unicodedata.normalize("NFC", text) == text
    assert len(settled) > 250_000


def test_unsettled_documents_are_left_to_hugging_face(made_of: Made) -> None:
    folder = made_of("gpt")
    strings = ["\U00011de0", "one two", "", "three \ufdd0 four", "five", "1\U00011de0234", ""]
    encoder = Gigatoken(folder)
    assert lists(encoder.encode(arrow(strings))) == alone(folder, strings)
    assert lists(encoder.encode(arrow(strings).slice(1, 4))) == alone(folder, strings[1:5])
    differs = lists(encoder._encode(*encoders.text_buffers(arrow(["1\U00011de0234"]))))
    assert differs != alone(folder, ["1\U00011de0234"]), "a digit of Unicode 17 is none of Hugging Face's: if now it is, try a newer one"


# --- the choice ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_gigatoken_is_chosen_where_it_is_exact(made_of: Made, name: str) -> None:
    choice = choose(made_of(name), "auto", ["a sample", "</s>" * 300_000])
    assert (choice.kind, choice.name) == ("gigatoken", "gigatoken 0.10.0")
    assert choice.why.startswith("equal to tokenizers ")
    assert make(made_of(name), choice.kind).name == choice.name


@pytest.mark.parametrize("name", INEXACT)
def test_hugging_face_is_chosen_where_it_is_not_and_says_why(made_of: Made, name: str) -> None:
    folder, why = made_of(name), INEXACT[name][1]
    found = selfcheck.answer(folder, [])
    assert found.fault is not None and why in found.fault
    assert "\n" not in found.fault


def test_difference_in_a_sample_is_named(made_of: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made_of("single word")
    sample = f"{'a long line of text, and ' * 9}_sw"
    monkeypatch.setattr(selfcheck, "battery", lambda folder: [])
    fault = selfcheck.answer(folder, ["fine", sample]).fault
    assert fault is not None and f"differ on {sample[:60]!r}… ({len(sample)} characters) from token " in fault


def test_asking_for_an_encoder(made_of: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(made_of("gpt"), "gigatoken", []).kind == "gigatoken"
    with pytest.raises(
        UserError, match=r"gigatoken cannot be used with .*single word: gigatoken .* differ on '.* from token \d+ on; give --encoder hf"
    ):
        choose(made_of("single word"), "gigatoken", [])
    assert "not gigatoken: " in choose(made_of("single word"), "auto", []).why

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(selfcheck, "check", never)
    assert choose(made_of("gpt"), "hf", []).why == "asked for"


BROKEN = {
    "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)": "it crashed in its self-check (SIGSEGV)",
    "import os; os._exit(3)": "it crashed in its self-check (exit code 3)",
    "import nothing_of_this_name": "it is not installed",
    "class Tokenizer:\n    @staticmethod\n    def from_json(text): raise BaseException('panic')": "it does not load this tokenizer (panic)",
    "import time; time.sleep(60)": "its self-check did not end within 3 seconds",
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_crash_of_gigatoken_means_hugging_face(made_of: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    (tmp_path / "gigatoken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    if "sleep" in code:
        monkeypatch.setattr(selfcheck, "SECONDS", 3.0)
    assert check(made_of("gpt"), []).fault == BROKEN[code]


def test_breakdown_while_encoding_is_one_line(made_of: Made) -> None:
    encoder = Gigatoken(made_of("gpt"))

    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_batch(self, texts: object, parallel: bool) -> None:
            raise PanicException("index out of bounds\nmore")

    encoder.tokenizer = Panicking()  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"^gigatoken broke down \(index out of bounds more\); give --encoder hf$"):
        encoder.encode(arrow(["a"]))


def test_self_check_finds_an_encoder_that_is_wrong_once(made_of: Made) -> None:
    """Of all ids one differs: it is found, and its string named."""
    folder = made_of("gpt")
    right = HuggingFace(folder)
    strings = list(battery(folder, 300, 500))
    assert len(set(strings)) > 0.9 * len(strings)

    class Wrong:
        name = "wrong"

        def encode(self, texts: pa.LargeStringArray) -> Encoded:
            encoded = right.encode(texts)
            ids = encoded.ids.copy()
            ids[len(ids) // 2] += 1
            return Encoded(ids, encoded.offsets)

    wrong: Encoder = Wrong()
    fault = compare(right, wrong, strings)
    assert fault is not None and fault.startswith("wrong and tokenizers ")
    assert compare(right, right, strings) is None
