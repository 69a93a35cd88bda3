"""Held-out perplexity of any open model on any .bin/.idx pair: nats per token and bits per byte, at
chosen context lengths.

    python -m tools.evaluate.perplexity runs/demo --context 128 256 --stride 64

Every token except the first is scored exactly once, from the earlier tokens of its window (see
``heldout``). By default the method is that of validation during training: the documents form one
stream, end-of-document tokens are scored, and windows do not overlap.

With ``per_document`` a window contains no token of earlier documents except the end-of-document
token before its document. If this token precedes each document, the same tokens are scored as
without ``per_document``; otherwise the first token of a document is not scored.

Bits per byte are all nats / ln 2 / UTF-8 bytes of the entire text. The bytes are those that
data_prep counted or that the tokenizer decodes. Bits per byte are not available if first tokens of
documents are not scored, because the bytes of the scored tokens are then unknown.

Tokens that a loss mask next to the data excludes are not scored either.

A result is one file per task in the format of ``tools.evaluate``:

- ``value`` is nats per token at the longest context length, ``stderr`` its standard error over
  the ``n`` documents.
- ``subtasks`` has one entry per context length ("@128", "@256"), unless only one was measured.
- ``raw`` contains, for the longest context length: bits_per_byte, perplexity, nats, tokens,
  unscored (number of tokens that are not scored), bytes, context, stride, per_document,
  data. ``raw.contexts`` contains the same for every length.

The command writes one file per context length, for example ``valid_256.json`` with the label
``valid @256``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt

from fem_common import cli
from fem_common.errors import CommandError, ConfigError, StorageError, UserError, convert_os_errors
from fem_common.files import json_bytes, sha256_json, write_atomically
from fem_common.progress import Progress
from pretrain.checkpoint.folder import find
from tools.hf.paths import check_model

from .heldout import (
    Kept,
    Settings,
    Sums,
    Text,
    Window,
    batched,
    check_vocabulary,
    open_text,
    windows,
)
from .suite import SuiteTask

if TYPE_CHECKING:
    from tools.hf.open_model import OpenModel  # imports torch, which --help does not need

FORMAT = 1
METRIC = "nats_per_token"
SAVE_SECONDS = 30.0
_TOKENS_A_BATCH = 8192
_LOGITS_BYTES = 1 << 28  # for the fp32 logits of a batch; a single window may need more
_LOSS_ELEMENTS = 1 << 24  # number of logits from which losses are computed in one call


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
    """Return the loss sums of a model over a text.

    Stored sums of the same measurement are reused, and an interruption stores the finished part.

    Args:
        settings: windows over the text.
        kept: storage of the sums.
        model_key: text that identifies the weights.
        batch_size: affects speed only: windows are padded on the right, which no scored token
            reads.

    Raises:
        ConfigError: a token is not in the model's vocabulary, or a loss is not finite.
    """
    windowed = [settings.context, settings.stride, settings.per_document]
    key = sha256_json([model_key, str(opened.dtype), text.identity(), *windowed])
    sums = kept.sums.get(key, Sums())
    eod = text.eod_of(opened.tokenizer)
    size = batch_size or _batch_size(settings.context, vocabulary(opened))
    cut = windows(text.sections(settings.per_document, eod), settings.context, settings.stride)
    before, saved = sums.position, time.monotonic()
    title = f"{text.prefix.name} @{settings.context}"
    line = Progress(len(text.ids) - before, "tokens", title, stream=stream)
    try:
        for batch in batched((window for window in cut if window.end >= sums.position), size):
            # A copy, so that an interruption leaves the sums of complete batches.
            after = replace(sums)
            for window, losses in zip(batch, _losses(opened, text, batch), strict=True):
                after.add(window.first, losses, text.starts)
            sums = after
            if time.monotonic() - saved > SAVE_SECONDS:
                kept.keep(key, sums)
                saved = time.monotonic()
            line.update(sums.position - before)
    finally:
        line.close()
        kept.keep(key, sums)
    return sums.done()


def _losses(
    opened: OpenModel, text: Text, batch: Sequence[Window]
) -> list[npt.NDArray[np.float64]]:
    """Return the losses in nats of the scored tokens, one array per window, from one model call.

    The losses of tokens that do not count are NaN.
    """
    import torch

    longest = max(map(len, batch))
    read = np.zeros((len(batch), longest), dtype=np.int64)
    wanted = []
    for row, window in enumerate(batch):
        ids = text.ids[window.begin : window.end + 1].astype(np.int64)
        wrong = np.flatnonzero((ids >= vocabulary(opened)) | (ids < 0))
        if len(wrong):
            raise ConfigError(
                f"data {text.prefix} has the token {ids[wrong[0]]} at"
                f" {window.begin + int(wrong[0])}, but the model has {vocabulary(opened)}: name"
                " data of the model's tokenizer with --data PREFIX"
            )
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
            pieces = []
            for begin in range(0, len(answers), rows):
                part = slice(begin, begin + rows)
                pieces.append(
                    torch.nn.functional.cross_entropy(
                        scored[part].to(wide), answers[part], reduction="none"
                    )
                )
            found.append(torch.cat(pieces).double().cpu().numpy())
    for window, losses in zip(batch, found, strict=True):
        if not np.isfinite(losses).all():
            place = window.first + int(np.flatnonzero(~np.isfinite(losses))[0])
            raise ConfigError(
                f"{opened.name}: the loss of token {place} of {text.prefix} is not finite: check"
                " that the model's weights are finite"
            )
        if text.mask is not None:
            losses[text.mask[window.first : window.end + 1] == 0] = np.nan
    return found


def vocabulary(opened: OpenModel) -> int:
    """Return the number of rows of the model's embedding."""
    return int(opened.model.get_input_embeddings().weight.shape[0])


def _batch_size(context: int, vocab_size: int) -> int:
    """Return the number of windows per model call.

    It is large enough to use a device, and small enough for the memory of the logits.
    """
    return max(1, min(_TOKENS_A_BATCH // context, _LOGITS_BYTES // (4 * context * vocab_size)))


def heldout_result(
    opened: OpenModel,
    task: SuiteTask,
    out: Path | None,
    model_key: str,
    *,
    per_document: bool = False,
    batch_size: int | None = None,
    stream: TextIO = sys.stderr,
) -> dict[str, Any]:
    """Return the content of a result file for a task of kind ``heldout``.

    Args:
        task: its context lengths default to the sequence length of the training, its stride to
            the context length, its data to the validation data of the run. Several sources are
            read one after the other, each token once.
        out: folder of the model's results, in which unfinished work is stored; None: not stored.
        model_key: text that identifies the weights.
        per_document: see ``Settings``.

    Raises:
        ConfigError: the data is missing, damaged, empty or of another tokenizer; a context is
        longer than the model supports, or shorter than the stride; a loss is not finite.
        StorageError: the file system failed.
    """
    started = time.monotonic()
    contexts = sorted(set(task.context_lengths or (training_length(opened),)))
    settings = [Settings(context, task.stride or context, per_document) for context in contexts]
    for one in settings:
        _check(opened, one)
    prefixes = [Path(task.data)] if task.data else heldout_data(opened.manifest, opened.name)
    texts = [open_text(prefix).sample(task.max_tokens) for prefix in prefixes]
    for text in texts:
        check_vocabulary(text, vocabulary(opened), opened.tokenizer)
    kept = Kept(None if out is None else out / f".{task.name or task.task}.partial.json")
    found = []
    for one in settings:
        by_text = [
            measure(opened, text, one, kept, model_key, batch_size=batch_size, stream=stream)
            for text in texts
        ]
        found.append(sum(by_text[1:], by_text[0]))
        if not found[-1].tokens:
            raise ConfigError(
                f"data {', '.join(map(str, prefixes))}: no scored token counts in the loss, by its"
                " .mask; name other data with --data PREFIX"
            )
    sizes = [text.text_bytes(opened.tokenizer) for text in texts]
    text_bytes = None if None in sizes else sum(size for size in sizes if size is not None)
    kept.remove()
    raw = [_raw(sums, one, texts, text_bytes) for sums, one in zip(found, settings, strict=True)]
    subtasks = {}
    if len(settings) > 1:
        for sums, one in zip(found, settings, strict=True):
            subtasks[f"@{one.context}"] = {
                "value": sums.mean,
                "stderr": sums.stderr,
                "n": sums.documents,
                "chance": None,
            }
    return {
        "format": FORMAT,
        "model": opened.name,
        "model_key": model_key,
        "task": task.name or task.task,
        "label": task.label or task.name or task.task,
        "metric": METRIC,
        "value": found[-1].mean,
        "stderr": found[-1].stderr,
        "higher_is_better": False,
        "raw": {**raw[-1], "contexts": {str(one["context"]): one for one in raw}},
        "chance": None,
        "subtasks": subtasks,
        "n": found[-1].documents,
        "fewshot": None,
        "version": f"native held-out perplexity, format {FORMAT}",
        "seconds": time.monotonic() - started,
    }


def heldout_data(manifest: Mapping[str, Any], name: str) -> list[Path]:
    """Return the prefixes of the validation data of the run that trained a model.

    manifest: of its checkpoint, or training.json of its export. name: of the model, for messages.

    Raises:
        ConfigError: the run is unknown or has no validation data.
    """
    section = manifest.get("config", {}).get("data")
    if section is None:
        raise ConfigError(
            f"{name}: no held-out data is recorded for it: name a .bin/.idx pair with --data PREFIX"
            " (in a suite: data: PREFIX)"
        )
    if not section["valid"]:
        raise ConfigError(
            f"{name}: its run has no validation data (data.valid is empty): name a .bin/.idx pair"
            " with --data PREFIX"
        )
    return [Path(source["prefix"]) for source in section["valid"]]


def data_digest(path: Path, column: SuiteTask) -> str | None:
    """Return a hash of the tokens that a ``heldout`` column would score for the model at ``path``.

    The hash is independent of the folder of the data. No weight is read. None if the data is
    unknown or cannot be read; the evaluation itself then reports the reason.
    """
    try:
        prefixes = [Path(column.data)] if column.data else heldout_data(_manifest(path), path.name)
        return sha256_json([open_text(prefix).identity() for prefix in prefixes])[:16]
    except (ConfigError, StorageError, OSError):
        return None


def _manifest(path: Path) -> dict[str, Any]:
    from tools.hf.folder import read_folder
    from tools.hf.paths import is_folder

    if is_folder(path):
        return read_folder(path).training()
    return find(path).manifest


def training_length(opened: OpenModel) -> int:
    """Return the sequence length of the training in tokens.

    For a model of another project it is the longest context in its configuration.

    Raises:
        ConfigError: neither is known.
    """
    section = opened.manifest.get("config", {}).get("data")
    if section:
        length = section["seq_length"]
    else:
        length = getattr(opened.model.config, "max_position_embeddings", None)
    if length is None:
        raise ConfigError(
            f"{opened.name}: no context length is recorded for it: give --context TOKENS (in a"
            " suite: context_lengths)"
        )
    return int(length)


def _check(opened: OpenModel, settings: Settings) -> None:
    """Raise ConfigError if the model does not support these settings."""
    if settings.context < 2:
        raise ConfigError(f"--context {settings.context}: must be at least 2")
    if not 1 <= settings.stride <= settings.context:
        raise ConfigError(
            f"--stride {settings.stride}: must be from 1 to the context length {settings.context},"
            " else some tokens are never scored"
        )
    check_length(opened, "--context", settings.context)


def check_length(opened: OpenModel, option: str, length: int | None) -> None:
    """Raise ConfigError if the model is not causal or does not accept ``length`` tokens.

    option: the option that sets the length, for the message.
    """
    if opened.config is not None and not opened.config.causal:
        raise ConfigError(
            f"{opened.name} is not causal (model.causal = false): it cannot predict the next token"
        )
    longest = opened.max_length
    if length is not None and longest is not None and length > longest:
        raise ConfigError(
            f"{option} {length} is more than {opened.name} accepts: {longest} tokens at most"
        )


def _raw(
    sums: Sums, settings: Settings, texts: Sequence[Text], text_bytes: int | None
) -> dict[str, Any]:
    # First tokens of documents and masked ones. The first token of each text is never scored and
    # not counted here.
    unscored = sum(len(text.ids) - 1 for text in texts) - sums.tokens
    text_bytes = None if unscored else text_bytes
    return {
        METRIC: sums.mean,
        "bits_per_byte": sums.nats / math.log(2) / text_bytes if text_bytes else None,
        "perplexity": math.exp(min(sums.mean, 700.0)),
        "nats": sums.nats,
        "tokens": sums.tokens,
        "unscored": unscored,
        "bytes": text_bytes,
        "documents": sums.documents,
        "context": settings.context,
        "stride": settings.stride,
        "per_document": settings.per_document,
        "data": [str(text.prefix) for text in texts],
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write results below --out, and return the exit code."""
    parser = cli.Parser(
        prog="python -m tools.evaluate.perplexity",
        description=(
            "Measure held-out perplexity: nats per token and bits per byte on any .bin/.idx pair."
        ),
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="a run directory, a checkpoint, or a Hugging Face folder",
    )
    parser.add_argument(
        "--data",
        metavar="PREFIX",
        help="path of a .bin/.idx pair without its suffix; default: the validation data of the run",
    )
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        default=[],
        metavar="TOKENS",
        help="window lengths; default: the sequence length of the training",
    )
    parser.add_argument(
        "--stride",
        type=int,
        metavar="TOKENS",
        help="tokens between the starts of two windows; default: the window length, as in training",
    )
    parser.add_argument(
        "--per-document", action="store_true", help="no window extends over the start of a document"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="read a sample of N tokens from documents spread over the data; default: all",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help=(
            "windows per call of the model; default: as memory allows. Does not change the results"
        ),
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as stored")
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="default: the tokenizer of the model"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write DIR/MODEL/valid_256.json; the same command resumes an interrupted measurement",
    )
    given = parser.parse_args(arguments)
    for option, value, least in (
        ("--max-tokens", given.max_tokens, 2),
        ("--batch-size", given.batch_size, 1),
    ):
        if value is not None and value < least:
            parser.error(f"{option} {value}: too few")
    again = (
        "the same command resumes where it stopped"
        if given.out
        else "with --out DIR the same command could have resumed"
    )

    def measured() -> None:
        try:
            with convert_os_errors():
                _command(given)
        except CommandError:
            raise
        except ValueError as error:
            raise UserError(str(error)) from None

    return cli.run("tools.evaluate.perplexity", measured, kept=again)


def _command(given: argparse.Namespace) -> None:
    check_model(given.model, given.tokenizer)
    if given.data:
        open_text(Path(given.data))
    import torch  # takes seconds, which --help and wrong arguments should not need

    from tools.hf.open_model import fingerprint, open_model

    dtype = None if given.dtype is None else getattr(torch, given.dtype)
    opened = open_model(given.model, dtype=dtype, device=given.device, tokenizer=given.tokenizer)
    stem = Path(given.data).name if given.data else "valid"
    data = [given.data] if given.data else heldout_data(opened.manifest, opened.name)
    print(f"{opened.name}: {', '.join(map(str, data))}")
    print(" context   stride  nats/token   stderr  bits/byte       tokens")
    for context in sorted(set(given.context)) or [training_length(opened)]:
        task = SuiteTask(
            task=f"{stem}_{context}",
            label=f"{stem} @{context}",
            metric=METRIC,
            name=f"{stem}_{context}",
            kind="heldout",
            higher_is_better=False,
            data=given.data,
            context_lengths=(context,),
            stride=given.stride,
            max_tokens=given.max_tokens,
        )
        folder = None if given.out is None else given.out / opened.name
        options = {"per_document": given.per_document, "batch_size": given.batch_size}
        result = heldout_result(opened, task, folder, fingerprint(opened), **options)
        if folder is not None:
            write_atomically(folder / f"{task.name}.json", json_bytes(result))
        raw = result["raw"]
        stderr, bits = _cell(result["stderr"]), _cell(raw["bits_per_byte"])
        print(
            f"{context:>8} {raw['stride']:>8} {result['value']:>11.4f} {stderr:>8} {bits:>10}"
            f" {raw['tokens']:>12,}",
            flush=True,
        )
    if raw["unscored"]:
        print(
            f"tools.evaluate.perplexity: no bits/byte: {raw['unscored']:,} tokens are not scored:"
            " first tokens of documents without an end-of-document token before them, or tokens"
            " that a loss mask excludes",
            file=sys.stderr,
        )


def _cell(number: float | None) -> str:
    return "-" if number is None else f"{number:.4f}"


if __name__ == "__main__":
    sys.exit(main())
