"""Opening a model: the same from a checkpoint as from its export, memory, tokenizers, fingerprints; what cannot be opened is one line."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fem_common.errors import ConfigError
from pretrain.checkpoint.reader import Weights
from tests.tools.hf.small import random_state
from tests.tools.hf.texts import ENTRIES, byte_tokenizer, save, text_model
from tools.hf import open_model as from_store
from tools.hf.export import export_state_dict
from tools.hf.open_model import fingerprint, open_model, tokenizer_of
from tools.hf.recipes import Recipe

MIXERS = ("fem_softmax", "transformer")
IDS = torch.arange(5, 25)[None]


pytestmark = pytest.mark.usefixtures("open_folder")  # transformers copies a folder's code before it runs it: not into anybody's home


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Mixer -> checkpoint, export of the same weights."""
    found = {}
    for mixer in MIXERS:
        model, folder = text_model(mixer, tie_embeddings=mixer == "transformer"), tmp_path_factory.mktemp(mixer)
        state = random_state(model, dtype=torch.float32)
        checkpoint = save(model, folder / "checkpoint", state)
        options: dict[str, Any] = {"tokenizer_dir": checkpoint / "tokenizer", "dtype": torch.float32, "card": {"seq_length": 64}}
        export_state_dict(state, model, folder / "exported", **options)
        found[mixer] = (checkpoint, folder / "exported")
    return found


@pytest.fixture
def copy(pairs: dict[str, tuple[Path, Path]], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a pair's checkpoint or export, for breaking."""

    def of(mixer: str, which: int) -> Path:
        return Path(shutil.copytree(pairs[mixer][which], tmp_path / f"{mixer}{which}"))

    return of


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_checkpoint_is_its_export(pairs: dict[str, tuple[Path, Path]], mixer: str) -> None:
    """The class that export writes, the same numbers, tokenizer, special tokens and lengths."""
    ours, theirs = (open_model(path) for path in pairs[mixer])
    assert type(ours.model).__name__ == type(theirs.model).__name__ == {"transformer": "LlamaForCausalLM"}.get(mixer, "FemLMForCausalLM")
    assert theirs.model.__module__.startswith("transformers.models" if mixer == "transformer" else "transformers_modules")
    with torch.no_grad():
        assert torch.equal(ours.model(IDS).logits, theirs.model(IDS).logits)
    assert ours.model.config.max_position_embeddings == theirs.model.config.max_position_embeddings == 64
    assert ours.model.generation_config.eos_token_id == theirs.model.generation_config.eos_token_id == 256
    assert ours.tokenizer is not None and theirs.tokenizer is not None and ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()
    assert ours.config is not None and theirs.config is not None and ours.config.mixer == theirs.config.mixer == mixer
    assert not ours.model.training and not theirs.model.training
    # Without training.json, which an export of a run has, a stock folder could be anybody's.
    assert (ours.kind, theirs.kind) == ("checkpoint", "Hugging Face folder" if mixer == "transformer" else "exported folder")
    assert ours.manifest["progress"]["step"] == 12 and (ours.name, theirs.name) == ("small", "exported")


def test_tied_weights_stay_one(pairs: dict[str, tuple[Path, Path]]) -> None:
    for path in pairs["transformer"]:
        model = open_model(path).model
        assert model.lm_head.weight is model.model.embed_tokens.weight
    model = open_model(pairs["fem_softmax"][0]).model
    assert model.lm_head.weight is not model.model.embed_tokens.weight


def test_in_another_type(pairs: dict[str, tuple[Path, Path]]) -> None:
    """Weights come in that type; the constants of RoPE are computed, not rounded."""
    for path in pairs["transformer"]:
        opened = open_model(path, dtype=torch.bfloat16)
        assert opened.dtype == torch.bfloat16 and {weight.dtype for weight in opened.model.parameters()} == {torch.bfloat16}
        assert opened.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_are_held_once(pairs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One source at a time is held besides what is made of it, and no target keeps more alive than itself."""
    checkpoint = pairs["transformer"][0]
    weights = Weights(checkpoint / "step_00000012")
    recipes = {"a": Recipe((name := "decoder.layers.0.mixer.in_proj.weight",), (32, 32), lambda tensors: tensors[0][:32])}
    recipes["b"] = Recipe((name,), (32, 32), lambda tensors: tensors[0][32:64])
    reads: list[list[str]] = []
    read = Weights.read

    def counted(self: Weights, names: Iterable[str]) -> dict[str, torch.Tensor]:
        reads.append(list(names))
        return read(self, names)

    monkeypatch.setattr(Weights, "read", counted)
    made = from_store.state_of(weights, recipes, torch.float32, torch.device("cpu"))
    assert reads == [[name]]
    held = [tensor.untyped_storage().nbytes() for tensor in made.values()]
    assert held == [32 * 32 * 4] * 2
    # The model takes these tensors, it does not copy them.
    kept: dict[str, torch.Tensor] = {}
    monkeypatch.setattr(from_store, "state_of", lambda *given: kept.update(make(*given)) or dict(kept))
    opened = open_model(checkpoint)
    assert kept and all(opened.model.get_parameter(key).data_ptr() == tensor.data_ptr() for key, tensor in kept.items())


make = from_store.state_of


def test_nothing_reaches_for_a_network(pairs: dict[str, tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for mixer in MIXERS:
        for path in pairs[mixer]:
            open_model(path)
    with pytest.raises(ConfigError, match="hf download meta-llama/Llama-3.2-1B --local-dir DIR"):
        open_model(Path("meta-llama/Llama-3.2-1B"))


# --- tokenizers ------------------------------------------------------------------------------------------------------------------


def test_without_a_tokenizer_there_is_a_reason(copy: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint, folder = copy("fem_softmax", 0), copy("fem_softmax", 1)
    shutil.rmtree(checkpoint / "tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    for path in (checkpoint, folder):
        opened = open_model(path)
        assert opened.tokenizer is None and opened.no_tokenizer is not None and "--tokenizer DIR" in opened.no_tokenizer
        named = open_model(path, tokenizer=byte_tokenizer(tmp_path / "tokenizer"))
        assert named.tokenizer is not None and named.no_tokenizer is None and named.model.config.eos_token_id in (256, None)
        assert tokenizer_of(path) is None


def test_a_wrong_tokenizer(copy: Callable[..., Path], tmp_path: Path) -> None:
    larger = byte_tokenizer(tmp_path / "larger", pad_token="<pad>", unk_token="<unk>")
    for which in (0, 1):
        with pytest.raises(ConfigError, match=rf"has {ENTRIES + 2} entries, the model's vocabulary only {ENTRIES}"):
            open_model(copy("fem_softmax", which), tokenizer=larger)
    (larger / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer in .*larger cannot be read"):
        open_model(tmp_path / "fem_softmax0", tokenizer=larger)
    with pytest.raises(ConfigError, match="--tokenizer .*: no tokenizer folder"):
        open_model(tmp_path / "fem_softmax0", tokenizer=tmp_path)


# --- fingerprints ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["checkpoint", "export"])
def test_a_fingerprint_changes_with_what_is_computed_alone(copy: Callable[..., Path], tmp_path: Path, which: int) -> None:
    path = copy("fem_softmax", which)
    first = fingerprint(path)
    assert len(first) == 64 and fingerprint(open_model(path)) == first
    moved = path.rename(tmp_path / "moved")
    (moved / "README.md").write_text("another card")
    assert fingerprint(moved) == first
    other = byte_tokenizer(tmp_path / "tokenizer", pad_token="!")
    assert fingerprint(moved, other) != first
    assert fingerprint(open_model(moved, tokenizer=other)) == fingerprint(moved, other)


def test_one_bit_of_a_weight_changes_the_fingerprint(copy: Callable[..., Path], tmp_path: Path) -> None:
    folder = copy("fem_softmax", 1)
    first, weights = fingerprint(folder), load_file(folder / "model.safetensors")
    save_file(dict(reversed(weights.items())), folder / "model.safetensors")  # a file written otherwise
    assert fingerprint(folder) == first
    name = "model.layers.1.mixer.beta"
    weights[name] = weights[name].clone()
    weights[name].view(torch.int32).flatten()[3] ^= 1
    save_file(weights, folder / "model.safetensors")
    assert fingerprint(folder) != first
    model = text_model("fem_softmax")
    state = random_state(model, dtype=torch.float32)
    one = fingerprint(save(model, tmp_path / "one", state))
    assert fingerprint(save(model, tmp_path / "two", state, step=13)) == one
    state["decoder.layers.0.mixer.beta"] = state["decoder.layers.0.mixer.beta"] + 1e-3
    assert fingerprint(save(model, tmp_path / "three", state)) != one


def test_settings_and_code_change_the_fingerprint(copy: Callable[..., Path]) -> None:
    folder = copy("fem_softmax", 1)
    found = [fingerprint(folder)]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    assert fingerprint(folder) == found[0]
    config["architecture"]["norm_eps"] = 1e-3
    (folder / "config.json").write_text(json.dumps(config))
    found.append(fingerprint(folder))
    (folder / "modeling_fem.py").write_text((folder / "modeling_fem.py").read_text() + "\n")
    found.append(fingerprint(folder))
    assert len(set(found)) == 3


# --- what cannot be opened -------------------------------------------------------------------------------------------------------


def lines(error: pytest.ExceptionInfo[ConfigError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


Break = Callable[[Path], Any]


def edit(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config |= changes
        (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    return change


def without(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def reweighted(change: Callable[[dict[str, torch.Tensor]], Any]) -> Break:
    def save_changed(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return save_changed


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("mixer", "spoil", "told"),
    [
        ("transformer", edit(model_type="lama"), "model_type lama is no architecture that transformers .* knows"),
        ("transformer", edit(model_type="vit"), "model_type vit is no causal language model"),
        ("transformer", edit(model_type="own", auto_map={"AutoConfig": "x.Y"}), "wants to run code of its own"),
        ("transformer", edit(num_hidden_layers=3), "lacks model.layers.2.input_layernorm.weight and 8 more tensors: its weights and its"),
        ("transformer", edit(num_hidden_layers=1), "holds, besides the model's, model.layers.1"),
        ("transformer", reweighted(lambda weights: weights.update({Q: torch.zeros(3, 3)})), "has another shape .*q_proj"),
        ("fem_softmax", reweighted(lambda weights: weights.pop("model.layers.1.mixer.beta")), "lacks model.layers.1.mixer.beta: its"),
        ("fem_softmax", without("modeling_fem.py"), "half an export: modeling_fem.py is missing"),
        ("fem_softmax", edit(auto_map={"AutoConfig": "else/where--x.Y"}), "auto_map in config.json is not that of an export"),
        ("fem_softmax", edit(architecture={"mixer": "none"}), "cannot be opened: "),
    ],
)
def test_a_broken_folder_is_one_line(copy: Callable[..., Path], mixer: str, spoil: Break, told: str) -> None:
    folder = copy(mixer, 1)
    spoil(folder)
    with pytest.raises(ConfigError, match=told) as error:
        open_model(folder)
    assert str(folder) in lines(error)


def test_a_broken_checkpoint_is_one_line(copy: Callable[..., Path], tmp_path: Path) -> None:
    path = copy("fem_softmax", 0)
    step = path / "step_00000012"
    for broken in (tmp_path / "nothing", tmp_path):
        with pytest.raises(ConfigError, match=r"there is no folder|no checkpoint there") as error:
            open_model(broken)
        lines(error)
    data = max(step.glob("*.distcp"), key=lambda file: file.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match=f"{data.name} has .* bytes instead of"):
        open_model(step)
    data.write_bytes(bytes(200) + whole[200:])  # of the right size
    with pytest.raises(ConfigError, match="is damaged") as error:
        open_model(step)
    lines(error)
    with pytest.raises(ConfigError, match="is a file"):
        open_model(data)
