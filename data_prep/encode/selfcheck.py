"""Self-check that compares the ids of gigatoken with those of Hugging Face tokenizers.

The comparison runs in a separate process, so that a crash of gigatoken on a tokenizer or a string
is also a result. This process reads a tokenizer and sample documents from standard input and
writes the result to standard output. The only file that is read is the tokenizer's.
"""

from __future__ import annotations

import bisect
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from data_prep.encode.encoders import (
    Encoded,
    Encoder,
    Gigatoken,
    HuggingFace,
    first_unequal,
    gigatoken_name,
    unsettled_points,
)
from data_prep.encode.tokenizer import TokenizerFolder
from fem_common.errors import UserError
from fem_common.signals import signal_name
from fem_common.text import one_line

STRINGS = 2500  # number of random strings
STEP = 23  # one in STEP code points is tried
SAMPLE_CHARACTERS = 500_000
SECONDS = 300.0

# Known differences between tokenizers: spaces and line ends, controls, quotes, numbers, marks,
# joiners, scripts, unassigned code points.
PARTS = (
    " ",
    "  ",
    "   ",
    "    ",
    " " * 17,
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    " \n",
    "\n ",
    "\x00",
    "\x0b\x0c",
    "\x1c\x1f",
    "\x7f\x1b",
    "\x85",
    "\u00a0",
    "\u1680",
    "\u2003",
    "\u2028",
    "\u2029",
    "\u202f",
    "\u3000",
    "\u200b",
    "\u200d",
    "\u2060",
    "\ufeff",
    *(
        "'s¦'S¦'ll¦'LL¦'ve¦'¦''¦\u2019s¦'\u017f¦don't¦0¦12¦123¦1234¦0123456789¦3.14¦²¦Ⅷ¦١٢٣¦"
        "e\u0301¦é¦\u0301¦n\u0303\u0323¦ﬁ¦ß¦İ¦ǅ¦क्षि¦ไทย¦한국어¦\u1112\u1161\u11ab¦العربية¦עִבְרִית¦"
        "Ελλάδα¦日本語¦漢¦𠀋¦👩‍👩‍👧‍👦¦🇯🇵¦👍🏽¦❤️¦\ue000¦\uf8ff¦\ufffd¦\U000e0001¦\U0010fffd¦word¦the¦"
        " the¦The¦THE¦internationalization¦a¦B¦xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx¦aA1_¦_¦__init__¦"
        'def f(x):¦return¦!=¦->¦...¦!!!¦?!¦"¦(¦)¦[[¦{}¦<¦>¦</¦<|¦|>¦/>¦\\n¦//¦#¦@¦$1,000.00¦'
        "https://github.com/c?d=e&f¦▁¦▁▁¦Ġ¦Ċ¦##¦</w>¦<0x0A>¦<0xFF>¦<unk>¦<s>¦</s>¦<pad>¦[CLS]¦"
        "[MASK]¦<|endoftext|>¦<|im_start|>"
    ).split("¦"),
)
UNSETTLED = ("\ufdd0", "\uffff", "\U0010ffff", "x\U0001fffe y", "1\U00011de0234")
RUNS = ("a", " ", "\n", "!", "1", "é", "漢", "▁", "ab", " a", "\U0010fffd", "\u0301")


@dataclass(frozen=True)
class Found:
    """Result of the self-check.

    name: gigatoken's name and version.
    strings: number of strings compared.
    fault: first difference or failure on one line, or None if the encoders agree.
    """

    name: str
    strings: int
    fault: str | None


def check(folder: TokenizerFolder, samples: Sequence[str]) -> Found:
    """Compare both encoders in a child process and return the result.

    The strings are those of `battery` and about SAMPLE_CHARACTERS of the samples. The check takes
    about 2 CPU seconds.
    """
    question = json.dumps(
        {"folder": asdict(folder) | {"path": str(folder.path)}, "samples": _clipped(samples)}
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "data_prep.encode.selfcheck"]
    try:
        child = subprocess.run(
            command,
            input=question,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Found("gigatoken", 0, f"its self-check did not end within {SECONDS:.0f} seconds")
    if child.returncode:
        words = child.stderr.strip().splitlines()
        if child.returncode < 0:
            killed = signal_name(-child.returncode)
        else:
            killed = words[-1] if words else f"exit code {child.returncode}"
        return Found("gigatoken", 0, f"it crashed in its self-check ({killed})")
    return Found(**json.loads(child.stdout.splitlines()[-1]))


def _clipped(samples: Sequence[str]) -> list[str]:
    """Return the first samples up to a total of SAMPLE_CHARACTERS characters.

    The last one is truncated.
    """
    taken, left = [], SAMPLE_CHARACTERS
    for text in samples:
        if left <= 0:
            break
        taken.append(text[:left])
        left -= len(text)
    return taken


def battery(
    folder: TokenizerFolder, strings: int = STRINGS, step: int = STEP, seed: int = 0
) -> Iterator[str]:
    """Yield the test strings, which are the same for the same arguments.

    They are random combinations of PARTS, vocabulary entries and code points; long runs; and every
    ``step``-th code point. ``strings`` is the number of random combinations.
    """
    random_ = random.Random(seed)
    spec: dict[str, Any] = json.loads((folder.path / "tokenizer.json").read_bytes())
    own = [str(token["content"]) for token in spec.get("added_tokens") or ()]
    own += [
        part
        for token in own
        for part in (f" {token} ", f"x{token}x", token[1:], token[:-1], token.upper(), token * 2)
    ]
    tokenizer = Tokenizer.from_file(str(folder.path / "tokenizer.json"))
    ids = sorted(tokenizer.get_vocab(with_added_tokens=True).values())
    entries = [
        tokenizer.id_to_token(number) or "" for number in random_.sample(ids, min(len(ids), 2000))
    ]
    entries += [entry.replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n") for entry in entries]
    points = [
        point
        for point in np.flatnonzero(~unsettled_points(composed=False)).tolist()
        if not 0xD800 <= point < 0xE000
    ]
    ends = [bisect.bisect_left(points, limit) for limit in (0x80, 0x800, 0x10000, 0x40000)]
    yield from own
    yield from (*PARTS, *UNSETTLED)
    for _ in range(strings):
        parts = []
        for _ in range(random_.choice((1, 2, 3, 5, 8, 13))):
            kind = random_.random()
            source: Sequence[str] = ()
            if kind < 0.5:
                source = PARTS
            elif kind < 0.7:
                source = entries
            elif kind < 0.8:
                source = own
            if source:
                parts.append(random_.choice(source))
            else:  # any code point
                parts.append(chr(points[random_.randrange(random_.choice(ends))]))
        yield "".join(parts)
    for run in RUNS:
        yield from (run * length for length in (15, 16, 17, 31, 33, 63, 64, 65, 257, 1500))
        yield from ("b" * before + run * 3 + "." for before in range(66))
    tried = [chr(point) for point in points[random_.randrange(step) : ends[-1] : step]]
    for start in range(0, len(tried), 24):
        yield "".join(f"1{letter}234  {letter}the {letter}" for letter in tried[start : start + 24])


def first_difference(expected: Encoded, found: Encoded) -> tuple[int, int] | None:
    """Return (document, position in the document) of the first id that differs, or None."""
    same = np.array_equal(expected.offsets, found.offsets)
    if same and np.array_equal(expected.ids, found.ids):
        return None
    for number in range(len(expected.offsets) - 1):
        one, other = (
            part.ids[part.offsets[number] : part.offsets[number + 1]] for part in (expected, found)
        )
        if not np.array_equal(one, other):
            return number, first_unequal(one, other)
    raise RuntimeError("the documents are not as many")


def compare(expected: Encoder, encoder: Encoder, strings: list[str]) -> str | None:
    """Compare two encoders on ``strings``; return the first difference as one line, or None.

    Both encoders encode the strings in the given order and then in reverse order.
    """
    for ordered in (strings, strings[::-1]):
        texts = pa.array(ordered, pa.large_string())
        difference = first_difference(expected.encode(texts), encoder.encode(texts))
        if difference:
            text = ordered[difference[0]]
            shown = repr(text) if len(text) <= 60 else f"{text[:60]!r}… ({len(text):,} characters)"
            return (
                f"{encoder.name} and {expected.name} differ on {shown} from token "
                f"{difference[1]} on"
            )
    return None


def answer(folder: TokenizerFolder, samples: Sequence[str]) -> Found:
    """Load gigatoken, compare it with Hugging Face tokenizers, and return the result.

    The strings are those of `battery` and the samples. The call may crash the process.
    """
    try:
        encoder, name = Gigatoken(folder), gigatoken_name()
    except ModuleNotFoundError:
        return Found("gigatoken", 0, "it is not installed")
    except UserError as error:
        return Found("gigatoken", 0, str(error))
    except BaseException as error:  # a Rust panic is not an Exception
        return Found("gigatoken", 0, f"it does not load this tokenizer ({one_line(error)})")
    strings = [*battery(folder), *samples]
    try:
        return Found(name, len(strings), compare(HuggingFace(folder), encoder, strings))
    except BaseException as error:
        return Found(name, len(strings), f"its self-check failed ({one_line(error)})")


def main() -> int:
    """Read the folder and the samples as JSON from standard input and print the result as JSON."""
    question = json.load(sys.stdin)
    folder = TokenizerFolder(**question["folder"] | {"path": Path(question["folder"]["path"])})
    print(json.dumps(asdict(answer(folder, question["samples"]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
