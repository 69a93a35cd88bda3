"""Verb ``verify``: check whether two models, each a checkpoint or a Hugging Face folder, are equal,
and where they first differ.

One model is in memory at a time: the results of the first are stored in a temporary folder, and
weights are compared tensor by tensor.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fem_common.errors import ConfigError, convert_os_errors
from fem_common.files import read_lines
from fem_common.text import aligned, first_few
from fem_megatron.config import ModelConfig
from pretrain.checkpoint.reader import Weights as Stored

from .compare import (
    LOGITS,
    Difference,
    Findings,
    First,
    Predictions,
    Trace,
    Weights,
    compare_settings,
    compare_tokenizers,
    compare_traces,
    compare_weights,
    number,
    trace,
)
from .export import hf_config
from .folder import read_folder
from .open_model import (
    misread_by_transformers,
    open_model,
    quiet_transformers,
    tokenizer_of,
)
from .paths import is_folder
from .stock import exported
from .tokenizer import SPECIAL_IDS
from .weight_conversion import Tensors

SHOWN = 8  # settings and tensors that are listed before "and N more"


def as_text(found: Findings) -> str:
    """Return the findings as text for a reader; the last line is the verdict."""
    lines = [
        f"{side}  {path}: {about}"
        for side, path, about in zip("AB", found.sides, found.about, strict=True)
    ]
    listed = [f"{key} {one!r} and {two!r}" for key, (one, two) in found.settings.items()]
    differences = f"differs: {first_few(listed, SHOWN, '; ')}" if listed else "equal"
    lines.append(f"configuration: {differences}")
    if found.lacking_tokenizer:
        lacking = " and ".join(map(str, found.lacking_tokenizer))
        lines.append(f"tokenizers: not compared, no tokenizer in {lacking}")
    elif found.tokenizers:
        lines.append(f"tokenizers: differ: {found.tokenizers}")
    else:
        lines.append("tokenizers: equal")
    lines += _weight_lines(found.weights)
    skipped = f", {found.skipped} more that B does not accept" if found.skipped else ""
    lines.append(f"computed: {found.prompts} prompts, {found.predictions.tokens} tokens{skipped}")
    rows = [("", "largest |a - b|", "of the largest", "in")]
    for row, worst in found.layers():
        where = worst.where.partition(", ")[2] if worst.absolute else ""
        rows.append((row, number(worst.absolute), number(worst.relative), where))
    lines += [f"  {line}" for line in aligned(rows)]
    seen = found.predictions
    if seen.tokens:
        mean = number(seen.kl / seen.tokens)
        lines.append(
            f"likeliest token: the same {seen.agree} of {seen.tokens} times; KL {mean} nats per"
            f" token, at most {number(seen.largest_kl)}"
        )
    limit = f"{number(found.tolerance)} ({found.tolerance_from})"
    if found.equal:
        how = "equal bit for bit" if found.bitwise else "equal"
        lines.append(f"{how}: within {limit}")
    else:
        first = found.first()
        if first is not None:
            lines.append(str(first))
        lines.append(f"different at {limit}: {'; '.join(found.faults)}")
    return "\n".join(lines)


def _weight_lines(weights: Weights | None) -> Iterator[str]:
    if weights is None:
        yield "weights: not compared, the models have no names in common"
        return
    count = len(weights.differences)
    differing = [found for found in weights.differences if found.absolute]
    if not differing:
        yield f"weights: {count} tensors, equal bit for bit"
    else:
        worst = max(differing, key=lambda found: found.relative)
        how_far = number(worst.absolute)
        if worst.note:
            how_far += f", {worst.note}"
        yield (
            f"weights: {count - len(differing)} of {count} tensors equal bit for bit; the worst is"
            f" {worst.where}, {how_far}"
        )
    for side, names in (("A", weights.only_a), ("B", weights.only_b)):
        if names:
            yield f"weights that only {side} has: {first_few(names, SHOWN)}"


def as_json(found: Findings) -> dict[str, Any]:
    """Return the findings as a dictionary for JSON; non-finite numbers are None."""
    seen = found.predictions
    return {
        "format": 1,
        "a": str(found.sides[0]),
        "b": str(found.sides[1]),
        "equal": found.equal,
        "bitwise": found.bitwise,
        "faults": found.faults,
        "tolerance": found.tolerance,
        "tolerance_from": found.tolerance_from,
        "configuration": {key: list(pair) for key, pair in found.settings.items()},
        "tokenizers": found.tokenizers,
        "weights": None if found.weights is None else _weights_json(found.weights),
        "layers": [{"layer": row, **_numbers(d)} for row, d in found.layers()],
        "places": [_numbers(d) for d in found.differences.values()],
        "logits": _numbers(found.logits),
        "tokens": seen.tokens,
        "argmax_agrees": seen.agree,
        "kl_nats_per_token": _finite(seen.kl / seen.tokens) if seen.tokens else None,
        "kl_largest": _finite(seen.largest_kl),
        "first": None if found.equal else _first_json(found.first()),
    }


def _weights_json(weights: Weights) -> dict[str, Any]:
    return {
        "compared": len(weights.differences),
        "differing": [_numbers(found) for found in weights.differences if found.absolute],
        "only_a": weights.only_a,
        "only_b": weights.only_b,
    }


def _first_json(first: First | None) -> dict[str, Any] | None:
    if first is None:
        return None
    return {
        "where": first.where,
        "text": str(first),
        "weights": [found.where for found in first.weights or []],
    }


def _numbers(found: Difference) -> dict[str, Any]:
    absolute, relative = _finite(found.absolute), _finite(found.relative)
    return {"where": found.where, "absolute": absolute, "relative": relative, "note": found.note}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 2e-2}
LENGTHS = (1, 17, 64)  # lengths of the prompts of token ids
LONGEST = 512  # longer prompts are cut to this number of tokens
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "def read(self, size=-1):\n    return self.buffer[:size]\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 1 + 1 = 2; 你好。",
)

# Texts for the comparison of the tokenizers, with characters that pre-tokenizers and normalizers
# treat differently: digits, case, white space, scripts, composed characters.
READ = (
    (
        "It's 7 o'clock, they'll have 12345678 of 3.14159265 and 1,000,000; WE'RE done..."
        " (2026-11-27T23:59:01Z)"
    ),
    "  two  spaces,\ta tab,\u00a0no break,\r\n\r\n\n   lines   \n",
    (
        "#include <vector>\nfor (int i = 0; i < n; ++i) {\n\t\tx[i] += 0x1F00 * y_i; //"
        " HTTPServer2go\n}\n"
    ),
    "ftp://host/a_b-c/?q=1%202&lang=de#top @user C:\\temp $x^{2}_{10}$ <p>&amp;</p>",
    (
        "Été à l’école : « cœur » — ſtraße, İstanbul, Việt; Ελληνικά; Русский язык №5; עִבְרִית;"
        " العَرَبِيَّة ١٢٣"
    ),
    (
        "中文没有空格，標點符號；日本語のテキストです。ｶﾀｶﾅ；한국어 문장；हिन्दी १२३"
        " है；ภาษาไทยไม่มีช่องว่าง"
    ),
    "e\u0301 and é, ﬁ and fi, Ａ and A, x² and ½, \u200bzero\u200dwidth, 👩‍👩‍👧 🇩🇪 👍🏽 𝔘𝔫𝔦",
)


@dataclass(frozen=True)
class Side:
    """Data of one of the two models that remain after it is closed.

    about: description of the model. hf: transformers' configuration. limit: maximum number of
    tokens in a prompt.
    """

    path: Path
    source: Path
    about: str
    dtype: torch.dtype
    hf: Any
    config: ModelConfig | None
    limit: int

    @classmethod
    def open(cls, path: Path, device: str) -> tuple[Side, Any]:
        """Open the model at ``path`` and return (its Side, the model)."""
        print(f"opening {path}", file=sys.stderr)
        opened = open_model(path, device=device)
        model, dtype = opened.model, str(opened.dtype).removeprefix("torch.")
        parameters = sum(weight.numel() for weight in model.parameters())
        about = f"{opened.kind}, {type(model).__name__}, {dtype}, {parameters:,} parameters"
        limit = min(opened.max_length or LONGEST, LONGEST)
        return (
            cls(path, opened.source, about, opened.dtype, model.config, opened.config, limit),
            model,
        )

    @property
    def ours(self) -> bool:
        """True if the model is of our modeling code, False for a class of transformers."""
        return bool(self.hf.model_type == "fem_lm")

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of config.json, with the defaults of settings that an older export
        lacks.
        """
        settings: dict[str, Any] = self.hf.to_dict()
        if "architecture" not in settings or self.config is None:
            return settings
        # "architecture" contains the rope_ settings, too.
        others = {key: value for key, value in settings.items() if not key.startswith("rope_")}
        return others | {"architecture": asdict(self.config)}

    def without_modules(self) -> Side:
        """Return a checkpoint's side without modules of multi-token prediction.

        Its class is then that of its export without them.
        """
        if self.config is None or not self.config.mtp_depth or is_folder(self.source):
            return self
        model = replace(self.config, mtp_depth=0)
        tokens = {name: getattr(self.hf, name) for name in SPECIAL_IDS}
        hf = hf_config(model, self.dtype, tokens, self.hf.max_position_embeddings)
        return replace(self, config=model, hf=hf)


def verify(
    a: Path,
    b: Path,
    *,
    prompts: Path | None,
    tolerance: float | None,
    json_out: Path | None,
    device: str,
) -> bool:
    """Compare two models (configuration, tokenizers, weights, activations and logits).

    The findings are printed. Return True if the models are equal, which requires all of these:

    - no logit differs by more than ``tolerance`` x max(1, the largest logit);
    - no weight differs by more than ``tolerance`` x the largest element of its tensor;
    - the tokenizers agree, also as transformers opens them.

    tolerance: None: 1e-4, or 2e-2 if one model is stored in bf16. prompts: a file with one prompt
    per line, in place of the built-in texts. json_out: file to which the findings are written as
    JSON.

    Raises:
        ConfigError: a model cannot be opened, or an argument is invalid.
    """
    if tolerance is not None and not tolerance >= 0:
        raise ConfigError(f"--tolerance {tolerance}: expected a number of at least 0")
    texts = list(TEXTS) if prompts is None else lines_of(prompts)
    with quiet_transformers(), tempfile.TemporaryDirectory(prefix="verify_") as scratch:
        readers = tokenizer_of(a), tokenizer_of(b)
        misread = [
            misread_by_transformers(path, reader, [*READ, *texts])
            for path, reader in zip((a, b), readers, strict=True)
        ]
        one, requested = _remember(a, texts, readers[0] or readers[1], Path(scratch), device)
        two, differences, predictions, skipped = _compare(b, requested, Path(scratch), device)
    if one.ours != two.ours:
        one, two = one.without_modules(), two.without_modules()
    tied = any(side.hf.tie_word_embeddings for side in (one, two))
    weights = compare_weights(_tensors(one), _tensors(two), tied=tied)
    # Without a common name, or with one model of our modeling code, nothing was compared.
    comparable = bool(weights.differences) and one.ours == two.ours
    if one.ours == two.ours:
        settings = compare_settings(one.settings, two.settings)
    elif one.config is not None and two.config is not None:
        settings = compare_settings(asdict(one.config), asdict(two.config))
    else:
        settings = {"model_type": ("", "")}
    tokenizer_faults = [compare_tokenizers(*readers, [*READ, *texts]), *misread]
    coarser = min((one.dtype, two.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    tolerance_from = "--tolerance"
    if tolerance is None:
        tolerance = TOLERANCES[coarser]
        tolerance_from = f"the default of {str(coarser).removeprefix('torch.')}"
    findings = Findings(
        sides=(one.path, two.path),
        about=(one.about, two.about),
        settings=settings,
        tokenizers="; ".join(fault for fault in tokenizer_faults if fault) or None,
        lacking_tokenizer=[
            path for path, reader in zip((a, b), readers, strict=True) if reader is None
        ],
        vocabularies=(one.hf.vocab_size, two.hf.vocab_size),
        weights=weights if comparable else None,
        differences=differences,
        predictions=predictions,
        prompts=len(requested) - skipped,
        skipped=skipped,
        tolerance=tolerance,
        tolerance_from=tolerance_from,
    )
    print(as_text(findings))
    if json_out is not None:
        with convert_os_errors():
            json_out.parent.mkdir(parents=True, exist_ok=True)
            json_out.write_text(json.dumps(as_json(findings), indent=1) + "\n", encoding="utf-8")
    return findings.equal


def lines_of(prompts: Path) -> list[str]:
    """Return the non-empty lines of a file. Raises ConfigError if it has none."""
    lines = [line for line in read_lines(prompts) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {prompts} has no line with a prompt")
    return lines


def fixed_ids(vocabulary: int, limit: int) -> list[list[int]]:
    """Return built-in prompts as token ids; they need no tokenizer.

    They depend only on ``vocabulary``, the number of ids, and on ``limit``, the maximum length.
    """
    state = 20240229
    found = []
    for length in LENGTHS:
        ids = []
        for _ in range(min(length, limit)):
            state = (1103515245 * state + 12345) % 2**31
            ids.append((state >> 8) % vocabulary)
        found.append(ids)
    return found


# --- one model after the other --------------------------------------------------------------------


def _remember(
    path: Path, texts: list[str], reader: Any | None, scratch: Path, device: str
) -> tuple[Side, list[list[int]]]:
    """Open the first model, store a trace of each prompt in ``scratch``, and close the model.

    Returns:
        Its Side, and the token ids of all prompts.
    """
    side, model = Side.open(path, device)
    requested = fixed_ids(side.hf.vocab_size, side.limit)
    if reader is not None:
        read = [list(reader(text)["input_ids"])[: side.limit] for text in texts]
        requested += [ids for ids in read if ids]
    requested = [ids for ids in requested if max(ids) < side.hf.vocab_size]
    for index, ids in enumerate(requested):
        torch.save(trace(model, ids), scratch / f"{index}.pt")
    del model
    gc.collect()  # free the first model before the second one is loaded
    return side, requested


def _compare(
    path: Path, requested: list[list[int]], scratch: Path, device: str
) -> tuple[Side, dict[str, Difference], Predictions, int]:
    """Open the second model and compare its traces with the first model's in ``scratch``.

    Returns:
        Its Side; place -> the largest difference; the comparison of predictions; and the number of
        prompts that it does not accept.
    """
    side, model = Side.open(path, device)
    worst: dict[str, Difference] = {}
    predictions, skipped = Predictions(), 0
    for index, ids in enumerate(requested):
        if max(ids) >= side.hf.vocab_size or len(ids) > side.limit:
            skipped += 1
            continue
        one: Trace = torch.load(scratch / f"{index}.pt", weights_only=True)
        two = trace(model, ids)
        predictions = predictions.and_of(one[LOGITS], two[LOGITS])
        for found in compare_traces(one, two):
            where = found.where
            worst[where] = found.worse(worst[where]) if where in worst else found
    return side, worst, predictions, skipped


def _tensors(side: Side) -> Tensors:
    """Return the model's tensors with the names and shapes of an export."""
    if is_folder(side.source):
        return read_folder(side.source)
    assert side.config is not None
    return exported(Stored(side.source), side.config)
