"""Data for held-out loss: a .bin/.idx pair with its documents and bytes, windows over its tokens,
and sums over scored tokens.

A window reads the tokens ids[begin:end]. The model predicts each next token, and the loss is summed
over a part of ids[begin + 1:end + 1], the scored tokens. This module reads files and a tokenizer,
but no model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data_prep.prepared.indexed import FormatError, read_index, sample_digest, with_ending
from fem_common.errors import ConfigError, convert_os_errors
from fem_common.files import write_atomically
from fem_megatron.config import ModelConfig
from pretrain.config import DataConfig, RunConfig, Source
from pretrain.data.facts import DataFacts, check_data

FORMAT = 1  # format of the file of partial sums
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Window:
    """Window over tokens: the model reads ids[begin:end], and ids[first:end + 1] are scored.

    Each scored token has a context of at least ``first - begin`` tokens.
    """

    begin: int
    first: int
    end: int

    def __len__(self) -> int:
        """Number of tokens read."""
        return self.end - self.begin


def windows(sections: Iterable[tuple[int, int]], context: int, stride: int) -> Iterator[Window]:
    """Yield windows of at most ``context`` tokens, each beginning ``stride`` tokens after the last
    one.

    sections: spans [begin, end) of tokens that no window crosses. Every token except the first of a
    section is scored once. 1 <= stride <= context.

    With stride = context, windows do not overlap, as in training: the context of a scored token is
    1 to ``context`` tokens. With a smaller stride, each window except the first of a section scores
    only its last ``stride`` tokens, each with at least context - stride + 1 tokens of context.
    """
    for start, stop in sections:
        first, begin = start + 1, start
        while first < stop:
            end = min(begin + context, stop - 1)
            yield Window(begin, first, end)
            first, begin = end + 1, begin + stride


def batched(found: Iterable[Window], size: int) -> Iterator[list[Window]]:
    """Yield lists of ``size`` windows; the last list may be shorter."""
    batch: list[Window] = []
    for window in found:
        batch.append(window)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


@dataclass
class Sums:
    """Sums over the scored tokens before ``position``; every number of a result follows from them.

    They can be stored. Loss and number of tokens of the current document are in ``open_nats`` and
    ``open_tokens`` until the next document begins. The sums are float64 and per document, so that
    they do not depend on the batch size.
    """

    position: int = 0
    nats: float = 0.0
    tokens: int = 0
    documents: int = 0
    nats_squared: float = 0.0
    nats_times_tokens: float = 0.0
    tokens_squared: float = 0.0
    open_nats: float = 0.0
    open_tokens: int = 0

    def add(
        self, first: int, losses: npt.NDArray[np.float64], starts: npt.NDArray[np.int64]
    ) -> None:
        """Add the losses [n] of consecutive tokens, in nats; NaN for tokens that do not count.

        first: index of the first of these tokens. starts: indices of the first tokens of all
        documents. A document may begin with tokens that are not scored, between the last added
        token and ``first``.
        """
        first_begun, end = np.searchsorted(starts, (self.position, first + len(losses)))
        begun = starts[first_begun:end] - first
        for number, piece in enumerate(np.split(losses, np.maximum(begun, 0))):
            if number:
                self._close()
            self.open_nats += float(np.nansum(piece))
            self.open_tokens += int(np.count_nonzero(~np.isnan(piece)))
        self.position = first + len(losses)

    def _close(self) -> None:
        if self.open_tokens:
            self.nats += self.open_nats
            self.tokens += self.open_tokens
            self.documents += 1
            self.nats_squared += self.open_nats**2
            self.nats_times_tokens += self.open_nats * self.open_tokens
            self.tokens_squared += float(self.open_tokens) ** 2
        self.open_nats, self.open_tokens = 0.0, 0

    def done(self) -> Sums:
        """Return a copy of the sums in which the last document is finished."""
        closed = replace(self)
        closed._close()
        return closed

    def __add__(self, other: Sums) -> Sums:
        """Return the sums over two texts; both must be finished (see ``done``)."""
        return Sums(**{name: value + getattr(other, name) for name, value in asdict(self).items()})

    @property
    def mean(self) -> float:
        """Mean loss in nats per token."""
        return self.nats / self.tokens

    @property
    def stderr(self) -> float | None:
        """Standard error of ``mean``; None for fewer than two documents.

        The mean is a ratio of two sums over D documents with losses L_d and n_d tokens, and its
        error is

            sqrt(D / (D - 1) * sum_d (L_d - mean * n_d)^2) / sum_d n_d.

        Documents are assumed to be independent; tokens of one document are not.
        """
        if self.documents < 2:
            return None
        squares = (
            self.nats_squared
            - 2 * self.mean * self.nats_times_tokens
            + self.mean**2 * self.tokens_squared
        )
        return math.sqrt(self.documents / (self.documents - 1) * max(squares, 0.0)) / self.tokens


@dataclass(frozen=True)
class Text:
    """Tokens of a memory-mapped .bin/.idx pair.

    ids: [n] as stored. starts: int64 [documents + 1], the index of the first token of each
    document, and n. mask: uint8 [n], 0 for tokens that do not count in the loss; None if all count.
    The following are None without a manifest. eod: the id that ends a document.
    vocab_size: entries of the tokenizer. whole_bytes: UTF-8 bytes of all documents. tokenizer:
    folder of the tokenizer.
    """

    prefix: Path
    ids: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8] | None
    eod: int | None
    vocab_size: int | None
    total_bytes: int | None
    tokenizer: Path | None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def sample(self, tokens: int | None) -> Text:
        """Return a Text with only ``tokens`` tokens (None: all).

        The sample consists of complete documents that are spread evenly over the text; only its
        last document is truncated. Documents are taken in the order of the fractional part of
        (document number x golden ratio), so that any first few of them are far from each other.
        """
        if tokens is None or tokens >= len(self.ids):
            return self
        order = np.argsort(np.arange(self.documents) * GOLDEN % 1.0)
        ends = np.minimum(np.cumsum(np.diff(self.starts)[order]), tokens)
        starts = np.concatenate([[0], ends[: np.searchsorted(ends, tokens) + 1]])
        sizes = np.diff(starts)
        firsts = self.starts[order[: len(sizes)]]

        def taken(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            pieces = [values[i : i + size] for i, size in zip(firsts, sizes, strict=True)]
            return np.concatenate(pieces)

        mask = None if self.mask is None else taken(self.mask)
        return replace(self, ids=taken(self.ids), starts=starts, mask=mask, total_bytes=None)

    def text_bytes(self, tokenizer: Any | None) -> int | None:
        """Return the number of UTF-8 bytes of all documents; None if it cannot be determined.

        It is the number that data_prep counted. Without it, the tokenizer decodes each document.
        The result is then exact if the tokenizer reproduces the original text (byte-level BPE); if
        a document is truncated within a character, only its complete characters count.
        """
        if self.total_bytes is not None or tokenizer is None:
            return self.total_bytes
        return sum(self._decoded_bytes(start, end, tokenizer) for start, end in self.spans())

    def _decoded_bytes(self, start: int, end: int, tokenizer: Any) -> int:
        ids = self.ids[start:end].tolist()
        ended = bool(ids) and ids[-1] == self.eod_of(tokenizer)
        text = tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False)
        text = text if ended else text.rstrip("\N{REPLACEMENT CHARACTER}")
        return len(text.encode("utf-8", "surrogatepass"))

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield the span [start, end) of every document, in order."""
        return zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True)

    def eod_of(self, tokenizer: Any | None) -> int | None:
        """Return the id that ends a document, or None if unknown.

        It is the id in the manifest; without a manifest it is the tokenizer's end-of-sequence
        token.
        """
        return self.eod if self.eod is not None or tokenizer is None else tokenizer.eos_token_id

    def identity(self) -> list[Any]:
        """Return values that identify the tokens independently of their folder.

        They are a digest of the size and a sample of the .bin file, the number of tokens, the
        number of documents, and the digest of a loss mask.
        """
        endings = ["bin"] if self.mask is None else ["bin", "mask"]
        digest, *mask = [sample_digest(with_ending(self.prefix, ending)) for ending in endings]
        return [digest, len(self.ids), self.documents, *mask]

    def sections(self, per_document: bool, eod: int | None) -> Iterator[tuple[int, int]]:
        """Yield the spans [begin, end) that no window crosses (see ``windows``).

        All tokens of a span except its first are scored. With per_document False, the only span is
        the entire text. Otherwise each document is a span that begins with the end-of-document
        token before it, so that the same tokens are scored. A document without this token before it
        is scored from its second token on. eod: the end-of-document token.
        """
        if not per_document:
            yield 0, len(self.ids)
            return
        for start, end in self.spans():
            if end > start:
                preceded = start > 0 and int(self.ids[start - 1]) == eod
                yield start - 1 if preceded else start, end


def open_text(prefix: Path) -> Text:
    """Map ``PREFIX.bin`` and ``PREFIX.idx``, with the same checks as for training data.

    Raises:
        ConfigError: a file is missing, damaged, not of one pair or different from its manifest, or
        no token can be predicted. StorageError: the file system failed.
    """
    facts = _facts(prefix)
    (source,) = facts.sources
    with convert_os_errors():
        try:
            found = read_index(with_ending(prefix, "idx"))
        except FormatError as error:
            raise ConfigError(f"data {prefix}: {with_ending(prefix, 'idx')} {error}") from None
        ends = np.concatenate([[0], np.cumsum(found.lengths, dtype=np.int64)])
        if not np.array_equal(found.pointers, ends[:-1] * np.dtype(found.dtype).itemsize):
            raise ConfigError(
                f"data {prefix}: the sequences of its .idx are not consecutive in its .bin; write"
                " the pair again"
            )
        if found.document_indices[-1] != len(found.lengths):
            raise ConfigError(
                f"data {prefix}: the documents in its .idx do not match its sequences; write the"
                " pair again"
            )
        ids = np.memmap(
            with_ending(prefix, "bin"), dtype=np.dtype(found.dtype).newbyteorder("<"), mode="r"
        )
        mask = None
        if source.mask is not None:
            mask = np.memmap(with_ending(prefix, "mask"), dtype=np.uint8, mode="r")
    return Text(
        prefix,
        ids,
        ends[found.document_indices],
        mask,
        facts.eod_id,
        facts.vocab_size,
        source.text_bytes,
        facts.tokenizer,
    )


def _facts(prefix: Path) -> DataFacts:
    """Return the facts about the pair, read and checked as for training data."""
    key, any_vocabulary = "data.train.0.prefix = ", 2**31
    # A sequence length of 1 needs two tokens.
    settings = RunConfig(
        model=ModelConfig(vocab_size=any_vocabulary),
        data=DataConfig(train=(Source(prefix=str(prefix)),), seq_length=1),
    )
    try:
        with convert_os_errors():
            return check_data(settings)
    except ConfigError as error:
        if str(error).startswith("data.seq_length"):
            raise ConfigError(
                f"data {prefix} has fewer than two tokens, so no token can be predicted; name"
                " another .bin/.idx pair"
            ) from None
        raise ConfigError(str(error).replace(key, "data ")) from None


def check_vocabulary(text: Text, vocab_size: int, tokenizer: Any | None) -> None:
    """Raise ConfigError if the data was created with another tokenizer than the model's.

    vocab_size: that of the model. tokenizer: the model's; None: only sizes are compared. The tokens
    and their ids must agree.
    """
    if text.vocab_size is not None and text.vocab_size > vocab_size:
        raise ConfigError(
            f"data {text.prefix} is of a tokenizer with {text.vocab_size} entries, but the model"
            f" has {vocab_size}: name data of the model's tokenizer with --data PREFIX"
        )
    file = None if text.tokenizer is None else text.tokenizer / "tokenizer.json"
    if file is None or tokenizer is None or not file.is_file():
        return
    ours = tokenizer.get_vocab()
    for token, number in _entries(json.loads(file.read_bytes())):
        if ours.get(token) != number:
            there = "is not in" if token not in ours else f"has the id {ours[token]} in"
            raise ConfigError(
                f"data {text.prefix} was created with another tokenizer, {text.tokenizer}: its"
                f" token {token!r} (id {number}) {there} the model's tokenizer; name data of the"
                " model's tokenizer with --data PREFIX"
            )


def _entries(raw: dict[str, Any]) -> list[tuple[str, int]]:
    """Return all (token, id) pairs of the content of a tokenizer.json.

    A Unigram model has a list of [token, score], in which ids are positions.
    """
    vocabulary = raw.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, dict):
        pairs = list(vocabulary.items())
    else:
        pairs = [(token, i) for i, (token, _) in enumerate(vocabulary)]
    return pairs + [(token["content"], token["id"]) for token in raw.get("added_tokens", [])]


@dataclass(frozen=True)
class Settings:
    """Windows over a text.

    context: tokens per window. stride: tokens between the beginnings of two windows. per_document:
    no window crosses the border of a document.
    """

    context: int
    stride: int
    per_document: bool = False


class Kept:
    """Sums on disk, so that an interrupted measurement can resume.

    sums: key of a measurement -> its Sums. path: None: sums are not written to disk.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.sums: dict[str, Sums] = {}
        if path is None:
            return
        # A file that cannot be read costs only time: the measurement starts from the first token.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            raw = json.loads(path.read_bytes())
            if raw["format"] == FORMAT:
                self.sums = {key: Sums(**value) for key, value in raw["sums"].items()}

    def keep(self, key: str, sums: Sums) -> None:
        """Store the sums of a measurement; the file is replaced atomically."""
        self.sums[key] = sums
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {
                "format": FORMAT,
                "sums": {name: asdict(value) for name, value in self.sums.items()},
            }
            write_atomically(self.path, json.dumps(content).encode())

    def remove(self) -> None:
        """Delete the file: the result contains the sums."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
