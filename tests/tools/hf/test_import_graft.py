"""Tests of ``import --mixer``: copied parts have the same meaning in both models, new ones are
initialised as in training, and the table lists both.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fem_megatron.config import ModelConfig
from fem_megatron.mixers.attention.shape import AttentionConfig
from pretrain.checkpoint.folder import find
from pretrain.plan.run_plan import count_by_component, model_weights
from tests.tools.hf.checkpoints import hf, stock_folder, tensors, weights
from tests.tools.hf.small import MIXERS, export, small
from tools.hf.folder import json_object
from tools.hf.open_model import open_model

MODES = "fem.free_energy fem.temperature fem.gate fem.conditioner"
HEADS, GROUPS, HEAD = 4, 2, 8


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; two heads of queries share a key."""
    return stock_folder("llama", tmp_path_factory.mktemp("stock") / "llama")


def graft(
    source: Path, out: Path, mixer: str, *settings: str
) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Any]]:
    given = chain.from_iterable(("--set", setting) for setting in settings)
    assert hf("import", source, out, "--mixer", mixer, *given) == 0
    model = ModelConfig.from_dict(find(out).manifest["config"]["model"])
    return model, weights(out), json_object(out / "grafted.json")


def in_proj(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the table's first entry about a packed projection."""
    return next(
        entry for entry in fields["tensors"] if entry["name"].endswith("mixer.in_proj.weight")
    )


@torch.no_grad()
def logits(path: Path) -> Tensor:
    found: Tensor = open_model(path).model(torch.arange(24).view(2, 12)).logits
    return found


def of_layer(folder: Path, layer: int = 0) -> dict[str, Tensor]:
    """Return a stock layer's matrices by their last names; k and v repeated for every head."""
    place = f"model.layers.{layer}."
    found = {
        name.removeprefix(place).split(".")[1]: t
        for name, t in tensors(folder).items()
        if name.startswith(place) and t.ndim == 2
    }
    for name in ("k_proj", "v_proj"):
        found[name] = (
            found[name]
            .view(GROUPS, HEAD, -1)
            .repeat_interleave(HEADS // GROUPS, dim=0)
            .flatten(0, 1)
        )
    return found


def test_fem_with_its_switches_off_is_the_transformer(llama: Path, tmp_path: Path) -> None:
    """q, k, v, out_proj, norms, MLP, embedding and output are therefore in the right positions,
    keys and values with each of their queries.
    """
    off = [f"model.{name}=false" for name in MODES.split()]
    _, _, report = graft(llama, tmp_path / "ck", "fem_softmax", *off, "model.fem.value_size=32")
    assert report["copied"] == report["parameters"] and report["left_behind"] == []
    wanted, got = logits(llama), logits(tmp_path / "ck")
    # Both in fp32 on the CPU; the sums of attention are in a different order.
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert wanted.std() > 0.1


def test_cem_by_hand(llama: Path, tmp_path: Path) -> None:
    """K = V from keys, O = Q^T from queries; the projection inside SiLU is the gate's, its factor
    the up projection.
    """
    _, state, report = graft(llama, tmp_path / "ck", "cem")
    layer, theirs = "decoder.layers.1.", of_layer(llama, 1)
    for ours, name in (
        ("mixer.query", "q_proj"),
        ("mixer.key", "k_proj"),
        ("mlp.up", "gate_proj"),
        ("mlp.gamma", "up_proj"),
    ):
        assert torch.equal(state[f"{layer}{ours}.weight"], theirs[name]), ours
    assert torch.equal(
        state[f"{layer}mixer.norm.weight"], tensors(llama)["model.layers.1.input_layernorm.weight"]
    )
    assert torch.equal(
        state[f"{layer}mlp.norm.weight"],
        tensors(llama)["model.layers.1.post_attention_layernorm.weight"],
    )
    assert report["left_behind"] == [
        "decoder.layers.N.mixer.in_proj.weight (0-1): v",
        "decoder.layers.N.mixer.out_proj.weight (0-1)",
        "decoder.layers.N.mlp.down.weight (0-1)",
    ]


PACKED: dict[str, tuple[tuple[str, ...], list[str | int], bool]] = {
    # mixer -> (settings, rows of one head in the packed projection in order: a part of attention or
    # a number of new rows, whether out_proj is copied).
    "fem_softmax": ((), ["q", "k", 4, 4, 4], False),
    "fem_linear": (("model.fem.value_size=32",), ["q", "k", "v", 8, 8], True),
    "fem_aft": (("model.fem.value_size=32",), [8, 8, "v", 8, 8], True),
    "mha2nd1st": ((), ["q", "k"], False),
    "energy_linear": ((), ["q", "k"], False),
    "differential": ((), [8, 8, "v"], True),
    "deltanet": ((), ["q", "k", "v"], True),
    "gated_deltanet": ((), [4, 4, "v", 8], True),
    "mamba2": (("model.mamba2.head_size=8", "model.mamba2.inner_size=32"), ["v", 8], True),
}


@pytest.mark.parametrize("mixer", PACKED)
def test_packed_projections(mixer: str, llama: Path, tmp_path: Path) -> None:
    settings, rows, out_proj = PACKED[mixer]
    model, state, report = graft(llama, tmp_path / "ck", mixer, *settings)
    layer, theirs = "decoder.layers.0.mixer.", of_layer(llama)
    heads = state[f"{layer}in_proj.weight"].view(HEADS, -1, 32)
    at = 0
    copied = 0
    for row in rows:
        if isinstance(row, int):
            at += row
            continue
        assert torch.equal(heads[:, at : at + HEAD], theirs[f"{row}_proj"].view(HEADS, HEAD, -1)), (
            row
        )
        at += HEAD
        copied += HEAD
    assert at == heads.shape[1] and {weight.dtype for weight in state.values()} == {torch.float32}
    assert torch.equal(state[f"{layer}out_proj.weight"], theirs["o_proj"]) == out_proj
    entry = in_proj(report)
    assert entry["copied"] == model.num_layers * HEADS * copied * 32
    if copied == at:
        status = "copied"
    elif copied:
        status = "partly"
    else:
        status = "new"
    assert entry["status"] == status


def test_two_of_attentions_heads_make_one_differential(llama: Path, tmp_path: Path) -> None:
    _, state, _ = graft(llama, tmp_path / "ck", "differential", "model.num_attention_heads=2")
    theirs = of_layer(llama)
    packed = torch.cat([theirs[f"{part}_proj"].view(2, 2 * HEAD, -1) for part in "qkv"], dim=1)
    assert torch.equal(state["decoder.layers.0.mixer.in_proj.weight"], packed.flatten(0, 1))
    assert torch.equal(state["decoder.layers.0.mixer.out_proj.weight"], theirs["o_proj"])


@pytest.mark.parametrize(("groups", "parts"), [(4, ["q", "k", "v"]), (1, ["q"])])
def test_keys_shared_otherwise(groups: int, parts: list[str], llama: Path, tmp_path: Path) -> None:
    """If fewer queries share a key, the model is the same. If more do, no shared key is defined."""
    _, _, report = graft(llama, tmp_path / "ck", "transformer", f"model.num_query_groups={groups}")
    if groups == 4:
        assert torch.allclose(logits(llama), logits(tmp_path / "ck"), atol=1e-5)
        assert report["copied"] == report["parameters"]
    else:
        assert (in_proj(report)["status"], in_proj(report)["parts"]) == ("partly", parts)


@pytest.mark.usefixtures("one_process")
def test_what_is_new_is_what_training_starts_from(tmp_path: Path) -> None:
    """For every mixer, the numbers that differ from training's initial ones are those that the
    table counts as copied.
    """
    from fem_megatron.megatron.model import Layout, build, global_name

    source = stock_folder("llama tied", tmp_path / "hf", num_hidden_layers=len(MIXERS))
    pattern = f"model.pattern=[{', '.join(MIXERS)}]"
    model, state, report = graft(
        source,
        tmp_path / "ck",
        "cem",
        pattern,
        "train.seed=5",
        "model.init_std=0.3",
        "model.tie_embeddings=false",
    )
    (chunk,) = build(model, Layout(), seq_length=16, seed=5)
    started = {
        global_name(chunk, name): weight.detach() for name, weight in chunk.named_parameters()
    }
    assert started.keys() == state.keys() == model_weights(model).keys()
    listed = {entry["name"]: 0 for entry in report["tensors"]}
    counted = dict(listed)
    for entry in report["tensors"]:
        counted[entry["name"]] += entry["copied"]
    for name, weight in state.items():
        parts = name.split(".")
        general = (
            ".".join([*parts[:2], "N", *parts[3:]]) if name.startswith("decoder.layers.") else name
        )
        listed[general] += int((weight != started[name]).sum())
    assert listed == counted
    assert sum(count_by_component(model).values()) == report["parameters"]
    assert 0.2 < report["copied"] / report["parameters"] < 0.9
    assert torch.equal(state["output_layer.weight"], state["embedding.word_embeddings.weight"])


def test_the_table(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare the printed table; a new model has no training history."""
    graft(llama, tmp_path / "ck", "fem_softmax")
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "tensor layers parameters copied"
    assert "decoder.layers.N.mixer.in_proj.weight 0-1 partly: q, k 7,168 4,096" in lines
    assert "decoder.layers.N.mixer.beta 0-1 new 32 0" in lines
    assert "decoder.layers.N.mlp.gate_up 0-1 copied 6,144 6,144" in lines
    assert (
        "weights of the folder that are not used: decoder.layers.N.mixer.in_proj.weight (0-1): v;"
        " decoder.layers.N.mixer.out_proj.weight (0-1)" in lines
    )
    manifest = find(tmp_path / "ck").manifest
    assert manifest["progress"]["step"] == 0
    assert manifest["config"]["name"] == "llama-fem_softmax"
    assert "heldout_loss" not in manifest


def test_attentions_own_switches_stay_with_attention(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A window is dropped with the last layer of attention, with a message; biases are kept in a
    hybrid's attention.
    """
    mistral = stock_folder("mistral", tmp_path / "mistral")
    model, _, _ = graft(mistral, tmp_path / "ck", "fem_softmax")
    assert (
        "fem_softmax has no model.attention.sliding_window; the folder's value 5 is not used"
        in capsys.readouterr().err
    )
    assert model.attention == AttentionConfig()
    qwen = stock_folder("qwen2", tmp_path / "qwen")
    _, state, report = graft(
        qwen, tmp_path / "ck2", "fem_softmax", "model.pattern=[transformer, fem_softmax]"
    )
    biases = [
        tensors(qwen)[f"model.layers.0.self_attn.{part}_proj.bias"].view(GROUPS, -1, HEAD)
        for part in "qkv"
    ]
    assert torch.equal(
        state["decoder.layers.0.mixer.in_proj.bias"], torch.cat(biases, dim=1).flatten()
    )
    assert "decoder.layers.N.mixer.in_proj.bias (1): q, k, v" in report["left_behind"]


def test_the_norms_of_queries_and_keys_go_with_them(tmp_path: Path) -> None:
    """Qwen3's norms are copied to the Free Energy Mixer and, from one group to one per query, to
    attention; a mixer without them drops them.
    """
    qwen = stock_folder("qwen3", tmp_path / "qwen", head_dim=HEAD)
    theirs = {part: tensors(qwen)[f"model.layers.1.self_attn.{part}_norm.weight"] for part in "qk"}
    for mixer, place in (("fem_softmax", "prior."), ("transformer", "")):
        model, state, _ = graft(
            qwen,
            tmp_path / mixer,
            mixer,
            *(["model.num_query_groups=null"] if mixer == "transformer" else []),
        )
        assert model.qk_norm and theirs["q"].std() > 0.01
        for part, weight in theirs.items():
            assert torch.equal(state[f"decoder.layers.1.mixer.{place}{part}_norm.weight"], weight)
    model, _, report = graft(qwen, tmp_path / "cem", "cem")
    assert not model.qk_norm
    assert "decoder.layers.N.mixer.q_norm.weight (0-1)" in report["left_behind"]


def test_one_line_where_nothing_can_stand_on_it(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fem = export(small("fem_softmax"), tmp_path / "fem")
    for source, words, report in (
        (llama, "cem model.hidden_size=64", "model.hidden_size is 64, but 32 in the folder"),
        (llama, "cem model.num_layers=4", "model.num_layers is 4, but 2 in the folder"),
        (llama, "cem model.vocab_size=49", "model.vocab_size is 49, but 50 in the folder"),
        (llama, "cen", "model.mixer = 'cen' is not a choice; did you mean cem?"),
        (llama, "fla.GatedLinearAttention", "a layer of another package"),
        (
            llama,
            "fem_softmax model.num_attention_heads=3",
            "model.num_attention_heads=3 does not divide",
        ),
        (fem, "cem", "layer 0 of the folder is fem_softmax; import it without --mixer"),
    ):
        mixer, *settings = words.split()
        options = ["--mixer", mixer, *chain.from_iterable(("--set", one) for one in settings)]
        assert hf("import", source, tmp_path / "ck", *options) == 2
        err = capsys.readouterr().err
        assert err.startswith("tools.hf: error: ") and err.count("\n") == 1 and report in err, err
    assert not (tmp_path / "ck").exists()
