"""One pass of an open model over a text: losses of all its tokens in windows, summed, kept on disk as it goes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
import numpy.typing as npt

from data_prep.report.progress import LiveLine, count, duration
from data_prep.store.files import sha256_json, write_whole
from fem_common.errors import ConfigError

from .perplexity_data import Text
from .perplexity_windows import Sums, Window, batched, windows

if TYPE_CHECKING:
    from tools.hf.open_model import OpenModel  # with torch: not for --help

FORMAT = 1
SAVE_SECONDS = 30.0
_TOKENS_A_BATCH = 8192
_LOGITS_BYTES = 1 << 28  # of a batch, in fp32; a single window may take more
_LOSS_ELEMENTS = 1 << 24  # logits looked at together when their losses are taken


@dataclass(frozen=True)
class Settings:
    """How a text is cut: tokens a window reads, tokens it moves on, whether it stays in a document."""

    context: int
    stride: int
    per_document: bool = False


class Kept:
    """Sums on disk, by what they are the sums of, so that a measurement goes on where it was interrupted."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.sums = path, {}
        try:
            raw = json.loads(path.read_bytes()) if path is not None and path.is_file() else {}
            self.sums = {key: Sums(**value) for key, value in raw["sums"].items()} if raw.get("format") == FORMAT else {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.sums = {}  # nothing is lost but time

    def keep(self, key: str, sums: Sums) -> None:
        """Writes them down, whole or not at all."""
        self.sums[key] = sums
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {"format": FORMAT, "sums": {name: value.as_json() for name, value in self.sums.items()}}
            write_whole(self.path, json.dumps(content).encode())

    def remove(self) -> None:
        """All is done: the result has it."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def measure(
    opened: OpenModel,
    text: Text,
    settings: Settings,
    kept: Kept,
    model_key: str,
    *,
    batch_size: int | None = None,
    stream: TextIO = sys.stderr,
) -> Sums:
    """The sums over a text. What was kept of the same measurement is not computed again; an interruption keeps what is done.

    The batch size changes how fast, not what: windows are filled up on the right, where no scored token looks.

    Raises:
        ConfigError: a token is not the model's, or a loss is not finite.
    """
    key = sha256_json([model_key, str(opened.dtype), text.identity(), settings.context, settings.stride, settings.per_document])
    sums = kept.sums.get(key, Sums())
    eod = text.eod_of(opened.tokenizer)
    size = batch_size or _batch_size(settings.context, vocabulary(opened))
    cut = windows(text.sections(settings.per_document, eod), settings.context, settings.stride)
    line, before, saved = LiveLine(stream), sums.position, time.monotonic()
    try:
        for batch in batched((window for window in cut if window.end >= sums.position), size):
            after = replace(sums)  # so that an interruption finds whole batches
            for window, losses in zip(batch, _losses(opened, text, batch), strict=True):
                after.add(window.first, losses, text.starts)
            sums = after
            if time.monotonic() - saved > SAVE_SECONDS:
                kept.keep(key, sums)
                saved = time.monotonic()
            if line.due:
                line.show(_progress(text, settings, sums.position, before, line.elapsed))
    finally:
        line.close()
        kept.keep(key, sums)
    return sums.done()


def _losses(opened: OpenModel, text: Text, batch: Sequence[Window]) -> list[npt.NDArray[np.float64]]:
    """Nats of every scored token of each window, from one call of the model."""
    import torch

    longest = max(map(len, batch))
    read, wanted = np.zeros((len(batch), longest), dtype=np.int64), []
    for row, window in enumerate(batch):
        ids = text.ids[window.begin : window.end + 1].astype(np.int64)
        _check_tokens(text, ids, window.begin, vocabulary(opened))
        read[row, : len(window)] = ids[:-1]
        wanted.append(ids[window.first - window.begin :])
    device = next(opened.model.parameters()).device
    with torch.inference_mode():
        logits = opened.model(input_ids=torch.from_numpy(read).to(device), use_cache=False).logits
        wide = torch.promote_types(logits.dtype, torch.float32)
        rows = max(1, _LOSS_ELEMENTS // logits.shape[-1])
        found = []
        for row, (window, targets) in enumerate(zip(batch, wanted, strict=True)):
            scored = logits[row, window.first - window.begin - 1 : len(window)]
            answers = torch.from_numpy(targets).to(device)
            pieces = [
                torch.nn.functional.cross_entropy(scored[i : i + rows].to(wide), answers[i : i + rows], reduction="none")
                for i in range(0, len(answers), rows)
            ]
            found.append(torch.cat(pieces).double().cpu().numpy())
    for window, losses in zip(batch, found, strict=True):
        if not np.isfinite(losses).all():
            place = window.first + int(np.flatnonzero(~np.isfinite(losses))[0])
            raise ConfigError(f"{opened.name}: the loss of token {place} of {text.prefix} is not finite: are the model's weights?")
    return found


def _check_tokens(text: Text, ids: npt.NDArray[np.int64], begin: int, vocab_size: int) -> None:
    wrong = np.flatnonzero((ids >= vocab_size) | (ids < 0))
    if len(wrong):
        place = int(wrong[0])
        raise ConfigError(
            f"data {text.prefix} has the token {ids[place]} at {begin + place}, but the model knows {vocab_size}: name data of its own "
            "tokenizer with --data PREFIX"
        )


def vocabulary(opened: OpenModel) -> int:
    """Ids that the model knows."""
    return int(opened.model.get_input_embeddings().weight.shape[0])


def _batch_size(context: int, vocab_size: int) -> int:
    """Windows a call: enough to keep a device busy, few enough for their logits."""
    return max(1, min(_TOKENS_A_BATCH // context, _LOGITS_BYTES // (4 * context * vocab_size)))


def _progress(text: Text, settings: Settings, position: int, before: int, seconds: float) -> str:
    rate, left = (position - before) / seconds, len(text.ids) - position
    name = f"{text.prefix.name} @{settings.context}"
    return f"{name}: {position / len(text.ids):.1%} · {count(rate)} tokens/s · {duration(left / max(rate, 1e-9))} left"
