"""Tests of ``python -m tools.generate``: streamed and complete text, batches, seeds, beams, reports
of speed and cache, Ctrl-C, mistakes.
"""

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
from tests.tools.hf.checkpoints import hf
from tests.tools.hf.small import random_state
from tests.tools.hf.texts import save, text_model
from tests.tools.refusals import Refused
from tests.tools.refusals import refused as refused
from tools.bench.speculative import main as benchmark
from tools.generate import generation
from tools.generate.__main__ import main
from tools.generate.generation import BETWEEN
from tools.hf.open_model import open_model

PROMPT, TEXTS = "def f(", ("def f(", "x", "Zwölf")
CASES = ("fem_softmax", "fem_linear", "transformer", "mha2nd")
Models = dict[str, tuple[Path, ModelConfig]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints whose next token is not constant."""
    found = {}
    for mixer in CASES:
        model = text_model(mixer)
        state = random_state(model, dtype=torch.float32)
        state["output_layer.weight"][256] = 0  # makes the end of a text unlikely
        found[mixer] = (save(model, tmp_path_factory.mktemp(mixer) / "model", state), model)
    return found


Generate = Callable[..., tuple[str, str]]
Answer = Callable[..., dict[str, Any]]


@pytest.fixture
def generate(models: Models, capsys: pytest.CaptureFixture[str]) -> Generate:
    """Run the command in this process on a mixer's model or a path; return stdout and stderr."""

    def run(model: str | Path, *arguments: str, code: int = 0, new: int = 10) -> tuple[str, str]:
        capsys.readouterr()
        path = models[model][0] if isinstance(model, str) else model
        assert (
            main([str(path), *arguments, "--device", "cpu", "--max-new-tokens", str(new)]) == code
        )
        return capsys.readouterr()

    return run


@pytest.fixture
def answer(generate: Generate) -> Answer:
    """Content written by --json."""
    return lambda *arguments, **more: json.loads(generate(*arguments, "--json", **more)[0])


@pytest.mark.parametrize("mixer", CASES)
def test_what_is_streamed_is_the_text(
    generate: Generate, answer: Answer, models: Models, mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streamed, from stdin, as JSON, without a cache and by transformers itself the text is equal;
    the cache has the size of the formula.
    """
    streamed, report = generate(mixer, PROMPT, "--greedy", new=12)
    found = answer(mixer, PROMPT, "--greedy", new=12)
    without = answer(mixer, PROMPT, "--greedy", "--no-cache", new=12)
    opened = open_model(models[mixer][0])
    assert opened.tokenizer is not None
    wanted = opened.model.generate(
        opened.tokenizer(PROMPT, return_tensors="pt").input_ids, max_new_tokens=12, do_sample=False
    )[0]
    assert streamed == opened.tokenizer.decode(wanted) + "\n"
    (result,) = found["results"]
    assert result == without["results"][0]
    assert result["text"] + "\n" == streamed
    assert result["new_tokens"] == wanted[6:].tolist()
    assert len(set(result["new_tokens"])) > 2
    costs = found["costs"]
    assert [costs[f"{what}_tokens"] for what in ("prompt", "new", "decode", "cache")] == [
        6,
        12,
        11,
        17,
    ]
    assert (
        costs["cache_bytes"]
        == costs["cache_formula_bytes"]
        == decoding_state_bytes(models[mixer][1], 17, 4)
        > 0
    )
    assert without["costs"]["cache_bytes"] is None
    output = (
        r"prefill: 6 tokens, [\d,.]+ tokens/s\ndecode: 11 tokens, [\d,.]+ tokens/s\ncache: [\d,]+"
        r" bytes, 17 tokens of 1 seq"
    )
    assert re.search(output, report)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert generate(mixer, "-", "--greedy", new=12)[0] == streamed


def test_a_batch_is_each_prompt_alone(generate: Generate, answer: Answer, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_bytes(
        f"\N{BYTE ORDER MARK}{TEXTS[1]}\r\n\n{TEXTS[2]}\n".encode()
    )
    batch = answer(
        "fem_softmax", TEXTS[0], "--file", str(tmp_path / "prompts.txt"), "--greedy", new=6
    )
    assert [result["prompt"] for result in batch["results"]] == list(TEXTS)
    assert batch["results"] == [
        answer("fem_softmax", text, "--greedy", new=6)["results"][0] for text in TEXTS
    ]
    costs = batch["costs"]
    assert (costs["prompt_tokens"], costs["new_tokens"]) == (
        sum(len(text.encode()) for text in TEXTS),
        18,
    )
    # The cache of three rows, each as long as the longest.
    assert costs["cache_bytes"] == costs["cache_formula_bytes"] > 0
    texts = [result["text"] for result in batch["results"]]
    assert (
        generate("fem_softmax", *TEXTS, "--greedy", new=6)[0] == f"\n{BETWEEN}\n".join(texts) + "\n"
    )


def test_what_is_drawn(generate: Generate, answer: Answer) -> None:
    """A seed determines the text, also a reported one; the narrowest draws give the most likely
    text, the widest do not.
    """
    drawn = [
        answer("fem_linear", PROMPT, "--temperature", "2", "--seed", seed)["results"]
        for seed in "112"
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    text, report = generate("fem_linear", PROMPT, "--temperature", "2")
    seed = re.search(r"seed: (\d+)", report)
    assert seed
    assert generate("fem_linear", PROMPT, "--temperature", "2", "--seed", seed[1])[0] == text
    likeliest = answer("fem_linear", PROMPT, "--greedy")["results"]
    for one in (("--top-k", "1"), ("--top-p", "1e-6"), ("--temperature", "1e-4")):
        assert answer("fem_linear", PROMPT, "--seed", "1", *one)["results"] == likeliest, one
    hot = answer(
        "fem_linear", PROMPT, "--seed", "1", "--temperature", "100", "--top-k", "0", new=40
    )
    # 40 draws from 257 nearly equally likely tokens give 37 different ones; from the 40 likeliest,
    # they would give 25.
    assert len(set(hot["results"][0]["new_tokens"])) > 30


def test_a_folders_own_penalties_count_for_nothing(
    generate: Generate, models: Models, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    settings = tmp_path / "model" / "generation_config.json"
    assert hf("export", models["transformer"][0], folder) == 0
    wanted = generate(folder, "w1 w2", "--greedy")[0]
    settings.write_text(
        json.dumps(
            json.loads(settings.read_text())
            | {
                "repetition_penalty": 1.9,
                "no_repeat_ngram_size": 1,
            }
        )
    )
    assert generate(folder, "w1 w2", "--greedy")[0] == wanted


def test_beams_find_a_likelier_text(generate: Generate, answer: Answer, models: Models) -> None:
    opened = open_model(models["fem_softmax"][0])
    assert opened.tokenizer is not None
    prompt = opened.tokenizer(PROMPT, return_tensors="pt").input_ids

    def likelihood(tokens: list[int]) -> float:
        ids = torch.cat((prompt, torch.tensor([tokens])), dim=1)
        with torch.no_grad():
            scores = opened.model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        return float(scores[-len(tokens) :].sum())

    greedy = answer("fem_softmax", PROMPT, "--greedy", new=8)
    beams = answer("fem_softmax", PROMPT, "--beams", "5", new=8)
    assert likelihood(beams["results"][0]["new_tokens"]) > likelihood(
        greedy["results"][0]["new_tokens"]
    )
    assert (
        beams["costs"]["cache_bytes"]
        == 5 * greedy["costs"]["cache_bytes"]
        == beams["costs"]["cache_formula_bytes"]
    )
    assert (
        generate("fem_softmax", PROMPT, "--beams", "5", new=8)[0]
        == beams["results"][0]["text"] + "\n"
    )


def test_the_end_of_a_text_ends_it(answer: Answer, models: Models, tmp_path: Path) -> None:
    state = random_state(models["transformer"][1], dtype=torch.float32)
    # All tokens are equally likely, so the first one is chosen; then the end of the text.
    state["output_layer.weight"][:] = 0
    state["output_layer.weight"][256] = 1
    path = save(models["transformer"][1], tmp_path / "ends", state)
    found = answer(path, "ab", "c", "xyz", "q", "hello", "--greedy", new=30)["results"]
    rows = [result["new_tokens"] for result in found]
    assert all(256 not in row[:-1] for row in rows)
    assert len({len(row) for row in rows if row[-1] == 256}) > 1
    assert all("<eod>" not in result["text"] for result in found)


@pytest.mark.parametrize("more", [(), ("--json",), ("another",)], ids=str)
def test_ctrl_c_keeps_the_text_so_far(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    clock = generation.Clock.__call__

    def five_tokens(self: generation.Clock, *arguments: Any, **options: Any) -> Any:
        found = clock(self, *arguments, **options)
        if len(self.times) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(generation.Clock, "__call__", five_tokens)
        text, report = generate("transformer", PROMPT, *more, "--greedy", new=40, code=130)
    # A token is counted before it is streamed.
    full = generate("transformer", PROMPT, "--greedy", new=5 if more else 4)[0]
    assert report.splitlines()[-1] == "interrupted"
    if more == ("--json",):
        found = json.loads(text)
        assert found["interrupted"] and found["results"][0]["text"] + "\n" == full
    else:
        assert text == full or text.startswith(full.removesuffix("\n") + f"\n{BETWEEN}\nanother")


def test_speculative(
    generate: Generate, answer: Answer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text of greedy decoding, streamed and as JSON, with the accepted drafts."""
    model = text_model("fem_gla", mtp_depth=2)
    path = save(model, tmp_path / "model", random_state(model, dtype=torch.float32))
    found = answer(path, PROMPT, "--speculative")
    assert found["results"] == answer(path, PROMPT, "--greedy")["results"]
    costs = found["costs"]
    assert costs["new_tokens"] == costs["passes"] + costs["accepted"]
    assert costs["cache_formula_bytes"] == costs["cache_bytes"] > 0 < costs["modules_cache_bytes"]
    streamed, report = generate(path, PROMPT, "--speculative")
    assert streamed == found["results"][0]["text"] + "\n"
    assert f"{costs['accepted']} of {costs['drafted']} drafts accepted" in report
    assert benchmark([str(path), "--new", "4", "--rounds", "1"]) == 0
    assert capsys.readouterr().out.endswith("the tokens are equal\n")


MISTAKES = (
    "",
    "EMPTY",
    "x --file none.txt",
    "x --greedy --top-k 3",
    "x --beams 2 --temperature 1",
    "x --greedy --beams 2",
    "x --temperature 0",
    "x --top-p 1.5",
    "x --max-new-tokens 0",
    "x --compile --no-cache",
    "x --speculative --compile",
    "x --speculative --no-cache",
    "x --speculative --beams 2",
    "x --speculative --top-k 3",
    "x y --speculative",
    "x --speculative",
    f"{'x' * 500} --max-new-tokens 14",
)


def test_mistakes_are_one_line(models: Models, tmp_path: Path, refused: Refused) -> None:
    for arguments in MISTAKES:
        words = ["" if word == "EMPTY" else word for word in arguments.split()]
        refused(main, "tools.generate", models["mha2nd"][0], *words, "--device", "cpu")
    bare = Path(shutil.copytree(models["transformer"][0], tmp_path / "bare"))
    shutil.rmtree(bare / "tokenizer")
    encoder = save(text_model("transformer", causal=False), tmp_path / "encoder")
    for path in (tmp_path / "none", bare, encoder):
        refused(main, "tools.generate", path, "x", "--device", "cpu")


@pytest.mark.parametrize("mixer", ["fem_softmax", "transformer"])
@pytest.mark.parametrize("stance", ["force_eager", pytest.param("default", marks=pytest.mark.slow)])
def test_compiled(answer: Answer, mixer: str, stance: str) -> None:
    """Tokens and cache size are equal without the compiler and with it, which compiles C++ for a
    minute.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.compiler.set_stance(stance):
        compiled = answer(mixer, PROMPT, "--greedy", "--compile", new=8)
    assert compiled["results"] == answer(mixer, PROMPT, "--greedy", new=8)["results"]
    costs = compiled["costs"]
    assert costs["cache_bytes"] >= costs["cache_formula_bytes"] > 0
    assert costs["cache_tokens"] >= 6 + 8 - 1
    assert bool(torch._dynamo.utils.counters["stats"]["unique_graphs"]) == (stance == "default")
    # inductor's cache may be warm; a step takes milliseconds, and tracing one step takes a few
    # hundred.
    if stance == "default":
        assert costs["compiling_seconds"] > costs["decode_seconds"] > 0
