"""Encoders that convert text to token ids with gigatoken or Hugging Face tokenizers, in one thread.

Both encoders return exactly the ids of Hugging Face's ``Tokenizer.encode`` for each document
separately, without BOS, end-of-document (EOD) token or truncation. The literal text of a special
token is encoded like ordinary text. ``choose`` selects gigatoken only if a self-check finds no
difference (see selfcheck). The only file that this module reads is the tokenizer's.
"""

from __future__ import annotations

import array
import functools
import json
import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
import tokenizers
from tokenizers import Tokenizer, pre_tokenizers

from data_prep.aliases import AnyArray, BoolArray, Int64Array, Json, Uint8Array, Uint32Array
from data_prep.encode.tokenizer import TokenizerFolder
from data_prep.sources.rows import Drop
from fem_common.errors import UserError
from fem_common.text import one_line

Kind = Literal["gigatoken", "hf", "chat"]

# One limit for both encoders, because the output must not depend on the encoder. With this limit
# the most expensive text found (bytes that are separate tokens, a run of one letter) costs a
# process less than 1.5 GB and ten seconds. Common Crawl truncates pages to the same size.
MAX_DOCUMENT_BYTES = 5 * 2**20

# Growth of the process that causes a reload of gigatoken, checked after CACHE_EVERY bytes of text.
CACHE_BYTES = 300 * 10**6
CACHE_EVERY = 32 * 10**6
# Text in one call of tokenizers, whose Encodings use up to 400 bytes per byte of text.
BATCH_BYTES = 2**19
NO_TEXT = "\uffff" * 4  # occurs in no text: U+FFFF is not a character
# Characters of a long document that tokenizers encodes in one call, if PIECES contains its pattern.
WINDOW = 2**18
# A boundary this many characters before the last non-space character of a window is final.
MARGIN = 16
# Patterns of GPT-2, GPT-4 and Qwen. A match depends only on the text after its start, and on at
# most MARGIN characters after its end.
PIECES = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class Encoded:
    """Token ids of n documents, concatenated.

    The ids of document i are ``ids[offsets[i]:offsets[i + 1]]``; ``offsets`` has n + 1 entries. The
    other fields are those of conversations (see chat).

    mask: 1 for each id that counts in the loss, else 0; after the ids of each document also the
        value of its EOD [len(ids) + n].
    sizes: UTF-8 bytes of the rendered texts [n].
    faults: reasons and messages of the documents that cannot be encoded; they have no ids.
    """

    ids: Uint32Array
    offsets: Int64Array
    mask: Uint8Array | None = None
    sizes: Int64Array | None = None
    faults: Mapping[int, tuple[Drop, str]] = field(default_factory=dict)


class Encoder(Protocol):
    """Interface of a converter of text to token ids.

    ``name`` is the name and version of the library that it uses.
    """

    name: str

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """Return the ids of each of n texts, which must be valid UTF-8 without nulls.

        Raises UserError if the library fails.
        """


@dataclass(frozen=True)
class Choice:
    """Result of `choose`.

    kind: encoder to pass to `make`.
    name: name and version of the encoder's library.
    why: reason for the selection.
    """

    kind: Kind
    name: str
    why: str


def choose(folder: TokenizerFolder, wanted: str, samples: Sequence[str]) -> Choice:
    """Choose between gigatoken and Hugging Face tokenizers.

    wanted: "auto", "gigatoken" or "hf". For "auto" and "gigatoken" a self-check compares both
    libraries on test strings and on ``samples``. "auto" selects gigatoken if they agree and Hugging
    Face if they differ. "hf" selects Hugging Face without a check.

    Raises UserError if ``wanted`` is "gigatoken" and gigatoken differs or does not run.
    """
    from data_prep.encode.selfcheck import check

    plain = f"tokenizers {tokenizers.__version__}"
    if wanted == "hf":
        return Choice("hf", plain, "requested")
    found = check(folder, samples)
    if found.fault is None:
        return Choice("gigatoken", found.name, f"equal to {plain} on {found.strings:,} strings")
    if wanted == "gigatoken":
        raise UserError(
            f"gigatoken cannot be used with {folder.path}: {found.fault}; give --encoder hf, "
            "or leave it out"
        )
    return Choice("hf", plain, f"not gigatoken: {found.fault}")


def chat(folder: TokenizerFolder, wanted: str, template_sha256: str | None) -> Choice:
    """Return the choice for conversations. ``template_sha256``: see chat.Chat. Raises UserError."""
    if wanted == "gigatoken":
        raise UserError("--encoder gigatoken cannot encode --messages; leave it out")
    return Choice("chat", make(folder, "chat", template_sha256).name, "chat template")


def make(folder: TokenizerFolder, kind: str, template_sha256: str | None = None) -> Encoder:
    """Return the encoder of the given kind (see Choice.kind). ``template_sha256``: see chat.Chat.

    Raises UserError.
    """
    if kind == "chat":
        from data_prep.encode.chat import Chat

        return Chat(folder, template_sha256)
    return Gigatoken(folder) if kind == "gigatoken" else HuggingFace(folder)


def encoding_spec(folder: TokenizerFolder) -> Json:
    """Return the content of tokenizer.json, changed so that it encodes plain documents.

    Special tokens, truncation, padding and the post-processor are removed. Other added tokens are
    kept.
    """
    # The tokenizer's own serialization includes the defaults that a file may omit.
    spec: Json = json.loads(Tokenizer.from_file(str(folder.path / "tokenizer.json")).to_str())
    special = {
        token["content"]
        for token in spec["added_tokens"]
        if token["special"] or token["id"] == folder.eod_id
    } | {folder.eod_token}
    added = [token for token in spec["added_tokens"] if token["content"] not in special]
    model = _hidden(spec["model"], special)
    return spec | {
        "added_tokens": added,
        "model": model,
        "truncation": None,
        "padding": None,
        "post_processor": None,
    }


def _hidden(model: Json, special: set[str]) -> Json:
    """Return a tokenizer's ``model`` section in which no text can match a special token.

    Each special token is renamed to a string that occurs in no text and keeps its id. Without this,
    Unigram, WordPiece, WordLevel and a BPE that ignores merges would encode the literal text of a
    special token as its id, because they search the vocabulary for the text. Other BPEs are
    returned unchanged: they reach entries only by merges, and a special token has no merges.
    """
    if model["type"] == "BPE" and not model["ignore_merges"]:
        return model
    merged = {left + right for left, right in model.get("merges", ())}
    names = {name: NO_TEXT + name for name in special - merged}
    if model["type"] == "Unigram":
        return model | {
            "vocab": [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        }
    vocabulary = {names.get(token, token): number for token, number in model["vocab"].items()}
    return model | {
        "vocab": vocabulary,
        "unk_token": names.get(model["unk_token"], model["unk_token"]),
    }


class Gigatoken:
    """Encoder that uses gigatoken in the calling thread, without a copy of the text.

    The input must be valid UTF-8; gigatoken crashes on other input. Documents with code points on
    which gigatoken may differ (see unsettled_points) are encoded by Hugging Face tokenizers.
    gigatoken caches every word, so the tokenizer is reloaded when the process has grown by more
    than CACHE_BYTES. Raises UserError for a normalizer with which gigatoken may not be exact.
    """

    def __init__(self, folder: TokenizerFolder) -> None:
        self.name = gigatoken_name()
        self.folder = folder
        self.spec = encoding_spec(folder)
        steps = _steps(self.spec.get("normalizer"), "normalizers")
        strange = [
            step["type"]
            for step in steps
            if step["type"] not in ("NFC", "Prepend") and "String" not in step.get("pattern", ())
        ]
        if strange:
            raise UserError(
                f"its normalizer has a step {strange[0]}, with which it is not known to be exact"
            )
        self.unsettled = unsettled_points(any(step["type"] == "NFC" for step in steps))
        self._load()

    def _load(self) -> None:
        import gigatoken

        self.tokenizer = gigatoken.Tokenizer.from_json(json.dumps(self.spec))
        self.seen, self.resident = 0, resident_bytes()

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """Return the ids of each text. Raises UserError if gigatoken panics."""
        if not len(texts):
            return Encoded(np.zeros(0, np.uint32), np.zeros(1, np.int64))
        offsets, data = text_buffers(texts)
        encoded = self._encode(offsets, data)
        numbers = unsettled_documents(offsets, data, self.unsettled)
        self.seen += len(data)
        if self.seen > CACHE_EVERY and resident_bytes() - self.resident > CACHE_BYTES:
            self._load()
        return (
            replaced(encoded, numbers, self._exact.encode(texts.take(pa.array(numbers))))
            if len(numbers)
            else encoded
        )

    @functools.cached_property
    def _exact(self) -> HuggingFace:
        return HuggingFace(self.folder)

    def _encode(self, offsets: Int64Array, data: Uint8Array) -> Encoded:
        import awkward as ak

        characters = ak.contents.NumpyArray(data, parameters={"__array__": "char"})
        strings = ak.contents.ListOffsetArray(
            ak.index.Index64(offsets), characters, parameters={"__array__": "string"}
        )
        try:
            layout = self.tokenizer.encode_batch(ak.Array(strings), parallel=False).layout
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # a Rust panic is not an Exception
                raise
            raise UserError(
                f"gigatoken broke down ({one_line(error)}); give --encoder hf"
            ) from None
        ends = np.asarray(layout.offsets.data, np.int64)
        return Encoded(
            np.asarray(layout.content.data, np.uint32)[ends[0] : ends[-1]], ends - ends[0]
        )


def replaced(encoded: Encoded, numbers: Int64Array, others: Encoded) -> Encoded:
    """Return ``encoded`` with the ids of some documents replaced.

    numbers: indices of the documents to replace, ascending.
    others: new ids of these documents only, in the same order.
    """
    parts, done = [], 0
    lengths = np.diff(encoded.offsets)
    lengths[numbers] = np.diff(others.offsets)
    for place, number in enumerate(numbers.tolist()):
        parts.append(encoded.ids[encoded.offsets[done] : encoded.offsets[number]])
        parts.append(others.ids[others.offsets[place] : others.offsets[place + 1]])
        done = number + 1
    parts.append(encoded.ids[encoded.offsets[done] :])
    return Encoded(
        np.concatenate(parts), np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    )


def first_unequal(one: AnyArray, other: AnyArray) -> int:
    """Return the first position at which two different arrays of ids differ."""
    shared = min(len(one), len(other))
    unequal = np.flatnonzero(one[:shared] != other[:shared])
    return int(unequal[0]) if len(unequal) else shared


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", "rb") as stream:
        return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def gigatoken_name() -> str:
    """Return "gigatoken" and its version. Raises importlib.metadata.PackageNotFoundError if it is
    not installed.
    """
    from importlib.metadata import version

    return f"gigatoken {version('gigatoken')}"


def text_buffers(texts: pa.LargeStringArray) -> tuple[Int64Array, Uint8Array]:
    """Return (offsets, bytes) of an array of n >= 1 texts. No bytes are copied.

    offsets: int64 [n + 1], starting at 0; text i is ``bytes[offsets[i]:offsets[i + 1]]``. The array
    may be a slice.
    """
    _, offset_buffer, data_buffer = texts.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, count=len(texts) + 1, offset=8 * texts.offset)
    data = np.frombuffer(data_buffer, np.uint8) if data_buffer else np.zeros(0, np.uint8)
    return offsets - offsets[0], data[offsets[0] : offsets[-1]]


class HuggingFace:
    """Encoder that uses Hugging Face tokenizers, which supports every tokenizer.

    The constructor disables the threads that tokenizers would start in this process.
    """

    def __init__(self, folder: TokenizerFolder) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.name = f"tokenizers {tokenizers.__version__}"
        spec = encoding_spec(folder)
        self.tokenizer = Tokenizer.from_str(json.dumps(spec))
        self.renumbered = _renumbered(folder, spec["added_tokens"], self.tokenizer)
        self.has_windows = _has_windows(spec)

    def encode(self, texts: pa.LargeStringArray) -> Encoded:
        """Return the ids of each text."""
        parts: list[Uint32Array] = []
        for batch in _batches(texts):
            if len(batch) == 1 and self.has_windows and batch.nbytes > 4 * WINDOW:
                parts.append(self._long(batch[0].as_py()))
            else:
                parts += [
                    _ids(encoding)
                    for encoding in self.tokenizer.encode_batch_fast(
                        batch.to_pylist(), add_special_tokens=False
                    )
                ]
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        ids = np.concatenate(parts) if parts else np.zeros(0, np.uint32)
        return Encoded(ids if self.renumbered is None else self.renumbered[ids], offsets)

    def _long(self, text: str) -> Uint32Array:
        """Return the ids of a long document, encoded window by window.

        Each window is cut at a word boundary that later text cannot change, and the next window
        starts at this boundary.
        """
        parts: list[Uint32Array] = []
        start, size = 0, WINDOW
        while start + size < len(text):
            window = text[start : start + size]
            # encode_batch_fast does not return character offsets.
            encoding = self.tokenizer.encode_batch([window], add_special_tokens=False)[0]
            tokens, characters = _certain(encoding, len(window.rstrip()) - MARGIN)
            parts.append(_ids(encoding)[:tokens])
            start += characters
            size = WINDOW if tokens else 4 * size
            del encoding
        parts.append(
            _ids(self.tokenizer.encode_batch_fast([text[start:]], add_special_tokens=False)[0])
        )
        return np.concatenate(parts)


def _certain(encoding: tokenizers.Encoding, last: int) -> tuple[int, int]:
    """Return (tokens, characters) of an encoded window before the word at which it is cut.

    This is the last word that begins at or before character ``last``. (0, 0) if the window has no
    such boundary.
    """
    word = encoding.token_to_word(len(encoding) - 1) or 0
    while word > 0:
        characters, tokens = encoding.word_to_chars(word), encoding.word_to_tokens(word)
        if characters and tokens and characters[0] <= last:
            return tokens[0], characters[0]
        word -= 1
    return 0, 0


def _ids(encoding: tokenizers.Encoding) -> Uint32Array:
    # Four times as fast as numpy's conversion of a list.
    return np.frombuffer(array.array("I", encoding.ids), np.uint32)


def _batches(texts: pa.LargeStringArray) -> Iterator[pa.LargeStringArray]:
    """Yield the texts in order as slices, each with at most BATCH_BYTES of text.

    A longer text is a slice by itself.
    """
    if not len(texts):
        return
    offsets, _ = text_buffers(texts)
    start = 0
    while start < len(texts):
        stop = max(
            start + 1, int(np.searchsorted(offsets, offsets[start] + BATCH_BYTES, side="right")) - 1
        )
        yield texts.slice(start, stop - start)
        start = stop


def _renumbered(
    folder: TokenizerFolder, added: list[Json], without: Tokenizer
) -> Uint32Array | None:
    """Return a table that maps ids of ``without`` to ids of the original tokenizer.

    ``without`` is the tokenizer from which the special tokens were removed, which can change the
    ids of the other ``added`` tokens. The table is uint32 [highest id + 1]. Return None if no id
    changed.
    """
    if not added:
        return None
    own = Tokenizer.from_file(str(folder.path / "tokenizer.json")).get_vocab(with_added_tokens=True)
    ids = without.get_vocab(with_added_tokens=True)
    moved = [
        (ids[token["content"]], own[token["content"]])
        for token in added
        if ids[token["content"]] != own[token["content"]]
    ]
    table = np.arange(1 + max(ids.values()), dtype=np.uint32)
    for there, here in moved:
        table[there] = here
    return table if moved else None


def _has_windows(spec: Json) -> bool:
    """Return True if ``HuggingFace._long`` gives exact ids with the tokenizer ``spec``.

    This requires that the tokenizer splits unnormalized text with one of PIECES and that every byte
    has its own token.
    """
    model, steps = spec["model"], _steps(spec.get("pre_tokenizer"), "pretokenizers")
    last = steps[-1] if steps else {}
    if (
        spec.get("normalizer")
        or spec["added_tokens"]
        or last.get("type") != "ByteLevel"
        or last["add_prefix_space"]
    ):
        return False
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if (
        model["type"] != "BPE"
        or affixes
        or not set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
    ):
        return False
    if last.get("use_regex", True):
        return len(steps) == 1
    split = steps[0] if len(steps) == 2 and steps[0]["type"] == "Split" else {}
    return (
        split.get("pattern", {}).get("Regex") in PIECES
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
    )


def _steps(part: Json | None, name: str) -> list[Json]:
    """Return the steps of a normalizer or pre-tokenizer as a flat list.

    The list is empty for None. The steps of a Sequence are under its key ``name``.
    """
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [inner for step in part[name] for inner in _steps(step, name)]


PLANES_IN_USE = (*range(0x40000), *range(0xE0000, 0xE1000), *range(0xF0000, 0x110000))
HANGUL_VOWELS_AND_ENDS = slice(0x1161, 0x11C3)


@functools.cache
def unsettled_points(composed: bool) -> BoolArray:
    """Return a table, bool [0x110000], of code points on which the two libraries may differ.

    True for unassigned code points, because their treatment depends on the Unicode version.
    Surrogates are False: no text contains them. If ``composed`` (the tokenizer normalizes text to
    NFC), code points that NFC may change, compose or reorder are also True.
    """
    points = np.ones(0x110000, dtype=bool)
    letters = [chr(point) for point in PLANES_IN_USE]
    points[list(PLANES_IN_USE)] = [unicodedata.category(letter) == "Cn" for letter in letters]
    if composed:
        points[HANGUL_VOWELS_AND_ENDS] = True
        points[list(PLANES_IN_USE)] |= [
            unicodedata.combining(letter) > 0 or not unicodedata.is_normalized("NFC", letter)
            for letter in letters
        ]
        parts = [unicodedata.decomposition(letter).split() for letter in letters]
        points[
            [int(part[1], 16) for part in parts if len(part) == 2 and not part[0].startswith("<")]
        ] = True
    return points


def unsettled_documents(offsets: Int64Array, data: Uint8Array, points: BoolArray) -> Int64Array:
    """Return the indices, ascending, of the documents that contain a code point of a set.

    points: bool [0x110000], True for the code points of the set; no ASCII code point may be True.
    offsets, data: document i is the valid UTF-8 text ``data[offsets[i]:offsets[i + 1]]``; the first
    offset is 0.
    """
    leads = np.flatnonzero(data >= 0xC0)
    first = data[leads]
    found = []
    for size, lowest, highest in ((2, 0xC0, 0xDF), (3, 0xE0, 0xEF), (4, 0xF0, 0xFF)):
        at = leads[(first >= lowest) & (first <= highest)]
        here = data[at].astype(np.uint32) & (0x7F >> size)
        for place in range(1, size):
            here = here << 6 | (data[at + place] & 0x3F)
        found.append(at[points[here]])
    return np.unique(np.searchsorted(offsets, np.concatenate(found), side="right") - 1)
