"""Text generation from prompts, and measurement of its time and memory.

The text of a single prompt is streamed to stdout; several prompts are generated as one left-padded
batch.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, GenerationConfig, StoppingCriteria, TextStreamer

from fem_common.errors import ConfigError
from fem_megatron.megatron import platform
from pretrain.plan.run_plan import decoding_state_bytes
from tools.hf.open_model import OpenModel, open_model, quiet_transformers
from tools.hf.tokenizer import SPECIAL_IDS, first_line

from .speculative import Speculation, speculate

BETWEEN = "-" * 20  # a line between the texts of several prompts
COMPILING_STEPS = 2  # first decoding steps, during which torch compiles


class Clock(StoppingCriteria):
    """Stopping criterion that never stops, but records the time and all ids after each token.

    The time is taken after the device has finished its work.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []
        self.ids: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        platform.synchronize()
        self.times.append(time.perf_counter())
        self.ids = input_ids
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Settings:
    """Settings of a generation, with the names of the command's options.

    draws: True if the next token is sampled. speculative: see ``speculative``.
    """

    model: Path
    device: str
    dtype: str | None
    tokenizer: Path | None
    max_new_tokens: int
    draws: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    beams: int
    seed: int
    no_cache: bool
    speculative: bool
    compile: bool
    json: bool


@dataclass
class Answer:
    """Generated texts, with the data from which `costs` are computed.

    rows: ids of each prompt's new tokens.
    sizes: prompt lengths in tokens.
    texts: text of each row.
    cache: the cache that ``generate`` returned, or None.
    speculation: result of speculative decoding, or None.
    interrupted: True after Ctrl-C.
    """

    opened: OpenModel
    settings: Settings
    prompts: list[str]
    sizes: list[int]
    clock: Clock = field(default_factory=Clock)
    rows: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    cache: Any | None = None
    speculation: Speculation | None = None
    interrupted: bool = False


def run(prompts: list[str], settings: Settings) -> int:
    """Open the model, write texts (or JSON) to stdout and costs to stderr.

    Return 0, or 130 after Ctrl-C, which keeps the text that was generated before it.

    Raises:
        ConfigError: the model cannot be opened, has no tokenizer or cannot generate, or the prompts
        do not fit it.
    """
    dtype = None if settings.dtype is None else getattr(torch, settings.dtype)
    try:
        opened = open_model(
            settings.model, dtype=dtype, device=settings.device, tokenizer=settings.tokenizer
        )
    except ValueError as error:  # for example a checkpoint whose parts do not fit together
        raise ConfigError(str(error)) from error
    answer = generate(opened, prompts, encode(opened, prompts, settings), settings)
    cost = costs(answer)
    if settings.json:
        json.dump(as_json(answer, cost), sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
    elif len(prompts) > 1 or settings.beams > 1:  # else the text has been streamed
        sys.stdout.write(f"\n{BETWEEN}\n".join(answer.texts) + "\n")
    sys.stdout.flush()
    for line in cost_lines(answer, cost):
        print(line, file=sys.stderr)
    return 130 if answer.interrupted else 0


def encode(opened: OpenModel, prompts: list[str], settings: Settings) -> list[list[int]]:
    """Return the token ids of each prompt.

    Raises ConfigError if the model has no tokenizer, is not causal or lacks the modules for
    speculative decoding, or if a prompt has no tokens or too many.
    """
    if opened.tokenizer is None:
        raise ConfigError(f"{opened.source} has {opened.no_tokenizer}")
    if opened.config is not None and not opened.config.causal:
        raise ConfigError(
            f"{opened.source} is an encoder (model.causal=false): it reads all tokens at once and "
            "cannot continue a text"
        )
    if settings.speculative and not hasattr(opened.model, "mtp_modules"):
        raise ConfigError(
            "--speculative: the model has no modules of multi-token prediction; train with "
            "model.mtp_depth=1, and export with --mtp"
        )
    rows = [opened.encode(prompt) for prompt in prompts]
    for index, row in enumerate(rows, 1):
        if not row:
            raise ConfigError(
                f"prompt {index} has no tokens: a continuation needs something to continue"
            )
    longest, limit = max(map(len, rows)), opened.max_length
    if limit is not None and longest + settings.max_new_tokens - 1 > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max-new-tokens {settings.max_new_tokens} "
            f"exceed the {limit} tokens that this model takes"
        )
    return rows


def generate(
    opened: OpenModel, prompts: list[str], rows: list[list[int]], settings: Settings
) -> Answer:
    """Generate the continuations.

    The text of a single prompt is streamed, except for JSON output and for beam search, which may
    still change earlier tokens. The generation settings in the model's folder are not used, except
    for the special tokens.
    """
    tokenizer, model = opened.tokenizer, opened.model
    assert tokenizer is not None
    theirs = model.generation_config  # replaced: its penalties would even change greedy decoding
    model.generation_config = GenerationConfig(
        **{name: getattr(theirs, name) for name in SPECIAL_IDS}
    )
    end = theirs.eos_token_id
    ends = set(end) if isinstance(end, list) else {end}
    pad = next(
        token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if token is not None
    )
    ids, mask = left_padded(rows, pad)
    streamer = None
    if len(rows) == 1 and settings.beams == 1 and not settings.json:
        streamer = TextStreamer(tokenizer, skip_special_tokens=True)
    torch.manual_seed(settings.seed)
    answer = Answer(opened, settings, prompts, [len(row) for row in rows])
    clock = answer.clock
    try:
        with quiet_transformers(), compiled_on(model.device, settings) as compiler:
            if settings.speculative:
                found = _speculate(answer, rows[0], ends, streamer)
            else:
                done = model.generate(
                    ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    pad_token_id=pad,
                    stopping_criteria=[clock],
                    streamer=streamer,
                    return_dict_in_generate=True,
                    do_sample=settings.draws,
                    temperature=settings.temperature,
                    top_k=settings.top_k,
                    top_p=settings.top_p,
                    max_new_tokens=settings.max_new_tokens,
                    num_beams=settings.beams,
                    use_cache=not settings.no_cache,
                    **compiler,
                )
                found, answer.cache = done.sequences, getattr(done, "past_key_values", None)
    except KeyboardInterrupt:
        answer.interrupted = True
        if streamer is not None:
            streamer.end()
        found = ids if clock.ids is None else clock.ids[:: settings.beams]
    for row, sequence in zip(rows, found.tolist(), strict=True):
        new = sequence[ids.shape[1] :]
        stop = next((place + 1 for place, token in enumerate(new) if token in ends), len(new))
        answer.rows.append(new[:stop])
        answer.texts.append(tokenizer.decode(row + new[:stop], skip_special_tokens=True))
    return answer


def _speculate(
    answer: Answer, row: list[int], ends: set[int | None], streamer: TextStreamer | None
) -> Tensor:
    """Return the prompt's ids ``row`` and their continuation, [1, t], by speculative decoding."""
    shown, ids = list(row), torch.tensor([row])
    if streamer is not None:
        streamer.put(ids)
    for found in speculate(answer.opened.model, row, answer.settings.max_new_tokens, ends):
        answer.speculation, answer.cache = found, found.cache
        for token in found.tokens[len(shown) - len(row) :]:
            shown.append(token)
            ids = torch.tensor([shown])
            answer.clock(ids, None)
            if streamer is not None:
                streamer.put(ids[0, -1:])
    if streamer is not None:
        streamer.end()
    return ids


def left_padded(rows: list[list[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Return (ids, mask), both [b, t], of rows that are padded on the left.

    The mask is 0 at padding and 1 elsewhere.
    """
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


@contextlib.contextmanager
def compiled_on(device: torch.device, settings: Settings) -> Any:
    """Yield the additional arguments of ``generate`` for a compiled decoding step on this device.

    Raises ConfigError if the step cannot be compiled.
    """
    if not settings.compile:
        yield {}
        return
    how = CompileConfig(mode="default" if device.type == "cpu" else "reduce-overhead")
    # Without this transformers compiles only on accelerators; it has no public setting for it.
    how._compile_all_devices = True  # type: ignore[assignment]
    try:
        yield {"compile_config": how, "cache_implementation": "static"}
    except Exception as error:  # torch's compilers raise exceptions of many types
        if "torch._" not in type(error).__module__ and "compil" not in str(error).lower():
            raise
        raise ConfigError(
            f"the decoding step cannot be compiled on this machine ({first_line(error)}): "
            "leave --compile out"
        ) from error


# --- costs --------------------------------------------------------------------------------------


def costs(answer: Answer) -> dict[str, Any]:
    """Return JSON key -> number: seconds, tokens and bytes. Unknown numbers are None."""
    times, new = answer.clock.times, sum(map(len, answer.rows))
    opened, settings = answer.opened, answer.settings
    skipped = min(COMPILING_STEPS if settings.compile else 0, max(0, len(times) - 1))
    found: dict[str, Any] = {
        "prompt_tokens": sum(answer.sizes),
        "new_tokens": new,
        "prefill_seconds": times[0] - answer.clock.started if times else None,
        "compiling_seconds": times[skipped] - times[0] if skipped else None,
        "decode_tokens": max(0, new - len(answer.rows) * (1 + skipped)),
        "decode_seconds": times[-1] - times[skipped] if times else None,
        "cache_bytes": None,
        "cache_tokens": None,
        "cache_formula_bytes": None,
    }
    if answer.speculation is not None:
        seen = answer.speculation
        found |= {
            "drafted": seen.drafted,
            "accepted": seen.accepted,
            "passes": seen.passes,
            "modules_cache_bytes": sum(map(layer_bytes, seen.modules_cache.layers)),
        }
    layers = getattr(answer.cache, "layers", None)
    if layers:
        assert answer.cache is not None
        tokens = layer_places(layers[0]) if settings.compile else answer.cache.get_seq_length()
        found["cache_bytes"] = sum(map(layer_bytes, layers))
        found["cache_tokens"] = int(tokens)
        if opened.config is not None:
            one = decoding_state_bytes(opened.config, int(tokens), opened.dtype.itemsize)
            found["cache_formula_bytes"] = one * len(answer.rows) * settings.beams
    return found


def layer_places(layer: Any) -> int:
    """Return the capacity in tokens of one layer of a static cache.

    The method's name depends on the version of transformers.
    """
    name = "get_max_length" if hasattr(layer, "get_max_length") else "get_max_cache_shape"
    places: int = getattr(layer, name)()
    return places


def layer_bytes(layer: Any) -> int:
    """Return the bytes of one layer of a cache.

    A layer has this project's dictionary of tensors, or keys and values.
    """
    state = getattr(layer, "state", None)
    if isinstance(state, dict):
        held = list(state.values())
    else:
        held = [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return sum(tensor.nbytes for tensor in held if isinstance(tensor, Tensor))


def cost_lines(answer: Answer, cost: dict[str, Any]) -> list[str]:
    """Return the costs as lines of text."""
    opened, settings = answer.opened, answer.settings
    size = sum(weight.numel() for weight in opened.model.parameters())
    lines = [
        f"{opened.name}: {size:,} parameters, {str(opened.dtype).removeprefix('torch.')}, "
        f"{opened.model.device.type}"
    ]
    if cost["prefill_seconds"] is not None:
        lines.append(
            f"prefill: {cost['prompt_tokens']} tokens, "
            f"{_rate(cost['prompt_tokens'], cost['prefill_seconds'])}"
        )
    if cost["compiling_seconds"] is not None:
        lines.append(f"compiling: {cost['compiling_seconds']:.1f} s")
    if cost["decode_seconds"]:
        lines.append(
            f"decode: {cost['decode_tokens']} tokens, "
            f"{_rate(cost['decode_tokens'], cost['decode_seconds'])}"
        )
    if cost["cache_bytes"] is not None:
        formula = ""
        if cost["cache_formula_bytes"] is not None:
            formula = f"; by the formula {cost['cache_formula_bytes']:,}"
        rows = len(answer.rows) * settings.beams
        held = "capacity " if settings.compile else ""
        lines.append(
            f"cache: {cost['cache_bytes']:,} bytes, {held}{cost['cache_tokens']} tokens "
            f"of {rows} sequences{formula}"
        )
    if "drafted" in cost:
        lines.append(
            f"speculative: {cost['accepted']} of {cost['drafted']} drafts accepted, "
            f"{cost['new_tokens'] / max(1, cost['passes']):.2f} tokens per forward pass; cache of "
            f"the modules: {cost['modules_cache_bytes']:,} bytes"
        )
    if settings.draws:
        lines.append(f"seed: {settings.seed}")
    return [*lines, "interrupted"] if answer.interrupted else lines


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens / seconds:,.1f} tokens/s" if seconds else "no time at all"


def as_json(answer: Answer, cost: dict[str, Any]) -> dict[str, Any]:
    """Return texts and costs for the JSON output."""
    results = [
        {"prompt": prompt, "text": text, "new_tokens": row}
        for prompt, text, row in zip(answer.prompts, answer.texts, answer.rows, strict=True)
    ]
    return {
        "format": 1,
        "model": answer.opened.name,
        "source": str(answer.opened.source),
        "seed": answer.settings.seed if answer.settings.draws else None,
        "interrupted": answer.interrupted,
        "results": results,
        "costs": cost,
    }
