"""Repeated conversions checkpoint -> folder -> checkpoint keep every bit of every weight and every
byte of every exported file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig
from fem_megatron.mixers.cem.shape import CemConfig
from fem_megatron.mixers.hyperset.shape import HyperSetConfig
from pretrain.checkpoint.folder import find
from tests.tools.hf.checkpoints import (
    STOCK,
    changed,
    equal,
    hf,
    save,
    stock_folder,
    tensors,
    weights,
)
from tests.tools.hf.runs import Folders, files
from tests.tools.hf.small import MIXERS, VOCAB, random_state, small
from tests.wording import Wording
from tools.hf.folder import json_object
from tools.hf.open_model import open_model
from tools.hf.weight_conversion import VOCABULARY

QKV_BIAS = AttentionConfig(qkv_bias=True)
EVERYTHING = small(
    num_layers=len(MIXERS), pattern=MIXERS, num_query_groups=2, attention=QKV_BIAS
).__dict__
# The entire catalogue in one model, one layer per mixer. Variants: plain; tied embeddings, looped
# with an adapter for each iteration, CEM's MLP in every layer, several paddings of the vocabulary,
# modules of multi-token prediction; and through transformers' own classes, whose configurations
# cannot contain every setting (padding, nulls).
TRIPS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "every mixer": ({}, torch.float32),
    "every mixer, looped": (
        {"tie_embeddings": True, "recurrence": 2, "mlp": "cem", "make_vocab_size_divisible_by": 48}
        | {"mtp_depth": 2}
        | {"cem": CemConfig(diagonal="head"), "hyperset": HyperSetConfig(lora_rank=2)},
        torch.bfloat16,
    ),
    "llama": ({"mixer": "transformer", "make_vocab_size_divisible_by": 56}, torch.float32),
    "qwen2": (
        {
            "mixer": "transformer",
            "attention": AttentionConfig(qkv_bias=True, sliding_window=7),
            "tie_embeddings": True,
        },
        torch.float32,
    ),
}


@pytest.mark.parametrize("name", TRIPS)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """Weights, configuration and progress, and the files of the folders, twice."""
    changes, dtype = TRIPS[name]
    if name.startswith("every"):
        model = ModelConfig(**EVERYTHING | changes)
    else:
        model = small(num_query_groups=2, **changes)
    state = random_state(model, dtype=dtype)
    for key in VOCABULARY & state.keys():
        state[key][VOCAB:] = 0  # exports do not contain the padding of the vocabulary
    last = save(model, tmp_path / "first", state)
    first = find(last)
    exports = []
    for trip in range(2):
        exports.append(tmp_path / f"hf{trip}")
        assert hf("export", last, exports[-1], *["--mtp"][: model.mtp_depth]) == 0
        last = tmp_path / f"again{trip}"
        assert hf("import", exports[-1], last) == 0
        equal(weights(last), state)
        found = find(last)
        assert found.path.name == first.path.name
        assert ModelConfig.from_dict(found.manifest["config"]["model"]) == model
        report = ("progress", "data", "heldout_loss", "config", "contents")
        assert {key: found.manifest[key] for key in report} == {
            key: first.manifest[key] for key in report
        }
    assert model.padded_vocab_size() > VOCAB and files(exports[0]) == files(exports[1])
    assert {"config.json", "model.safetensors", "training.json", "README.md"} <= files(
        exports[0]
    ).keys()
    assert bool(list(exports[0].glob("*.py"))) == name.startswith("every")


@pytest.mark.parametrize(
    ("name", "mixer", "ends"),
    [
        ("llama", None, 4),
        ("mistral", None, [6, 4]),
        ("qwen2", None, 4),
        ("llama", "fem_softmax", [6, 4]),
    ],
)
def test_special_tokens_need_no_tokenizer(
    name: str, mixer: str | None, ends: int | list[int], tmp_path: Path
) -> None:
    """A folder without a tokenizer keeps them and its context length: as a checkpoint, as another
    mixer, in our own format; -1 is not a token.
    """
    place = stock_folder(name, tmp_path / "hf", bos_token_id=3, eos_token_id=4, pad_token_id=None)
    changed(place / "config.json", pad_token_id=-1)
    changed(place / "generation_config.json", eos_token_id=ends)
    more = ["--mixer", mixer] if mixer else []
    for trip in range(2):
        assert hf("import", place, tmp_path / f"ck{trip}", *more) == 0
        place, more = tmp_path / f"hf{trip}", []
        assert hf("export", tmp_path / f"ck{trip}", place) == 0
        for file in ("config.json", "generation_config.json"):
            report = json_object(place / file)
            assert (report["bos_token_id"], report["eos_token_id"], report.get("pad_token_id")) == (
                3,
                ends,
                None,
            )
    for found in (
        open_model(tmp_path / "ck1").model.config.to_dict(),
        json_object(place / "config.json"),
    ):
        assert (found["max_position_embeddings"], found["eos_token_id"]) == (64, ends)


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_folder(name: str, tmp_path: Path) -> None:
    """import -> export returns transformers' own tensors and class, whose logits equal the
    original's bit for bit.
    """
    folder = stock_folder(
        name, tmp_path / "hf", torch.bfloat16 if name == "mistral" else torch.float32
    )
    assert hf("import", folder, tmp_path / "ck") == 0
    assert hf("export", tmp_path / "ck", tmp_path / "again") == 0
    equal(tensors(tmp_path / "again"), tensors(folder))
    ids = torch.arange(2 * 12).view(2, 12) % VOCAB
    models = [open_model(path).model for path in (folder, tmp_path / "again")]
    assert type(models[0]) is type(models[1]) and models[0].dtype == models[1].dtype
    with torch.no_grad():
        assert torch.equal(models[0](ids).logits, models[1](ids).logits)
    assert models[1].config.max_position_embeddings == 64


def test_the_configuration_that_transformers_reads_wins(
    exports: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], wording: Wording
) -> None:
    """An edited config.json: another norm, more iterations; a folder of an older version:
    defaults.
    """
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in exports["fem_softmax"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json_object(folder / "config.json")
    older = {
        key: value
        for key, value in raw["architecture"].items()
        if key not in ("attention", "causal")
    }
    changed(folder / "config.json", architecture=older | {"norm_eps": 1e-5}, recurrence=3)
    capsys.readouterr()
    assert hf("import", folder, tmp_path / "ck") == 0
    wording(capsys.readouterr().err)
    read = ModelConfig.from_dict(find(tmp_path / "ck").manifest["config"]["model"])
    assert (read.norm_eps, read.causal, read.blocks()[0].recurrence) == (1e-5, True, 3)
