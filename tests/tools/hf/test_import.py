"""Tests of import: one clear line for each mistake, no partial files; dtypes, settings, the
tokenizer, training.json.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from fem_megatron.config import ModelConfig
from pretrain.checkpoint.folder import find, hash_file_of
from pretrain.config import load_run
from tests.tools.hf.checkpoints import (
    Spoil,
    changed,
    equal,
    held,
    hf,
    rewrite,
    save,
    settings,
    stock_folder,
    tensors,
    weights,
)
from tests.tools.hf.small import VOCAB, export, small, write_tokenizer
from tests.tools.refusals import Refused
from tools.hf.__main__ import main
from tools.hf.folder import json_object

RUN = Path(__file__).resolve().parents[3] / "configs/run/demo.yaml"
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock folder with several shards."""
    folder = stock_folder("llama", tmp_path_factory.mktemp("stock") / "llama", shard="30KB")
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may damage."""
    return Path(shutil.copytree(llama, tmp_path / "hf"))


def shard(change: Callable[[bytes], bytes | None]) -> Spoil:
    """Return a function that changes the second file of weights by ``change``; None: delete it."""

    def spoil(folder: Path) -> None:
        file = sorted(folder.glob("model-*"))[1]
        left = change(file.read_bytes())
        file.unlink() if left is None else file.write_bytes(left)

    return spoil


def written(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def alone(*files: str) -> Spoil:
    """Return a function that replaces the weights by these files; next to an adapter config.json is
    removed.
    """

    def spoil(folder: Path) -> None:
        for file in folder.glob("model*"):
            file.unlink()
        for name in files:
            (folder / name).write_bytes(b"x")
        if "adapter_config.json" in files:
            (folder / "config.json").unlink()

    return spoil


def damaged_tokenizer(folder: Path) -> None:
    (write_tokenizer(folder, 9) / "tokenizer.json").write_text("{")


def another_hash(folder: Path) -> None:
    hash_file_of(sorted(folder.glob("model-*"))[1]).write_text("0" * 32)


SPOILED: dict[str, Spoil] = {
    "no config.json": lambda folder: (folder / "config.json").unlink(),
    "config.json no JSON": written("config.json", "{'a'}"),
    "a shard is missing": shard(lambda content: None),
    "a shard is half": shard(lambda content: content[:-100]),
    "a shard is another": another_hash,
    "a header is broken": shard(lambda content: b"\xff" * 2000),
    "a tensor is missing": held(lambda found: found.pop(Q)),
    "a tensor too many": held(lambda found: found.update({"lora.a": torch.ones(2)})),
    "a wrong shape": held(lambda found: found.update({Q: found[Q][:-1].clone()})),
    "quantised": held(lambda found: found.update({Q: found[Q].to(torch.int8)})),
    "gpt2": settings(model_type="gpt2"),
    "mixtral": settings(model_type="mixtral"),
    "pickles": alone("pytorch_model.bin"),
    "no weights": alone(),
    "another head": settings(tie_word_embeddings=True),
    "an adapter": alone("adapter_config.json"),
    "tokenizer": lambda folder: write_tokenizer(folder, VOCAB + 1),
    "damaged tokenizer": damaged_tokenizer,
    "training.json": written("training.json", "[]"),
    "progress": written("training.json", '{"progress": {"step": "a"}}'),
    "unknown key": written("training.json", '{"config": {"trian": 1}}'),
}


@pytest.mark.parametrize("case", SPOILED)
def test_one_line_for_a_spoiled_folder(
    case: str, copy: Path, tmp_path: Path, refused: Refused
) -> None:
    SPOILED[case](copy)
    refused(main, "tools.hf", "import", copy, tmp_path / "ck")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


# Folders and checkpoints in the working directory, and options.
PLACES = (
    "meta-llama/Llama-3.2-1B new",
    "ck new",
    "run new",
    "ck/step_00000012 new",
    "mine new",
    "file new",
    "nothing new",
    "newer new",
    "hf mine",
    "hf mine --overwrite",
    "hf file",
    "hf hf --overwrite",
    "hf . --overwrite",
    "hf new --set model.norm_epz=1",
    "hf new --set model.num_layers=1",
    "hf new --set model.mixer=cem",
    "hf new --set model.rope=maybe",
)


def test_one_line_for_a_wrong_place(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    """Invalid folders to import, invalid paths for a checkpoint, and invalid settings."""
    monkeypatch.chdir(tmp_path)
    save(small("transformer"), Path("ck"))
    shutil.copytree("ck", "run/checkpoints")
    for name in ("mine/thesis.tex", "file"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("x")
    newer = export(small("cem"), Path("newer")) / "config.json"
    changed(newer, architecture=json_object(newer)["architecture"] | {"wormholes": 2})
    before = sorted(tmp_path.rglob("*"))
    for arguments in PLACES:
        refused(main, "tools.hf", "import", *arguments.split())
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_written(copy: Path, tmp_path: Path) -> None:
    """Dtypes as stored or requested; settings; the model section as a file; an earlier import is
    replaced; the tokenizer is copied.
    """
    ck, again = tmp_path / "ck", tmp_path / "again"
    write_tokenizer(copy, VOCAB)
    changes = "--set model.make_vocab_size_divisible_by=20 --set model.rope_base=10 --set name=mine"
    assert hf("import", copy, ck) == 0
    stored = weights(ck)
    assert hf("import", copy, ck, "--overwrite", "--dtype", "bfloat16", *changes.split()) == 0
    report = find(ck).manifest["config"]
    model = ModelConfig.from_dict(report["model"])
    assert (model.rope_base, model.padded_vocab_size(), report["name"]) == (10, 60, "mine")
    assert (report["train"]["precision"], report["data"]["seq_length"]) == ("bf16", 64)
    got = weights(ck)
    for name, tensor in stored.items():
        rows = VOCAB if tensor.shape[0] == 128 else len(tensor)
        assert tensor.dtype == torch.float32, name
        assert torch.equal(got[name][:rows], tensor[:rows].bfloat16()), name
    tokenizer = ck / "tokenizer"
    assert report["data"]["tokenizer"] == str(tokenizer)
    assert (tokenizer / "tokenizer.json").read_bytes() == (copy / "tokenizer.json").read_bytes()
    assert sorted(file.name for file in tokenizer.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert ModelConfig.from_dict(yaml.safe_load((ck / "model.yaml").read_text())) == model
    assert load_run(RUN, [f"model={ck}/model.yaml"]).model == model
    assert hf("export", ck, again) == 0
    assert (again / "tokenizer.json").exists()
    equal(
        tensors(again),
        {name: tensor.bfloat16() for name, tensor in tensors(copy).items()},
    )


def test_types_stay_tensor_by_tensor(tmp_path: Path) -> None:
    """Half precision, in a folder in which only norms are fp32, as other trainers write it."""
    folder = stock_folder("qwen2", tmp_path / "hf", torch.float16)
    rewrite(
        folder,
        lambda found: found.update(
            {name: tensor.float() for name, tensor in found.items() if tensor.ndim == 1}
        ),
    )
    assert hf("import", folder, tmp_path / "ck") == 0
    types = {(tensor.ndim == 1, tensor.dtype) for tensor in weights(tmp_path / "ck").values()}
    assert types == {(True, torch.float32), (False, torch.float16)}


def test_a_tied_output_layer_that_is_stored_twice(tmp_path: Path) -> None:
    """Some folders contain it; old ones also contain RoPE's frequencies."""
    folder = stock_folder("llama tied", tmp_path / "hf")
    head = tensors(folder)["model.embed_tokens.weight"].clone()
    rewrite(
        folder,
        lambda found: found.update(
            {"lm_head.weight": head, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        ),
    )
    assert hf("import", folder, tmp_path / "ck") == 0
    assert "output_layer.weight" not in weights(tmp_path / "ck")
