"""Tests of opening a model: a checkpoint equals its export; memory, tokenizers, fingerprints;
failures are one line.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fem_common.errors import ConfigError
from pretrain.checkpoint.reader import Weights
from tests.tools.hf.checkpoints import Spoil, changed, held, hf, rewrite, settings
from tests.tools.hf.small import random_state
from tests.tools.hf.texts import byte_tokenizer, save, text_model
from tests.tools.refusals import Refused
from tools.hf import open_model as from_store
from tools.hf.folder import json_object
from tools.hf.open_model import fingerprint, open_model, tokenizer_of
from tools.hf.weight_conversion import Conversion, Converted

MIXERS = ("fem_softmax", "transformer")
Pairs = dict[str, tuple[Path, Path]]
"""Mixer -> checkpoint, its export."""
Copy = Callable[[str, int], Path]
"""Mixer and 0 for the checkpoint or 1 for the export -> copy that a test may damage."""
IDS = torch.arange(5, 25)[None]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Mixer -> checkpoint, its export."""
    found = {}
    for mixer in MIXERS:
        folder = tmp_path_factory.mktemp(mixer)
        found[mixer] = (
            save(text_model(mixer, tie_embeddings=mixer == "transformer"), folder / "checkpoint"),
            folder / "exported",
        )
        assert hf("export", *found[mixer]) == 0
    return found


@pytest.fixture
def copy(pairs: Pairs, tmp_path: Path) -> Copy:
    """Copies of a pair's checkpoint or export that a test may damage."""

    def made(mixer: str, which: int) -> Path:
        return Path(shutil.copytree(pairs[mixer][which], tmp_path / f"{mixer}{which}"))

    return made


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_checkpoint_is_its_export(
    pairs: Pairs, mixer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The class of the export, equal numbers, tokenizer, special tokens and lengths; no network is
    used.
    """
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setattr(socket, "getaddrinfo", None)
    ours, theirs = (open_model(path) for path in pairs[mixer])
    assert (
        type(ours.model).__name__
        == type(theirs.model).__name__
        == {"transformer": "LlamaForCausalLM"}.get(mixer, "FemLMForCausalLM")
    )
    assert theirs.model.__module__.startswith(
        "transformers.models" if mixer == "transformer" else "transformers_modules"
    )
    with torch.no_grad():
        assert torch.equal(ours.model(IDS).logits, theirs.model(IDS).logits)
    for opened in (ours, theirs):
        assert opened.tokenizer is not None
        assert opened.config is not None
        assert opened.config.mixer == mixer
        assert not opened.model.training
        assert opened.model.config.max_position_embeddings == 64
        assert opened.model.generation_config.eos_token_id == 256
        assert opened.manifest["progress"]["step"] == 12
        tied = opened.model.lm_head.weight is opened.model.model.embed_tokens.weight
        assert tied == (mixer == "transformer")
    assert ours.tokenizer.get_vocab() == theirs.tokenizer.get_vocab()  # type: ignore[union-attr]
    assert (ours.kind, theirs.kind, ours.name, theirs.name) == (
        "checkpoint",
        "exported folder",
        "small",
        "exported",
    )


def test_in_another_type(pairs: Pairs) -> None:
    """Weights have that dtype; the constants of RoPE are computed, not rounded."""
    for path in pairs["transformer"]:
        opened = open_model(path, dtype=torch.bfloat16)
        assert opened.dtype == torch.bfloat16
        assert {weight.dtype for weight in opened.model.parameters()} == {torch.bfloat16}
        assert opened.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_are_held_once(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one source tensor is in memory besides the results, and no result keeps more memory
    alive than its size.
    """
    weights = Weights(pairs["transformer"][0] / "step_00000012")
    reads = list[list[str]]()
    read = Weights.read
    name = "decoder.layers.0.mixer.in_proj.weight"
    halves = {
        "a": Conversion((name,), (32, 32), lambda tensors: tensors[0][:32]),
        "b": Conversion((name,), (32, 32), lambda tensors: tensors[0][32:64]),
    }

    def counted(self: Weights, names: Iterable[str]) -> dict[str, Tensor]:
        reads.append(list(names))
        return read(self, names)

    monkeypatch.setattr(Weights, "read", counted)
    make, kept = from_store.state_of, dict[str, Tensor]()
    made = make(Converted(weights, halves), torch.float32, torch.device("cpu"))
    assert reads == [[name]]
    assert [tensor.untyped_storage().nbytes() for tensor in made.values()] == [32 * 32 * 4] * 2
    # The model uses these tensors without a copy.
    monkeypatch.setattr(
        from_store, "state_of", lambda *given: kept.update(make(*given)) or dict(kept)
    )
    opened = open_model(pairs["transformer"][0])
    assert kept
    assert all(
        opened.model.get_parameter(key).data_ptr() == tensor.data_ptr()
        for key, tensor in kept.items()
    )


def test_without_a_tokenizer_there_is_a_reason(copy: Copy, tmp_path: Path) -> None:
    checkpoint, folder = copy("fem_softmax", 0), copy("fem_softmax", 1)
    shutil.rmtree(checkpoint / "tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    for path in (checkpoint, folder):
        opened = open_model(path)
        assert opened.tokenizer is None
        assert opened.no_tokenizer is not None
        assert "--tokenizer DIR" in opened.no_tokenizer
        named = open_model(path, tokenizer=byte_tokenizer(tmp_path / "tokenizer"))
        assert named.tokenizer is not None
        assert named.no_tokenizer is None
        assert named.model.config.eos_token_id in (256, None)
        assert tokenizer_of(path) is None


# --- fingerprints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["checkpoint", "export"])
def test_a_fingerprint_changes_with_what_is_computed_alone(
    copy: Copy, tmp_path: Path, which: int
) -> None:
    path = copy("fem_softmax", which)
    first = fingerprint(path)
    assert len(first) == 64 and fingerprint(open_model(path)) == first
    moved = path.rename(tmp_path / "moved")
    (moved / "README.md").write_text("another card")
    assert fingerprint(moved) == first
    other = byte_tokenizer(tmp_path / "tokenizer", pad_token="!")
    assert fingerprint(moved, other) != first
    assert fingerprint(open_model(moved, tokenizer=other)) == fingerprint(moved, other)


def test_one_bit_or_setting_or_line_of_code_changes_the_fingerprint(
    copy: Copy, tmp_path: Path
) -> None:
    folder = copy("fem_softmax", 1)
    found = [fingerprint(folder)]
    rewrite(folder, lambda held: None)  # the same contents, written in another way
    changed(folder / "config.json", transformers_version="0")
    assert fingerprint(folder) == found[0]
    rewrite(
        folder,
        lambda held: (
            held["model.layers.1.mixer.beta"].view(torch.int32).flatten()[3].bitwise_xor_(1)
        ),
    )
    found.append(fingerprint(folder))
    architecture = json_object(folder / "config.json")["architecture"]
    changed(folder / "config.json", architecture=architecture | {"norm_eps": 1e-3})
    found.append(fingerprint(folder))
    (folder / "modeling_fem.py").write_text((folder / "modeling_fem.py").read_text() + "\n")
    found.append(fingerprint(folder))
    model = text_model("fem_softmax")
    state = random_state(model)
    found.append(fingerprint(save(model, tmp_path / "one", state)))
    assert fingerprint(save(model, tmp_path / "two", state, step=13)) == found[-1]
    state["decoder.layers.0.mixer.beta"] = state["decoder.layers.0.mixer.beta"] + 1e-3
    found.append(fingerprint(save(model, tmp_path / "three", state)))
    assert len(set(found)) == 6


# --- models that cannot be opened -----------------------------------------------------------------


Q = "model.layers.0.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[str, Spoil]] = {
    "unknown": ("transformer", settings(model_type="lama")),
    "no language model": ("transformer", settings(model_type="vit")),
    "own code": ("transformer", settings(model_type="own", auto_map={"AutoConfig": "x.Y"})),
    "more layers": ("transformer", settings(num_hidden_layers=3)),
    "fewer layers": ("transformer", settings(num_hidden_layers=1)),
    "a shape": ("transformer", held(lambda found: found.update({Q: torch.zeros(3, 3)}))),
    "a weight": ("fem_softmax", held(lambda found: found.pop("model.layers.1.mixer.beta"))),
    "code": ("fem_softmax", lambda folder: (folder / "modeling_fem.py").unlink()),
    "code from elsewhere": ("fem_softmax", settings(auto_map={"AutoConfig": "else/where--x.Y"})),
    "a mixer": ("fem_softmax", settings(architecture={"mixer": "none"})),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_one_line(copy: Copy, raised: Refused, case: str) -> None:
    mixer, spoil = BROKEN[case]
    folder = copy(mixer, 1)
    spoil(folder)
    raised(open_model, folder)


def test_what_cannot_be_opened_is_one_line(copy: Copy, tmp_path: Path, raised: Refused) -> None:
    path = copy("fem_softmax", 0)
    larger = byte_tokenizer(tmp_path / "larger", pad_token="<pad>", unk_token="<unk>")
    for named in (path, copy("fem_softmax", 1)):
        raised(open_model, named, tokenizer=larger)
    (larger / "tokenizer.json").write_text("{")
    for tokenizer in (larger, tmp_path):
        raised(open_model, path, tokenizer=tokenizer)
    for broken in (tmp_path / "nothing", tmp_path, Path("meta-llama/Llama-3.2-1B")):
        raised(open_model, broken)
    data = max(path.glob("step_*/*.distcp"), key=lambda file: (file.stat().st_size, file.name))
    raised(open_model, data)
    full = data.read_bytes()
    # The second one has the right size.
    for content, word in (
        (full[:-1], "bytes instead of"),
        (bytes(200) + full[200:], "is damaged"),
    ):
        data.write_bytes(content)
        with pytest.raises(ConfigError, match=word) as error:
            open_model(data.parent)
        assert "\n" not in str(error.value)
