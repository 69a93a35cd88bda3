"""checkpoint -> folder -> checkpoint -> ..., three times in a row: every bit of every weight, every byte of every exported file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fem_megatron import catalogue
from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from pretrain.checkpoint.reader import find
from tests.tools.hf.checkpoints import STOCK, changed, equal, hf, save, stock_folder, tensors, weights
from tests.tools.hf.small import NAMES, VOCAB, config_of, random_state, small
from tools.hf.open_model import open_model
from tools.hf.recipes import VOCABULARY

MIXERS = tuple(name for name in catalogue.MIXERS if not name.startswith("fla."))
EVERYTHING: dict[str, Any] = {
    "num_layers": len(MIXERS),
    "pattern": MIXERS,
    "num_query_groups": 2,
    "attention": AttentionConfig(qkv_bias=True),
}
EVERY_MIXER = {
    "fp32": (small(**EVERYTHING), torch.float32),
    # Tied, looped with an adapter for each iteration, every MLP CEM's, the vocabulary of several paddings.
    "bf16": (
        small(
            **EVERYTHING,
            tie_embeddings=True,
            recurrence=2,
            mlp="cem",
            make_vocab_size_divisible_by=48,
            cem=CemConfig(diagonal="head"),
            hyperset=HyperSetConfig(lora_rank=2),
        ),
        torch.bfloat16,
    ),
}


def three_times(model: ModelConfig, dtype: torch.dtype, folder: Path) -> None:
    state = random_state(model, dtype=dtype)
    for name in VOCABULARY & state.keys():
        state[name][VOCAB:] = 0  # what pads the vocabulary is in no export
    last = save(model, folder / "first", state)
    exports = []
    for trip in range(3):
        exports.append(folder / f"hf{trip}")
        assert hf("export", last, exports[-1]) == 0
        last = folder / f"again{trip}"
        assert hf("import", exports[-1], last) == 0
        found = find(last)
        equal(weights(last), state)
        assert ModelConfig.from_dict(found.manifest["config"]["model"]) == model
        assert found.manifest["progress"] == find(folder / "first").manifest["progress"]
    files = {file.name for file in exports[0].iterdir()}
    assert {"config.json", "model.safetensors", "training.json", "README.md"} <= files
    for other in exports[1:]:
        assert {file.name for file in other.iterdir()} == files
        assert [file for file in files if (other / file).read_bytes() != (exports[0] / file).read_bytes()] == []


@pytest.mark.parametrize("name", EVERY_MIXER)
def test_every_mixer(name: str, tmp_path: Path) -> None:
    """All of the catalogue in one model, a layer each."""
    model, dtype = EVERY_MIXER[name]
    assert set(model.pattern or ()) == set(MIXERS) and model.padded_vocab_size() > VOCAB
    three_times(model, dtype, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_mixer(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    three_times(config_of(name), dtype, tmp_path)


@pytest.mark.parametrize("changes", [{}, {"attention": AttentionConfig(qkv_bias=True, sliding_window=7), "tie_embeddings": True}], ids=str)
def test_the_plain_transformer(changes: dict[str, Any], tmp_path: Path) -> None:
    """By way of transformers' own classes; what their configurations cannot say (padding, nulls) is back from training.json."""
    model = small("transformer", num_query_groups=2, make_vocab_size_divisible_by=56, **changes)
    three_times(model, torch.float32, tmp_path)
    assert not list((tmp_path / "hf0").glob("*.py"))


@pytest.mark.parametrize(
    ("name", "mixer", "ends"), [("llama", None, 4), ("mistral", None, [6, 4]), ("qwen2", None, 4), ("llama", "fem_softmax", [6, 4])]
)
def test_special_tokens_need_no_tokenizer(name: str, mixer: str | None, ends: int | list[int], tmp_path: Path) -> None:
    """A folder without one keeps them and its context length, as a checkpoint, as another mixer, through our own format; -1 is no token."""
    folder = stock_folder(name, tmp_path / "hf", bos_token_id=3, eos_token_id=4, pad_token_id=None)
    changed(folder / "config.json", pad_token_id=-1)
    changed(folder / "generation_config.json", eos_token_id=ends)
    place, more = folder, ["--mixer", mixer] if mixer else []
    for trip in range(2):
        assert hf("import", place, tmp_path / f"ck{trip}", *more) == 0
        place, more = tmp_path / f"hf{trip}", []
        assert hf("export", tmp_path / f"ck{trip}", place) == 0
        for file in ("config.json", "generation_config.json"):
            told = json.loads((place / file).read_text())
            assert (told["bos_token_id"], told["eos_token_id"], told.get("pad_token_id")) == (3, ends, None)
    opened = open_model(tmp_path / "ck1").model
    for config in (opened.config, json.loads((place / "config.json").read_text())):
        found = config if isinstance(config, dict) else config.to_dict()
        assert (found["max_position_embeddings"], found["eos_token_id"]) == (64, ends)


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_folder(name: str, tmp_path: Path) -> None:
    """import -> export gives transformers' own tensors back, and its class, whose logits are the original's to the bit."""
    from transformers import AutoModelForCausalLM

    folder = stock_folder(name, tmp_path / "hf", torch.bfloat16 if name == "mistral" else torch.float32)
    assert hf("import", folder, tmp_path / "ck") == 0
    assert hf("export", tmp_path / "ck", tmp_path / "again") == 0
    equal(tensors(tmp_path / "again"), tensors(folder))
    loader: Any = AutoModelForCausalLM
    ids = torch.arange(2 * 12).view(2, 12) % VOCAB
    models = [loader.from_pretrained(path).eval() for path in (folder, tmp_path / "again")]
    assert type(models[0]) is type(models[1]) and models[0].dtype == models[1].dtype
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    assert models[1].config.max_position_embeddings == 64
    assert hf("import", tmp_path / "again", tmp_path / "ck2") == 0
    equal(weights(tmp_path / "ck2"), weights(tmp_path / "ck"))


def test_what_the_training_was_comes_back(tmp_path: Path) -> None:
    """Name, progress, data, loss and settings; the tokenizer is the checkpoint's own now."""
    model = small("cem", rope_base=777)
    first = find(save(model, tmp_path / "first", random_state(model, dtype=torch.float32)))
    assert hf("export", tmp_path / "first", tmp_path / "hf") == 0
    assert hf("import", tmp_path / "hf", tmp_path / "ck") == 0
    again = find(tmp_path / "ck")
    assert again.path.name == first.path.name == "step_00000012"
    assert {key: again.manifest[key] for key in ("progress", "data", "heldout_loss", "config", "contents")} == {
        "progress": {"step": 12, "consumed_samples": 96, "order_samples": 960, "skipped_steps": 0, "bad_steps_in_a_row": 0},
        "data": "data-key",
        "heldout_loss": 2.5,
        "config": first.manifest["config"],
        "contents": "weights",
    }


def test_the_configuration_that_transformers_reads_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An edited config.json: a smaller vocabulary (resized by a user), another norm; a folder of an older version: defaults."""
    model = small("fem_softmax")
    save(model, tmp_path / "first", random_state(model, dtype=torch.float32))
    assert hf("export", tmp_path / "first", tmp_path / "hf") == 0
    raw = json.loads((tmp_path / "hf" / "config.json").read_text())
    older = {key: value for key, value in raw["architecture"].items() if key not in ("attention", "causal")}
    changed(tmp_path / "hf" / "config.json", architecture=older | {"norm_eps": 1e-5}, recurrence=3)
    capsys.readouterr()
    assert hf("import", tmp_path / "hf", tmp_path / "ck") == 0
    told = capsys.readouterr().err
    assert "config.json and training.json differ, and config.json is taken" in told
    assert "model.norm_eps is 1e-05, was 1e-06" in told and "model.recurrence is 3, was 1" in told
    read = ModelConfig.from_dict(find(tmp_path / "ck").manifest["config"]["model"])
    assert (read.norm_eps, read.recurrence, read.causal) == (1e-5, 3, True)
    assert read.blocks()[0].recurrence == 3
