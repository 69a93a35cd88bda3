"""What import reads and refuses: one clear line for each mistake, nothing half-written; types, settings, the tokenizer, training.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from fem_megatron.config import ModelConfig
from pretrain.checkpoint.reader import find
from pretrain.config import load_run
from tests.tools.hf.checkpoints import changed, equal, hf, save, stock_folder, tensors, weights
from tests.tools.hf.small import VOCAB, export, random_state, small

RUN = Path(__file__).resolve().parents[3] / "configs/run/demo.yaml"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stock folder in three shards."""
    folder = stock_folder("llama", tmp_path_factory.mktemp("stock") / "llama")
    held, files = tensors(folder), [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    listed = {name: files[n % 3] for n, name in enumerate(sorted(held))}
    for file in files:
        save_file({name: held[name] for name in held if listed[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    shutil.copytree(llama, tmp_path / "hf")
    return tmp_path / "hf"


def write_tokenizer(folder: Path, entries: int) -> None:
    """A tokenizer of so many entries, the last of them the end of a text."""
    folder.mkdir(exist_ok=True)
    made = Tokenizer(models.WordLevel({f"w{n}": n for n in range(entries)}, unk_token="w0"))
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{entries - 1}", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))


def shard(folder: Path) -> Path:
    return folder / "model-00002-of-00003.safetensors"


def edit_shard(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """One shard written anew, its index with it."""
    held = {name: tensor for name, tensor in tensors(folder).items() if name in listed_in(folder)}
    edit(held)
    save_file(held, shard(folder))
    index = folder / "model.safetensors.index.json"
    others = {name: file for name, file in json.loads(index.read_text())["weight_map"].items() if file != shard(folder).name}
    changed(index, weight_map=others | dict.fromkeys(held, shard(folder).name))


def listed_in(folder: Path) -> list[str]:
    listed = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return [name for name, file in listed.items() if file == shard(folder).name]


def no_weights(folder: Path, *files: str) -> None:
    for file in folder.glob("model*"):
        file.unlink()
    for name in files:
        (folder / name).write_bytes(b"x")


def adapter_alone(folder: Path) -> None:
    no_weights(folder, "adapter_config.json")
    (folder / "config.json").unlink()


def damaged_tokenizer(folder: Path) -> None:
    write_tokenizer(folder, 9)
    (folder / "tokenizer.json").write_text("{")


def another_head(folder: Path) -> None:
    """A tied model that comes with an output layer of its own."""
    changed(folder / "config.json", tie_word_embeddings=True)


def a_wrong_shape(held: dict[str, Any]) -> None:
    name = next(name for name in sorted(held) if held[name].ndim == 2)
    held[name] = held[name][:-1].clone()


def quantised(held: dict[str, Any]) -> None:
    held.update({name: tensor.to(torch.int8) for name, tensor in held.items() if tensor.ndim == 2})


SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config.json": (lambda f: (f / "config.json").unlink(), "half a model: config.json is missing"),
    "config.json no JSON": (lambda f: (f / "config.json").write_text("{'a'}"), "config.json is damaged: no JSON"),
    "a shard is missing": (lambda f: shard(f).unlink(), "half a model: model-00002-of-00003.safetensors is missing (1 of 3"),
    "a shard is half": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-100]), "is damaged: it has"),
    "a header is broken": (lambda f: shard(f).write_bytes(b"\xff" * 2000), "is damaged: no safetensors file starts like this"),
    "a tensor is missing": (lambda f: edit_shard(f, lambda held: held.pop(sorted(held)[0])), "lacks model."),
    "a tensor too many": (lambda f: edit_shard(f, lambda held: held.update({"lora.a": torch.ones(2)})), "holds lora.a, which a model of"),
    "a wrong shape": (lambda f: edit_shard(f, a_wrong_shape), "they are not of one model"),
    "quantised": (lambda f: edit_shard(f, quantised), "is I8; readable: BF16, F16, F32, no quantised weights"),
    "gpt2": (lambda f: changed(f / "config.json", model_type="gpt2"), "model_type is 'gpt2'; a Transformer can be started from llama"),
    "mixtral": (lambda f: changed(f / "config.json", model_type="mixtral"), "model_type is 'mixtral'"),
    "pickles": (lambda f: no_weights(f, "pytorch_model.bin"), "pytorch_model.bin is a pickle, which is not read here; write safetensors"),
    "no weights": (no_weights, "half a model: config.json is there, model.safetensors is not"),
    "another head": (another_head, "ties the output layer to the embedding, but lm_head.weight is another"),
    "an adapter": (adapter_alone, "an adapter alone: merge it"),
    "tokenizer": (lambda f: write_tokenizer(f, VOCAB + 1), "has 51 entries, the model's vocabulary only 50: not its own"),
    "damaged tokenizer": (damaged_tokenizer, "cannot be read"),
    "training.json": (lambda f: (f / "training.json").write_text("[]"), "training.json is damaged: it holds no JSON object"),
    "progress": (lambda f: (f / "training.json").write_text('{"progress": {"step": "a"}}'), "training.json is damaged: its progress"),
    "unknown key": (
        lambda f: (f / "training.json").write_text('{"config": {"trian": 1}}'),
        "training.json: unknown key trian; did you mean",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_one_line_for_a_spoiled_folder(name: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoil, told = SPOILED[name]
    spoil(copy)
    assert hf("import", copy, tmp_path / "ck") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("tools.hf: error: ") and err.count("\n") == 1 and told in err
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_one_line_for_a_wrong_place(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is not a folder to import, and what is no place for a checkpoint."""
    monkeypatch.chdir(tmp_path)
    model = small("transformer")
    save(model, Path("ck"), random_state(model, dtype=torch.float32))
    Path("run").mkdir()
    shutil.copytree("ck", "run/checkpoints")
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("x")
    Path("file").write_text("x")
    shutil.copytree(llama, "hf")
    before = sorted(tmp_path.rglob("*"))
    for source, out, options, told in (
        ("meta-llama/Llama-3.2-1B", "new", (), "hf download meta-llama/Llama-3.2-1B --local-dir DIR"),
        ("ck", "new", (), "ck is a checkpoint already, or a run with some: there is nothing to import"),
        ("run", "new", (), "run is a checkpoint already"),
        (find(Path("ck")).path, "new", (), "is a checkpoint already"),
        ("mine", "new", (), "mine holds no Hugging Face model: config.json is missing"),
        ("file", "new", (), "file is a file"),
        ("nothing", "new", (), "there is no folder nothing"),
        ("hf", "mine", (), "mine is not empty: choose another folder, or replace it with --overwrite"),
        ("hf", "mine", ("--overwrite",), "mine is no earlier import (model.yaml is missing), and nothing else is replaced"),
        ("hf", "file", (), "file is a file"),
        ("hf", "hf", ("--overwrite",), "hf is the folder to import"),
        ("hf", ".", ("--overwrite",), ". holds the folder to import"),
        ("hf", "new", ("--set", "model.norm_epz=1"), "command line: unknown key model.norm_epz; did you mean model.norm_eps?"),
        ("hf", "new", ("--set", "model.num_layers=1"), "--set changes what weights the model has"),
        ("hf", "new", ("--set", "model.mixer=cem"), "--set changes what weights the model has"),
        ("hf", "new", ("--set", "model.rope=maybe"), "model.rope = 'maybe': expected true or false"),
    ):
        capsys.readouterr()
        assert hf("import", source, out, *options) == 2, told
        err = capsys.readouterr().err
        assert err.startswith("tools.hf: error: ") and err.count("\n") == 1 and told in err, err
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_written(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Types as stored or as asked; settings; the model section as a file; an earlier import is replaced; the tokenizer goes along."""
    shutil.copytree(llama, tmp_path / "hf")
    write_tokenizer(tmp_path / "hf", VOCAB)
    settings = ("--set", "model.make_vocab_size_divisible_by=20", "--set", "model.rope_base=10", "--set", "name=mine")
    assert hf("import", tmp_path / "hf", tmp_path / "ck") == 0
    stored = weights(tmp_path / "ck")
    assert hf("import", tmp_path / "hf", tmp_path / "ck", "--overwrite", "--dtype", "bfloat16", *settings) == 0
    assert "wrote" in capsys.readouterr().out
    manifest = find(tmp_path / "ck").manifest
    model = ModelConfig.from_dict(manifest["config"]["model"])
    assert (model.rope_base, model.padded_vocab_size(), manifest["config"]["name"]) == (10, 60, "mine")
    assert manifest["config"]["train"]["precision"] == "bf16" and manifest["config"]["data"]["seq_length"] == 64
    got = weights(tmp_path / "ck")
    for name, tensor in stored.items():
        rows = VOCAB if tensor.shape[0] == 128 else len(tensor)
        assert tensor.dtype == torch.float32 and torch.equal(got[name][:rows], tensor[:rows].bfloat16()), name
    tokenizer = tmp_path / "ck" / "tokenizer"
    assert manifest["config"]["data"]["tokenizer"] == str(tokenizer)
    assert (tokenizer / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert sorted(file.name for file in tokenizer.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert ModelConfig.from_dict(yaml.safe_load((tmp_path / "ck" / "model.yaml").read_text())) == model
    assert load_run(RUN, [f"model={tmp_path / 'ck'}/model.yaml"]).model == model
    assert hf("export", tmp_path / "ck", tmp_path / "again") == 0
    assert (tmp_path / "again" / "tokenizer.json").exists()
    equal(tensors(tmp_path / "again"), {name: tensor.bfloat16() for name, tensor in tensors(llama).items()})


def test_types_stay_tensor_by_tensor(tmp_path: Path) -> None:
    """Half precision, and a folder whose norms alone are fp32, as other trainers write it."""
    folder = stock_folder("qwen2", tmp_path / "hf", torch.float16)
    held = {name: tensor.float() if tensor.ndim == 1 else tensor for name, tensor in tensors(folder).items()}
    save_file(held, folder / "model.safetensors")
    assert hf("import", folder, tmp_path / "ck") == 0
    assert {(tensor.ndim == 1, tensor.dtype) for tensor in weights(tmp_path / "ck").values()} == {
        (True, torch.float32),
        (False, torch.float16),
    }


def test_a_tied_output_layer_that_is_stored_twice(tmp_path: Path) -> None:
    """Some folders hold it; also RoPE's frequencies, as old ones do."""
    folder = stock_folder("llama tied", tmp_path / "hf")
    held = tensors(folder)
    extra = {"lm_head.weight": held["model.embed_tokens.weight"].clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(held | extra, folder / "model.safetensors")
    assert hf("import", folder, tmp_path / "ck") == 0
    assert "output_layer.weight" not in weights(tmp_path / "ck")


def test_a_folder_of_ours_of_another_version(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = export(small("cem"), tmp_path / "hf")
    raw = json.loads((folder / "config.json").read_text())
    changed(folder / "config.json", architecture=raw["architecture"] | {"wormholes": 2})
    assert hf("import", folder, tmp_path / "ck") == 2
    err = capsys.readouterr().err
    assert "wormholes" in err and "another version" in err and err.count("\n") == 1
