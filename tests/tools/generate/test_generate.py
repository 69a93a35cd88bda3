"""``python -m tools.generate``: text as it comes and whole, batches, seeds, beams, what it tells of speed and cache, Ctrl-C, mistakes."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_megatron.config import ModelConfig
from pretrain.plan.run_plan import decoding_state_bytes
from tests.tools.hf.small import random_state
from tests.tools.hf.texts import save, text_model
from tools.generate import generation
from tools.generate.__main__ import main
from tools.generate.generation import ToStdout, left_padded
from tools.hf.__main__ import main as hf
from tools.hf.open_model import open_model
from tools.hf.tokenizer import load_tokenizer

SHORT = ("--max-new-tokens", "10")
PROMPT, TEXTS = "def f(", ("def f(", "x", "Zwölf")
CASES = ("fem_softmax", "fem_linear", "transformer", "mha2nd")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, ModelConfig]]:
    """Checkpoints whose next token is not always the same."""
    found = {}
    for mixer in CASES:
        model = text_model(mixer)
        state = random_state(model, dtype=torch.float32)
        state["output_layer.weight"][256] = 0  # the end of a text is never likely
        found[mixer] = (save(model, tmp_path_factory.mktemp(mixer) / "model", state), model)
    return found


Answer = tuple[int, str, str]


@pytest.fixture
def generate(models: dict[str, tuple[Path, ModelConfig]], capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command in this process, on a mixer's model: exit code, stdout, stderr."""

    def run(mixer: str, *arguments: str) -> Answer:
        code = main([str(models[mixer][0]), *arguments, "--device", "cpu"])
        return code, *capsys.readouterr()

    return run


def answer(found: Answer) -> dict[str, Any]:
    """What --json wrote."""
    assert found[0] == 0, found[2]
    value: dict[str, Any] = json.loads(found[1])
    return value


@pytest.mark.parametrize("mixer", CASES)
def test_what_is_streamed_is_the_text(generate: Callable[..., Answer], models: dict[str, tuple[Path, ModelConfig]], mixer: str) -> None:
    """Streamed, as JSON, without a cache, by transformers' own generate: the same; and the cache is as large as the formula says."""
    code, streamed, told = generate(mixer, PROMPT, "--greedy", "--max-new-tokens", "12")
    found = answer(generate(mixer, PROMPT, "--greedy", "--max-new-tokens", "12", "--json"))
    without = answer(generate(mixer, PROMPT, "--greedy", "--max-new-tokens", "12", "--json", "--no-cache"))
    opened = open_model(models[mixer][0])
    assert opened.tokenizer is not None
    ids = opened.tokenizer(PROMPT, return_tensors="pt").input_ids
    wanted = opened.model.generate(ids, max_new_tokens=12, do_sample=False)[0]
    assert code == 0 and streamed == opened.tokenizer.decode(wanted) + "\n"
    (result,) = found["results"]
    assert result == without["results"][0] and result["text"] + "\n" == streamed and result["new_tokens"] == wanted[6:].tolist()
    assert len(set(result["new_tokens"])) > 2
    costs = found["costs"]
    assert costs["prompt_tokens"] == 6 and costs["new_tokens"] == 12 and costs["decode_tokens"] == 11 and costs["cache_tokens"] == 17
    assert costs["cache_bytes"] == costs["cache_formula_bytes"] == decoding_state_bytes(models[mixer][1], 17, 4) > 0
    assert without["costs"]["cache_bytes"] is None
    assert re.search(
        r"prefill: 6 tokens, [\d,.]+ tokens/s\ndecode: 11 tokens, [\d,.]+ tokens/s\ncache: [\d,]+ bytes, 17 tokens of 1 seq", told
    )


def test_a_batch_is_each_prompt_alone(generate: Callable[..., Answer], tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text(f"{TEXTS[1]}\n\n{TEXTS[2]}\n", encoding="utf-8")
    greedy = ("--greedy", "--max-new-tokens", "6")
    batch = answer(generate("fem_softmax", TEXTS[0], "--file", str(tmp_path / "prompts.txt"), "--json", *greedy))
    assert [result["prompt"] for result in batch["results"]] == list(TEXTS)
    alone = [answer(generate("fem_softmax", text, "--json", *greedy))["results"][0] for text in TEXTS]
    assert batch["results"] == alone
    assert batch["costs"]["prompt_tokens"] == sum(len(text.encode()) for text in TEXTS) and batch["costs"]["new_tokens"] == 18
    # Of three rows as long as the longest.
    assert batch["costs"]["cache_bytes"] == batch["costs"]["cache_formula_bytes"] > 0
    assert generate("fem_softmax", *TEXTS, *greedy)[1] == f"\n{generation.BETWEEN}\n".join(result["text"] for result in alone) + "\n"


def test_a_seed_is_a_text(generate: Callable[..., Answer]) -> None:
    drawn = [
        answer(generate("fem_linear", PROMPT, "--json", "--temperature", "2", "--seed", seed, *SHORT))["results"]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    # Without a seed it is told, and makes the same text again.
    code, text, told = generate("fem_linear", PROMPT, "--temperature", "2", *SHORT)
    seed = re.search(r"seed: (\d+)", told)
    assert code == 0 and seed
    assert generate("fem_linear", PROMPT, "--temperature", "2", "--seed", seed[1], *SHORT)[1] == text


def test_what_is_drawn_from(generate: Callable[..., Answer]) -> None:
    likeliest = answer(generate("fem_linear", PROMPT, "--json", "--greedy", *SHORT))["results"]
    for one in (("--top-k", "1"), ("--top-p", "1e-6"), ("--temperature", "1e-4")):
        assert answer(generate("fem_linear", PROMPT, "--json", "--seed", "1", *SHORT, *one))["results"] == likeliest, one
    hot = answer(generate("fem_linear", PROMPT, "--json", "--seed", "1", "--temperature", "100", "--top-k", "0"))
    assert len(set(hot["results"][0]["new_tokens"])) > 30  # of 40 drawn from 257 nearly evenly: 37; from the 40 likeliest: 25


def test_a_folders_own_penalties_count_for_nothing(
    models: dict[str, tuple[Path, ModelConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, settings = tmp_path / "model", tmp_path / "model" / "generation_config.json"
    assert hf(["export", str(models["transformer"][0]), str(folder)]) == 0
    capsys.readouterr()
    asked = [str(folder), "w1 w2", "--greedy", "--max-new-tokens", "12"]
    assert main(asked) == 0
    wanted = capsys.readouterr().out
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"repetition_penalty": 1.9, "no_repeat_ngram_size": 1}))
    assert main(asked) == 0
    assert capsys.readouterr().out == wanted


def test_beams_find_a_likelier_text(generate: Callable[..., Answer], models: dict[str, tuple[Path, ModelConfig]]) -> None:
    opened = open_model(models["fem_softmax"][0])

    def likelihood(tokens: list[int]) -> float:
        assert opened.tokenizer is not None
        ids = torch.cat((opened.tokenizer(PROMPT, return_tensors="pt").input_ids, torch.tensor([tokens])), dim=1)
        with torch.no_grad():
            scores = opened.model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        return float(scores[-len(tokens) :].sum())

    length = ("--max-new-tokens", "8", "--json")
    greedy, beams = (answer(generate("fem_softmax", PROMPT, *how, *length)) for how in (("--greedy",), ("--beams", "5")))
    assert likelihood(beams["results"][0]["new_tokens"]) > likelihood(greedy["results"][0]["new_tokens"])
    assert beams["costs"]["cache_bytes"] == 5 * greedy["costs"]["cache_bytes"] == beams["costs"]["cache_formula_bytes"]
    assert generate("fem_softmax", PROMPT, "--beams", "5", "--max-new-tokens", "8")[1] == beams["results"][0]["text"] + "\n"


def test_the_end_of_a_text_ends_it(models: dict[str, tuple[Path, ModelConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = models["transformer"][1]
    state = random_state(model, dtype=torch.float32)
    state["output_layer.weight"][:] = 0  # all tokens are equally likely, so the first is; then the end of the text
    state["output_layer.weight"][256] = 1
    path = save(model, tmp_path / "ends", state)
    assert main([str(path), "ab", "c", "xyz", "q", "hello", "--greedy", "--json", "--device", "cpu", "--max-new-tokens", "30"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = [result["new_tokens"] for result in found["results"]]
    assert all(256 not in row[:-1] for row in rows) and len({len(row) for row in rows if row[-1] == 256}) > 1
    assert all("<eod>" not in result["text"] for result in found["results"])


def test_characters_come_whole(models: dict[str, tuple[Path, ModelConfig]], capsys: pytest.CaptureFixture[str]) -> None:
    """Byte by byte: every piece is text, and together they are the text."""
    tokenizer = load_tokenizer(models["transformer"][0] / "tokenizer")
    text = "Zwölf Boxkämpfer\n你好 🦊 x\n\n end"
    pieces: list[str] = []
    streamer = ToStdout(tokenizer, skip_special_tokens=True)
    for token in tokenizer(text)["input_ids"]:
        streamer.put(torch.tensor([token]))
        pieces.append(capsys.readouterr().out)
    streamer.end()
    pieces.append(capsys.readouterr().out)
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) > 5  # as it comes


def test_left_padding() -> None:
    ids, mask = left_padded([[1, 2, 3], [4]], pad=9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]] and mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_stdin_is_a_prompt(generate: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    greedy = ("--greedy", "--max-new-tokens", "4")
    assert generate("fem_linear", "-", *greedy)[1] == generate("fem_linear", PROMPT, *greedy)[1]


@pytest.mark.parametrize("more", [(), ("--json",), ("another",)])
def test_ctrl_c_keeps_the_text_so_far(generate: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]) -> None:
    clock = generation.Clock.__call__

    def five_tokens(self: generation.Clock, *arguments: Any, **options: Any) -> Any:
        found = clock(self, *arguments, **options)
        if len(self.times) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(generation.Clock, "__call__", five_tokens)
    code, text, told = generate("transformer", PROMPT, *more, "--greedy", "--max-new-tokens", "40")
    monkeypatch.undo()
    # A token is counted before it is streamed.
    whole = generate("transformer", PROMPT, "--greedy", "--max-new-tokens", "5" if more else "4")[1]
    assert code == 130 and told.splitlines()[-1] == "interrupted"
    if more == ("--json",):
        found = json.loads(text)
        assert found["interrupted"] and found["results"][0]["text"] + "\n" == whole
    elif more:
        assert text.startswith(whole.removesuffix("\n") + f"\n{generation.BETWEEN}\nanother")
    else:
        assert text == whole


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "no prompt: give one as an argument, - for stdin, or --file PROMPTS"),
        (("",), "prompt 1 is empty"),
        (("x", "--file", "none.txt"), "none.txt: No such file"),
        (("x", "--greedy", "--top-k", "3"), "--top-k is for drawing tokens, and --greedy draws none"),
        (("x", "--beams", "2", "--temperature", "1"), "--temperature is for drawing tokens, and --beams draws none"),
        (("x", "--greedy", "--beams", "2"), "leave one of them out"),
        (("x", "--temperature", "0"), "--temperature 0.0: must be more than 0, or --greedy"),
        (("x", "--top-p", "1.5"), "--top-p 1.5: must be more than 0, up to 1"),
        (("x", "--max-new-tokens", "0"), "--max-new-tokens 0: must be at least 1"),
        (("x", "--compile", "--no-cache"), "--compile is for the step with a cache"),
        (("x" * 500, "--max-new-tokens", "14"), "a prompt of 500 tokens and --max-new-tokens 14 are more than the 512"),
    ],
)
def test_mistakes_are_one_line(generate: Callable[..., Answer], arguments: tuple[str, ...], told: str) -> None:
    code, text, error = generate("mha2nd", *arguments)
    assert code == 2 and text == "" and error.count("\n") == 1
    assert error.startswith("tools.generate: error: ") and told in error


def test_models_that_generate_nothing(
    models: dict[str, tuple[Path, ModelConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Path(shutil.copytree(models["transformer"][0], tmp_path / "bare"))
    shutil.rmtree(bare / "tokenizer")
    encoder = save(text_model("transformer", causal=False), tmp_path / "encoder")
    for path, told in (
        (tmp_path / "none", "there is no folder"),
        (bare, "no tokenizer"),
        (encoder, "is an encoder (model.causal=false)"),
    ):
        assert main([str(path), "x", "--device", "cpu"]) == 2
        text, error = capsys.readouterr()
        assert text == "" and error.count("\n") == 1 and told in error, error


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["fem_softmax", "transformer"])
def test_compiled(generate: Callable[..., Answer], mixer: str) -> None:
    """torch builds its C++ for a minute; the tokens are the same."""
    greedy = (PROMPT, "--greedy", "--max-new-tokens", "8", "--json")
    compiled, eager = answer(generate(mixer, *greedy, "--compile")), answer(generate(mixer, *greedy))
    assert compiled["results"] == eager["results"]
    assert compiled["costs"]["compiling_seconds"] > 1 and compiled["costs"]["cache_bytes"] >= compiled["costs"]["cache_formula_bytes"] > 0
